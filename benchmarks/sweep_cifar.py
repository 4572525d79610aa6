"""A sweep of pruning on CIFAR-10: ResNet-20 without training again, with fine-tuning, and with both ways of rewinding.

Seed 0 removes from 0 to 98 % of the weights, the others 80 and 90 %. Every network is trained from new weights on a share of the
training images, and each pruned one again for two thirds of the epochs, but for "none". Writes `sweep_cifar.json`, `.md` and
`.svg`; finished networks are kept in `--out`, where an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "recipes"))

from vision import CifarResNet, Images, cifar10  # noqa: E402

import compresskit as ck  # noqa: E402
from compresskit.prune.masks.sweep import Sweep, sweep  # noqa: E402

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
ALL, MAIN = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98), (0.8, 0.9)
REWOUND = 0.33  # of the training; rewinding runs what is left of its schedule


def sweep_all(args: argparse.Namespace) -> Sweep:
    """The points of all seeds."""
    data = cifar10(args.data, None)
    images, labels = (part[: args.images] for part in data["train"])
    train = Images(images, labels, args.batch_size, MEAN, STD, augment=4, flip=True, shuffle=True)
    task = ck.Task(train=train, val=Images(*data["test"], 500, MEAN, STD))
    sgd = partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4, nesterov=True)
    how = partial(ck.Train, precision=ck.mixed.AMP_BF16, validate_every=0)
    first = how(epochs=args.epochs, optimizer=partial(sgd, lr=0.1), schedule=ck.lr.OneCycle())
    again = how(epochs=round((1 - REWOUND) * args.epochs), optimizer=partial(sgd, lr=0.01))
    sweeps = []
    for seed in reversed(range(args.seeds)):
        torch.manual_seed(seed)
        model, out = CifarResNet(20), Path(args.out) / str(seed)
        ratios = MAIN if seed else ALL
        sweeps.append(sweep(model, task, first, ratios=ratios, finetune=again, rewind_to=REWOUND, seeds=(seed,), out=out))
        print(f"seed {seed}\n{sweeps[-1]}", flush=True)
    sweeps.reverse()
    dense = {seed: metric for one in sweeps for seed, metric in one.dense.items()}
    return Sweep(dense=dense, points=tuple(point for one in sweeps for point in one.points))


def table(found: dict[str, Any]) -> str:
    """The committed page."""
    about, points = found["about"], found["points"]
    ratios = sorted({point["ratio"] for point in points})
    lines = [
        "# Pruning by several fractions, and three ways to train again",
        "",
        f"ResNet-20 on {about['images']:,} images of CIFAR-10, {about['epochs']} epochs, accuracy in % on the {about['tested']:,}"
        f" test images; training again takes {1 - REWOUND:.0%} of the steps of the first. {about['where']}.",
        f"Unpruned, by seed: {', '.join(f'{100 * value:.2f}' for value in found['dense'].values())}. Cells of several seeds are"
        " mean, lowest and highest.",
        "",
        "| removed | " + " | ".join(f"{ratio:.0%}" for ratio in ratios) + " |",
        "|---|" + "--:|" * len(ratios),
    ]
    for method in dict.fromkeys(point["method"] for point in points):
        cells = []
        for ratio in ratios:
            metrics = [100 * point["metric"] for point in points if (point["method"], point["ratio"]) == (method, ratio)]
            spread = f" ({min(metrics):.2f} to {max(metrics):.2f})" if len(metrics) > 1 else ""
            cells.append(f"{statistics.mean(metrics):.2f}{spread}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "![accuracy against the fraction removed](sweep_cifar.svg)"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="torchvision's CIFAR-10, or an image folder with train/ and test/")
    parser.add_argument("--out", default="runs/sweep_cifar", help="folder of finished networks")
    parser.add_argument("--images", type=int, default=10_000, help="training images")
    parser.add_argument("--epochs", type=int, default=6, help="of the first training")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = sweep_all(args)
    where = f"{platform.machine()}, torch {torch.__version__}, bf16 by autocast"
    about = {"images": args.images, "epochs": args.epochs, "tested": 10_000, "where": where}
    record = {"about": about, **found.to_json()}
    (HERE / "sweep_cifar.json").write_text(json.dumps(record, indent=1) + "\n")
    (HERE / "sweep_cifar.svg").write_text(found.svg() + "\n")
    (HERE / "sweep_cifar.md").write_text(table(record))


if __name__ == "__main__":
    main()
