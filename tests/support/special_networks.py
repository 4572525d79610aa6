"""Small networks, one for each special case of structured pruning; all take what `example(kind)` gives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def conv(i, o, k=3, **settings):
    return nn.Sequential(nn.Conv2d(i, o, k, 1, k // 2, bias=False, **settings), nn.BatchNorm2d(o), nn.ReLU())


class Images(nn.Module):
    """Images (N, 3, 8, 8) to a stem of 16 channels, `body`, and a classifier of `width` channels."""

    def __init__(self, width=16, stem=16):
        super().__init__()
        self.stem, self.head = conv(3, stem), nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class Conv1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(6, 16, 3), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


class Conv3d(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(3, 16, 3, 1, 1), nn.BatchNorm3d(16), nn.ReLU(), nn.Conv3d(16, 16, 1), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3, 4)))


class TwoOutputs(Images):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.other = conv(16, 16), conv(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.a(self.stem(x))
        return self.head(self.b(x).mean((2, 3))), self.other(x.mean((2, 3)))


class Maxout(Images):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(16, 32, 3, 1, 1)

    def body(self, x):
        x = self.a(x)
        n, c, h, w = x.shape
        return x.view(n, c // 2, 2, h, w).max(2).values


class BroadcastAdd(Images):
    def __init__(self):
        super().__init__()
        self.a, self.b = conv(16, 16), nn.Conv2d(16, 16, 1)

    def body(self, x):
        return self.a(x) + self.b(x.mean((2, 3), keepdim=True))


class DenseConcat(Images):
    def __init__(self):
        super().__init__(40)
        self.a, self.b = conv(16, 12), conv(28, 12)

    def body(self, x):
        x = torch.cat([x, self.a(x)], 1)
        return torch.cat([x, self.b(x)], 1)


class SpaceToDepth(Images):
    def __init__(self):
        super().__init__()
        self.a = conv(64, 16)

    def body(self, x):
        n, c, h, w = x.shape
        x = x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, c * 4, h // 2, w // 2)
        return self.a(x)


class Multiplier(Images):
    def __init__(self):
        super().__init__(32)
        self.depth = nn.Conv2d(16, 32, 3, 1, 1, groups=16)

    def body(self, x):
        return F.relu(self.depth(x))


class Grouped(Images):
    def __init__(self):
        super().__init__(48)
        self.a, self.b = conv(16, 32, groups=4), conv(32, 48, groups=4)

    def body(self, x):
        return self.b(self.a(x))


class Flat(Images):
    def __init__(self):
        super().__init__(16 * 64)
        self.a = conv(16, 16)

    def forward(self, x):
        x = self.a(self.stem(x))
        return self.head(x.view(x.size(0), -1))


class HardView(Flat):
    def forward(self, x):
        return self.head(self.a(self.stem(x)).view(-1, 1024))


class LinearToImage(nn.Module):
    """Numbers (N, 8) to an image."""

    def __init__(self):
        super().__init__()
        self.up, self.a, self.out = nn.Linear(8, 16 * 16), conv(16, 16), nn.Conv2d(16, 3, 1)

    def forward(self, x):
        return self.out(self.a(F.relu(self.up(x)).view(x.shape[0], -1, 4, 4)))


class Gated(Images):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(16, 32, 3, 1, 1)

    def body(self, x):
        a, b = self.a(x).chunk(2, 1)
        return a * torch.sigmoid(b)


class Glu(Gated):
    def body(self, x):
        return F.glu(self.a(x), 1)


class C2f(Images):
    """As in YOLOv8: halves, one of which goes on, all of them side by side."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = conv(16, 32), conv(16, 16), conv(48, 16)

    def body(self, x):
        left, right = self.a(x).chunk(2, 1)
        return self.c(torch.cat([left, right, self.b(right)], 1))


class Split(Images):
    def __init__(self):
        super().__init__(24)
        self.a, self.b = conv(16, 32), conv(8, 24)

    def body(self, x):
        a, b = self.a(x).split([8, 24], 1)
        return self.b(a) + b


class Sliced(Split):
    def __init__(self):
        super().__init__()
        self.b = conv(24, 8)
        self.head = nn.Linear(8, 10)

    def body(self, x):
        x = self.a(x)
        return x[:, :8] + self.b(x[:, 8:])


class HalvesByWidth(Images):
    """Halves cut where the width says, and every other channel."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 24, 3), nn.Conv2d(24, 32, 3)

    def body(self, x):
        x = self.a(x)
        half = x.shape[1] // 2
        x = self.b(torch.cat([-x[:, half:], x[:, :half]], 1))
        return x[:, ::2] * x[:, 1::2].sigmoid()


class ListedParts(Images):
    """Parts whose sizes are a list of the module."""

    def __init__(self):
        super().__init__(32)
        self.a, self.sizes = nn.Conv2d(16, 32, 3), [8, 16, 8]

    def body(self, x):
        a, b, c = self.a(x).split(self.sizes, 1)
        return torch.cat([a, b.relu(), c.sigmoid()], 1)


class ShuffleByHand(Images):
    def __init__(self):
        super().__init__(32, 32)
        self.a, self.b = conv(32, 32, groups=4), conv(32, 32, groups=4)

    def shuffle(self, x):
        n, c, h, w = x.shape
        return x.view(n, 4, c // 4, h, w).transpose(1, 2).reshape(n, c, h, w)

    def body(self, x):
        return self.b(self.shuffle(self.a(x)))


class ShuffleModule(ShuffleByHand):
    def __init__(self):
        super().__init__()
        self.shuffle = nn.ChannelShuffle(4)


class Pixels(Images):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.shuffle = nn.Conv2d(16, 64, 3, 1, 1), conv(16, 16), nn.PixelShuffle(2)

    def body(self, x):
        return self.b(self.shuffle(self.a(x)))


class Unpixels(Images):
    def __init__(self):
        super().__init__()
        self.a, self.shuffle = conv(64, 16), nn.PixelUnshuffle(2)

    def body(self, x):
        return self.a(self.shuffle(x))


class OptionA(Images):
    def __init__(self):
        super().__init__(32)
        self.inner, self.out = conv(16, 32), conv(32, 32)

    def body(self, x):
        return F.relu(self.out(self.inner(x))[:, :, ::2, ::2] + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 8, 8)))


class Regions(Images):
    """Regions of the image, cut out by torchvision's roi_align."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(16, 16), conv(16, 16)

    def body(self, x):
        from torchvision.ops import roi_align

        boxes = [torch.tensor([[0.0, 0.0, 6.0, 6.0]], dtype=x.dtype) for _ in x]
        return self.b(roi_align(self.a(x), boxes, output_size=4))


class Deformed(Images):
    """A deformable convolution: where it reads is computed by another one."""

    def __init__(self):
        from torchvision.ops import DeformConv2d

        super().__init__()
        self.where, self.a, self.b = nn.Conv2d(16, 27, 3, padding=1), DeformConv2d(16, 16, 3, padding=1), conv(16, 16)

    def body(self, x):
        where = self.where(x)
        return self.b(self.a(x, where[:, :18], where[:, 18:].sigmoid()))


class Messages(nn.Module):
    """Rows that send messages to others, which are added up, or of which the largest is taken; then one row is read."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(8, 16), nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 4)

    def forward(self, x):
        count, to = x.shape[1], torch.arange(x.shape[1]) // 2
        y = self.a(x)
        y = torch.zeros_like(y).scatter_add_(1, to.view(1, -1, 1).expand_as(y), y.flip(1)).relu()
        y = self.b(y)
        y = y.scatter_reduce(1, to.view(1, -1, 1).expand(len(x), count, y.shape[2]), y.flip(1), "amax")
        y = self.c(y)
        y = torch.zeros_like(y).scatter(1, to.flip(0).view(1, -1, 1).expand_as(y), y).tanh()
        return self.head(y.gather(1, to.new_full((len(x), 1, y.shape[2]), 1)).squeeze(1))


class Slopes(Images):
    def __init__(self):
        super().__init__()
        self.a, self.act = nn.Conv2d(16, 16, 3, 1, 1), nn.PReLU(16)

    def body(self, x):
        return self.act(self.a(x))


class SqueezeByLinear(Images):
    def __init__(self):
        super().__init__()
        self.down, self.up, self.a = nn.Linear(16, 8), nn.Linear(8, 16), conv(16, 16)

    def body(self, x):
        gate = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))
        return self.a(x * gate.view(x.shape[0], -1, 1, 1))


class Transposed(Images):
    groups = 1

    def __init__(self):
        super().__init__(24)
        self.up, self.norm = nn.ConvTranspose2d(16, 24, 2, 2, groups=self.groups), nn.BatchNorm2d(24)

    def body(self, x):
        return F.relu(self.norm(self.up(x)))


class TransposedGroups(Transposed):
    groups = 4


class Norms(Images):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.group = nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(16, 16, 1), nn.GroupNorm(4, 16)
        self.instance = nn.InstanceNorm2d(16, affine=True)
        nn.init.normal_(self.group.bias)
        nn.init.normal_(self.group.weight)

    def body(self, x):
        return F.relu(self.instance(self.b(F.relu(self.group(self.a(x))))))


class BareInstanceNorm(Images):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(16, 16, 3, 1, 1), nn.InstanceNorm2d(16)

    def body(self, x):
        return F.relu(self.norm(self.a(x)))


class ChannelGroups(Images):
    """Group norms with as many groups as channels, of torch and by a function."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(16, 16, 3), nn.GroupNorm(16, 16), nn.Conv2d(16, 16, 3)
        self.groups = 16

    def body(self, x):
        return F.group_norm(self.b(self.norm(self.a(x)).sigmoid()), self.groups).relu()


class WideLayerNorm(Images):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(16, 16, 3, 1, 1), nn.LayerNorm([16, 8, 8]), conv(16, 16)
        nn.init.normal_(self.norm.bias)

    def body(self, x):
        return self.b(self.norm(self.a(x)))


class Frozen(Images):
    """torchvision's FrozenBatchNorm2d and a backbone that takes no gradient."""

    def __init__(self):
        from torchvision.ops import FrozenBatchNorm2d

        super().__init__()
        self.a, self.norm = nn.Conv2d(16, 16, 3, 1, 1, bias=False), FrozenBatchNorm2d(16)
        for buffer in self.norm.buffers():
            buffer.uniform_(0.5, 1.5)
        self.stem.requires_grad_(False)
        self.a.requires_grad_(False)

    def body(self, x):
        return F.relu(self.norm(self.a(x)))


class Grn(nn.Module):
    """Global response normalisation, as in ConvNeXt-v2; tokens (N, 6, 8)."""

    def __init__(self):
        super().__init__()
        self.a, self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 10)
        self.gamma, self.beta = nn.Parameter(torch.rand(64)), nn.Parameter(torch.rand(64))

    def forward(self, x):
        x = self.a(x)
        y = F.gelu(self.up(x))
        response = torch.norm(y, p=2, dim=1, keepdim=True)
        y = self.gamma * (y * (response / (response.mean(-1, keepdim=True) + 1e-6))) + self.beta + y
        return self.head((x + self.down(y)).mean(1))


class Tokens(nn.Module):
    """Tokens (N, 6, 8) to a residual stream of 32 channels, `body`, and a classifier."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(self.embed(x)).mean(1))


class Vision(Tokens):
    """Class token, position embedding, layer scale, layer norm."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Parameter(torch.randn(1, 1, 32)), nn.Parameter(torch.randn(1, 7, 32))
        self.norm, self.up, self.down, self.scale = (
            nn.LayerNorm(32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
            nn.Parameter(torch.rand(32)),
        )
        nn.init.normal_(self.norm.bias)

    def body(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class FusedAttention(Tokens):
    """Fused qkv whose head width is computed from the width of the input, a relative-position table, weights used by name."""

    def __init__(self):
        super().__init__()
        self.heads = 4
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)
        self.table = nn.Parameter(torch.randn(11, self.heads))
        self.register_buffer("index", (torch.arange(6)[:, None] - torch.arange(6)[None] + 5).flatten())

    def body(self, x):
        n, length, c = x.shape
        qkv = F.linear(self.norm(x), self.qkv.weight, self.qkv.bias)
        q, k, v = qkv.reshape(n, length, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
        scores = scores + self.table[self.index].view(6, 6, -1).permute(2, 0, 1).unsqueeze(0)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, length, c))


class StoredAttention(Tokens):
    """Fused qkv with a stored head width and a stored scale."""

    def __init__(self):
        super().__init__()
        self.heads, self.head_dim = 4, 8
        self.scale = self.head_dim**-0.5
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def body(self, x):
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        scores = (q @ k.transpose(-2, -1)) * self.scale
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(*x.shape[:2], -1))


class Rotary(Tokens):
    """Grouped queries with rotary positions whose frequencies are a buffer; halves are turned into one another."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(32, 32)
        self.register_buffer("frequencies", 1 / 10 ** (torch.arange(4) / 4), persistent=False)
        self.width = 8

    def turned(self, x):
        angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * self.frequencies.to(x.dtype)
        angles = torch.cat([angles, angles], -1)
        half = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)
        return x * angles.cos() + half * angles.sin()

    def body(self, x):
        q, k, v = (m(x).view(*x.shape[:2], -1, self.width).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, scale=0.3, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class SeparateAttention(Tokens):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def body(self, x):
        q, k, v = (f(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Multihead(Tokens):
    def __init__(self, **settings):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True, **settings)
        nn.init.normal_(self.attention.in_proj_bias)

    def body(self, x):
        return x + self.attention(x, x, x)[0]


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.memory, self.head = nn.Linear(8, 32), nn.Linear(8, 48), nn.Linear(32, 10)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True, kdim=48, vdim=48)

    def forward(self, x):
        y, memory = self.embed(x), self.memory(x)
        return self.head((y + self.attention(y, memory, memory, need_weights=False)[0]).mean(1))


class Encoder(Tokens):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Embedded(nn.Module):
    """Numbers (N, 6) below 50."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(50, 32), nn.Linear(32, 48), nn.Linear(48, 10)

    def forward(self, x):
        return self.head(F.relu(self.up(self.embed(x))).mean(1))


class TiedByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(50, 32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        x = self.embed(x)
        return F.linear(x + self.down(F.gelu(self.up(x))), self.embed.weight)


class TiedByModule(TiedByFunction):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        return self.head(x + self.down(F.gelu(self.up(x))))


class Recurrent(nn.Module):
    kind = nn.LSTM

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.rnn = self.kind(16, 24, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0].mean(1))


class Gru(Recurrent):
    kind = nn.GRU


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(50, 16), nn.LSTMCell(16, 24), nn.Linear(24, 10)

    def forward(self, x):
        x = self.embed(x)
        state = x.new_zeros(x.shape[0], self.cell.hidden_size), x.new_zeros(x.shape[0], self.cell.hidden_size)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


class Projection(Recurrent):
    """An LSTM whose cells are projected before they are read."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(16, 24, num_layers=2, batch_first=True, bidirectional=True, proj_size=12)
        self.head = nn.Linear(24, 10)


class UnevenProjection(Projection):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(16, 24, batch_first=True, bidirectional=True, proj_size=10)
        self.head, self.out = nn.Linear(32, 10), nn.Linear(20, 32)

    def forward(self, x):
        return self.head(self.out(self.rnn(self.embed(x))[0].mean(1)).relu())


class LearnedState(Recurrent):
    """The first state of both layers and directions is learned."""

    def __init__(self):
        super().__init__()
        self.h, self.c = nn.Parameter(torch.randn(4, 1, 24)), nn.Parameter(torch.randn(4, 1, 24))

    def forward(self, x):
        state = self.h.expand(-1, len(x), -1).contiguous(), self.c.repeat(1, len(x), 1)
        return self.head(self.rnn(self.embed(x), state)[0].mean(1))


class Einsum(Tokens):
    """A raw matrix in an einsum, another with @."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(32, 24) / 5), nn.Parameter(torch.randn(24, 32) / 5)

    def body(self, x):
        return F.relu(torch.einsum("nld,de->nle", x, self.first)) @ self.second


class Bilinear(Tokens):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.pairs = nn.Linear(32, 16), nn.Linear(32, 24), nn.Bilinear(16, 24, 32)

    def body(self, x):
        return self.pairs(self.a(x), self.b(x)).relu()


class RowsByEinsum(Tokens):
    """Channels that are viewed as (rows, width) and read with a weight of both."""

    def __init__(self):
        super().__init__()
        self.up, self.weight = nn.Linear(32, 48), nn.Parameter(torch.randn(32, 8, 6) / 5)

    def body(self, x):
        rows = self.up(x).relu().view(*x.shape[:2], 8, -1)
        return torch.einsum("nlig,oig->nlo", rows, self.weight)


class Similarities(Tokens):
    """Cosines of features with one another and with prototypes, and distances to others."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.back = nn.Linear(32, 24), nn.Linear(32, 24), nn.Linear(17, 32)
        self.prototypes, self.centres = nn.Parameter(torch.randn(10, 24)), nn.Parameter(torch.randn(1, 6, 24))

    def body(self, x):
        a, b = self.a(x), self.b(x)
        cosines = F.cosine_similarity(a, b, -1).unsqueeze(-1)
        to_prototypes = F.cosine_similarity(a.unsqueeze(2), self.prototypes[None, None], dim=-1)
        return self.back(torch.cat([cosines, to_prototypes, torch.cdist(b, self.centres.expand(len(b), -1, -1))], -1))


class Product(nn.Module):
    """The product of two features."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(36, 10)

    def forward(self, x):
        return self.head((self.a(x) @ self.b(x).transpose(1, 2)).flatten(1))


class WeightNorm(Tokens):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 48)), nn.ReLU(), nn.Linear(48, 32))


class SpectralNorm(Tokens):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(32, 48)), nn.ReLU(), nn.Linear(48, 32))


class StandardConv(nn.Conv2d):
    """A convolution whose weight has mean 0 and variance 1 over its inputs, times a gain."""

    def __init__(self, *sizes, **settings):
        super().__init__(*sizes, **settings)
        self.gain = nn.Parameter(0.5 + torch.rand(self.out_channels, 1, 1, 1))

    def standardized(self, weight, gain):
        gain = (gain * 0.3).view(-1)
        flat = weight.reshape(1, len(gain), -1)
        return F.batch_norm(flat, None, None, weight=gain, training=True, momentum=0.0, eps=1e-6).reshape_as(weight)

    def forward(self, x):
        return self._conv_forward(x, self.standardized(self.weight, self.gain), self.bias)


class StandardConvByHand(StandardConv):
    def standardized(self, weight, gain):
        weight = weight - weight.mean(1, keepdim=True).mean((2, 3), keepdim=True)
        std = weight.view(weight.size(0), -1).std(dim=1).view(-1, 1, 1, 1) + 1e-5
        return gain * weight / std.expand_as(weight)


class StandardConvAtOnce(StandardConv):
    def standardized(self, weight, gain):
        var, mean = torch.var_mean(weight, dim=[1, 2, 3], keepdim=True)
        return (weight - mean) * (torch.rsqrt(var + 1e-6) * gain)


class Standardized(Images):
    """Weight standardization: the sigmoid of a zeroed channel is not zero, so what reads it must not see it."""

    kind = StandardConv

    def __init__(self):
        super().__init__()
        self.a, self.b = self.kind(16, 24, 3, padding=1), self.kind(24, 16, 3, groups=2, padding=1)

    def body(self, x):
        return self.b(self.a(x).sigmoid())


class StandardizedByHand(Standardized):
    kind = StandardConvByHand


class StandardizedAtOnce(Standardized):
    kind = StandardConvAtOnce


class CosineClassifier(Tokens):
    """Unit features and unit weights; the weights of the layer before are masked and scaled."""

    def __init__(self):
        super().__init__()
        self.up, self.rate = nn.Linear(32, 48), nn.Parameter(torch.rand(48, 1))
        self.kept = nn.Parameter((torch.rand(48, 32) > 0.3).float(), requires_grad=False)
        self.classes, self.back = nn.Parameter(torch.randn(12, 48)), nn.Parameter(torch.randn(32, 12))

    def body(self, x):
        x = F.linear(x, self.up.weight * self.kept * self.rate.sigmoid(), self.up.bias).relu()
        return F.linear(F.linear(F.normalize(x, dim=-1), F.normalize(self.classes, dim=1)), self.back)


class JoinedBias(Tokens):
    """Attention whose keys have no bias: that of q, k and v is put together in the forward pass."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(32))

    def body(self, x):
        n, length, _ = x.shape
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias, requires_grad=False), self.v_bias])
        q, k, v = F.linear(x, self.qkv.weight, bias).reshape(n, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, scale=0.5).transpose(1, 2).flatten(2))


class FixedBias(JoinedBias):
    """The zeros of the keys are as many as the code says."""

    def body(self, x):
        bias = torch.cat([self.q_bias, torch.zeros(32, dtype=x.dtype), self.v_bias])
        q, k, v = F.linear(x, self.qkv.weight, bias).chunk(3, -1)
        return x + self.out((q * k).sigmoid() * v)


class Auxiliary(Images):
    """A second head that only training runs."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.side = conv(16, 16), conv(16, 16), nn.Sequential(conv(16, 8), nn.AdaptiveAvgPool2d(1))
        self.second = nn.Linear(8, 10)

    def forward(self, x):
        x = self.a(self.stem(x))
        y = self.head(self.b(x).mean((2, 3)))
        return (y, self.second(self.side(x).flatten(1))) if self.training else y


class DataDependent(Images):
    """A path that depends on values, which no export can follow."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(16, 16), conv(16, 16)

    def body(self, x):
        x = self.a(x)
        return self.b(x) if float(x.detach().mean()) > -1 else x


class Written(Images):
    """Channels written into a part of a tensor."""

    def __init__(self):
        super().__init__()
        self.a = conv(16, 16)

    def body(self, x):
        y = torch.zeros(x.shape[0], 16, 8, 8, dtype=x.dtype)
        y[:, :, ::2] = self.a(x)[:, :, ::2]
        return y


class SelectiveKernel(Images):
    """Two branches, weighted channel by channel by a softmax over the branches (Li et al., 1903.06586)."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(16, 16), conv(16, 16, 5)
        self.squeeze, self.select = conv(16, 8, 1), nn.Conv2d(8, 32, 1)

    def body(self, x):
        branches = torch.stack([self.a(x), self.b(x)], 1)
        weights = self.select(self.squeeze(branches.sum(1).mean((2, 3), keepdim=True)))
        n, channels = weights.shape[:2]
        return (branches * weights.view(n, 2, channels // 2, 1, 1).softmax(1)).sum(1)


class SplitAttention(Images):
    """Two splits of two groups, weighted channel by channel by a softmax over the splits (ResNeSt, Zhang et al., 2004.08955)."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(16, 32, 3, 1, 1, groups=4), nn.BatchNorm2d(32)
        self.squeeze, self.select = nn.Conv2d(16, 8, 1, groups=2), nn.Conv2d(8, 32, 1, groups=2)

    def body(self, x):
        x = self.norm(self.a(x)).relu()
        n, channels, height, width = x.shape
        splits = x.reshape(n, 2, channels // 2, height, width)
        weights = self.select(self.squeeze(splits.sum(1).mean((2, 3), keepdim=True)).relu())
        weights = weights.view(n, 2, 2, -1).transpose(1, 2).softmax(1).reshape(n, 2, channels // 2, 1, 1)
        return (splits * weights).sum(1)


class StateSpace(nn.Module):
    """A selective scan (Mamba, Gu and Dao, 2312.00752): the state of every channel starts at zero."""

    states = 3

    def __init__(self, width=16):
        super().__init__()
        self.width, self.enter, self.select = width, nn.Linear(8, width), nn.Linear(width, 1 + 2 * self.states)
        self.rate, self.decay, self.head = nn.Linear(1, width), nn.Parameter(torch.rand(width, self.states)), nn.Linear(width, 10)

    def forward(self, x):
        x = self.enter(x).relu()
        rate, keys, queries = self.select(x).split([1, self.states, self.states], -1)
        rate, state = F.softplus(self.rate(rate)), x.new_zeros(len(x), self.width, self.states)
        outputs = []
        for t in range(x.shape[1]):
            state = state * torch.exp(-rate[:, t, :, None] * self.decay) + (rate[:, t] * x[:, t])[..., None] * keys[:, t, None]
            outputs.append((state * queries[:, t, None]).sum(-1))
        return self.head(torch.stack(outputs, 1))


def example(kind):
    """Inputs of a network of this kind, two rows."""
    if kind is Conv1d:
        return (torch.randn(2, 6, 12),)
    if kind is Conv3d:
        return (torch.randn(2, 3, 4, 8, 8),)
    if kind is LinearToImage:
        return (torch.randn(2, 8),)
    if issubclass(kind, Embedded | TiedByFunction | Recurrent | Cells):
        return (torch.randint(0, 50, (2, 6)),)
    if issubclass(kind, Images):
        return (torch.randn(2, 3, 8, 8),)
    return (torch.randn(2, 6, 8),)
