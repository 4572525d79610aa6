"""Speed-up of the rewrites for ONNX Runtime's integer kernels: small quantized networks with and without them.

Each row is one or a few layers on an image, quantized for `X86` and for the same target with `tuned=False`, executed in turn in
ONNX Runtime on one thread at batch 1. Volumes of 8 x 24 x 24 are quantized for `X86`, too, with all convolutions in integers
beside those that its rule places there. The row of a depthwise convolution with 8 channels is of another machine
(AMX) than the others. Writes `quantize_kernels.json` and `quantize_kernels.md` beside this file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnxruntime
import torch
from torch import nn

import compresskit as ck
from compresskit.measure import latency

HERE = Path(__file__).parent


class Pools(nn.Module):
    """Average pooling between convolutions, as in Inception's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.pool, self.after = nn.Conv2d(3, 192, 3, 6), nn.AvgPool2d(3, 1, 1), nn.Conv2d(192, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(self.pool(self.before(x).relu())).relu().mean((2, 3))
        return result


def stem(channels: int, kernel: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, channels, kernel, stride, kernel // 2), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1))


def bent(channels: int, steepest: float) -> nn.Module:
    """Convolutions on 56x56, each with a PReLU behind it, whose slopes go from 0 to the steepest."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 4, 4)]
    for _ in range(4):
        slopes = nn.PReLU(channels)
        slopes.weight.data.copy_(torch.linspace(0, steepest, channels))
        layers += [nn.Conv2d(channels, channels, 3, 1, 1), slopes]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))


def between(channels: int, *, depthwise: bool) -> nn.Module:
    """Layers on 56x56: 1x1 convolutions around depthwise ones, or 3x3 ones."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 4, 4)]
    for _ in range(4):
        wide = nn.Conv2d(16, channels, 1 if depthwise else 3, 1, 0 if depthwise else 1)
        middle = [nn.Conv2d(channels, channels, 3, 1, 1, groups=channels), nn.ReLU()] if depthwise else []
        narrow = nn.Conv2d(channels, 16, 1 if depthwise else 3, 1, 0 if depthwise else 1)
        layers += [wide, nn.ReLU(), *middle, narrow, nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))


def grouped(channels: int, groups: int) -> nn.Module:
    """Layers on 28x28, as in ResNeXt."""
    convs = [part for _ in range(4) for part in (nn.Conv2d(channels, channels, 3, 1, 1, groups=groups), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, channels, 8, 8), *convs, nn.AdaptiveAvgPool2d(1))


def volume(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(outputs, 8)
    )


VOLUMES = {
    f"volume, Conv 3x3x3, {a} -> {b}": (a, b)
    for a, b in ((1, 16), (3, 16), (3, 64), (8, 16), (8, 64), (16, 8), (16, 16), (16, 64), (32, 32))
}
ROWS: dict[str, Callable[[], nn.Module]] = {
    "Conv 3x3/2, 3 -> 32": lambda: stem(32, 3, 2),
    "Conv 3x3/1, 3 -> 64": lambda: stem(64, 3, 1),
    "Conv 7x7/2, 3 -> 64": lambda: stem(64, 7, 2),
    "AveragePool 3x3 between Convs, 192 channels": Pools,
    "PReLU behind Conv 3x3, 16 channels, slopes to 0.5": lambda: bent(16, 0.5),
    "PReLU behind Conv 3x3, 16 channels, slopes to 1.5": lambda: bent(16, 1.5),
    "PReLU behind Conv 3x3, 28 channels, slopes to 0.5": lambda: bent(28, 0.5),
    "PReLU behind Conv 3x3, 28 channels, slopes to 1.5": lambda: bent(28, 1.5),
    **{f"depthwise Conv 3x3 between 1x1, {n} channels": partial(between, n, depthwise=True) for n in (8, 12, 20, 24, 58, 72)},
    **{f"groups of Conv 3x3, {n} channels in {g}": partial(grouped, n, g) for n, g in ((64, 16), (128, 32))},
    **{f"few channels: Conv 3x3, 16 -> {n} -> 16": partial(between, n, depthwise=False) for n in (8, 12)},
    **{name: partial(volume, *widths) for name, widths in VOLUMES.items()},
}


def measure(name: str, seconds: float) -> dict[str, float]:
    torch.manual_seed(0)
    shape = (VOLUMES[name][0], 8, 24, 24) if name in VOLUMES else (3, 224, 224)
    model, x = ROWS[name]().eval(), torch.randn(4, *shape)
    conv = replace(ck.quant.X86.operators["conv"], volume=0)
    plain = replace(ck.quant.X86, tuned=name in VOLUMES, operators={**ck.quant.X86.operators, "conv": conv})
    with tempfile.TemporaryDirectory() as folder:
        files = [ck.export_onnx(model, Path(folder) / "fp32.onnx", x)]
        for file, target in (("plain", plain), ("tuned", ck.quant.X86)):
            quantized = ck.quant.quantize_static(model, [x], target=target)
            files.append(ck.export_onnx(quantized, Path(folder) / f"{file}.onnx", x))
        milliseconds = latency(files, x[:1], seconds=seconds)
    return dict(zip(("fp32_ms", "plain_ms", "tuned_ms"), milliseconds, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5, help="spent on each file")
    parser.add_argument("--rows", default="", help="only those whose name holds this; the others stay as they are")
    args = parser.parse_args()
    path = HERE / "quantize_kernels.json"
    rows: dict[str, dict[str, float]] = json.loads(path.read_text())["rows"] if args.rows and path.exists() else {}
    rows |= {name: measure(name, args.seconds) for name in ROWS if args.rows in name}
    versions = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    lines = ["| 224 x 224, batch 1, one thread | fp32 ms | int8 as placed | int8 rewritten | saved |", "|---|--:|--:|--:|--:|"]
    for name, row in rows.items():
        saved = 1 - row["tuned_ms"] / row["plain_ms"]
        lines.append(f"| {name} | {row['fp32_ms']:.3f} | {row['plain_ms']:.3f} | {row['tuned_ms']:.3f} | {saved:.0%} |")
    text = "\n".join([*lines, "", ", ".join(f"{k} {v}" for k, v in versions.items())])
    path.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    (HERE / "quantize_kernels.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
