"""Train a wide residual network for CIFAR-10 with one cycle, and the same network with a constant rate, against the clock.

The first reaches a stated accuracy in a few epochs (Smith & Topin, 1708.07120; Zagoruyko & Komodakis, 1605.07146). Depth 22 and
width 6 are those of fastai's entry to DAWNBench, which took 30 epochs to 94 % on the original CIFAR-10; that wants a GPU.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vision import Images, cifar10

import compresskit as ck
from compresskit.train.callbacks import StepReport

MEAN, STD = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
POLICIES = {policy.name: policy for policy in (ck.mixed.FP32, ck.mixed.AMP_BF16, ck.mixed.MASTER_BF16)}


class WideBlock(nn.Module):
    """BatchNorm, ReLU and a 3x3 convolution, twice, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.short = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x))
        x = x if isinstance(self.short, nn.Identity) else self.short(y)
        return x + self.conv2(F.relu(self.bn2(self.conv1(y))))


def wide_resnet(depth: int, width: int) -> nn.Sequential:
    """(N, 3, 32, 32) to (N, 10), with three groups of (depth - 4) / 6 blocks."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    inputs = 16
    for group in range(3):
        for block in range((depth - 4) // 6):
            outputs = 16 * width * 2**group
            layers.append(WideBlock(inputs, outputs, 2 if group and not block else 1))
            inputs = outputs
    head = [nn.BatchNorm2d(inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)]
    return nn.Sequential(*layers, *head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--data", default="data", help="torchvision's CIFAR-10 (downloaded where missing), or train/ and test/ folders"
    )
    parser.add_argument("--depth", type=int, default=22, help="layers of the network: 10, 16, 22, 28")
    parser.add_argument("--width", type=int, default=6, help="factor on its channels")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of either training")
    parser.add_argument("--goal", type=float, default=0.94, help="the accuracy whose time is reported")
    parser.add_argument("--precision", default="AMP_BF16", choices=sorted(POLICIES), help="of both trainings")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    parser.add_argument("--batch-size", type=int, default=512, help="images a step")
    parser.add_argument("--limit", type=int, help="use only so many images of each split, to try things out")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of the images")
    args = parser.parse_args()

    data = cifar10(args.data, args.limit)
    train = Images(*data["train"], args.batch_size, MEAN, STD, augment=4, flip=True, shuffle=True)
    task = ck.Task(train=train, val=Images(*data["test"], 500, MEAN, STD), device=args.device)
    sgd = partial(torch.optim.SGD, momentum=0.9, weight_decay=2e-4, nesterov=True)
    for name, schedule, rate in (("one cycle to 0.4", ck.lr.OneCycle(), 0.4), ("constant 0.05", ck.lr.Constant(), 0.05)):
        torch.manual_seed(args.seed)
        reached: list[tuple[float, float]] = []
        begin = time.perf_counter()

        def note(report: StepReport, begin: float = begin, reached: list[tuple[float, float]] = reached) -> None:
            if report.metric is not None:
                reached.append((report.metric, time.perf_counter() - begin))

        ck.Train(epochs=args.epochs, optimizer=partial(sgd, lr=rate), schedule=schedule, precision=POLICIES[args.precision],
                 validate_every=1, on_step=note)(wide_resnet(args.depth, args.width), task)  # fmt: skip
        there = next((seconds for accuracy, seconds in reached if accuracy >= args.goal), None)
        goal = f"not reached {args.goal:.0%}" if there is None else f"{args.goal:.0%} after {there:.0f} s"
        print(
            f"{name:<18}{goal}; last {reached[-1][0]:.4f}, best {max(reached)[0]:.4f}, {reached[-1][1]:.0f} s in all", flush=True
        )


if __name__ == "__main__":
    main()
