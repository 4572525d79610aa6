"""Weights as palettes beside the uniform grid at the same bits: accuracy of the executed file, its size, its time.

    python benchmarks/palettes.py --data CIFAR10 --checkpoints FOLDER

uniform    quantize_weights, one scale for each output channel, symmetric; 3 bits are stored in 4
palette    the same with Palette(bits=...): one for each weight, or for each 16 output channels

Every weight of ResNet-20 has these bits, first and last layer too; activations and products stay float, and nothing is trained
or calibrated. Load: until the file is ready to run. Latency: one thread, batch 1, all files in turn.

Writes `palettes.json` and `palettes.md` beside this file.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from quantize_cifar import MEAN, STD, X, trained
from real_networks import executed
from torch import Tensor
from vision import cifar10

import compresskit as ck
from compresskit.measure import latency, session
from compresskit.quant import BlockScheme, quantize_weights
from compresskit.quant.weight_only import Palette

HERE = Path(__file__).parent
SCHEMES: dict[str, BlockScheme | Palette] = {
    "uniform, 4 bits": BlockScheme(bits=4, block_size=None),
    "palette, 4 bits": Palette(bits=4),
    "palette for 16 channels, 4 bits": Palette(bits=4, group_size=16),
    "uniform, 3 bits": BlockScheme(bits=3, block_size=None),
    "palette, 3 bits": Palette(bits=3),
    "palette for 16 channels, 3 bits": Palette(bits=3, group_size=16),
    "palette, 2 bits": Palette(bits=2),
}


def top1(path: Path, test: list[tuple[Tensor, Tensor]]) -> float:
    """Percent of the images that a file classifies rightly."""
    run = executed(path)
    hits = sum(int((run(x)[0].argmax(1) == labels).sum()) for x, labels in test)
    return 100 * hits / sum(len(labels) for _, labels in test)


def loading(path: Path) -> float:
    """Milliseconds to load a file, the median of 9."""
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        session(path)
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


def table(found: dict[str, Any]) -> str:
    lines = [
        "| weights | top-1 % | SQNR of the weights, dB | file, KiB | of float | load ms | latency, of float | seconds |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    whole = found["rows"]["float"]
    for name, row in found["rows"].items():
        cells = [name, f"{row['top1']:.2f}", f"{row['db']:.1f}" if "db" in row else "", f"{row['bytes'] / 1024:.0f}"]
        cells += [f"{row['bytes'] / whole['bytes']:.3f}", f"{row['load_ms']:.1f}", f"{row['ms'] / whole['ms']:.2f}"]
        cells.append(f"{row['seconds']:.1f}" if "seconds" in row else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"ResNet-20, 10,000 test images, executed in ONNX Runtime. {found['about']}"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10: train/<class>/* and test/<class>/*")
    parser.add_argument("--checkpoints", type=Path, required=True)
    args = parser.parse_args()
    images, labels = cifar10(args.data, None)["test"]
    test = list(
        zip(((images.float() / 255 - MEAN.view(-1, 1, 1)) / STD.view(-1, 1, 1)).split(500), labels.split(500), strict=True)
    )
    model = trained("resnet20", args.checkpoints)
    with tempfile.TemporaryDirectory() as folder:
        paths = {"float": ck.export_onnx(model, Path(folder) / "float.onnx", X)}
        rows: dict[str, dict[str, Any]] = {"float": {}}
        for i, (name, scheme) in enumerate(SCHEMES.items()):
            began = time.perf_counter()
            quantized = quantize_weights(model, X, scheme=scheme, convolutions=scheme)
            rows[name] = {"seconds": time.perf_counter() - began}
            rows[name]["db"] = statistics.mean(row.sqnr for row in quantized.plan.rows if row.sqnr is not None)
            paths[name] = ck.export_onnx(quantized, Path(folder) / f"{i}.onnx", X)
            if not ck.verify_onnx(paths[name], quantized, [(test[0][0][:64],)]).passed:
                raise SystemExit(f"{name}: the file does not compute what the model does")
        for name, path in paths.items():
            rows[name] |= {"top1": top1(path, test), "bytes": path.stat().st_size, "load_ms": loading(path)}
            print(name, rows[name], flush=True)
        for name, ms in zip(paths, latency(list(paths.values()), (test[0][0][:1],), seconds=2.0), strict=True):
            rows[name]["ms"] = ms
    about = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__, "python": platform.python_version()}
    result = {"about": about, "rows": rows}
    (HERE / "palettes.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "palettes.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
