"""Train a plain convolutional network on an image folder for one epoch, with and without mixed precision (Imagenette's lesson).

Images of 128 pixels, batches of 64, convolutions of widths 32 to 512, Adam at 1e-2. The folder has train/CLASS/* and val/CLASS/*
(or test/CLASS/*), as Imagenette and Imagewoof do.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from torch import nn
from vision import Images, image_folder

import compresskit as ck

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
POLICIES = (ck.mixed.FP32, ck.mixed.AMP_BF16, ck.mixed.MASTER_BF16)


def network(widths: list[int], classes: int) -> nn.Sequential:
    """3x3 convolutions of stride 2 with BatchNorm and ReLU, the mean over places, a linear layer."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip([3, *widths], widths, strict=False):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default="data/imagenette2-160", help="image folder with train/ and val/ (or test/)")
    parser.add_argument("--size", type=int, default=128, help="pixels of a side")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256, 512], help="of the convolutions")
    parser.add_argument("--epochs", type=int, default=1, help="of every training")
    parser.add_argument("--rate", type=float, default=1e-2, help="highest learning rate, of one cycle")
    parser.add_argument("--batch-size", type=int, default=64, help="images a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    parser.add_argument("--limit", type=int, help="use only so many images of each split, to try things out")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of the images")
    args = parser.parse_args()

    data = image_folder(args.data, args.size, args.limit)
    classes = int(max(labels.max() for _, labels in data.values())) + 1
    images = Images(*data["train"], args.batch_size, MEAN, STD, flip=True, shuffle=True)
    task = ck.Task(train=images, val=Images(*data["test"], args.batch_size, MEAN, STD), device=args.device)
    adam = partial(torch.optim.Adam, lr=args.rate)
    print(f"{'policy':<14}{'accuracy':>10}{'seconds':>10}")
    for policy in POLICIES:
        torch.manual_seed(args.seed)
        begin = time.perf_counter()
        train = ck.Train(epochs=args.epochs, optimizer=adam, schedule=ck.lr.OneCycle(), precision=policy)
        trained = train(network(args.widths, classes), task)
        seconds = time.perf_counter() - begin
        print(f"{policy.name:<14}{ck.evaluate(trained, task):>10.4f}{seconds:>10.1f}", flush=True)
    batch = next(iter(images))
    torch.manual_seed(args.seed)
    model = network(args.widths, classes).to(args.device)
    print(ck.mixed.memory_report(model, tuple(x.to(args.device) for x in batch), loss=task.loss, policies=POLICIES))


if __name__ == "__main__":
    main()
