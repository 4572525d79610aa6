"""Shared by the image recipes: loaders of images, drawn and real pictures, the residual networks of He et al. for CIFAR."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchvision.datasets import CIFAR10, ImageFolder


class Images:
    """Batches of (images, labels) from uint8 tensors in memory: normalised, and optionally shuffled, cropped and flipped.

    Order and crops come from torch's global generator, so that a seeded run is reproducible.
    """

    def __init__(self, images: Tensor, labels: Tensor, batch_size: int, mean: Tensor, std: Tensor, *, augment: int = 0,
                 flip: bool = False, shuffle: bool = False) -> None:  # fmt: skip
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self.mean, self.std = mean.view(1, -1, 1, 1), std.view(1, -1, 1, 1)
        self.augment, self.flip, self.shuffle = augment, flip, shuffle

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.images)) if self.shuffle else torch.arange(len(self.images))
        for index in order.split(self.batch_size):
            yield self._prepare(self.images[index], *self.draw(index)), self.labels[index]

    def draw(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the images (N,) are flipped, (N,), and the corners of their crops in the padded images, (2, N)."""
        return torch.rand(len(index)) < 0.5, torch.randint(0, 2 * self.augment + 1, (2, len(index)))

    def _prepare(self, images: Tensor, flipped: Tensor, corners: Tensor) -> Tensor:
        if self.flip:
            images = torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)
        x = (images.float() / 255 - self.mean) / self.std
        if self.augment:
            rows, columns = x.shape[2:]
            padded = F.pad(x, [self.augment] * 4)
            top, left = corners.view(2, -1, 1, 1, 1)
            h = (top + torch.arange(rows).view(1, 1, -1, 1)).expand(-1, x.shape[1], -1, padded.shape[3])
            w = (left + torch.arange(columns).view(1, 1, 1, -1)).expand(-1, x.shape[1], rows, -1)
            x = padded.gather(2, h).gather(3, w)
        return x


class Pad(nn.Module):
    """The shortcut without parameters ("option A"): every second position, zeros for the new channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.channels, self.channels))


class Basic(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, outputs // inputs, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else Pad((outputs - inputs) // 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class CifarResNet(nn.Module):
    """ResNet-20, -32, -44, -56 for 32x32 images (He et al., 1512.03385, section 4.2): (N, 3, 32, 32) to (N, 10)."""

    def __init__(self, depth: int = 20) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Basic(16, 16) for _ in range(blocks)))
        self.layer2 = nn.Sequential(*(Basic(16 if i == 0 else 32, 32) for i in range(blocks)))
        self.layer3 = nn.Sequential(*(Basic(32 if i == 0 else 64, 64) for i in range(blocks)))
        self.linear = nn.Linear(64, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


def cifar10(folder: str, limit: int | None) -> dict[str, tuple[Tensor, Tensor]]:
    """`{"train": (images uint8 (N, 3, 32, 32), labels), "test": ...}` from torchvision's CIFAR-10 or an image folder.

    An image folder has `train/<class>/*` and `test/<class>/*`; any other folder is read in torchvision's layout, into which
    the data is downloaded where it is missing.
    """
    parts = {}
    for split in ("train", "test"):
        if (Path(folder) / split).is_dir():
            images = _classes(Path(folder) / split)
            labels = torch.tensor(images.targets)
            chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:limit]
            pixels = np.stack([np.asarray(images[i][0].resize((32, 32))) for i in chosen.tolist()])
            labels = labels[chosen]
        else:
            try:
                data = CIFAR10(folder, train=split == "train", download=True)
            except OSError as error:
                raise SystemExit(
                    f"{folder}: neither train/CLASS/* and test/CLASS/* nor torchvision's CIFAR-10 is there, and it cannot be"
                    f" downloaded ({error})"
                ) from None
            pixels, labels = data.data[:limit], torch.tensor(data.targets)[:limit]
        parts[split] = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), labels
    return parts


def image_folder(folder: str, size: int, limit: int | None) -> dict[str, tuple[Tensor, Tensor]]:
    """`{"train": (images uint8 (N, 3, size, size), labels), "test": ...}` of `train/<class>/*` and `val/<class>/*` or `test/...`.

    The shorter side is scaled to `size`, and the middle is cut out. `limit` images of each are
    drawn at random, the same each time.
    """
    root, parts = Path(folder), {}
    for split, names in (("train", ("train",)), ("test", ("val", "test"))):
        found = next((root / name for name in names if (root / name).is_dir()), None)
        if found is None:
            raise SystemExit(
                f"{folder}: wanted train/CLASS/* and val/CLASS/* (or test/CLASS/*); there is no {' or '.join(names)}"
            )
        images = _classes(found)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:limit].tolist()
        pixels = torch.stack([_middle(images[i][0], size) for i in order])
        parts[split] = pixels, torch.tensor([images.targets[i] for i in order])
    return parts


def _classes(folder: Path) -> ImageFolder:
    try:
        return ImageFolder(str(folder))
    except FileNotFoundError as error:
        raise SystemExit(f"{folder}: {error}") from None


def _middle(image: Image.Image, size: int) -> Tensor:
    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    cut = image.convert("RGB").resize((width, height)).crop((left, top, left + size, top + size))
    return torch.from_numpy(np.array(cut)).permute(2, 0, 1)


def pictures(count: int, size: int, seed: int, folder: str | None = None) -> Tensor:
    """Square pictures with values in 0..1, (count, 3, size, size): crops of those in a folder, or drawn where none is given."""
    generator = torch.Generator().manual_seed(seed)
    if folder is None:
        return torch.stack([drawn(size, generator) for _ in range(count)])
    paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".bmp"))
    if not paths:
        raise SystemExit(f"{folder}: no .png, .jpg, .jpeg or .bmp picture in it")
    crops = []
    for i in range(count):
        image = Image.open(paths[i * len(paths) // count if count < len(paths) else i % len(paths)]).convert("RGB")
        image = image.resize([max(size, side) for side in image.size])
        left, top = (int(torch.randint(side - size + 1, (), generator=generator)) for side in image.size)
        crops.append(torch.from_numpy(np.array(image.crop((left, top, left + size, top + size)))).permute(2, 0, 1) / 255)
    return torch.stack(crops)


def drawn(size: int, generator: torch.Generator) -> Tensor:
    """One picture of waves, rectangles and discs in random colours, (3, size, size) in 0..1."""
    y, x = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
    u = torch.rand(64, generator=generator).tolist()
    picture = torch.stack([0.5 + 0.25 * torch.sin(12 * (u[i] * x + u[i + 3] * y) + 6 * u[i + 6]) for i in range(3)])
    for k in range(6):
        r = u[9 + 8 * k : 17 + 8 * k]
        inside = (x - r[0]).abs() + (y - r[1]).abs() * r[2] < r[3] / 4 if k % 2 else (x - r[0]) ** 2 + (y - r[1]) ** 2 < r[3] / 20
        picture = torch.where(inside, torch.tensor(r[4:7]).view(3, 1, 1), picture)
    return picture
