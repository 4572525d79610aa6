"""Effect of moving scales off rounding boundaries: torchvision networks in int8, simulated, as written, and in integer kernels.

Random weights, BatchNorm statistics of random images, 32 images. Each network is quantized twice: with its scales as calibrated,
and with scales moved off rounding boundaries (`quant/passes/rounding_boundaries.py`), which is what `quantize_static` does.

    integers   fraction of the integers of all QuantizeLinear operators that differ between the file as written (no optimization,
               float kernels) and as ONNX Runtime optimizes it (integer kernels)
    written    fraction of outputs of the file as written within a step (1/255 of their range) of the simulation
    optimized  the same of the file as optimized
    dB         SQNR of the outputs of the optimized file against fp32: the error of rounding itself
    seconds    to find the scales, one thread
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

import compresskit as ck
from compresskit.quant.passes.rounding_boundaries import nudge_scales_

HERE = Path(__file__).parent
NAMES = """resnet18 resnet50 mobilenet_v2 mobilenet_v3_small shufflenet_v2_x1_0 densenet121 googlenet efficientnet_b0
 regnet_y_400mf squeezenet1_1""".split()


def network(name: str, size: int) -> nn.Module:
    """A network with random weights, its activations of a sane size."""
    import torchvision

    torch.manual_seed(0)
    model: nn.Module = torchvision.models.get_model(name, weights=None)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        for _ in range(4):
            model.train()(torch.randn(8, 3, size, size))
    return model.eval()


def executed(file: onnx.ModelProto, images: Tensor, optimize: bool) -> list[np.ndarray]:
    """All outputs of a file."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(file.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return found


def compared(model: nn.Module, calibration: Tensor, images: Tensor, off: bool, folder: Path) -> dict[str, float]:
    """One row: quantized, exported, run three ways."""
    with mock.patch("compresskit.quant.static.nudge_scales_"):
        quantized = ck.quant.quantize_static(model, [calibration])
    begin = time.perf_counter()
    if off:
        nudge_scales_(quantized.body)
    seconds = time.perf_counter() - begin
    file = onnx.load(str(ck.export_onnx(quantized, folder / "int8.onnx", (images[:2],))))
    rounded = [node.output[0] for node in file.graph.node if node.op_type == "QuantizeLinear"]
    file.graph.output.extend(onnx.helper.make_tensor_value_info(n, onnx.TensorProto.UINT8, None) for n in rounded)
    with torch.no_grad():
        wanted, simulated = model(images).numpy(), quantized(images).numpy()
    written, optimized = executed(file, images, False), executed(file, images, True)
    step = float(simulated.max() - simulated.min()) / 255
    pairs = list(zip(written[1:], optimized[1:], strict=True))
    return {
        "integers": sum(int((a != b).sum()) for a, b in pairs) / sum(a.size for a, _ in pairs),
        "written": float((np.abs(written[0] - simulated) <= step).mean()),
        "optimized": float((np.abs(optimized[0] - simulated) <= step).mean()),
        "db": float(10 * np.log10((wanted**2).sum() / ((wanted - optimized[0]) ** 2).sum())),
        "seconds": seconds,
    }


def table(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    """The rows as Markdown: as calibrated, then moved."""
    lines = ["| network | integers that differ | written | optimized | dB | seconds |", "|---|--:|--:|--:|--:|--:|"]
    for name, row in rows.items():
        before, after = row["calibrated"], row["moved"]
        cells = [f"{100 * before['integers']:.2f} % -> {100 * after['integers']:.4f} %"]
        cells += [f"{100 * before[key]:.1f} % -> {100 * after[key]:.1f} %" for key in ("written", "optimized")]
        cells += [f"{before['db']:.1f} -> {after['db']:.1f}", f"{after['seconds']:.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NAMES)
    parser.add_argument("--size", type=int, default=96, help="pixels of an image's side")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    versions = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__, "pixels": args.size}
    for name in args.networks:
        model = network(name, args.size)
        calibration, images = torch.randn(16, 3, args.size, args.size), torch.randn(32, 3, args.size, args.size)
        with tempfile.TemporaryDirectory() as folder:
            ways = {"calibrated": False, "moved": True}
            rows[name] = {way: compared(model, calibration, images, off, Path(folder)) for way, off in ways.items()}
        print(name, rows[name], flush=True)
        (HERE / "quantize_ties.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
        (HERE / "quantize_ties.md").write_text(f"{table(rows)}\n\n{(__doc__ or '').strip()}\n\n{versions}\n")


if __name__ == "__main__":
    main()
