"""Parameters that are read as values (queries, tables, tokens), and other code that people write, are cut, not locked."""

# ruff: noqa: NPY002  (models draw from the global state)
from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pruned import assert_equals_zeroed
from torch import nn

from compresskit import keep
from compresskit.prune import apply_, plan_channels
from compresskit.prune.structure.repeatable import repeatable
from compresskit.prune.structure.trial import TrialRepair, trial_plan


class Queries(nn.Module):
    """Learned queries, (5, 16), go through a layer and read the tokens."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(5, 16))
        self.q, self.k, self.head = nn.Linear(16, 24), nn.Linear(6, 24), nn.Linear(24, 4)

    def forward(self, x):
        keys = self.k(x)
        return self.head((self.q(self.queries) @ keys.transpose(1, 2)).softmax(-1) @ keys)


class Distances(nn.Module):
    """A table of distances, (7, 16), is normalised and projected."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 16), nn.LayerNorm(16)
        self.q, self.k, self.head = nn.Linear(6, 24), nn.Linear(16, 24), nn.Linear(7, 4)

    def forward(self, x):
        return self.head(self.q(x) @ self.k(self.norm(self.table.weight)).T)


class MaskToken(nn.Module):
    """A learned token, (16,), is written where the input is negative."""

    def __init__(self):
        super().__init__()
        self.embed, self.token = nn.Linear(6, 16), nn.Parameter(torch.randn(16))
        self.up, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        h = self.embed(x)
        h[x[..., 0] < 0] = self.token.to(h.dtype)
        return self.head(self.up(h).relu())


class ResizedPositions(nn.Module):
    """A position embedding, (1, 17, 16), is resized to the image."""

    def __init__(self):
        super().__init__()
        self.stem, self.positions = nn.Conv2d(3, 16, 1), nn.Parameter(torch.randn(1, 17, 16))
        self.up, self.head = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 4, 1)

    def forward(self, x):
        places = self.positions[:, 1:].transpose(1, 2).reshape(1, -1, 4, 4)
        return self.head(self.up(self.stem(x) + F.interpolate(places, x.shape[2:], mode="bicubic")).relu())


class EachChannel(nn.Module):
    """A group norm of as many groups as channels."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 16, 1), nn.GroupNorm(16, 16), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        return self.b(self.norm(self.a(x)).relu())


class HeadsByEinsum(nn.Module):
    """Weights (width, heads, inner) make heads and read them."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 4)
        self.q, self.out = (nn.Parameter(torch.randn(16, 2, 8) / 4) for _ in range(2))

    def forward(self, x):
        h = self.embed(x)
        heads = torch.einsum("bth,hnd->btnd", h, self.q).relu()
        return self.head(torch.einsum("btnd,hnd->bth", heads, self.out) + h)


class Windows(nn.Module):
    """Windows of four positions that overlap by two, of values that do not lie in order."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.a(x).transpose(0, 1).relu()
        n, b, c = h.shape
        s = h.stride()
        windows = h.as_strided((n // 2 - 1, 4, b, c), (2 * s[0], *s))
        return self.head(self.b(windows.mean(1)).relu())


class ReducedKeys(nn.Module):
    """Attention whose keys and values are of fewer positions; sizes are those of the input."""

    def __init__(self, heads):
        super().__init__()
        self.heads, self.width = heads, 16 // heads
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.reduce = nn.Conv1d(16, 16, 2, 2)

    def forward(self, x):
        b, n, c = x.shape
        small = self.reduce(x.transpose(1, 2)).reshape(b, c, -1).transpose(1, 2)
        q = self.q(x).view(b, n, self.heads, self.width).transpose(1, 2)
        k, v = (m(small).view(b, n // 2, self.heads, self.width).transpose(1, 2) for m in (self.k, self.v))
        return x + self.out((q @ k.transpose(2, 3)).softmax(-1).matmul(v).transpose(1, 2).reshape(b, n, c))


class Reduced(nn.Module):
    """Two blocks of such attention, of one and of two heads."""

    def __init__(self):
        super().__init__()
        self.embed, self.a, self.b, self.head = nn.Linear(6, 16), ReducedKeys(1), ReducedKeys(2), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.b(self.a(self.embed(x))))


class ScaledTable(nn.Module):
    """A table of positions, (10, 16), times a number of each sample, and what is computed of it, is added to the tokens."""

    def __init__(self, function):
        super().__init__()
        self.function, self.positions = function, nn.Parameter(torch.randn(10, 16))
        self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head((self.embed(x) + self.function(self.positions, x.mean((1, 2)).view(-1, 1, 1))).relu().mean(1))


class NetVLAD(nn.Module):
    """Centers, (4, 16), are weighted by how much of each sample belongs to them (1511.07247)."""

    def __init__(self):
        super().__init__()
        self.stem, self.belongs, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1), nn.Linear(4 * 16, 5)
        self.centers = nn.Parameter(torch.randn(4, 16))

    def forward(self, x):
        x = self.stem(x).relu()
        belongs = self.belongs(x).flatten(2).softmax(1)
        summed = torch.einsum("nkp,ncp->nkc", belongs, x.flatten(2))
        return self.head((summed - belongs.sum(-1, keepdim=True) * self.centers).flatten(1))


TOKENS = torch.randn(3, 10, 6, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("kind", "x", "tensors"),
    [
        (Queries, TOKENS, [("queries", 1), ("q.weight", 1), ("q.weight", 0), ("k.weight", 0)]),
        (Distances, TOKENS, [("table.weight", 1), ("norm.weight", 0), ("k.weight", 1), ("q.weight", 0)]),
        (MaskToken, TOKENS, [("token", 0), ("embed.weight", 0), ("up.weight", 1)]),
        (ResizedPositions, IMAGES, [("positions", 2), ("stem.weight", 0), ("up.weight", 1)]),
        (EachChannel, IMAGES, [("a.weight", 0), ("norm.weight", 0), ("b.weight", 1)]),
        (HeadsByEinsum, TOKENS, [("q", 2), ("out", 2), ("q", 0), ("out", 0), ("head.weight", 1)]),
        (Reduced, TOKENS, [("embed.weight", 0), ("a.q.weight", 0), ("a.reduce.weight", 0), ("b.reduce.weight", 1)]),
        (Windows, TOKENS, [("a.weight", 0), ("b.weight", 1), ("b.weight", 0)]),
        (partial(ScaledTable, lambda p, t: p * t), TOKENS, [("positions", 1), ("embed.weight", 0), ("head.weight", 1)]),
        (partial(ScaledTable, lambda p, t: (p + t).cos() * 2 + p), TOKENS, [("positions", 1), ("embed.weight", 0)]),
        (NetVLAD, IMAGES, [("centers", 1), ("stem.weight", 0), ("belongs.weight", 1), ("head.weight", 1)]),
    ],
)
def test_is_cut_and_equals_the_zeroed_model(kind, x, tensors) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    search = TrialRepair(model, (x,), inside=None, ignore=())
    analysis = search.find_groups(1)
    plan = trial_plan(analysis)
    assert search.prove(plan, analysis) is None
    assert [(name, dim) for name, dim in tensors if not plan.remove.get(name, {}).get(dim)] == []
    if kind is not EachChannel:
        assert_equals_zeroed(model, plan, (x,))
    smaller = apply_(model, plan)
    assert smaller(x[:2]).shape[0] in (2, 4)


def test_a_group_norm_of_each_channel_keeps_one_group_for_each() -> None:
    torch.manual_seed(0)
    model = EachChannel().eval()
    plan = plan_channels(model, (IMAGES,), budget=keep(macs=0.5), round_to=1)
    kept = plan.keep("norm.weight")[0]
    with torch.no_grad():
        h = model.norm(model.a(IMAGES))[:, kept].relu()
        wanted = F.conv2d(h, model.b.weight[:, kept], model.b.bias)
    smaller = apply_(model, plan)
    assert smaller.norm.num_groups == smaller.norm.num_channels == len(kept) < 16
    assert torch.allclose(smaller(IMAGES), wanted, atol=1e-6)


def test_rows_of_a_parameter_that_is_read_as_values_stay() -> None:
    analysis = TrialRepair(Queries(), (TOKENS,), inside=None, ignore=()).find_groups(1)
    assert sorted(trial_plan(analysis).remove["queries"]) == [1]


class RandomSpans(MaskToken):
    """In train mode, spans that numpy draws are masked."""

    def forward(self, x):
        h = self.embed(x)
        if self.training:
            h[torch.from_numpy(np.random.rand(*x.shape[:2]) < random.random())] = self.token.to(h.dtype)
        return self.head(self.up(h).relu())


def test_masks_that_numpy_draws_are_the_same_in_both_runs_of_a_proof() -> None:
    torch.manual_seed(0)
    plan = plan_channels(RandomSpans(), (TOKENS,), budget=keep(macs=0.5), round_to=1)
    assert "token" in plan.remove
    before = random.getstate()
    with repeatable(RandomSpans()):
        first = np.random.rand(3), random.random()
    with repeatable(RandomSpans()):
        again = np.random.rand(3), random.random()
    assert np.array_equal(first[0], again[0])
    assert first[1] == again[1]
    assert before == random.getstate()


def test_keys_of_fewer_positions_stay_as_wide_as_the_input() -> None:
    torch.manual_seed(0)
    model = Reduced().eval()
    plan = plan_channels(model, (TOKENS,), budget=keep(macs=0.4), round_to=1)
    assert plan.macs <= 0.4 * plan.macs_before
    assert_equals_zeroed(model, plan, (TOKENS[:2],))
