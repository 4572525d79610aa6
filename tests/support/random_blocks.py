"""The blocks that random networks are made of.

A block is a function `(shape, *settings) -> (module, shape)`: it is told the shape of its input and says that of its output.
Settings are plain numbers, strings and tuples, so that a network can be written down; a module adapts those that do not fit it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {
    "relu": nn.ReLU,
    "inplace": lambda: nn.ReLU(inplace=True),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "leaky": lambda: nn.LeakyReLU(0.1),
    "relu6": nn.ReLU6,
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "none": nn.Identity,
}


@dataclass(frozen=True)
class Shape:
    """Of one sample. `dims`: 2 for images (width, size, size), 1 for signals (width, size), 0 for tokens (size, width)."""

    dims: int
    width: int
    size: int

    @property
    def axis(self) -> int:
        """The dimension of the channels, the batch being dimension 0."""
        return 1 if self.dims else 2

    @property
    def places(self) -> tuple[int, ...]:
        """The dimensions of the places."""
        return (2, 3)[: self.dims] if self.dims else (1,)

    @property
    def per_channel(self) -> tuple[int, ...]:
        """The shape of a tensor with one value for each channel, which broadcasts."""
        return (1, self.width, *[1] * self.dims) if self.dims else (1, 1, self.width)


def divisor(wanted: int, *widths: int) -> int:
    """The largest number up to `wanted` that divides all widths."""
    return math.gcd(wanted, *widths)


class RMS(nn.Module):
    """Root mean square norm over the last dimension, written by hand."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def norm(shape: Shape, kind: str) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    if not shape.dims:
        return RMS(shape.width) if kind in ("rms", "instance") else nn.LayerNorm(shape.width)
    if kind in ("group", "rms", "layer"):  # one group: a layer norm over channels and places
        return nn.GroupNorm(1 if kind == "layer" else divisor(4, shape.width), shape.width)
    kinds = {"batch": (nn.BatchNorm1d, nn.BatchNorm2d), "instance": (nn.InstanceNorm1d, nn.InstanceNorm2d)}[kind]
    return kinds[shape.dims - 1](shape.width, **({"affine": True} if kind == "instance" else {}))


def layer(shape: Shape, out: int, kernel: int = 1, **settings) -> nn.Module:
    """A convolution that keeps the size, or a linear layer over tokens."""
    if not shape.dims:
        return nn.Linear(shape.width, out, bias=settings.get("bias", True))
    settings["padding"] = settings.get("dilation", 1) * (kernel // 2)
    return (nn.Conv1d, nn.Conv2d)[shape.dims - 1](shape.width, out, kernel, **settings)


def dense(shape: Shape, out: int, kernel: int, normalized: str, activation: str, bias: bool):
    """Layer, norm, activation."""
    made = replace(shape, width=out)
    return nn.Sequential(layer(shape, out, kernel, bias=bias), norm(made, normalized), ACTIVATIONS[activation]()), made


def grouped(shape: Shape, groups: int, dilation: int, padding: str):
    """A convolution in groups (0: one for each channel)."""
    if not shape.dims:
        return dense(shape, shape.width, 1, "none", "relu", True)
    groups = divisor(groups, shape.width) if groups else shape.width
    if padding == "reflect" and shape.size <= dilation:
        padding = "zeros"
    if padding == "circular" and shape.size < dilation:
        padding = "zeros"
    made = layer(shape, shape.width, 3, groups=groups, dilation=dilation, padding_mode=padding)
    return nn.Sequential(made, nn.ReLU()), shape


def down(shape: Shape, kind: str):
    """Half the size."""
    if not shape.dims or shape.size < 4 or shape.size % 2:
        return dense(shape, shape.width, 1, "none", "relu", False)
    made, two = replace(shape, size=shape.size // 2), shape.dims == 2
    if kind == "conv":
        return (nn.Conv2d if two else nn.Conv1d)(shape.width, shape.width, 3, 2, 1), made
    if kind == "unshuffle" and two:
        return nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(4 * shape.width, shape.width, 1)), made
    if kind == "average":
        return (nn.AvgPool2d if two else nn.AvgPool1d)(2), made
    return (nn.MaxPool2d if two else nn.MaxPool1d)(3, 2, 1), made


class Resize(nn.Module):
    def __init__(self, mode: str):
        super().__init__()
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode=self.mode)


def up(shape: Shape, kind: str):
    """Twice the size."""
    if not shape.dims or shape.size > 8:
        return dense(shape, shape.width, 1, "none", "relu", False)
    made, two = replace(shape, size=shape.size * 2), shape.dims == 2
    if kind in ("transposed", "transposed groups"):
        groups = divisor(2, shape.width) if kind.endswith("groups") else 1
        return (nn.ConvTranspose2d if two else nn.ConvTranspose1d)(shape.width, shape.width, 2, 2, groups=groups), made
    if kind == "shuffle" and two:
        return nn.Sequential(nn.Conv2d(shape.width, 4 * shape.width, 1), nn.PixelShuffle(2)), made
    return Resize("bilinear" if kind == "linear" and two else "nearest"), made


class Residual(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Joined(nn.Module):
    """Branches whose outputs are concatenated."""

    def __init__(self, axis: int, *branches: nn.Module):
        super().__init__()
        self.axis, self.branches = axis, nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], self.axis)


def projected(shape: Shape, inner: tuple, out: int):
    """A block that keeps size, then a layer of `out` channels."""
    module, made = build_block(shape, inner)
    return nn.Sequential(module, layer(made, out)), replace(made, width=out)


def residual(shape: Shape, inner: tuple):
    module, made = projected(shape, inner, shape.width)
    return (Residual(module) if made == shape else module), made


def joined(shape: Shape, inner: tuple, width: int):
    module, made = projected(shape, inner, width)
    if made.size != shape.size:
        return module, made
    return Joined(shape.axis, module, layer(shape, width)), replace(shape, width=2 * width)


class Pieces(nn.Module):
    """The channels in two halves: one passes a layer, the other does not."""

    def __init__(self, shape: Shape, kind: str):
        super().__init__()
        self.kind, self.axis, self.half = kind, shape.axis, shape.width // 2
        self.layer = layer(replace(shape, width=self.half), self.half, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "split":
            a, b = x.split(self.half, self.axis)
        elif self.kind == "chunk":
            a, b = x.chunk(2, self.axis)
        else:
            a, b = x.narrow(self.axis, 0, self.half), x.narrow(self.axis, self.half, self.half)
        return torch.cat([self.layer(a), b], self.axis)


def pieces(shape: Shape, kind: str):
    module, made = dense(shape, 2 * (shape.width // 2), 1, "none", "relu", True)
    return nn.Sequential(module, Pieces(made, kind)), made


class Excite(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, shape: Shape, activation: type[nn.Module]):
        super().__init__()
        self.places = shape.places
        self.squeeze, self.excite, self.gate = layer(shape, 4), layer(replace(shape, width=4), shape.width), activation()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.excite(self.squeeze(x.mean(self.places, keepdim=True)).relu()))


def excite(shape: Shape, gate: str):
    return Excite(shape, nn.Hardsigmoid if gate == "hard" else nn.Sigmoid), shape


class Gated(nn.Module):
    """A gated linear unit."""

    def __init__(self, shape: Shape, out: int, kind: str):
        super().__init__()
        self.kind, self.axis, self.layer = kind, shape.axis, layer(shape, 2 * out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.kind == "glu":
            return F.glu(x, self.axis)
        a, b = x.chunk(2, self.axis)
        return F.silu(a) * b


def gated(shape: Shape, out: int, kind: str):
    return Gated(shape, out, kind), replace(shape, width=out)


class ShuffleChannels(nn.Module):
    def __init__(self, groups: int):
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        n, c, *places = x.shape
        return x.view(n, self.groups, c // self.groups, *places).transpose(1, 2).reshape(n, c, *places)


def shuffled(shape: Shape, groups: int):
    groups = divisor(groups, shape.width)
    if not shape.dims:
        return dense(shape, shape.width, 1, "none", "relu", True)
    return nn.Sequential(layer(shape, shape.width, 3, groups=groups), ShuffleChannels(groups)), shape


class Twice(nn.Module):
    """One layer that is used twice, or two whose weight is one tensor."""

    def __init__(self, shape: Shape, kind: str):
        super().__init__()
        self.first = layer(shape, shape.width)
        self.second = self.first if kind == "shared" else layer(shape, shape.width)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def twice(shape: Shape, kind: str):
    return Twice(shape, kind), shape


class Functional(nn.Module):
    """A layer whose parameters the code reads itself."""

    def __init__(self, shape: Shape, out: int):
        super().__init__()
        self.dims, one = shape.dims, [1] * shape.dims
        self.weight = nn.Parameter(torch.randn(out, shape.width, *one) / shape.width**0.5)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return (F.linear, F.conv1d, F.conv2d)[self.dims](x, self.weight, self.bias)


def functional(shape: Shape, out: int):
    return Functional(shape, out), replace(shape, width=out)


class Constants(nn.Module):
    """A scale, a shift and a number that is written in the code; the scale is a parameter or a buffer."""

    def __init__(self, shape: Shape, kind: str):
        super().__init__()
        scale = torch.rand(shape.per_channel) + 0.5
        if kind == "parameter":
            self.scale = nn.Parameter(scale)
        else:
            self.register_buffer("scale", scale)
        self.shift = nn.Parameter(torch.zeros(shape.per_channel))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * 0.9 + self.shift


def constants(shape: Shape, kind: str):
    return Constants(shape, kind), shape


def dropped(shape: Shape, kind: str):
    return (nn.Dropout2d if kind == "channels" and shape.dims == 2 else nn.Dropout)(0.2), shape


class Attention(nn.Module):
    """Self-attention over tokens: one layer for queries, keys and values, or three; torch's kernel, or written out."""

    def __init__(self, width: int, heads: int, kind: str):
        super().__init__()
        self.kind, self.heads, self.depth = kind, heads, width // heads
        self.qkv = nn.Linear(width, 3 * width) if kind == "fused" else None
        self.q, self.k, self.v = (None if kind == "fused" else nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        if self.qkv is not None:
            q, k, v = self.qkv(x).view(n, length, 3, self.heads, self.depth).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (f(x).view(n, length, self.heads, self.depth).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.kind == "written out":
            mixed = (q @ k.transpose(-2, -1) * self.depth**-0.5).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.kind == "causal")
        return self.out(mixed.transpose(1, 2).reshape(n, length, self.heads * self.depth))


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class OverPlaces(nn.Module):
    """What works on tokens, over the places of an image or a signal."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])


def over_tokens(shape: Shape, module: nn.Module) -> nn.Module:
    return OverPlaces(module) if shape.dims else module


def attention(shape: Shape, heads: int, kind: str):
    heads = divisor(heads, shape.width)
    made = SelfAttention(shape.width, heads) if kind == "torch" else Attention(shape.width, heads, kind)
    return over_tokens(shape, Residual(nn.Sequential(nn.LayerNorm(shape.width), made))), shape


def encoder(shape: Shape, heads: int, first: bool):
    made = nn.TransformerEncoderLayer(
        shape.width, divisor(heads, shape.width), 2 * shape.width, 0.1, batch_first=True, norm_first=first
    )
    return over_tokens(shape, made), shape


class Recurrent(nn.Module):
    def __init__(self, kind: str, width: int, hidden: int, layers: int, both: bool):
        super().__init__()
        made = nn.LSTM if kind == "lstm" else nn.GRU
        self.layer = made(width, hidden, layers, batch_first=True, bidirectional=both)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def recurrent(shape: Shape, kind: str, hidden: int, layers: int, both: bool):
    made = Recurrent(kind, shape.width, hidden, layers, both)
    return over_tokens(shape, made), replace(shape, width=hidden * (1 + both))


class Positions(nn.Module):
    """A value for each place and channel, learned or constant."""

    def __init__(self, shape: Shape, learned: bool):
        super().__init__()
        places = [shape.size] * shape.dims
        values = torch.randn(1, shape.width, *places) if shape.dims else torch.randn(1, shape.size, shape.width)
        if learned:
            self.values = nn.Parameter(values)
        else:
            self.register_buffer("values", values)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.values


def positions(shape: Shape, learned: bool):
    return Positions(shape, learned), shape


class Product(nn.Module):
    """A product by a stored matrix."""

    def __init__(self, width: int, out: int, kind: str):
        super().__init__()
        self.kind, self.matrix = kind, nn.Parameter(torch.randn(width, out) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nli,io->nlo", x, self.matrix) if self.kind == "einsum" else x @ self.matrix


def product(shape: Shape, out: int, kind: str):
    return over_tokens(shape, Product(shape.width, out, kind)), replace(shape, width=out)


class Token(nn.Module):
    """A learned token before the others, which all pass a layer; it is added to them afterwards."""

    def __init__(self, width: int):
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.randn(1, 1, width)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1))
        return x[:, 1:] + x[:, :1]


def token(shape: Shape):
    return over_tokens(shape, Token(shape.width)), shape


class Selective(nn.Module):
    """Two branches, weighted for each channel by a softmax over the branches."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.places = shape.places
        self.a, self.b = layer(shape, shape.width), layer(shape, shape.width, 3)
        self.weigh_a, self.weigh_b = layer(shape, shape.width), layer(shape, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        branches, mean = torch.stack([self.a(x), self.b(x)]), x.mean(self.places, keepdim=True)
        return (branches * torch.stack([self.weigh_a(mean), self.weigh_b(mean)]).softmax(0)).sum(0)


def selective(shape: Shape):
    return Selective(shape), shape


class Cast(nn.Module):
    """What careful code does for the device or the precision of its inputs: nothing here."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "device":
            return x.to(x.device)
        return x.to(x.dtype if x.dtype == torch.float64 else torch.float32)  # a reference in float64 stays one


def cast(shape: Shape, kind: str):
    return Cast(kind), shape


BLOCKS = {
    block.__name__: block
    for block in (
        dense, grouped, down, up, residual, joined, pieces, excite, gated, shuffled, twice, functional, constants, dropped,
        attention, encoder, recurrent, positions, product, token, selective, cast,
    )
}  # fmt: skip


def build_block(shape: Shape, block: tuple) -> tuple[nn.Module, Shape]:
    """The module of a block, and the shape of its output."""
    name, *settings = block
    return BLOCKS[name](shape, *settings)
