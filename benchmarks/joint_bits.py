"""Channels and bits chosen together, beside pruning and then quantizing: ResNet-20 at three sizes of the file.

    python benchmarks/joint_bits.py --cifar CIFAR10 --checkpoints FOLDER [--sizes 0.25 ...] [--draws 0 1 2] [--arms joint ...]

sizes    of the file with 8 bits and all channels
joint    `choose_channels_and_bits(check=False)`, the program's choice
checked  `choose_channels_and_bits`, which measures some choices, among them the program's
mixed    pruned first to a fraction of the parameters (`plan_channels`, its defaults), then bits by layer that fill the size, by
         the same sensitivities and program as in joint: a row for each fraction
uniform  as many bits for all layers; pruned first until the file has the size: a row for each number of bits

Everything after the choice is the same for all rows: layers refitted (`JointPlan.pruned`, `reconstruct_`), `quantize_static`,
`reconstruct_blocks_` (40 steps a block), `imitate_float_` (100 steps) with the whole float network as its teacher. 512 training
images without labels, a draw each; top-1 in % of the file in ONNX Runtime on the 10,000 test images. No file is above its size.
The frontier of pruning and then quantizing is the best of its rows, chosen by the test images, which favours it.

Writes `joint_bits.json` and `joint_bits.md` beside this file; what is not measured again stays.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]
from quantize_cifar import trained  # noqa: E402
from real_networks import cifar, executed  # noqa: E402

import compresskit as ck  # noqa: E402
from compresskit.quant import Bits  # noqa: E402
from compresskit.search.joint import choose_channels_and_bits  # noqa: E402
from compresskit.search.joint.joint_plan import repaired  # noqa: E402

SIZES = (0.25, 0.35, 0.5)
KEPT = {0.25: (0.5, 0.65, 0.4, 0.8), 0.35: (0.8, 0.65, 1.0, 0.5), 0.5: (1.0, 0.85, 0.7)}  # parameters before mixed bits
WIDTHS = {0.25: (3, 4), 0.35: (3, 4), 0.5: (4,)}  # uniform
STEPS, RATE, TUNING = 40, 5e-2, 100
ARMS = ("joint", "checked", "mixed", "uniform")
Batches = list[tuple[Tensor]]
Row = dict[str, Any]


def written(quantized: Any, folder: Path, example: tuple[Tensor]) -> tuple[Path, int]:
    path = ck.export_onnx(quantized, folder / "joint_bits.onnx", (example[0][:2],))
    return path, path.stat().st_size


def quantized_size(model: nn.Module, bits: Any, batches: Batches, folder: Path) -> int:
    return written(ck.quant.quantize_static(model, batches[:1], bits=bits), folder, batches[0])[1]


def cut(model: nn.Module, kept: float, batches: Batches) -> nn.Module:
    """Pruned to a fraction of its parameters, by the defaults, with single channels, and refitted."""
    if kept == 1:
        return model
    plan = ck.prune.plan_channels(model, batches[0], ck.keep(parameters=kept), round_to=1)
    return repaired(model, plan, batches)


def mixed(model: nn.Module, kept: float, batches: Batches, most: int) -> tuple[nn.Module, Any] | None:
    """Bits by layer after pruning, by the same sensitivities and program, which has no channels to choose any more."""
    small = cut(model, kept, batches)
    try:
        return small, choose_channels_and_bits(small, batches, most, ratios=(), check=False).bits
    except ck.SettingError:  # above the size with the fewest bits
        return None


def uniform(model: nn.Module, width: int, batches: Batches, most: int, folder: Path) -> tuple[nn.Module, Any] | None:
    """The largest network whose file is within the size with as many bits everywhere."""
    low, high, bits = 0.05, 1.0, Bits(weights=width)
    best = None
    for _ in range(6):
        kept = (low + high) / 2
        plan = ck.prune.plan_channels(model, batches[0], ck.keep(parameters=kept), round_to=1)
        small = ck.prune.replayed(model, plan)
        if quantized_size(small, bits, batches, folder) <= most:
            low, best = kept, kept
        else:
            high = kept
    return None if best is None else (cut(model, best, batches), bits)


def arms(
    model: nn.Module, size: float, batches: Batches, most: int, folder: Path, known: Row
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of the rows of one size, and what makes the pruned network and its bits."""

    def joint(check: bool) -> tuple[nn.Module, Any]:
        plan = choose_channels_and_bits(model, batches, most, check=check, sensitivities=known.get("sensitivities"))
        known["sensitivities"] = plan.sensitivities
        print(plan, flush=True)
        return plan.pruned(model, batches), plan.bits

    yield "joint", partial(joint, check=False)
    yield "checked", partial(joint, check=True)
    for kept in KEPT[size]:
        yield f"mixed, {kept:.0%} of the parameters", partial(mixed, model, kept, batches, most)
    for width in WIDTHS[size]:
        yield f"uniform, {width} bits", partial(uniform, model, width, batches, most, folder)


def finished(small: nn.Module, bits: Any, model: nn.Module, batches: Batches) -> Any:
    quantized = ck.quant.quantize_static(small, batches, bits=bits)
    ck.quant.reconstruct_blocks_(quantized, batches, steps=STEPS, rate=RATE)
    ck.quant.imitate_float_(quantized, model, batches, steps=TUNING)
    return quantized


def page(found: dict[str, Any]) -> str:
    lines = ["# Joint pruning and bits", "", *(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(), ""]
    lines += ["| size | way | top-1, % | each draw | KiB | parameters | seconds to choose |", "|--:|---|--:|---|--:|--:|--:|"]
    for size, rows in sorted(found["sizes"].items()):
        for way, row in sorted(rows.items()):
            top1 = [one["top1"] for one in row.values()]
            some = next(iter(row.values()))
            lines.append(
                f"| {size} | {way} | {statistics.mean(top1):.2f} | {' / '.join(f'{value:.2f}' for value in top1)}"
                f" | {some['bytes'] / 1024:.1f} | {some['parameters']:,} | {some['seconds']:.0f} |"
            )
    lines += ["", f"All channels, 8 bits: {found['int8']['top1']:.2f} %, {found['int8']['bytes'] / 1024:.1f} KiB."]
    return "\n".join([*lines, "", str(found["about"]), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", type=float, default=SIZES, choices=SIZES)
    parser.add_argument("--draws", nargs="+", type=int, default=(0,))
    parser.add_argument("--arms", nargs="+", default=ARMS, help="how the names of the rows begin")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, path = trained("resnet20", args.checkpoints), HERE / "joint_bits.json"
    network = cifar(model, args.cifar)
    about = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in args.draws:
            batches = [(x,) for x in network.draws[number]]
            whole, most = written(ck.quant.quantize_static(model, batches), folder, batches[0])
            found = json.loads(path.read_text()) if path.exists() else {"sizes": {}}
            found |= {"about": about, "int8": {"top1": network.quality(executed(whole)), "bytes": most}}
            path.write_text(json.dumps(found, indent=1) + "\n")
            known: Row = {}
            for size in args.sizes:
                for way, make in arms(model, size, batches, int(size * most), folder, known):
                    if not way.startswith(tuple(args.arms)):
                        continue
                    began = time.perf_counter()
                    made = make()
                    if made is None:
                        continue
                    seconds = time.perf_counter() - began
                    quantized = finished(made[0], made[1], model, batches)
                    file, size_of_file = written(quantized, folder, batches[0])
                    ck.verify_onnx(file, quantized, [batches[0]])
                    row = {"top1": network.quality(executed(file)), "bytes": size_of_file, "seconds": seconds}
                    row["parameters"] = ck.count_parameters(made[0])
                    found = json.loads(path.read_text())
                    found["sizes"].setdefault(f"{size:g}", {}).setdefault(way, {})[str(number)] = row
                    path.write_text(json.dumps(found, indent=1) + "\n")
                    path.with_suffix(".md").write_text(page(found))
                    print(size, way, number, row, flush=True)


if __name__ == "__main__":
    main()
