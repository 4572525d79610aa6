"""What a user can get wrong: one clear error each, and the model as it was."""

from __future__ import annotations

import copy

import networks
import pytest
import special_networks as special
import torch
from torch import nn

from compresskit import keep
from compresskit.base.errors import ModelError, SettingError
from compresskit.prune import apply_, plan_channels


def state(model):
    return {k: v.clone() for k, v in model.state_dict().items()}, [m.training for m in model.modules()]


def assert_untouched(model, before):
    tensors, modes = before
    assert all(torch.equal(v, tensors[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


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
def test_examples_that_do_not_run(x, message) -> None:
    model = networks.build(networks.Chain).train()
    before = state(model)
    with pytest.raises(ModelError, match=message):
        plan_channels(model, (x,), budget=keep(macs=0.5))
    assert_untouched(model, before)


def test_half_models_are_refused() -> None:
    model = networks.build(networks.Chain).half()
    with pytest.raises(ModelError, match=r"a\.0\.weight is torch\.float16; prune the fp32 model"):
        plan_channels(model, (torch.randn(2, 3, 16, 16).half(),), budget=keep(macs=0.5))


def test_a_budget_below_what_the_locks_allow() -> None:
    model = special.Split().eval()
    before = state(model)
    with pytest.raises(ModelError, match=r"only \d+\.\d% can be reached; locked: .*32 channels: cut at fixed places by split"):
        plan_channels(model, special.example(special.Split), budget=keep(macs=0.02))
    assert_untouched(model, before)


def test_an_unknown_name_to_ignore() -> None:
    with pytest.raises(SettingError, match="no layer with channels stands in a module of that name"):
        plan_channels(networks.build(networks.Chain), networks.image(2), budget=keep(macs=0.5), ignore=("backbone",))


def test_a_plan_of_another_architecture() -> None:
    plan = plan_channels(
        special.StoredAttention().eval(), special.example(special.StoredAttention), budget=keep(macs=0.6), round_to=1
    )
    other = special.StoredAttention().eval()
    other.head_dim = 4
    before = state(other)
    with pytest.raises(
        ModelError, match=r"head_dim: the plan was made for 8, this StoredAttention has 4; replay a plan on a fresh"
    ):
        apply_(other, plan)
    assert_untouched(other, before)
    with pytest.raises(ModelError, match="no module|no parameter"):
        apply_(networks.build(networks.Chain), plan)


def test_a_plan_cannot_be_applied_twice() -> None:
    model = networks.build(networks.Chain)
    plan = plan_channels(model, networks.image(2), budget=keep(macs=0.5))
    apply_(model, plan)
    before = state(model)
    with pytest.raises(ModelError, match="the plan was made for shape"):
        apply_(model, plan)
    assert_untouched(model, before)


def test_planning_leaves_everything_as_it_was() -> None:
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


class Silent(nn.Module):
    """Fails in a way of its own once it is narrower."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = networks.conv(3, 16), networks.conv(16, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = self.b(self.a(x))
        if x.shape[1] != 16:
            raise ValueError("made for 16 channels")
        return self.head(x.mean((2, 3)))


def test_code_that_refuses_narrow_layers_keeps_them() -> None:
    plan = plan_channels(networks.build(Silent), networks.image(2), budget=keep(macs=0.8), round_to=1)
    assert any("made for 16 channels" in reason for reason in plan.locked)
    assert "b.0.weight" not in plan.remove or 0 not in plan.remove["b.0.weight"]
