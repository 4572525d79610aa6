"""Static int8 of torchvision networks: ours against onnxruntime's own quantizer in its strongest setting, and fp32.

onnxruntime: pre-processed, per channel, uint8 activations; for transformers Conv, Gemm and MatMul only. Both calibrate on
the same inputs. Latency: batch 1, one thread, the three files measured in turn, as a ratio to the fp32 file. SQNR: of the
outputs, against fp32, in dB. The weights are random (no hub can be reached), BatchNorm statistics those of random images:
such networks amplify noise with depth, so SQNR compares the rows of one network and says nothing about trained ones.

Writes `quantize_zoo.json` and `quantize_zoo.md` beside this file; networks that are there already are kept.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import torchvision
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn

import compresskit as ck
from compresskit.measure import numpy_inputs, session

HERE = Path(__file__).parent
NETWORKS = """resnet18 resnet50 mobilenet_v2 mobilenet_v3_large efficientnet_b0 shufflenet_v2_x1_0 googlenet inception_v3
 densenet121 regnet_y_400mf squeezenet1_1 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large vit_b_16 swin_t
 convnext_tiny""".split()
TRANSFORMERS = ("vit", "swin", "convnext")


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """Hands batches over one by one, as onnxruntime wants them."""

    def __init__(self, name: str, batches: list[Tensor]) -> None:
        self.batches = iter([{name: x.numpy()} for x in batches])

    def get_next(self) -> Any:
        return next(self.batches, None)


def network(name: str, x: Tensor) -> nn.Module:
    torch.manual_seed(0)
    settings: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        settings = {"aux_logits": False, "init_weights": False}
    if "lraspp" in name or "deeplab" in name:
        settings = {"weights_backbone": None}
    model = torchvision.models.get_model(name, weights=None, **settings)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None
        if type(module).__name__ == "CNBlock":
            nn.init.constant_(module.layer_scale, 0.3)  # 1e-6 would hide the body
    if hasattr(model, "heads"):
        nn.init.normal_(model.heads[-1].weight, 0, 0.02)  # zeros would, too
    with torch.no_grad():
        for _ in range(4):
            model.train()(torch.randn_like(x))
    return model.eval()


def sqnr(path: Path, wanted: Tensor, x: Tensor) -> float:
    runtime = session(path)
    got = torch.from_numpy(runtime.run(None, numpy_inputs(runtime, (x,)))[0])
    return float(10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()))


def measure(name: str, folder: Path, samples: int, seconds: float) -> dict[str, Any]:
    size = 299 if name == "inception_v3" else 224
    x = torch.randn(samples, 3, size, size)
    model = network(name, x)
    files = [folder / f"{kind}.onnx" for kind in ("fp32", "ours", "ort")]
    ck.export_onnx(model, files[0], (x,))
    begin = time.perf_counter()
    quantized = ck.quant.quantize_static(model, [(x,)])
    ck.export_onnx(quantized, files[1], (x,))
    ours = time.perf_counter() - begin
    begin = time.perf_counter()
    quant_pre_process(str(files[0]), str(folder / "pre.onnx"), skip_symbolic_shape=True)
    operators = ["Conv", "Gemm", "MatMul"] if any(t in name for t in TRANSFORMERS) else None
    reader = Reader(session(files[0]).get_inputs()[0].name, [x])
    quantize_static(
        str(folder / "pre.onnx"), str(files[2]), reader, per_channel=True, activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8, op_types_to_quantize=operators,
    )  # fmt: skip
    theirs = time.perf_counter() - begin
    with torch.no_grad():
        wanted = model(x)
    wanted = wanted["out"] if isinstance(wanted, dict) else wanted
    times = ck.latency(files, (x[:1],), seconds=seconds)
    audit = ck.audit(files[1])
    return {
        "fp32_ms": times[0],
        "ours": times[1] / times[0],
        "ort": times[2] / times[0],
        "ours_db": sqnr(files[1], wanted, x),
        "ort_db": sqnr(files[2], wanted, x),
        "mb": [f.stat().st_size / 1e6 for f in files],
        "seconds": [ours, theirs],
        "integer_macs": audit.share,
        "conversions": audit.conversions,
        "verified": ck.verify_onnx(files[1], quantized, [(x,)]).passed,
    }


def write(rows: dict[str, Any]) -> None:
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__, "onnxruntime": onnxruntime.__version__}
    (HERE / "quantize_zoo.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    head = "network, fp32 ms, ours, onnxruntime, ours dB, onnxruntime dB, MB of the three, MACs in integers, verified".split(", ")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, row in rows.items():
        sizes = ", ".join(f"{mb:.1f}" for mb in row["mb"])
        lines.append(
            f"| {name} | {row['fp32_ms']:.2f} | {row['ours']:.3f} | {row['ort']:.3f} | {row['ours_db']:.1f} | {row['ort_db']:.1f}"
            f" | {sizes} | {row['integer_macs']:.1%} | {'yes' if row['verified'] else 'no'} |"
        )
    ratio = torch.tensor([row["ours"] / row["ort"] for row in rows.values()]).log().mean().exp().item()
    lines += ["", f"Ours / onnxruntime, geometric mean over {len(rows)} networks: {ratio:.3f}. {versions}"]
    (HERE / "quantize_zoo.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS, help="torchvision names; those of the table where none is given")
    parser.add_argument("--samples", type=int, default=8, help="calibration images, which are also those of the SQNR")
    parser.add_argument("--seconds", type=float, default=4, help="timing of each file")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    path = HERE / "quantize_zoo.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    for name in args.networks:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = measure(name, Path(folder), args.samples, args.seconds)
        write(rows)


if __name__ == "__main__":
    main()
