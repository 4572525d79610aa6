"""Time and memory of block reconstruction at 4 bits: ResNet-20 at 32 pixels and ResNet-18 at 224, 512 images, two threads.

    python benchmarks/reconstruct_cost.py [--images 512] [--threads 2]

Each row runs in a process of its own: `quantize_static(bits=Bits(weights=4))`, then `reconstruct_blocks_` with 60 steps at a
rate of 0.05, as in `low_bit.py`, or its default of 300. With `MALLOC_MMAP_THRESHOLD_` in its environment glibc gives tensors
above that many bytes back as soon as they are freed; it else keeps those below 32 MiB, which are most here. Seconds: of the
reconstruction alone. Memory: the largest resident set of the process, imports, model and images included. SQNR: of the outputs
for 64 other images, before and after. Weights are random, with a BatchNorm that has seen the images, which are smooth noise.
Accuracy of trained networks is in `low_bit.md`.

Writes `reconstruct_cost.json` and `reconstruct_cost.md` beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet18

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))
from vision import CifarResNet

import compresskit as ck

HERE = Path(__file__).parent
SIZES = {"ResNet-20": 32, "ResNet-18": 224}
SPARING = "60 steps, MALLOC_MMAP_THRESHOLD_=4194304"
ROWS = (("ResNet-20", "default"), ("ResNet-20", "60 steps"), ("ResNet-18", "60 steps"), ("ResNet-18", SPARING))
SHORT = {"steps": 60, "rate": 0.05}
WAYS: dict[str, dict[str, Any]] = {"default": {}, "60 steps": SHORT, SPARING: SHORT}


def pictures(count: int, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.interpolate(torch.randn(count, 3, size // 8, size // 8, generator=generator), size=size, mode="bilinear")


class Loader:
    """Batches that are made when they are asked for."""

    def __init__(self, images: int, size: int) -> None:
        self.images, self.size = images, size

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return ((pictures(32, self.size, seed),) for seed in range(self.images // 32))


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = CifarResNet(20) if name == "ResNet-20" else resnet18()
    with torch.no_grad():
        for seed in range(4):
            model.train()(pictures(32, SIZES[name], 1000 + seed))
    return model.eval()


def decibels(model: nn.Module, quantized: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        wanted, got = model(x), quantized(x)
    return float(10 * (wanted.square().sum() / (wanted - got).square().sum()).log10())


def row_of(name: str, way: str, images: int) -> dict[str, Any]:
    model, size = model_of(name), SIZES[name]
    batches = Loader(images, size)
    other = pictures(64, size, 2000)
    quantized = ck.quant.quantize_static(model, batches, bits=ck.quant.Bits(weights=4))
    before = decibels(model, quantized, other)
    began = time.perf_counter()
    layers = ck.quant.reconstruct_blocks_(quantized, batches, **WAYS[way])
    seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found = {"layers": layers, "seconds": seconds, "peak_gib": peak, "before": before}
    return {"network": name, "way": way} | found | {"after": decibels(model, quantized, other)}


def table(found: dict[str, Any]) -> str:
    lines = ["| network | way | layers | minutes | peak GiB | SQNR before | after |", "|---|---|--:|--:|--:|--:|--:|"]
    for row in found["rows"]:
        cells = [row["network"], row["way"], str(row["layers"]), f"{row['seconds'] / 60:.1f}", f"{row['peak_gib']:.2f}"]
        cells += [f"{row[key]:.1f} dB" for key in ("before", "after")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{found['about']}"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--row", nargs=2, metavar=("NETWORK", "WAY"), help="measure this row alone, and print it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.row:
        name, way = args.row
        print(json.dumps(row_of(name, way, args.images)))
        return
    rows = []
    for name, way in ROWS:
        command = [sys.executable, __file__, "--images", str(args.images), "--threads", str(args.threads), "--row", name, way]
        environment = os.environ | dict(part.split("=") for part in way.split(", ")[1:])
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    about = {"images": args.images, "threads": args.threads, "torch": torch.__version__, "python": platform.python_version()}
    found = {"rows": rows, "about": about}
    (HERE / "reconstruct_cost.json").write_text(json.dumps(found, indent=1) + "\n")
    (HERE / "reconstruct_cost.md").write_text(table(found))


if __name__ == "__main__":
    main()
