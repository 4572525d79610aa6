"""Runs that are to be compared have the same noise whatever their width, and move nothing."""

from __future__ import annotations

import networks
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compresskit.prune.structure.repeatable import repeatable, state_restored, varied_inputs, vary_constants_

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
