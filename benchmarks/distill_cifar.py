"""CIFAR-10: a small residual network alone, with soft targets, and with decoupled ones. Several seeds.

All train for the same number of epochs; accuracy is after the last. Teacher: a trained ResNet-56. Its logits are cached for a few
fixed augmented views of every image. All arms train on these views, so that they differ only in their losses. Writes
`distill_cifar.json` and `distill_cifar.md` beside this file after every run; runs that are in the file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import compresskit as ck
from compresskit import distill as kd

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "recipes"))
from vision import CifarResNet, Images, cifar10  # noqa: E402

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
ARMS = ("alone", "kd", "dkd")


class Views(Images):
    """Images whose crops and flips repeat: pass n shows view n % views of every image, in whatever order."""

    def __init__(self, images: Tensor, labels: Tensor, batch_size: int, views: int) -> None:
        super().__init__(images, labels, batch_size, MEAN, STD, augment=4, flip=True, shuffle=True)
        self.views, self.passes = views, 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        random = torch.Generator().manual_seed(self.passes % self.views)
        count = len(self.images)
        self.flipped = torch.rand(count, generator=random) < 0.5
        self.corners = torch.randint(0, 2 * self.augment + 1, (2, count), generator=random)
        self.passes += 1
        return super().__iter__()

    def draw(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.flipped[index], self.corners[:, index]


def objective(arm: str, cached: kd.Cached | kd.Teacher, beta: float) -> ck.Objective | None:
    """The objective of an arm; the weights are those of the papers (1503.02531 as RepDistiller has it, 2203.08679)."""
    if arm == "alone":
        return None
    if arm == "kd":
        return kd.imitate(cached, temperature=4.0, weight=0.9, task_weight=0.1)
    return kd.imitate(cached, loss=partial(kd.losses.dkd, alpha=1.0, beta=beta, temperature=4.0), weight=1.0, task_weight=1.0)


def train(
    arm: str, seed: int, cached: kd.Cached | kd.Teacher, task: ck.Task, args: argparse.Namespace
) -> dict[str, float | int | str]:
    """One run: test accuracy after the last epoch."""
    torch.manual_seed(seed)
    assert isinstance(task.train, Views)
    task.train.passes = 0
    sgd = partial(torch.optim.SGD, lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    how = ck.Train(epochs=args.epochs, optimizer=sgd, schedule=ck.lr.OneCycle(), precision=ck.mixed.AMP_BF16,
                   objective=objective(arm, cached, args.beta))  # fmt: skip
    begin = time.perf_counter()
    model = how(CifarResNet(args.depth), task)
    seconds = round(time.perf_counter() - begin, 1)
    return {"arm": arm, "seed": seed, "accuracy": ck.evaluate(model, task), "seconds": seconds}


def report(settings: dict[str, object], teacher: float, rows: list[dict[str, float | int | str]], name: str) -> str:
    """Write both files, and give the table."""
    lines = ["| arm | seeds | last-epoch top-1, mean | of each seed |", "|---|--:|--:|---|"]
    for arm in ARMS:
        values = [float(row["accuracy"]) for row in rows if row["arm"] == arm]
        if values:
            each = ", ".join(f"{100 * v:.2f}" for v in values)
            lines.append(f"| {arm} | {len(values)} | {100 * statistics.mean(values):.2f} | {each} |")
    lines += ["", f"Teacher: {100 * teacher:.2f}. " + ", ".join(f"{k}={v}" for k, v in settings.items())]
    record = {"settings": settings, "teacher": teacher, "rows": rows}
    (HERE / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (HERE / f"{name}.md").write_text("\n".join(lines) + "\n")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", required=True, help="torchvision's CIFAR-10, or a folder with train/ and test/")
    parser.add_argument("--teacher", required=True, help="safetensors file of a trained ResNet-56")
    parser.add_argument("--cache", default="runs/distill_cifar", help="folder for the teacher's logits")
    parser.add_argument("--depth", type=int, default=8, help="layers of the student, 6 n + 2")
    parser.add_argument("--epochs", type=int, default=6, help="of every run")
    parser.add_argument("--views", type=int, default=3, help="fixed crops and flips of every image")
    parser.add_argument("--lr", type=float, default=0.2, help="peak learning rate")
    parser.add_argument("--beta", type=float, default=2.0, help="of the decoupled loss")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    parser.add_argument("--limit", type=int, help="use only so many images of each split, to try things out")
    parser.add_argument("--runs", type=int, help="stop after so many new runs; the next call goes on")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--name", default="distill_cifar", help="of the files that are written")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = cifar10(args.data, args.limit)
    task = ck.Task(train=Views(*data["train"], 128, args.views), val=Images(*data["test"], 500, MEAN, STD))
    teacher = CifarResNet(56).eval()
    teacher.load_state_dict(load_file(args.teacher))
    cached = kd.cache(kd.Teacher(teacher, dtype=torch.bfloat16), task, args.cache, views=args.views)
    names = ("depth", "epochs", "views", "lr", "beta", "limit")
    settings = {name: getattr(args, name) for name in names}
    settings |= {"batch": 128, "torch": torch.__version__, "machine": platform.machine()}
    old, file = {}, HERE / f"{args.name}.json"
    if file.exists():
        old = json.loads(file.read_text())
    same = old.get("settings") == settings
    rows = old["rows"] if same else []
    accuracy = old["teacher"] if same else ck.evaluate(teacher, task)
    done = {(row["arm"], row["seed"]) for row in rows}
    left = [(arm, seed) for seed in range(args.seeds) for arm in ARMS if (arm, seed) not in done]
    for arm, seed in left[: args.runs]:
        rows.append(train(arm, seed, cached, task, args))
        print(report(settings, accuracy, rows, args.name), flush=True)


if __name__ == "__main__":
    main()
