"""Learn handwritten digits from 100 labels and 1,157 images without labels, and compare with the labels alone.

A few networks learn from the labels. Together they are the teacher, whose soft predictions of the unlabelled images a student
learns beside the labels (Parthasarathi & Strom, 1904.01624, do so with a million hours of speech). `--rounds` above 1 makes the
students of a round the teachers of the next. The labels alone train a network of the same size for as many steps. The data is
part of scikit-learn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from digits import data, resnet
from torch import Tensor, nn

import compresskit as ck
from compresskit import distill as kd


class Shifted:
    """An epoch of random batches of images, moved by at most a pixel and with a little noise; with labels if there are any."""

    def __init__(self, images: Tensor, labels: Tensor | None, size: int, batches: int) -> None:
        self.images, self.labels, self.size, self.batches = images, labels, size, batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for _ in range(self.batches):
            index = torch.randint(len(self.images), (self.size,))
            x = torch.roll(self.images[index], torch.randint(-1, 2, (2,)).tolist(), (2, 3))
            x = x + 0.1 * torch.randn_like(x)
            yield (x,) if self.labels is None else (x, self.labels[index])


def compare(args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Test accuracy of a network that learns from the labels alone, and of the student."""
    task = data(seed, args.batch_size)
    images, labels = map(torch.cat, zip(*task.train or (), strict=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    known = torch.cat([order[labels[order] == digit][: args.labels // 10] for digit in range(10)])
    unknown = torch.ones(len(labels), dtype=torch.bool).index_fill(0, known, value=False)
    unlabelled = Shifted(images[unknown], None, 2 * args.batch_size, args.steps)
    task = replace(task, train=Shifted(images[known], labels[known], args.batch_size, args.steps))
    adam = partial(torch.optim.AdamW, lr=3e-3)

    def trained(number: int, objective: ck.Objective | None = None) -> nn.Module:
        torch.manual_seed(1000 * seed + number)
        train = ck.Train(epochs=args.epochs, optimizer=adam, schedule=ck.lr.OneCycle(), objective=objective)
        return train(resnet(*args.widths), task)

    networks = [trained(number) for number in range(args.teachers)]
    alone = ck.evaluate(networks[0], task)
    for turn in range(1, args.rounds + 1):
        last = turn == args.rounds  # of the last round one student is enough
        objective = kd.pseudo_label(kd.Teacher(*networks), unlabelled, loss=kd.losses.soft_targets)
        networks = [trained(100 * turn + number, objective) for number in range(1 if last else args.teachers)]
    return {"labels alone": alone, "with unlabelled images": ck.evaluate(networks[0], task)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--labels", type=int, default=100, help="labelled images, as many of each digit")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of every network")
    parser.add_argument("--steps", type=int, default=20, help="steps of an epoch")
    parser.add_argument("--teachers", type=int, default=3, help="networks that teach together")
    parser.add_argument("--rounds", type=int, default=2, help="how often students become teachers, plus one")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32], help="widths of the network's blocks")
    parser.add_argument("--batch-size", type=int, default=32, help="labelled images a step; of the others, twice as many")
    parser.add_argument("--seeds", type=int, default=3, help="runs; each has other labels")
    args = parser.parse_args()
    runs = [compare(args, seed) for seed in range(args.seeds)]
    for name in runs[0]:
        accuracies = [run[name] for run in runs]
        print(f"{name:<24}{statistics.mean(accuracies):.4f}   of seeds: {', '.join(f'{a:.4f}' for a in accuracies)}")


if __name__ == "__main__":
    main()
