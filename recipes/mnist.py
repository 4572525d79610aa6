"""Train, prune and quantize a small convolutional network on MNIST, and export a verified int8 ONNX file."""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import nn
from torchvision.datasets import MNIST
from vision import Images

import compresskit as ck


def network() -> nn.Module:
    """(N, 1, 28, 28) to (N, 10)."""

    def conv(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *conv(1, 32), nn.MaxPool2d(2), *conv(32, 64), nn.MaxPool2d(2), *conv(64, 128), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128 * 9, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default="data", help="where torchvision finds MNIST, or downloads it to")
    parser.add_argument("--out", default="runs/mnist", help="folder of the run; an interrupted run continues")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of the first training, and of fine-tuning")
    parser.add_argument("--macs", type=float, default=0.3, help="fraction of the multiply-accumulates that stays")
    parser.add_argument("--batch-size", type=int, default=128, help="images a step")
    parser.add_argument("--limit", type=int, help="use only so many images of each split, to try things out")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and every stage")
    args = parser.parse_args()

    loaders = []
    for train in (True, False):
        try:
            part = MNIST(args.data, train=train, download=True)
        except OSError as error:
            parser.error(f"{args.data}: no MNIST of torchvision, and no download ({str(error).splitlines()[0]})")
        images, labels = part.data[: args.limit, None], part.targets[: args.limit]
        loaders.append(Images(images, labels, args.batch_size if train else 500, torch.tensor([0.1307]), torch.tensor([0.3081]),
                              shuffle=train))  # fmt: skip
    task = ck.Task(train=loaders[0], val=loaders[1])

    adam = partial(torch.optim.AdamW, lr=2e-3)
    recipe = ck.Recipe(
        ck.Train(epochs=args.epochs, optimizer=adam, schedule=ck.lr.OneCycle(), precision=ck.mixed.MASTER_BF16),
        ck.Prune(budget=ck.keep(macs=args.macs), finetune=ck.Train(epochs=args.epochs, optimizer=adam, objective=ck.imitate())),
        ck.QAT(epochs=1, objective=ck.imitate()),
        seed=args.seed,
    )
    torch.manual_seed(args.seed)
    print(recipe.run(network(), task, out=args.out))


if __name__ == "__main__":
    main()
