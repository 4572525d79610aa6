"""Train, distil, prune and quantize a network for handwritten digits, and export a verified int8 ONNX file.

The data is part of scikit-learn (1,797 images of 8x8 pixels): nothing is downloaded. Takes a minute or two on two cores.
The first training is in bf16 with fp32 masters; an x86 processor without AVX512 has no bf16 and trains in fp32.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compresskit as ck


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet(*widths: int) -> nn.Module:
    """A small residual network for one-channel images: one block per width, each but the first with stride 2."""
    layers: list[nn.Module] = [nn.Conv2d(1, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    inputs = widths[0]
    for i, width in enumerate(widths):
        layers.append(Block(inputs, width, 1 if i == 0 else 2))
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def data(seed: int, batch_size: int) -> ck.Task:
    """1,257 images for training, 540 for testing."""
    digits = load_digits()
    split = train_test_split(digits.images / 16.0, digits.target, test_size=540, random_state=seed, stratify=digits.target)
    x_train, x_val, y_train, y_val = (torch.from_numpy(part) for part in split)
    train = TensorDataset(x_train.float()[:, None], y_train)
    val = TensorDataset(x_val.float()[:, None], y_val)
    return ck.Task(train=DataLoader(train, batch_size, shuffle=True), val=DataLoader(val, 180))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", default="runs/digits", help="folder of the run; an interrupted run continues")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of the first training; later stages take a fraction of it")
    parser.add_argument("--batch-size", type=int, default=64, help="images a step")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the initial weights and every stage")
    fastest = "fp32" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "bf16"
    parser.add_argument("--precision", default=fastest, choices=("bf16", "fp32"), help="of the first training")
    args = parser.parse_args()

    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    half = max(1, args.epochs // 2)
    precision = ck.mixed.MASTER_BF16 if args.precision == "bf16" else ck.mixed.FP32
    recipe = ck.Recipe(
        ck.Train(epochs=args.epochs, optimizer=sgd, schedule=ck.lr.OneCycle(), precision=precision),
        ck.Distill(student=partial(resnet, 24, 48, 64), epochs=args.epochs, optimizer=sgd, schedule=ck.lr.OneCycle()),
        ck.Prune(
            budget=ck.keep(macs=0.5),
            criterion=ck.prune.criteria.taylor,
            finetune=ck.Train(epochs=half, optimizer=sgd, objective=ck.imitate()),
        ),
        ck.QAT(epochs=max(1, half // 2), optimizer=partial(torch.optim.SGD, lr=0.005, momentum=0.9), objective=ck.imitate()),
        seed=args.seed,
    )
    torch.manual_seed(args.seed)
    print(recipe.run(resnet(32, 64, 128), data(args.seed, args.batch_size), out=args.out))


if __name__ == "__main__":
    main()
