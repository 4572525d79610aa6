"""Networks whose convolutions can be merged, small; they take (N, 3, 16, 16)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Narrow(nn.Module):
    """Inverted residuals of a few channels, which are faster, and take fewer MACs, as one convolution."""

    def __init__(self, width=4, wide=24):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        self.blocks = nn.Sequential(
            *[
                nn.Sequential(
                    nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
                    nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
                    nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width), nn.Hardswish(),
                )
                for _ in range(3)
            ]
        )  # fmt: skip
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class InCode(nn.Module):
    """Basic blocks whose ReLU is called in code, or is one module for both places."""

    def __init__(self, shared=False, inplace=False, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        self.blocks = nn.Sequential(BlockInCode(width, 1, shared, inplace), BlockInCode(width, 2, shared, inplace))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.stem(x)), 2)
        return self.head(self.blocks(x).mean((2, 3)))


class BlockInCode(nn.Module):
    def __init__(self, width, stride, shared, inplace):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace) if shared else None
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(width, width, 1, stride)

    def forward(self, x):
        relu = self.act or F.relu
        y = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(y + self.shortcut(x))


def merged_by_hand(block, x):
    """What a `BlockInCode` gives without its first ReLU: padded once, before the first convolution."""
    stride = block.conv1.stride[0]
    x0, pad = x, 1 + stride
    x = F.conv2d(F.pad(x, (pad,) * 4), block.conv1.weight, None, stride)
    x = F.conv2d(block.bn1(x), block.conv2.weight)
    return torch.relu(block.bn2(x) + block.shortcut(x0))
