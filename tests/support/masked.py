"""Helpers of the tests of masks: a network with every kind of layer, and what a stage that masks must reach and hold."""

from __future__ import annotations

from functools import partial

import networks
import pytest
import torch
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit.prune import masks_of
from compresskit.prune.patterns import NM

ADAM = partial(torch.optim.Adam, lr=3e-3)


class Net(nn.Module):
    """Layers of every kind that has weights, in an order that can be turned round."""

    def __init__(self, turned=False):
        super().__init__()
        torch.manual_seed(1)
        parts = {
            "conv": nn.Conv2d(4, 8, 3), "deep": nn.Conv2d(8, 8, 3, groups=4), "up": nn.ConvTranspose2d(8, 4, 2),
            "linear": nn.Linear(16, 12), "words": nn.Embedding(10, 8), "lstm": nn.LSTM(8, 8, num_layers=2),
            "attention": nn.MultiheadAttention(8, 2), "norm": nn.LayerNorm(8),
        }  # fmt: skip
        for name in reversed(parts) if turned else parts:
            setattr(self, name, parts[name])


def ratio_is_reached(stage) -> None:
    """Assert that a stage removes its budget, and that the masks outlast another training."""
    task = images_task(ck, samples=96)
    model = stage(build(networks.Residual), task)
    masks = masks_of(model)
    assert masks.violations(model) == {}
    if isinstance(stage.allocation, dict):
        assert masks.ratios() == {"inner.0.weight": 0.5, "out.weight": 0.25}
    else:
        wanted = 0.5 if stage.pattern == NM() else stage.budget.removed
        assert masks.ratio == pytest.approx(wanted, abs=2 / masks.total)
    again = ck.Train(epochs=1, optimizer=ADAM)(model, task)
    assert masks.violations(again) == {}
    assert not any(p._backward_hooks for p in model.parameters())
