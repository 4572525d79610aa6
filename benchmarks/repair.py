"""Networks that 8 bits break: what `quant.repair` finds, what each remedy buys, and what the file reaches.

    python benchmarks/repair.py --data FOLDER --cifar CIFAR10 --checkpoints FOLDER [--cases NAME ...]

FOLDER: networks.py with `load(name)` and photographs in images/. Every figure is of the file in ONNX Runtime, on data that chose
nothing. Nothing has labels: the float network's outputs judge, those of the last case by their F1.

scaled     ResNet-20; one channel inside a block times 100, the layer that reads it divided by 100
outlier    ResNet-20; one channel that nothing reads is 400 everywhere
sample     ResNet-20; one pixel of one calibration picture is 60
separable  face detector; channels between depthwise convolutions and the next times 1/16 to 16, at random
face       face detector as it is, to an F1 of 0.97 by its own measure (drop=3)

ResNet-20: top-1 in % on the 10,000 test images, calibrated on 512 training images. Face detector: F1 in % of cells with a score
above 0.3 against those of the float network, on photographs 200 to 399; calibrated on 0 to 127; `face` is judged on 128 to 199.
Writes `repair.json` and `repair.md` beside this file; what is not measured again stays.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]
from real_networks import SCORE, Network, executed, float_run, networks, photographs  # noqa: E402

import compresskit as ck  # noqa: E402

Case = tuple[nn.Module, list[Tensor], ck.Task | None, float]  # network, calibration, what judges, percent that may be lost


def scaled(model: nn.Module) -> nn.Module:
    block = model.get_submodule("layer2.1")
    with torch.no_grad():
        for vector in (block.get_parameter("bn1.weight"), block.get_parameter("bn1.bias")):
            vector[3] *= 100
        block.get_parameter("conv2.weight")[:, 3] /= 100
    return model


def outlier(model: nn.Module) -> nn.Module:
    block = model.get_submodule("layer2.1")
    with torch.no_grad():
        block.get_parameter("bn1.weight")[3] = 0
        block.get_parameter("bn1.bias")[3] = 400
        block.get_parameter("conv2.weight")[:, 3] = 0
    return model


def unequalised(model: nn.Module) -> nn.Module:
    random = torch.Generator().manual_seed(0)
    for part in model.modules():
        if not isinstance(part, nn.Sequential) or len(part) != 6:
            continue
        depthwise, norm, _, pointwise, *_ = part
        if not isinstance(depthwise, nn.Conv2d) or depthwise.groups == 1:
            continue
        factor = torch.exp2(8 * torch.rand(depthwise.out_channels, generator=random) - 4)
        with torch.no_grad():
            for vector in (norm.get_parameter("weight"), norm.get_parameter("bias")):
                vector.mul_(factor)
            pointwise.get_parameter("weight").div_(factor[:, None, None])
    return model


def confident(output: tuple[Tensor, Tensor]) -> Tensor:
    """Scores of the faces, (N, cells)."""
    return output[0].softmax(-1)[..., 1]


def f1(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found > SCORE, wanted > SCORE
    return float(2 * (found & wanted).sum() / (found.sum() + wanted.sum()).clamp(min=1))


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Network, Callable[[], Case]]]:
    """Name, the network as it was, and what makes the case."""
    given = {"data": args.data, "cifar": args.cifar, "checkpoints": args.checkpoints}
    found = dict(networks(Namespace(networks=["face", "resnet20"] if args.cifar else ["face"], **given)))
    if resnet := found.get("resnet20"):
        batches = resnet.draws[0]
        hot = [batches[0].clone(), *batches[1:]]
        hot[0][0, 0, 9, 9] = 60
        yield "scaled", resnet, lambda: (scaled(copy.deepcopy(resnet.model)), batches, None, 0.1)
        yield "outlier", resnet, lambda: (outlier(copy.deepcopy(resnet.model)), batches, None, 0.1)
        yield "sample", resnet, lambda: (resnet.model, hot, None, 0.1)
    face = found["face"]
    x = torch.cat([(p - 127) / 128 for p in photographs(args.data / "images", (240, 320))])[128:200]
    held = ck.metrics.float_targets(face.model, [(part,) for part in x.split(12)], predict=confident)
    task = ck.Task(val=held, metric=f1, predict=confident, higher_is_better=True)
    yield "separable", face, lambda: (unequalised(copy.deepcopy(face.model)), face.draws[0], None, 0.1)
    yield "face", face, lambda: (face.model, face.draws[0], task, 3.0)


def measure(network: Network, case: Case, folder: Path) -> dict[str, Any]:
    model, batches, task, drop = case
    inputs = [(x,) for x in batches]
    plain = ck.quant.quantize_static(model, inputs)
    began = time.perf_counter()
    repaired, report = ck.quant.repair(model, inputs, task=task, drop=drop)
    seconds = time.perf_counter() - began
    files = [ck.export_onnx(part, folder / f"{i}.onnx", inputs[0]) for i, part in enumerate((plain, repaired))]
    return {
        "float": network.quality(float_run(model)),
        "plain": network.quality(executed(files[0])),
        "repaired": network.quality(executed(files[1])),
        "seconds": seconds,
        "reached": report.reached,
        "integer_macs": ck.audit(files[1]).integer_fraction,
        "causes": [str(cause) for cause in report.causes],
        "left out": [str(planned) for planned in report.plan if planned.skipped],
        "remedies": [str(remedy) for remedy in report.remedies],
    }


def page(rows: dict[str, Any]) -> str:
    lines = ["# Repair", "", *(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(), ""]
    lines += ["| case | float | int8 | repaired | MACs in integers | seconds |", "|---|--:|--:|--:|--:|--:|"]
    for name, row in rows.items():
        numbers = " | ".join(f"{row[key]:.2f}" for key in ("float", "plain", "repaired"))
        lines.append(f"| {name} | {numbers} | {row['integer_macs']:.0%} | {row['seconds']:.0f} |")
    for name, row in rows.items():
        texts = [*row["causes"], *(f"tried: {text}" for text in row["remedies"]), *row["left out"]]
        lines += ["", f"## {name}", "", *(f"* {text}" for text in texts)]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--cases", nargs="+", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = HERE / "repair.json"
    rows: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    for name, network, case in cases(args):
        if name in (args.cases or [name]):
            with TemporaryDirectory() as folder:
                rows[name] = measure(network, case(), Path(folder))
            print(name, json.dumps(rows[name], indent=1), flush=True)
            result.write_text(json.dumps(rows, indent=1) + "\n")
            (HERE / "repair.md").write_text(page(rows))


if __name__ == "__main__":
    main()
