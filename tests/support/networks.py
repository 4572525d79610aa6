"""Small networks, one for each thing that a graph can do; every one takes (N, 3, 16, 16) unless it says otherwise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def conv(i, o, k=3, s=1, groups=1):
    return nn.Sequential(nn.Conv2d(i, o, k, s, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = conv(3, 16), conv(16, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.b(self.a(x)).mean((2, 3)))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.out = conv(3, 16), conv(16, 16), nn.Conv2d(16, 16, 3, 1, 1)
        self.down, self.head = nn.Conv2d(16, 32, 1, 2), nn.Linear(32, 10)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(self.out(self.inner(x)) + x)
        return self.head(F.adaptive_avg_pool2d(F.relu(self.down(x)), 1).flatten(1))


class PaddedShortcut(nn.Module):
    """The CIFAR ResNets' option A: every second position, zeros around the channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.out = conv(3, 16), conv(16, 32, s=2), nn.Conv2d(32, 32, 3, 1, 1)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(self.out(self.inner(x)) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 8, 8)))
        return self.head(x.mean((2, 3)))


class Depthwise(nn.Module):
    """An inverted residual, as in MobileNetV2."""

    def __init__(self, multiplier=1):
        super().__init__()
        self.stem, self.expand = conv(3, 16), conv(16, 32, 1)
        self.depth = nn.Sequential(
            nn.Conv2d(32, 32 * multiplier, 3, 1, 1, groups=32, bias=False), nn.BatchNorm2d(32 * multiplier)
        )
        self.project, self.head = nn.Conv2d(32 * multiplier, 16, 1), nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.project(F.relu6(self.depth(self.expand(x))))
        return self.head(x.mean((2, 3)))


class Concat(nn.Module):
    """Two branches side by side, then a dense one on top."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = conv(3, 16), conv(16, 16), conv(16, 24, 1)
        self.c, self.head = conv(56, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, self.a(x), self.b(x)], 1)
        return self.head(self.c(F.max_pool2d(x, 2)).mean((2, 3)))


class Flatten(nn.Module):
    """Channels times positions into a linear layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(3, 16, s=2), conv(16, 16, s=2)
        self.hidden, self.head = nn.Linear(16 * 16, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(F.relu(self.hidden(self.b(self.a(x)).flatten(1))))


class HardView(nn.Module):
    """The same with the size written in the code: its last convolution cannot get narrower."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = conv(3, 16, s=2), conv(16, 16, s=2), nn.Linear(256, 10)

    def forward(self, x):
        return self.head(self.b(self.a(x)).view(-1, 256))


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.down, self.up = conv(3, 32), nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.out, self.head = conv(32, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        x = x * torch.sigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))
        return self.head(self.out(x).mean((2, 3)))


class Shuffle(nn.Module):
    """Grouped convolutions with a channel shuffle between."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b, self.head = conv(3, 32), conv(32, 32, groups=4), conv(32, 32, groups=4), nn.Linear(32, 10)

    def forward(self, x):
        x = self.a(self.stem(x))
        n, c, h, w = x.shape
        x = x.view(n, 4, c // 4, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.head(self.b(x).mean((2, 3)))


class Gate(nn.Module):
    """chunk, PReLU, PixelShuffle, a transposed convolution, an attention map over all channels, a layer scale."""

    def __init__(self):
        super().__init__()
        self.stem, self.both, self.act = conv(3, 16), nn.Conv2d(16, 64, 3, 1, 1), nn.PReLU(16)
        self.map, self.scale = nn.Conv2d(32, 1, 1), nn.Parameter(torch.rand(16, 1, 1))
        self.up, self.shuffle = nn.ConvTranspose2d(32, 16, 2, 2), nn.PixelShuffle(2)
        self.head = nn.Linear(4, 10)

    def forward(self, x):
        a, b = self.both(self.stem(x)).chunk(2, 1)
        x = a * torch.sigmoid(b)
        x = x * torch.sigmoid(self.map(x))
        x = self.act(self.up(x)) * self.scale
        return self.head(self.shuffle(x).mean((2, 3)))


class Twice(nn.Module):
    """A layer called twice, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.stem, self.again, self.head = conv(3, 16), conv(16, 16), nn.Linear(16, 10)
        self.stem.requires_grad_(False)

    def forward(self, x):
        return self.head(self.again(self.again(self.stem(x))).mean((2, 3)))


class TwoInputs(nn.Module):
    """Images (N, 3, 16, 16) and numbers (N, 8), by position or by keyword; gives a dict."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Sequential(conv(3, 16), conv(16, 16)), nn.Linear(8, 16), nn.Linear(32, 10)

    def forward(self, image, numbers):
        both = torch.cat([self.a(image).mean((2, 3)), F.relu(self.b(numbers))], 1)
        return {"logits": self.head(both), "features": both}


class Tied(nn.Module):
    """Two layers that hold one weight."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = conv(3, 16), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
        self.b.weight = self.a.weight
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(F.relu(self.b(F.relu(self.a(self.stem(x))))).mean((2, 3)))


class Unknown(nn.Module):
    """An operator that no rule knows sits on one of two paths."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = conv(3, 16), conv(16, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = self.b(self.a(x))
        return self.head(torch.sort(x, dim=1).values.mean((2, 3)))


class Mobile(nn.Module):
    """Hardswish, SiLU, and a squeeze-and-excite gate that ends in a hardsigmoid, as in MobileNetV3."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        self.expand = nn.Sequential(nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU())
        self.down, self.up, self.project = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1), nn.Conv2d(32, 16, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        y = self.expand(x)
        y = y * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(y, 1)))))
        return self.head((x + self.project(y)).mean((2, 3)))


class Preactivation(nn.Module):
    """BatchNorm before convolutions and behind a concat, which no layer can take in, as in DenseNet; a split."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm1, self.a = nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, 1, 1)
        self.norm2, self.b, self.head = nn.BatchNorm2d(32), nn.Conv2d(32, 32, 1), nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, self.a(F.relu(self.norm1(x)))], 1)
        left, right = F.relu(self.b(F.relu(self.norm2(x)))).chunk(2, 1)
        return self.head((left + right).mean((2, 3)))


class Tokens(nn.Module):
    """Patches, a linear layer of three dimensions, layer norm: (N, 3, 16, 16) as 16 tokens of 48 values."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.up, self.down = nn.Linear(48, 32), nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = x.unflatten(2, (4, 4)).unflatten(4, (4, 4)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x = self.embed(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x.mean(1))


class PaddedEncoder(nn.Module):
    """Two layers of torch's encoder over (N, L, 16) tokens with a mask (N, L) of the padded ones: three classes a token."""

    def __init__(self, nested: bool = True):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested), nn.Linear(16, 3)

    def forward(self, x, padded):
        return self.head(self.encoder(x, src_key_padding_mask=padded))


def padded_tokens(n=4, length=8, *, longest=8):
    """Inputs of a `PaddedEncoder`: sentences of two tokens or more, the first of `longest`, padded to `length`."""
    lengths = torch.randint(2, longest + 1, (n, 1))
    lengths[0] = longest
    return torch.randn(n, length, 16), torch.arange(length).expand(n, length) >= lengths


class TableOnDemand(nn.Module):
    """Adds positions from a table to (N, L, 8) tokens; it is made when a longer sentence comes, and no state dict holds it."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.length = nn.Linear(8, 32), nn.Linear(32, 8), 0
        self.register_buffer("table", torch.zeros(0, 8), persistent=False)

    def forward(self, x):
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.table = (torch.arange(self.length)[:, None] * torch.arange(8) / 8).sin()
        return self.down(self.up(x + self.table[: x.shape[1]]).relu())


class TableOfConstants(nn.Module):
    """Adds a table that is drawn, and that no state dict holds, to the 32 channels of (N, 6, 4) tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.head = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        self.register_buffer("table", torch.randn(6, 32), persistent=False)

    def forward(self, x):
        return self.head(self.hidden(self.embed(x) + self.table).relu())


NETWORKS = [Chain, Residual, PaddedShortcut, Depthwise, Concat, Flatten, SqueezeExcite, Shuffle, Gate, Twice, Tied, Unknown]
NETWORKS += [Mobile, Preactivation, Tokens]


def trained_like(model: nn.Module, example) -> nn.Module:
    """BatchNorm statistics and affine parameters that are not trivial, without any training."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    model.train()
    with torch.no_grad():
        for _ in range(20):
            model(*[torch.randn_like(v) for v in example])
    return model.eval()


def image(n=4):
    return (torch.randn(n, 3, 16, 16),)


def build(kind):
    model = kind()
    return trained_like(model, image(16))


def images_task(ck, *, samples=96, batch=32, classes=10, **settings):
    """A task on random images whose class shows in their mean, so that it can be learned."""
    y = torch.arange(samples) % classes
    x = torch.randn(samples, 3, 16, 16) * 0.5 + (y.float() / classes).view(-1, 1, 1, 1) * 3
    batches = [(x[i : i + batch], y[i : i + batch]) for i in range(0, samples, batch)]
    return ck.Task(train=batches, val=batches, **settings)


class WideChain(Chain):
    """`Chain` at twice the width."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = conv(3, 32), conv(32, 64), nn.Linear(64, 10)


DEPTHS = ("one", "two", "three")


class ThreeDepths(nn.Module):
    """Features of three depths, of other widths and sizes each: `DEPTHS` names them."""

    def __init__(self, width):
        super().__init__()
        self.one, self.two, self.three = conv(3, width), conv(width, width, s=2), conv(width, 2 * width, s=2)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x):
        return self.head(self.three(self.two(self.one(x))).mean((2, 3)))


def hooked_modules(model):
    return [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def indexed_task(ck, **settings):
    """`images_task` from a loader whose batches carry the indices of their samples; also all images and labels."""
    plain = images_task(ck)
    x, y = (torch.cat(parts) for parts in zip(*plain.train, strict=True))
    loader = ck.distill.indexed_loader(torch.utils.data.TensorDataset(x, y), batch_size=32, **settings)
    return ck.Task(train=loader, val=plain.val), x, y
