"""Runs that are to be compared have the same noise whatever their width, and move nothing."""

from __future__ import annotations

import random

import networks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compresskit.prune.structure.repeatable import (
    alike_rows,
    repeatable,
    state_restored,
    timed_rows,
    varied_inputs,
    vary_constants_,
)

NOISE = {
    "randn": lambda h: h + torch.randn(h.shape),
    "normal": lambda h: torch.normal(h, 2.0),
    "uniform": lambda h: h + torch.empty_like(h).uniform_(),
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "dropout": lambda h: F.dropout(h, 0.5),
    "attention": lambda h: F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], dropout_p=0.5)[:, 0],
}


@pytest.mark.parametrize("kind", NOISE)
def test_noise_is_the_same_for_every_width(kind) -> None:
    h = torch.randn(2, 4, 1).expand(2, 4, 8)
    with torch.inference_mode(), repeatable(nn.Identity()):
        wide, narrow = NOISE[kind](h), NOISE[kind](h[..., :5])
    if kind != "attention":  # which divides by the width
        assert torch.equal(wide[..., :5], narrow)
    with torch.inference_mode(), repeatable(nn.Identity()):
        assert torch.equal(NOISE[kind](h), wide)
    assert wide.std() > 0.1, "what is not noise is still there"


def test_buffers_are_put_back_also_where_they_were_replaced() -> None:
    model = nn.Module()
    model.register_buffer("moved", torch.zeros(2))
    model.register_buffer("replaced", torch.zeros(2))
    before = model.replaced
    with state_restored(model):
        model.moved.add_(1)
        model.replaced = model.replaced + 1
    assert model.replaced is before
    assert not model.moved.any()
    assert not model.replaced.any()


def test_a_table_and_its_length_are_put_back_together() -> None:
    model, x = networks.TableOnDemand(), torch.randn(2, 6, 8)
    table = model.table
    with torch.inference_mode(), repeatable(model):
        wanted = model(x)
        assert model.length == 6
    assert model.length == 0
    assert model.table is table
    assert not torch.is_inference(model(x))
    torch.testing.assert_close(model(x), wanted)


def test_only_constant_values_are_varied() -> None:
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.bias)
    weight = model.weight.clone()
    vary_constants_(model)
    assert torch.equal(model.weight, weight)
    assert model.bias.std() > 0
    x = (torch.randn(2, 3), torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.long))
    same, varied, integers = varied_inputs(x)
    assert same is x[0]
    assert integers is x[2]
    assert varied.std() > 0
    assert varied.min() >= 1


def test_what_a_single_zero_or_a_buffer_of_zeros_lets_through_is_varied() -> None:
    model = nn.Module()
    model.gate, model.open = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.tensor(0.5))
    model.register_buffer("gates", torch.zeros(3))
    model.register_buffer("ones", torch.ones(3))
    vary_constants_(model)
    assert model.gate != 0
    assert model.open == 0.5
    assert (model.gates > 0).all()
    assert torch.equal(model.ones, torch.ones(3))


class Pooled(nn.Module):
    """Attention over positions and its mean over them; in an unbatched sequence they are the first dimension."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.positions, self.enter, self.head = positions, nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        return self.head(F.scaled_dot_product_attention(h, h, h).mean(self.positions))


class Steps(nn.Module):
    """A recurrent layer and the classes of each step."""

    def __init__(self, *, batch_first: bool, classes: int = 3, both_ways: bool = False) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 8, batch_first=batch_first, bidirectional=both_ways)
        self.head = nn.Linear(16 if both_ways else 8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0]).softmax(-1)


class Towers(nn.Module):
    """The scores of users beside those of all items."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.users(users) @ self.items(items).T


class Placed(nn.Module):
    """Adds a table that a layer computes anew for each batch."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.enter, self.table = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("places", torch.randn(entries, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.enter(x) + self.table(self.places).mean(0)


class Experts(nn.Module):
    """Each row goes through the expert that it chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.experts = (
            nn.Linear(8, 4),
            nn.ModuleList(nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)) for width in (4, 8, 16, 32)),
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen, y = self.choose(x).argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x[rows]))
        return y


class Summary(nn.Module):
    """The mean over positions, and a head; in an unbatched sequence they are the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enter(x).mean(0))


class NoLoneRow(nn.Module):
    """Loses the dimension of a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = x.unsqueeze(1).squeeze()
        assert h.ndim == 2
        return self.layer(h[..., None])


class Pairs(nn.Module):
    """Compares rows in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.head((h[::2] - h[1::2]).abs())


def batch_statistics() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False), nn.Flatten(), nn.LazyLinear(4))


def spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 3))


#: Model, inputs, and the rows of the first one on which MACs are counted and milliseconds measured; None for all.
ROWS = {
    "images": (lambda: networks.build(networks.Residual), lambda: networks.image(6), 2, 1),
    "two samples": (lambda: Pooled(1), lambda: (torch.randn(2, 7, 4),), None, 1),
    "samples": (lambda: Pooled(1), lambda: (torch.randn(6, 7, 4),), 2, 1),
    "positions": (lambda: Pooled(0), lambda: (torch.randn(6, 4),), None, None),
    "steps of samples": (lambda: Steps(batch_first=True), lambda: (torch.randn(6, 7, 4),), 2, 1),
    "steps first": (lambda: Steps(batch_first=False), lambda: (torch.randn(6, 7, 4),), 2, None),
    "many classes": (lambda: Steps(batch_first=False, classes=1000), lambda: (torch.randn(6, 7, 4),), 2, None),
    "both ways": (lambda: Steps(batch_first=False, both_ways=True), lambda: (torch.randn(6, 7, 4),), 2, None),
    "a summary of positions": (Summary, lambda: (torch.randn(6, 4),), None, None),
    "batch statistics": (batch_statistics, lambda: networks.image(6), 2, 1),
    "experts": (Experts, lambda: (torch.randn(6, 8),), 2, 1),
    "spectral norm": (spectral_norm, lambda: (torch.randn(6, 4),), 2, 1),
    "no lone row": (NoLoneRow, lambda: (torch.randn(6, 4),), 2, None),
    "users and items": (Towers, lambda: (torch.randn(6, 4), torch.randn(9, 4)), None, None),
    "a small table": (lambda: Placed(1), lambda: (torch.randn(6, 200, 8),), 2, 1),
    "a large table": (lambda: Placed(100), lambda: (torch.randn(6, 200, 8),), 2, 1),
    "one size": (lambda: nn.Sequential(nn.Flatten(0), nn.Linear(24, 3)), lambda: (torch.randn(6, 4),), None, None),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_are_left_out_where_they_are_samples(case) -> None:
    torch.manual_seed(0)
    model, inputs, counted, timed = ROWS[case]
    model, inputs = model().eval(), inputs()
    before = [value.clone() for value in inputs]
    assert len(alike_rows(model, inputs, 2)[0]) == (counted or len(inputs[0]))
    assert len(timed_rows(model, inputs)[0]) == (timed or len(inputs[0]))
    assert all(torch.equal(value, old) for value, old in zip(inputs, before, strict=True))


def test_pairs_of_rows_stay_together() -> None:
    assert len(alike_rows(Pairs().eval(), (torch.randn(6, 4),), 2)[0]) == 2


def test_generators_stay_where_a_model_draws_from_them() -> None:
    class Draws(nn.Linear):
        def forward(self, x):
            return super().forward(x) if random.random() < 0.5 else super().forward(x + float(np.random.rand()))  # noqa: NPY002

    model = Draws(4, 3).eval()
    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state()  # noqa: NPY002
    assert len(timed_rows(model, (torch.ones(6, 4),))[0]) == 1
    after = random.getstate(), np.random.get_state()[2], torch.get_rng_state()  # noqa: NPY002
    assert after[:2] == before[:2]
    assert torch.equal(after[2], before[2])


def test_rows_are_where_they_are_said_to_be() -> None:
    model, x = Steps(batch_first=False).eval(), torch.randn(6, 7, 4)
    assert alike_rows(model, (x,), 2, (1,))[0].shape == (6, 2, 4)
    assert timed_rows(model, (x,), (1,))[0].shape == (6, 1, 4)
