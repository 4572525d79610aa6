"""Train a small face detector of separable convolutions, quantize it, and export a verified int8 ONNX file.

Faces (an oval, two eyes and a mouth) are drawn onto drawn pictures, so that nothing is downloaded and the boxes are known, or
onto the pictures of a folder. The metric is the F1 of boxes that overlap by half with the drawn face.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from vision import pictures

import compresskit as ck

SIZE, STRIDE = 64, 8  # pixels of a picture, and of a cell that finds the faces whose centre lies in it
CELLS = SIZE // STRIDE


def separable(i: int, o: int, stride: int) -> nn.Sequential:
    depthwise = [nn.Conv2d(i, i, 3, stride, 1, groups=i, bias=False), nn.BatchNorm2d(i), nn.ReLU()]
    return nn.Sequential(*depthwise, nn.Conv2d(i, o, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class Detector(nn.Module):
    """(N, 3, 64, 64) -> (N, 64, 5): for each cell the distances from its centre to the sides of a box, in cells, and a logit."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        first = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        blocks = [(1, 2, 2), (2, 4, 2), (4, 4, 1), (4, 8, 1)]
        self.body = nn.Sequential(*first, *(separable(a * width, b * width, stride) for a, b, stride in blocks))
        self.head = nn.Conv2d(8 * width, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).flatten(2).transpose(1, 2)


def centres() -> Tensor:
    """Of the cells, x and y in cells, (64, 2)."""
    y, x = torch.meshgrid(torch.arange(CELLS) + 0.5, torch.arange(CELLS) + 0.5, indexing="ij")
    return torch.stack((x.flatten(), y.flatten()), 1)


def with_faces(backgrounds: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Draw a face onto each picture; returns the pictures and, as the network gives them, the boxes, scores 0 or 1."""
    draw = torch.Generator().manual_seed(seed)
    images, targets = backgrounds.clone(), torch.zeros(len(backgrounds), CELLS * CELLS, 5)
    y, x = torch.meshgrid(torch.arange(SIZE) + 0.5, torch.arange(SIZE) + 0.5, indexing="ij")
    for image, target in zip(images, targets, strict=True):
        u = torch.rand(8, generator=draw).tolist()
        half = torch.tensor((6 + 6 * u[0], 8 + 8 * u[0]))  # of the width and the height
        centre = half + (SIZE - 2 * half) * torch.tensor(u[1:3])
        a, b = (x - centre[0]) / half[0], (y - centre[1]) / half[1]
        skin = torch.tensor((0.5 + 0.4 * u[3], 0.4 + 0.3 * u[3], 0.3 + 0.3 * u[4])).view(3, 1, 1)
        eyes = ((a.abs() - 0.4) ** 2 + (b + 0.3) ** 2) < 0.03
        mouth = (a.abs() < 0.4) & ((b - 0.5).abs() < 0.1)
        image.copy_(torch.where(a**2 + b**2 < 1, torch.where(eyes | mouth, skin * 0.3, skin), image))
        cell = int(centre[1] // STRIDE) * CELLS + int(centre[0] // STRIDE)
        middle = centre / STRIDE - centres()[cell]
        target[cell] = torch.cat((half / STRIDE - middle, half / STRIDE + middle, torch.ones(1)))
    return images, targets


def loss(predictions: Tensor, targets: Tensor) -> Tensor:
    face = targets[..., 4] == 1
    weight = torch.tensor(10.0)  # one cell of 64 holds the face
    return F.binary_cross_entropy_with_logits(predictions[..., 4], targets[..., 4], pos_weight=weight) + F.smooth_l1_loss(
        predictions[face][:, :4], targets[face][:, :4]
    )


def f1(predictions: Tensor, targets: Tensor) -> float:
    """Of the boxes with a score above a half."""

    def boxes(distances: Tensor, score: Tensor) -> Tensor:
        return torch.cat((centres() - distances[..., :2], centres() + distances[..., 2:4], score), 2)

    metric = ck.metrics.agreement("boxes", score=0.5, iou=0.5)
    return metric(boxes(predictions, predictions[..., 4:].sigmoid()), boxes(targets, targets[..., 4:]))


def data(folder: str | None, count: int, batch_size: int, seed: int) -> ck.Task:
    """`count` pictures for training and a quarter as many for testing, which no training or calibration sees."""
    images, targets = with_faces(pictures(count + count // 4, SIZE, seed, folder), seed)
    train, val = (TensorDataset(images[part], targets[part]) for part in (slice(None, count), slice(count, None)))
    return ck.Task(train=DataLoader(train, batch_size, shuffle=True), val=DataLoader(val, batch_size), loss=loss, metric=f1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", metavar="DIR", help="folder of pictures to draw faces onto; drawn ones where it is not given")
    parser.add_argument(
        "--from", dest="start", metavar="CHECKPOINT", help="safetensors file of a trained network; skips training"
    )
    parser.add_argument("--out", default="runs/face_detector", help="folder of the run; an interrupted run continues")
    parser.add_argument("--pictures", type=int, default=1024, help="how many to train on")
    parser.add_argument("--epochs", type=int, default=20, help="of the training")
    parser.add_argument("--batch-size", type=int, default=32, help="pictures a step")
    parser.add_argument("--effort", default="balanced", choices=("fast", "balanced", "best"), help="of the quantization")
    parser.add_argument("--choose", default="auto", choices=("auto", "rules", "measure"), help="how operators are placed")
    parser.add_argument("--threads", type=int, default=1, help="that the placement is timed for")
    parser.add_argument("--seed", type=int, default=0, help="of the pictures, the initial weights and every stage")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    network = Detector()
    deployment = ck.quant.targets.Deployment(threads=args.threads)
    stages: list[ck.Stage] = [ck.StaticQuant(effort=args.effort, samples=128, choose=args.choose, deployment=deployment)]
    if args.start:
        network.load_state_dict(load_file(args.start))
    else:
        adam = partial(torch.optim.Adam, lr=2e-3)
        stages.insert(0, ck.Train(epochs=args.epochs, optimizer=adam, schedule=ck.lr.OneCycle()))
    task = data(args.data, args.pictures, args.batch_size, args.seed)
    print(ck.Recipe(*stages, seed=args.seed).run(network, task, out=args.out))


if __name__ == "__main__":
    main()
