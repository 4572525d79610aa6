"""Exponential moving averages of the masters."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from mixed_runs import FIXED_SCALE, INF, USER_WARNINGS
from torch import nn

from compresskit.base.errors import SettingError
from compresskit.mixed import (
    MASTER_BF16,
    MASTER_FP16,
    SPLIT_BF16,
    prepare,
)

pytestmark = USER_WARNINGS


@pytest.mark.parametrize("policy", [MASTER_FP16, MASTER_BF16, SPLIT_BF16], ids=lambda p: p.name)
def test_the_average_is_of_the_masters(policy) -> None:
    """An average of fp16 weights stays where it began: (1 - decay) of a small step is below half a step of fp16."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    policy = replace(policy, loss_scale=8.0) if policy.loss_scale else policy
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), policy)
    average = run.ema(0.999)
    wanted, naive, weight = 1.0, torch.ones((), dtype=torch.float16), 1.0
    for _ in range(500):
        run.backward(-run(torch.ones(1, 1)).sum())
        run.step()
        weight += 1e-4
        wanted += (1 - 0.999) * (weight - wanted)
        naive += (1 - 0.999) * (model.weight.detach().flatten()[0].half() - naive)
    assert average.values["weight"].item() == pytest.approx(wanted, rel=1e-5)
    assert naive == 1.0
    own = copy.deepcopy(model.state_dict())
    with average.applied(model):
        assert model.weight.item() == pytest.approx(wanted, rel=2**-8)
    assert torch.equal(model.weight, own["weight"])


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_does_not_change_the_average(fused) -> None:
    model = nn.Linear(1, 1, bias=False)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=fused), FIXED_SCALE)
    average = run.ema(0.5)
    assert repr(average) == "WeightEMA(decay=0.5, 1 weights)"
    run.backward(run(torch.ones(1, 1)).sum())
    run.step()
    before = average.values["weight"].clone()
    run.backward(run(torch.full((1, 1), INF)).sum())
    run.step()
    assert torch.equal(before, average.values["weight"])
    with pytest.raises(SettingError, match=r"decay must be in \[0, 1\), got 1"):
        run.ema(1)
