"""Networks of residual blocks, a family each; all are small and take (N, 3, 16, 16)."""

from __future__ import annotations

import torch
from networks import conv
from torch import nn


class Basic(nn.Module):
    """relu(f(x) + x), or a projection where the shape changes."""

    def __init__(self, i, o, stride=1):
        super().__init__()
        self.a, self.b = conv(i, o, s=stride), nn.Sequential(nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o))
        self.shortcut = nn.Identity() if i == o else nn.Conv2d(i, o, 1, stride)

    def forward(self, x):
        out = self.b(self.a(x))
        out += self.shortcut(x)
        return torch.relu(out)


class ResNet(nn.Module):
    """Two stages of three blocks; the first block of the second changes the shape."""

    def __init__(self, width=8):
        super().__init__()
        self.stem = conv(3, width)
        self.layer1 = nn.Sequential(*[Basic(width, width) for _ in range(3)])
        self.layer2 = nn.Sequential(Basic(width, 2 * width, 2), *[Basic(2 * width, 2 * width) for _ in range(2)])
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x):
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class Pair(nn.Module):
    """Whether two inputs are alike, which go through one encoder (a Siamese network); the second is by default the first."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = ResNet(), nn.Linear(10, 2)

    def forward(self, a, b=None):
        return self.head((self.encoder(a) - self.encoder(a if b is None else b)).abs())


class Inverted(nn.Module):
    """x + project(depthwise(expand(x))), without an activation, so that values may be negative."""

    def __init__(self, width):
        super().__init__()
        self.expand, self.depthwise = conv(width, 2 * width, 1), conv(2 * width, 2 * width, groups=2 * width)
        self.project = nn.Sequential(nn.Conv2d(2 * width, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        return x + self.project(self.depthwise(self.expand(x)))


class Mobile(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = conv(3, 8), nn.ModuleList(Inverted(8) for _ in range(3)), nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Layer(nn.Module):
    """A transformer's layer: norms before its branches, or after its additions; takes values by name, gives a tuple."""

    def __init__(self, width, before):
        super().__init__()
        self.before = before
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp, self.drop = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)), nn.Dropout(0.1)

    def attention(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, scale, hidden=None):
        if self.before:
            hidden = hidden + self.drop(self.attention(self.norm1(hidden))) * scale
            return (hidden + self.drop(self.mlp(self.norm2(hidden))), None)
        hidden = self.norm1(hidden + self.drop(self.attention(hidden)) * scale)
        return (self.norm2(hidden + self.drop(self.mlp(hidden))), None)


class Transformer(nn.Module):
    def __init__(self, before=True):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 10)
        self.layers = nn.ModuleList(Layer(16, before) for _ in range(3))

    def forward(self, x):
        hidden = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            hidden = layer(1.0, hidden=hidden)[0]
        return self.head(hidden.mean(1))
