"""Weight sparsity by four methods (one-shot, gradual, rewinding, random) with the same number of steps.

ResNet-20 on CIFAR-10 (`--data`, `--checkpoint`), or a small residual network on scikit-learn's digits (`--digits`, a minute),
which is trained first. Every method starts from the same trained network and takes the same number of optimizer steps. Writes
`sparsity.json` (`sparsity_digits.json`) after every run, and continues where it was interrupted; `.md` is the table. Accuracy is
of the PyTorch model on the whole test set; sizes are of the ONNX file, of the file in a zip, and with sparse initializers.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import platform
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "recipes"))

import digits  # noqa: E402
from vision import CifarResNet, Images, cifar10  # noqa: E402

import compresskit as ck  # noqa: E402
from compresskit.prune import Masks, Sparsify, masks_of, rewind, schedules  # noqa: E402
from compresskit.prune.criteria import movement, random_scores  # noqa: E402

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
SNAPSHOT = 0.33

Data = dict[str, tuple[torch.Tensor, torch.Tensor]]
Method = Callable[[torch.nn.Module, ck.Task, float, ck.Train], torch.nn.Module]


def one_shot(model: torch.nn.Module, task: ck.Task, ratio: float, how: ck.Train) -> torch.nn.Module:
    return Sparsify(budget=ck.remove(weights=ratio), finetune=how)(model, task)


def gradual(model: torch.nn.Module, task: ck.Task, ratio: float, how: ck.Train) -> torch.nn.Module:
    return Sparsify(budget=ck.remove(weights=ratio), schedule=schedules.Cubic(), until=0.3, updates=20, finetune=how)(model, task)


def rigl(model: torch.nn.Module, task: ck.Task, ratio: float, how: ck.Train) -> torch.nn.Module:
    return Sparsify(
        budget=ck.remove(weights=ratio), schedule=schedules.Constant(), regrow=0.3, until=0.6, updates=6, finetune=how
    )(model, task)


def moving(model: torch.nn.Module, task: ck.Task, ratio: float, how: ck.Train) -> torch.nn.Module:
    return Sparsify(
        budget=ck.remove(weights=ratio), criterion=movement, schedule=schedules.Cubic(), until=0.3, updates=20, finetune=how
    )(model, task)


def rewinding(model: torch.nn.Module, task: ck.Task, ratio: float, how: ck.Train) -> torch.nn.Module:
    """Half of the steps dense, then rewound to a third of that half, and the other half of the steps sparse."""
    assert how.epochs is not None
    half = replace(how, epochs=how.epochs // 2)
    kept = ck.Task(val=task.val, train=task.train, snapshots={SNAPSHOT: {}})
    model = half(model, kept)
    return Sparsify(budget=ck.remove(weights=ratio), rewind=rewind(to=SNAPSHOT), finetune=half)(model, kept)


def at_random(model: torch.nn.Module, task: ck.Task, ratio: float, how: ck.Train) -> torch.nn.Module:
    return Sparsify(budget=ck.remove(weights=ratio), criterion=partial(random_scores, seed=torch.initial_seed()), finetune=how)(
        model, task
    )


def dense(model: torch.nn.Module, task: ck.Task, ratio: float, how: ck.Train) -> torch.nn.Module:
    return how(model, task)


METHODS: dict[str, Method] = {
    "one-shot": one_shot,
    "gradual": gradual,
    "rewinding": rewinding,
    "random": at_random,
    "rigl": rigl,
    "movement": moving,
    "dense": dense,
}


def sizes(model: torch.nn.Module, example: Any) -> dict[str, int]:
    """Bytes of the ONNX file: plain, zipped, with sparse initializers."""
    with tempfile.TemporaryDirectory() as folder:
        path = ck.export_onnx(model, Path(folder) / "model.onnx", example)
        found = {"onnx": path.stat().st_size, "zip": ck.export.compressed_bytes(path)["zip"] or 0}
        sparse = ck.export.store_sparse(path, Path(folder) / "sparse.onnx")
        return found | {"sparse_onnx": sparse.stat().st_size}


Setting = Callable[[int], tuple[torch.nn.Module, ck.Task]]


def cifar(args: argparse.Namespace) -> Setting:
    """For a seed, the trained ResNet-20 and a share of the training images."""
    data: Data = cifar10(args.data, None)

    def make(seed: int) -> tuple[torch.nn.Module, ck.Task]:
        images, labels = data["train"]
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[: args.images]
        train = Images(images[chosen], labels[chosen], args.batch_size, MEAN, STD, augment=4, flip=True, shuffle=True)
        test, targets = data["test"]
        model = CifarResNet(20)
        model.load_state_dict(load_file(args.checkpoint))
        return model.eval(), ck.Task(train=train, val=Images(test, targets, 500, MEAN, STD))

    return make


def handwritten(args: argparse.Namespace) -> Setting:
    """For a seed, a residual network trained on the digits for twelve epochs."""

    @functools.cache
    def make(seed: int) -> tuple[torch.nn.Module, ck.Task]:
        torch.manual_seed(seed)
        task = digits.data(seed, args.batch_size)
        sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
        return ck.Train(epochs=12, optimizer=sgd, schedule=ck.lr.OneCycle())(digits.resnet(16, 32, 64), task), task

    return make


def train_once(args: argparse.Namespace, make: Setting, name: str, ratio: float, seed: int) -> dict[str, Any]:
    """One network, trained and measured."""
    start, task = make(seed)
    model = copy.deepcopy(start)
    torch.manual_seed(seed)
    sgd = partial(torch.optim.SGD, lr=args.rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    precision = ck.mixed.AMP_BF16 if args.bf16 else ck.mixed.FP32
    how = ck.Train(epochs=args.epochs, optimizer=sgd, schedule=ck.lr.OneCycle(), precision=precision)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a layer of a small network may lose all of its weights
        model = METHODS[name](model, task, ratio, how)
    masks = masks_of(model) or Masks({})
    return {
        "method": name, "ratio": ratio, "seed": seed, "accuracy": ck.evaluate(model, task), "removed": masks.removed,
        "weights": masks.total, **sizes(model, task.example()),
    }  # fmt: skip


def table(runs: list[dict[str, Any]], settings: dict[str, Any]) -> str:
    """Means over seeds, methods down and ratios across; and the file sizes."""
    ratios = sorted({run["ratio"] for run in runs if run["method"] != "dense"})
    base = [run["accuracy"] for run in runs if run["method"] == "dense"]
    lines = [
        f"{settings['network']}, test accuracy in %, {settings['steps']} steps of {settings['batch_size']} images for each method"
        f" (mean of the seeds, their range, how many). The network before: {settings['start']:.2%}"
        + (f"; dense after the same steps: {statistics.mean(base):.2%}." if base else "."),
        "",
        "| method | " + " | ".join(f"{ratio:.0%} zeros" for ratio in ratios) + " |",
        "|---|" + "---|" * len(ratios),
    ]
    for name in METHODS:
        cells = []
        for ratio in ratios:
            found = [100 * run["accuracy"] for run in runs if run["method"] == name and run["ratio"] == ratio]
            spread = f" ({min(found):.2f} to {max(found):.2f}, {len(found)})" if len(found) > 1 else ""
            cells.append(f"{statistics.mean(found):.2f}{spread}" if found else "-")
        if name != "dense" and set(cells) != {"-"}:
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| zeros | ONNX KiB | zipped KiB | with sparse_initializer KiB |", "|--:|--:|--:|--:|"]
    for ratio in ratios:
        run = next(r for r in runs if r["ratio"] == ratio and r["method"] != "dense")
        numbers = " | ".join(f"{run[key] / 1024:.0f}" for key in ("onnx", "zip", "sparse_onnx"))
        lines.append(f"| {ratio:.0%} | {numbers} |")
    return "\n".join([*lines, "", f"{settings}"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--digits", action="store_true", help="a small network on scikit-learn's digits, without any data")
    parser.add_argument("--data", help="folder with train/<class>/* and test/<class>/*, or torchvision's CIFAR-10")
    parser.add_argument("--checkpoint", help="safetensors file of a trained ResNet-20")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.9, 0.95, 0.7, 0.5], help="shares of zeros, in this order")
    parser.add_argument("--methods", nargs="+", default=["one-shot", "gradual", "rewinding", "random"], choices=METHODS,
                        help="what is compared")  # fmt: skip
    parser.add_argument("--epochs", type=int, default=2, help="even, so that rewinding can halve it")
    parser.add_argument("--images", type=int, default=4992, help="training images of an epoch of CIFAR-10")
    parser.add_argument("--batch-size", type=int, default=128, help="images a step")
    parser.add_argument("--rate", type=float, default=0.05, help="largest learning rate")
    parser.add_argument("--bf16", action="store_true", help="train under autocast to bfloat16")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each")
    parser.add_argument("--out", default=str(HERE), help="folder for the .json and the .md")
    args = parser.parse_args()
    if not args.digits and not (args.data and args.checkpoint):
        parser.error("give --digits, or --data and --checkpoint")

    make = handwritten(args) if args.digits else cifar(args)
    file = Path(args.out) / ("sparsity_digits.json" if args.digits else "sparsity.json")
    model, task = make(0)
    settings = {
        "network": "ResNet-8 (16, 32, 64), digits" if args.digits else "ResNet-20, CIFAR-10", "epochs": args.epochs,
        "steps": args.epochs * task.length("train"), "batch_size": args.batch_size, "rate": args.rate, "bf16": args.bf16,
        "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip
    record = json.loads(file.read_text()) if file.exists() else None
    if record is None or {k: record["settings"].get(k) for k in settings} != settings:
        record = {"settings": settings | {"start": ck.evaluate(model, task)}, "runs": []}
    for seed, ratio, name in itertools.product(range(args.seeds), args.ratios, args.methods):
        if any((r["method"], r["ratio"], r["seed"]) == (name, ratio, seed) for r in record["runs"]):
            continue
        run = train_once(args, make, name, ratio, seed)
        print(f"seed {seed} {ratio:.0%} {name}: {run['accuracy']:.4f}", flush=True)
        record["runs"].append(run)
        file.write_text(json.dumps(record, indent=1) + "\n")
        file.with_suffix(".md").write_text(table(record["runs"], record["settings"]))


if __name__ == "__main__":
    main()
