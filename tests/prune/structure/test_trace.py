"""Tracing: the model runs once, in eval mode and where needed in train mode, and is left as it was."""

from __future__ import annotations

import copy

import networks
import pytest
import special_networks as special
import torch
from networks import image
from pruned import assert_untouched, cut, planned, state
from torch import nn

from compresskit import keep
from compresskit.base.errors import ModelError
from compresskit.prune import apply_, plan_channels


def test_heads_that_only_training_runs_are_cut_too() -> None:
    _, plan, pruned = cut(special.Auxiliary)
    one, two = pruned.train()(torch.randn(4, 3, 8, 8))
    (one.sum() + two.sum()).backward()
    assert pruned.side[0][0].weight.grad is not None
    assert plan.locked["an output of the model"] == 20


def test_a_submodule_is_traced_where_the_model_cannot_be_captured() -> None:
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = networks.Residual()

        def forward(self, x):
            y = self.net(x * 2)
            return y if float(y.detach().sum()) > 0 else -y  # cannot be captured, only recorded

    model = Outer().eval()
    assert all(name.startswith("net.") for name in planned(model).remove)
    plan = planned(model, inside="net")
    assert all(name.startswith("net.") for name in plan.remove)
    apply_(model, plan)(*image(2))


def test_planning_leaves_the_model_and_the_random_state_as_they_were() -> None:
    """Also the random state, running statistics, and modules that were in train mode."""
    model = special.Auxiliary().train()
    before, seed = state(model), torch.get_rng_state()
    plan_channels(model, special.example(special.Auxiliary), budget=keep(macs=0.6), round_to=1)
    assert_untouched(model, before)
    torch.set_rng_state(seed)
    expected = torch.rand(3)
    torch.set_rng_state(seed)
    plan_channels(copy.deepcopy(model), (torch.zeros(2, 3, 8, 8),), budget=keep(macs=0.6), round_to=1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(2, 5, 16, 16), r"Chain does not run on the example \(inputs of shape \[\(2, 5, 16, 16\)\]\): RuntimeError"),
        (torch.randint(0, 255, (2, 3, 16, 16), dtype=torch.uint8), r"and torch\.uint8 values; use \.float\(\)"),
        (torch.randn(2, 3, 16, 16).half(), r"and torch\.float16 values; use \.float\(\)"),
        ("an image", r"Chain does not run on the example"),
    ],
    ids=["shape", "integers", "half", "text"],
)
def test_examples_that_do_not_run_are_refused(x, message) -> None:
    model = networks.build(networks.Chain).train()
    before = state(model)
    with pytest.raises(ModelError, match=message):
        plan_channels(model, (x,), budget=keep(macs=0.5))
    assert_untouched(model, before)
