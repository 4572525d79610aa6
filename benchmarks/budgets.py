"""A budget in, a file out: `compress` called once for each of several budgets, and whether their files keep them.

    python benchmarks/budgets.py --data FOLDER --networks face                                 the face detector, without labels
    python benchmarks/budgets.py --cifar CIFAR10 --checkpoints FOLDER --networks resnet56      three budgets

face      trained by the float network's outputs on 264 photographs (crops of any size, flips), searched on 36 and measured on 200
          that it did not see: F1 in % of the confident cells, as in `real_networks.py`. Adam, batch 16
resnet*   128 images a step, crops and flips, SGD at `--lr` (rows that do not name it: 0.05), one cycle, in `--precision`;
          searched and measured on the test images, whose first 1,024 judge candidates

Short: points lost on the held-out images after the short training of what was chosen. Latency, one image and `--threads` threads,
is measured again after the search, the file and the uncompressed one in turn. The last column: seconds of the call by those of
the training of what was chosen; a later budget takes over what an earlier one measured. A search that was interrupted counts
with all its calls (`calls` in the JSON). All rows are from before the part of a training with rounding had the optimizer and the
schedule of the rest: it was SGD at 0.002 then.

What is not called again stays in `budgets.json` and `budgets.md` beside this file, or those of `--name` for another machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prune_cifar import MEAN, STD, load
from quantize_cifar import trained
from real_networks import SCORE, Network, cifar, executed, networks
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.io import ImageReadMode, decode_image
from vision import Images

import compresskit as ck
from compresskit.measure import latency

HERE = Path(__file__).parent
BUDGETS: dict[str, list[dict[str, Any]]] = {
    "face": [{"latency": "0.35x"}, {"drop": 0.05}],
    "resnet20": [{"latency": "0.35x"}, {"bytes": "0.1x"}, {"drop": "0.5pt"}],
    "resnet56": [{"latency": "0.25x"}, {"bytes": "0.1x"}, {"drop": "0.5pt"}],
}


@dataclass(frozen=True)
class Crops:
    """Batches of parts of photographs, of any size, (N, 3, 240, 320) normalised, without a target."""

    pictures: list[Tensor]
    size: int

    def __len__(self) -> int:
        return len(self.pictures) // self.size

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        order = torch.randperm(len(self.pictures))
        for some in order[: len(self) * self.size].split(self.size):
            x = torch.cat([self.part(self.pictures[int(k)]) for k in some])
            yield ((x - 127) / 128,)

    @staticmethod
    def part(picture: Tensor) -> Tensor:
        """(3, H, W) uint8 -> (1, 3, 240, 320): a crop of 0.3 to 1 of the sides, flipped or not, brighter or darker."""
        _, height, width = picture.shape
        scale = 0.3 + 0.7 * float(torch.rand(()))
        rows = int(scale * min(height, width * 3 / 4))
        columns = int(rows * 4 / 3)
        top, left = (int(torch.randint(0, free + 1, ())) for free in (height - rows, width - columns))
        x = picture[None, :, top : top + rows, left : left + columns].float()
        x = F.interpolate(x, (240, 320), mode="bilinear", antialias=True)
        x = (x * (0.7 + 0.6 * float(torch.rand(())))).clamp(0, 255)
        return x.flip(3) if float(torch.rand(())) < 0.5 else x


def both(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """Logits and boxes, (N, cells, 6)."""
    return torch.cat(outputs, -1)


def f1(found: Tensor, wanted: Tensor) -> float:
    a, b = (part[..., :2].softmax(-1)[..., 1] > SCORE for part in (found, wanted))
    return float(2 * (a & b).sum() / (a.sum() + b.sum()).clamp(min=1))


def detector(network: Network, args: argparse.Namespace) -> tuple[nn.Module, ck.Task, ck.Train]:
    paths = sorted((args.data / "images").iterdir())
    unseen = {*range(200, 400), *range(128, 164)}  # those that measure, and those that the search judges by
    pictures = [decode_image(str(p), ImageReadMode.RGB) for k, p in enumerate(paths) if k not in unseen]
    x = torch.cat([F.interpolate(decode_image(str(p), ImageReadMode.RGB).float()[None], (240, 320), mode="bilinear",
                                 antialias=True) for p in paths[128:164]])  # fmt: skip
    val = ck.metrics.float_targets(network.model, [((part - 127) / 128,) for part in x.split(12)], predict=both)
    task = ck.Task(
        train=Crops(pictures, 16), val=val, calibration=[(part, None) for part in network.draws[0]], metric=f1, predict=both,
        higher_is_better=True,
    )  # fmt: skip
    train = ck.Train(
        steps=args.steps, optimizer=partial(torch.optim.Adam, lr=1e-3), schedule=ck.lr.OneCycle(),
        objective=ck.imitate(loss=ck.distill.losses.hint, weight=1.0, task_weight=0.0),
    )  # fmt: skip
    return network.model, task, train


def classifier(network: Network, data: dict[str, Any], args: argparse.Namespace) -> tuple[nn.Module, ck.Task, ck.Train]:
    (images, labels), (test, answers) = data["train"], data["test"]
    loader = Images(images, labels, 128, MEAN, STD, augment=4, flip=True, shuffle=True)
    calibration = [(x, None) for x in network.draws[0]]
    task = ck.Task(train=loader, val=Images(test, answers, 500, MEAN, STD), calibration=calibration)
    sgd = partial(torch.optim.SGD, lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    train = ck.Train(
        epochs=args.epochs, optimizer=sgd, schedule=ck.lr.OneCycle(), precision=getattr(ck.mixed, args.precision),
        channels_last=True,
    )  # fmt: skip
    return network.model, task, train


def chosen(args: argparse.Namespace) -> Iterator[tuple[str, Network, tuple[nn.Module, ck.Task, ck.Train]]]:
    if "face" in args.networks:
        (pair,) = networks(argparse.Namespace(data=args.data, networks=["face"], cifar=None, checkpoints=None))
        yield "face", pair[1], detector(pair[1], args)
    for name in args.networks:
        if name != "face":
            data = load(args.cifar, args.out / "images.safetensors")
            network = cifar(trained(name, args.checkpoints), args.cifar)
            yield name, network, classifier(network, data, args)


def call(name: str, network: Network, parts: tuple[nn.Module, ck.Task, ck.Train], budget: dict[str, Any],
         args: argparse.Namespace) -> dict[str, Any]:  # fmt: skip
    """One budget: what was chosen, what its file has, and the time that took."""
    model, task, train = parts
    ceilings = ck.at_most(**budget, threads=args.threads)
    try:
        search = ck.compress(
            model, task, ceilings, out=args.out / name, train=train, trials=args.trials, finalists=args.finalists
        )
    except ck.ModelError as error:  # it cannot be met, and the message has the nearest that can
        return {"budget": budget, "refused": str(error).partition("; all files are in")[0]}
    print(search, flush=True)
    dense, mine = latency([args.out / name / "uncompressed" / "model.onnx", search.onnx], (network.example,),
                          threads=args.threads, seconds=3)  # fmt: skip
    curve = [(t.candidate.name, t.best.latency / search.dense.latency, t.best.drop) for t in search.curve() if t.best is not None]
    return {
        "budget": budget,
        "chosen": search.chosen.candidate.name,
        "untrained": search.chosen.untrained,
        "float": network.quality(lambda x: list(model(x)) if name == "face" else [model(x)]),
        "quality": network.quality(executed(search.onnx)),
        "latency": mine / dense,
        "bytes": search.onnx.stat().st_size / search.dense.bytes,
        "drop": search.figures.drop,
        "short": search.chosen.short,
        "met": not search.figures.excesses(search.ceilings),
        "seconds": search.seconds,
        "proxies": sum(t.figures.seconds for t in search.tried if t.figures),
        "short_trainings": sum(t.short_seconds for t in search.tried),
        "training": sum(t.training_seconds for t in search.tried),
        "chosen_training": search.chosen.training_seconds,
        "curve": [dict(zip(("candidate", "latency", "drop"), point, strict=True)) for point in curve],
    }


def table(found: dict[str, Any]) -> str:
    lines = [
        "| network | at most | chosen | quality, % | float, % | short | latency | size | kept | trained | minutes"
        " | total / training |",
        "|---|---|---|--:|--:|--:|--:|--:|---|---|--:|--:|",
    ]
    for name, rows in found["networks"].items():
        for row in rows:
            asked = ", ".join(f"{key} {value}" for key, value in row["budget"].items())
            if "refused" in row:
                lines.append(f"| {name} | {asked} | {row['refused']} {'| ' * 10}|")
                continue
            short = "" if row.get("short") is None else f"{100 * row['short']:.2f}"
            trained = f"{row['steps']} steps" if "steps" in row else f"{row['epochs']} epochs"
            trained += ", which made it worse: the file without" * row.get("untrained", False)
            lines.append(
                f"| {name} | {asked} | {row['chosen']} | {row['quality']:.2f} | {row['float']:.2f} | {short}"
                f" | {row['latency']:.3f} | {row['bytes']:.3f} | {'yes' if row['met'] else 'no'} | {trained}"
                f" | {row['seconds'] / 60:.0f} | {row['seconds'] / row['chosen_training']:.2f} |"
            )
    about = ", ".join(f"{key} {value}" for key, value in found["about"].items())
    return "\n".join([*lines, "", f"Latency and size as shares of the uncompressed file's. {about}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="networks.py with `load(name)` and photographs in images/")
    parser.add_argument("--cifar", type=Path, help="CIFAR-10: train/<class>/* and test/<class>/*")
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--networks", nargs="+", choices=list(BUDGETS), default=["face"])
    parser.add_argument("--budgets", nargs="+", choices=["latency", "bytes", "drop"], default=["latency", "bytes", "drop"],
                        help="those with a ceiling on one of these (default: all)")  # fmt: skip
    parser.add_argument("--epochs", type=int, default=4, help="of resnet*")
    parser.add_argument("--steps", type=int, default=1500, help="of face")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--finalists", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.02, help="of resnet*")
    parser.add_argument("--precision", choices=["AMP_BF16", "FP32"], default="AMP_BF16", help="of resnet*")
    parser.add_argument("--out", type=Path, default=Path("runs/budgets"), help="folder of the searches")
    parser.add_argument("--name", default="budgets", help="of the figures' files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = HERE / f"{args.name}.json"
    for name, network, parts in chosen(args):
        for budget in (each for each in BUDGETS[name] if each.keys() & {*args.budgets}):
            row = call(name, network, parts, budget, args)
            row |= {"epochs": args.epochs, "lr": args.lr} if name != "face" else {"steps": args.steps}
            found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"networks": {}}
            found["about"] = {"torch": torch.__version__, "trials": args.trials, "finalists": args.finalists}
            rows = [other for other in found["networks"].get(name, []) if other["budget"] != budget]
            found["networks"][name] = [*rows, row]
            path.write_text(json.dumps(found, indent=1) + "\n")
            path.with_suffix(".md").write_text(table(found))
            print(table(found), flush=True)


if __name__ == "__main__":
    main()
