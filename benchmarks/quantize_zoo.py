"""Static int8 of torchvision networks: ours against onnxruntime's quantizer in its best setting, and fp32.

    python benchmarks/quantize_zoo.py --folder /tmp/zoo              build, compare and time everything
    python benchmarks/quantize_zoo.py --folder /tmp/zoo --latency    time the files of that folder again, on a quiet machine
    python benchmarks/quantize_zoo.py --folder /tmp/zoo --measured   ours placed by measurement for two threads, timed there
    python benchmarks/quantize_zoo.py --folder /tmp/zoo --nncf       NNCF's ONNX backend (`pip install nncf`) against both

onnxruntime: pre-processed, per channel, uint8 activations; for transformers Conv, Gemm and MatMul only, which is best there.
Ours: no option set. Both calibrate on the same 8 inputs. Latency: the three files measured in turn, medians, as ratios to the
fp32 file, for batch 1 and 32 on one thread and batch 1 on two. SQNR: of the outputs, against fp32, in dB. The weights are random,
the BatchNorm statistics those of random images: such networks amplify noise with depth, so SQNR compares the rows of one network
and does not carry over to trained ones. NNCF: its defaults, `model_type=TRANSFORMER` for those, timed at batch 1 in turn with
fp32 and ours. Seconds: quantizing and exporting, in a process that has done both before.

Writes `quantize_zoo.json` and `quantize_zoo.md` beside this file; networks that are in the file are kept.
"""

from __future__ import annotations

import argparse
import importlib
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
from compresskit.measure import latency, numpy_inputs, session

HERE = Path(__file__).parent
NETWORKS = """resnet18 resnet50 mobilenet_v2 mobilenet_v3_large efficientnet_b0 shufflenet_v2_x1_0 googlenet inception_v3
 densenet121 regnet_y_400mf squeezenet1_1 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large vit_b_16 swin_t
 convnext_tiny""".split()
TRANSFORMERS = ("vit", "swin", "convnext")


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """Batches one by one, in the interface of onnxruntime's calibration."""

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
            nn.init.constant_(module.layer_scale, 0.3)  # with 1e-6 the body would not affect the output
    if hasattr(model, "heads"):
        nn.init.normal_(model.heads[-1].weight, 0, 0.02)  # the same with zeros
    with torch.no_grad():
        for _ in range(4):
            model.train()(torch.randn_like(x))
    return model.eval()


def sqnr(path: Path, wanted: Tensor, x: Tensor) -> float:
    runtime = session(path)
    got = torch.from_numpy(runtime.run(None, numpy_inputs(runtime, (x,)))[0])
    return float(10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()))


def example(name: str, samples: int) -> Tensor:
    size = 299 if name == "inception_v3" else 224
    return torch.randn(samples, 3, size, size, generator=torch.Generator().manual_seed(1))


def files_of(name: str, folder: Path) -> list[Path]:
    return [folder / f"{name}.{kind}.onnx" for kind in ("fp32", "ours", "ort")]


def build(name: str, folder: Path, samples: int) -> dict[str, Any]:
    """Write the three files (those that are there are kept, ours excepted); everything but their speed."""
    x = example(name, samples)
    model = network(name, x)
    float_file, ours, theirs = files_of(name, folder)
    row: dict[str, Any] = {}
    if not float_file.exists():
        ck.export_onnx(model, float_file, (x,))
    begin = time.perf_counter()
    quantized = ck.quant.quantize_static(model, [(x,)])
    ck.export_onnx(quantized, ours, (x,))
    row["seconds"] = time.perf_counter() - begin
    if not theirs.exists():
        begin = time.perf_counter()
        quantize_by_onnxruntime(float_file, theirs, x, transformer=any(t in name for t in TRANSFORMERS))
        row["ort_seconds"] = time.perf_counter() - begin
    with torch.no_grad():
        wanted = model(x)
    wanted = wanted["out"] if isinstance(wanted, dict) else wanted
    audit = ck.audit(ours)
    return row | {
        "ours_db": sqnr(ours, wanted, x),
        "ort_db": sqnr(theirs, wanted, x),
        "mb": [f.stat().st_size / 1e6 for f in (float_file, ours, theirs)],
        "integer_macs": audit.integer_fraction,
        "conversions": audit.conversions,
        "verified": ck.verify_onnx(ours, quantized, [(x,)]).passed,
    }


def quantize_by_onnxruntime(source: Path, target: Path, x: Tensor, *, transformer: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        quantize_static(
            str(prepared),
            str(target),
            Reader(session(source).get_inputs()[0].name, [x]),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=["Conv", "Gemm", "MatMul"] if transformer else None,
        )


def against_nncf(name: str, folder: Path, samples: int, seconds: float) -> dict[str, Any]:
    """NNCF's file, where it can make one: its SQNR and seconds, and milliseconds of fp32, ours and it."""
    nncf: Any = importlib.import_module("nncf")
    onnx: Any = importlib.import_module("onnx")
    x, (float_file, ours, _), file = example(name, samples), files_of(name, folder), folder / f"{name}.nncf.onnx"
    row: dict[str, Any] = {}
    if not file.exists():
        source = onnx.load(float_file)
        feed = {source.graph.input[0].name: x.numpy()}
        kind = nncf.ModelType.TRANSFORMER if any(t in name for t in TRANSFORMERS) else None
        begin = time.perf_counter()
        try:
            made = nncf.quantize(source, nncf.Dataset([feed]), model_type=kind, subset_size=1)
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"}
        onnx.save(made, file)
        row["seconds"] = time.perf_counter() - begin
    with torch.no_grad():
        wanted = network(name, x)(x)
    row["db"] = sqnr(file, wanted["out"] if isinstance(wanted, dict) else wanted, x)
    return row | ({"ms": latency([float_file, ours, file], (x[:1],), seconds=seconds)} if seconds else {})


def times(name: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Milliseconds of the three files: fp32, ours, onnxruntime's."""
    x, files = example(name, 32), files_of(name, folder)
    return {
        "ms": latency(files, (x[:1],), seconds=seconds),
        "ms_2_threads": latency(files, (x[:1],), threads=2, seconds=seconds / 2),
        "ms_batch_32": latency(files, (x,), seconds=seconds / 2, rounds=3),
    }


def measured(name: str, folder: Path, samples: int, seconds: float) -> dict[str, Any]:
    """Milliseconds on two threads of the fp32 file, of ours, of onnxruntime's, and of ours placed by measurement there."""
    x, files, file = example(name, samples), files_of(name, folder), folder / f"{name}.measured.onnx"
    begin = time.perf_counter()
    deployment = ck.quant.targets.Deployment(threads=2)
    quantized = ck.quant.quantize_static(network(name, x), [(x,)], choose="measure", deployment=deployment)
    ck.export_onnx(quantized, file, (x,))
    took = time.perf_counter() - begin
    return {"ms": latency([*files, file], (x[:1],), threads=2, seconds=seconds), "seconds": took}


def write(rows: dict[str, Any]) -> None:
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__, "onnxruntime": onnxruntime.__version__}
    (HERE / "quantize_zoo.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    head = "network, fp32 ms, ours, onnxruntime, NNCF (ours beside it), 2 threads, batch 32, our dB, onnxruntime dB, NNCF dB"
    head += ", MB of each, integer MACs, verified, our seconds (onnxruntime)"
    lines = [f"| {head.replace(', ', ' | ')} |", f"|{'---|' * len(head.split(', '))}"]
    for name, row in rows.items():
        both = [" / ".join(f"{ms / row[kind][0]:.3f}" for ms in row[kind][1:]) for kind in ("ms_2_threads", "ms_batch_32")]
        fp32, ours, theirs = row["ms"]
        other = row.get("nncf", {})
        beside = "{2:.3f} ({1:.3f})".format(*(ms / other["ms"][0] for ms in other["ms"])) if "ms" in other else "-"
        db = f"{other['db']:.1f}" if "db" in other else "-"
        sizes = ", ".join(f"{mb:.1f}" for mb in row["mb"])
        lines.append(
            f"| {name} | {fp32:.2f} | {ours / fp32:.3f} | {theirs / fp32:.3f} | {beside} | {' | '.join(both)}"
            f" | {row['ours_db']:.1f} | {row['ort_db']:.1f} | {db} | {sizes} | {row['integer_macs']:.1%}"
            f" | {'yes' if row['verified'] else 'no'} | {row['seconds']:.1f} ({row['ort_seconds']:.1f}) |"
        )
    said = []
    for kind, label in (("ms", "batch 1"), ("ms_2_threads", "batch 1 on two threads"), ("ms_batch_32", "batch 32")):
        ratios = torch.tensor([row[kind][1] / row[kind][2] for row in rows.values()])
        said.append(f"{ratios.log().mean().exp():.3f} (largest {ratios.max():.3f}) at {label}")
    lines += ["", f"Ours / onnxruntime, geometric means over {len(rows)} networks: {', '.join(said)}. {versions}"]
    pairs = [row["nncf"]["ms"] for row in rows.values() if "ms" in row.get("nncf", {})]
    if pairs:
        ratios = torch.tensor([ours / theirs for _, ours, theirs in pairs])
        lines.append(f"Ours / NNCF, over {len(pairs)} networks: {ratios.log().mean().exp():.3f} (largest {ratios.max():.3f}).")
    for name, found in ((name, row["measured"]) for name, row in rows.items() if "measured" in row):
        fp32, ours, theirs, placed = found["ms"]
        lines.append(
            f'{name} with `choose="measure", deployment=Deployment(threads=2)` ({found["seconds"]:.0f} s), on two threads:'
            f" {placed / fp32:.3f} of fp32 ({fp32:.2f} ms), by rules {ours / fp32:.3f}, onnxruntime {theirs / fp32:.3f}."
        )
    (HERE / "quantize_zoo.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS, help="torchvision names; those of the table where none is given")
    parser.add_argument("--folder", type=Path, required=True, help="where the files are kept")
    parser.add_argument("--latency", action="store_true", help="only time files that are there")
    parser.add_argument("--build", action="store_true", help="only build and compare")
    parser.add_argument("--measured", action="store_true", help="only ours placed by measurement for two threads")
    parser.add_argument("--nncf", action="store_true", help="only build and time NNCF's files, beside those that are there")
    parser.add_argument("--samples", type=int, default=8, help="calibration images, which are also those of the SQNR")
    parser.add_argument("--seconds", type=float, default=4, help="timing of each file")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    args.folder.mkdir(parents=True, exist_ok=True)
    path = HERE / "quantize_zoo.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    for name in args.networks:
        row = rows.setdefault(name, {})
        if args.nncf:
            found = against_nncf(name, args.folder, args.samples, 0 if args.build else args.seconds)
            row["nncf"] = row.get("nncf", {}) | found
        elif args.measured:
            row["measured"] = measured(name, args.folder, args.samples, args.seconds)
        elif not args.latency:
            row |= build(name, args.folder, args.samples)
        if not (args.build or args.nncf or args.measured):
            row |= times(name, args.folder, args.seconds)
        path.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        print(name, row, flush=True)
    if all("ms" in row and "ours_db" in row for row in rows.values()):
        write(rows)


if __name__ == "__main__":
    main()
