"""Pruned models for tests: a network, its plan and the pruned copy, and comparisons of them."""

from __future__ import annotations

import copy

import oracles
import special_networks as special
import torch
from networks import image, trained_like
from torch import nn

from compresskit import keep
from compresskit.prune import apply_, plan_channels


def planned(model, macs=0.6, **settings):
    """A plan for one of `networks`, which take images."""
    return plan_channels(model, image(2), budget=keep(macs=macs), round_to=settings.pop("round_to", 4), **settings)


def built(kind):
    """One of `special_networks` in eval mode, with BatchNorm statistics that are not trivial."""
    model = kind()
    return (
        trained_like(model, special.example(kind))
        if any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
        else model.eval()
    )


def cut(kind, macs=0.55, **settings):
    """A model, its plan, and the pruned copy."""
    model = built(kind)
    plan = plan_channels(model, special.example(kind), budget=keep(macs=macs), round_to=1, **settings)
    return model, plan, apply_(copy.deepcopy(model), plan)


def assert_equals_zeroed(model, plan, inputs):
    """The pruned model gives in float64 what the model gives with the removed values set to zero."""
    wanted = oracles.zeroed_forward(model, inputs, plan.remove)
    pruned = apply_(copy.deepcopy(model).double().eval(), plan)
    with torch.no_grad():
        got = pruned(*(v.double() if v.is_floating_point() else v for v in inputs))
    for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (wanted, got)), strict=True):
        assert (a - b).abs().max() < 1e-9 * max(1, a.abs().max())
        assert a.std() > 1e-3, "an output that is nearly constant proves nothing"


def state(model):
    """Tensors and modes of a model, for `assert_untouched`."""
    return {k: v.clone() for k, v in model.state_dict().items()}, [m.training for m in model.modules()]


def assert_untouched(model, before):
    """The model is as it was when `before = state(model)` was taken, and has no gradients."""
    tensors, modes = before
    assert all(torch.equal(v, tensors[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
