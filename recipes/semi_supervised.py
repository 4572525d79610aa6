"""Learn handwritten digits from 100 labels and 1,157 images without labels, and compare with the labels alone.

A few convolutional networks learn from the labels, on images that are turned, scaled and moved at random. Together they are the
teacher: a cheap student without convolutions learns their soft predictions of the unlabelled images beside the labels
(Parthasarathi & Strom, 1904.01624, do so with a million hours of speech). The labels alone train the same student for as many
steps, as they are and moved at random. The data is part of scikit-learn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from digits import data, resnet
from torch import Tensor, nn
from torch.utils.data import DataLoader

import compresskit as ck
from compresskit import distill as kd


class Moved(nn.Module):
    """In training, images turned by up to `turn` radians, scaled by up to `scale`, moved by up to `shift` pixels, with noise."""

    def __init__(self, turn: float = 0.17, scale: float = 0.1, shift: float = 1.0, noise: float = 0.1) -> None:
        super().__init__()
        self.turn, self.scale, self.shift, self.noise = turn, scale, shift, noise

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        between = 2 * torch.rand(5, len(x)) - 1
        angle, (wide, high) = self.turn * between[0], 1 + self.scale * between[1:3]
        right, down = 2 * self.shift / x.shape[3] * between[3:]
        rows = (angle.cos() * wide, -angle.sin() * high, right), (angle.sin() * wide, angle.cos() * high, down)
        matrix = torch.stack([torch.stack(row, 1) for row in rows], 1)
        x = F.grid_sample(x, F.affine_grid(matrix, list(x.shape), align_corners=False), align_corners=False)
        return x + self.noise * torch.randn_like(x)


class Drawn:
    """An epoch of batches drawn at random, with labels if there are any."""

    def __init__(self, images: Tensor, labels: Tensor | None, size: int, batches: int) -> None:
        self.images, self.labels, self.size, self.batches = images, labels, size, batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for _ in range(self.batches):
            index = torch.randint(len(self.images), (self.size,))
            x = self.images[index]
            yield (x,) if self.labels is None else (x, self.labels[index])


def teacher(*widths: int) -> nn.Module:
    """A convolutional network."""
    return nn.Sequential(Moved(), resnet(*widths))


def student(width: int) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def compare(args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Test accuracy of the student with each kind of training, and of a teacher."""
    task = data(seed, args.batch_size)
    images, labels = cast(DataLoader[Any], task.train).dataset.tensors  # type: ignore[attr-defined]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    known = torch.cat([order[labels[order] == digit][: args.labels // 10] for digit in range(10)])
    unknown = torch.ones(len(labels), dtype=torch.bool).index_fill(0, known, value=False)
    unlabelled = Drawn(images[unknown], None, 2 * args.batch_size, args.steps)
    task = replace(task, train=Drawn(images[known], labels[known], args.batch_size, args.steps))
    adam = partial(torch.optim.AdamW, lr=3e-3)

    def trained(make: Callable[[], nn.Module], number: int = 0, objective: ck.Objective | None = None) -> nn.Module:
        torch.manual_seed(1000 * seed + number)
        train = ck.Train(epochs=args.epochs, optimizer=adam, schedule=ck.lr.OneCycle(), objective=objective)
        return train(make(), task)

    small = partial(student, args.student)
    teachers = [trained(partial(teacher, *args.widths), 1 + number) for number in range(args.teachers)]
    loss = partial(kd.losses.soft_targets, temperature=2.0)
    networks = {
        "labels alone": trained(small),
        "labels alone, moved": trained(lambda: nn.Sequential(Moved(turn=0.0, scale=0.0, shift=0.5), small())),
        "with unlabelled images": trained(small, 0, kd.pseudo_label(kd.Teacher(*teachers), unlabelled, loss=loss, weight=3.0)),
        "a teacher": teachers[0],
    }
    return {name: ck.evaluate(network, task) for name, network in networks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--labels", type=int, default=100, help="labelled images, as many of each digit")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of every network")
    parser.add_argument("--steps", type=int, default=40, help="steps of an epoch")
    parser.add_argument("--teachers", type=int, default=3, help="networks that teach together")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32], help="widths of a teacher's blocks")
    parser.add_argument("--student", type=int, default=512, help="width of the student's hidden layer")
    parser.add_argument("--batch-size", type=int, default=32, help="labelled images a step; of the others, twice as many")
    parser.add_argument("--seeds", type=int, default=3, help="runs; each has other labels")
    args = parser.parse_args()
    x = torch.zeros(1, 1, 8, 8)
    macs = ck.count_macs(student(args.student), x), ck.count_macs(teacher(*args.widths), x)
    print("{:,} multiplications a student's image, {:,} a teacher's".format(*macs))
    runs = [compare(args, seed) for seed in range(args.seeds)]
    for name in runs[0]:
        accuracies = [run[name] for run in runs]
        print(f"{name:<24}{statistics.mean(accuracies):.4f}   of seeds: {', '.join(f'{a:.4f}' for a in accuracies)}")


if __name__ == "__main__":
    main()
