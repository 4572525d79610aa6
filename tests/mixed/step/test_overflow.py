"""Overflows: steps that are skipped, scales of several losses, and the parameters that are named."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from mixed_runs import FIXED_SCALE, INF, USER_WARNINGS, linear_steps, one_weight, two_weights
from torch import nn

from compresskit.base.errors import SettingError
from compresskit.mixed import (
    MASTER_BF16,
    MASTER_FP16,
    LossScaler,
    prepare,
)

pytestmark = USER_WARNINGS


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    model = nn.Linear(2, 2)
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), MASTER_FP16)
    before = copy.deepcopy(run.masters())
    run.backward(run(torch.full((1, 2), 60000.0)).sum())
    run.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.masters(), strict=True))
    assert not run.optimizer.state
    assert run.stats() == {"scale": 2.0**15, "skipped": 1}
    run.backward(run(torch.ones(1, 2)).sum())
    run.step()
    assert run.stats()["skipped"] == 1
    assert not torch.equal(before[0], run.masters()[0])


def test_skips_are_reported_with_fused_optimizers() -> None:
    """accelerate sees whether `optimizer.step` ran, which a fused one always does."""
    _, run = two_weights(FIXED_SCALE, functools.partial(torch.optim.SGD, lr=1.0, fused=True))
    linear_steps(run, [1.0, INF, 1.0])
    assert run.skipped.item() == 1
    assert run.stats()["skipped"] == 1
    _, run = two_weights(MASTER_BF16, functools.partial(torch.optim.SGD, lr=1.0))
    assert run.skipped.item() == 0


@pytest.mark.parametrize("fused", [False, True])
def test_at_the_floor_of_the_scale_stats_name_the_parameters(fused) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    make = functools.partial(LossScaler, 4.0)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), MASTER_FP16, scaler=make)
    for _ in range(4):
        out = model[0](torch.ones(1, 2).half())
        run.backward((model[1](out.detach()) + 0 * out).sum() + (model[1].weight * INF).sum())
        run.step()
    assert run.stats() == {"scale": 1.0, "skipped": 4, "nonfinite": ["1.weight"]}
    follow_clean = run(torch.ones(1, 2)).sum()
    run.backward(follow_clean)
    run.step()
    assert "nonfinite" not in run.stats()


@pytest.mark.parametrize("fused", [False, True])
def test_several_losses_have_a_scale_each(fused) -> None:
    """An overflow of one loss skips the step and backs only its own scale off; gradients add up unscaled."""
    model, run = two_weights(MASTER_FP16, functools.partial(torch.optim.SGD, lr=1.0, fused=fused), losses=("d", "g"),
                      scaler=functools.partial(LossScaler, 8.0, interval=2))  # fmt: skip
    for d, g in ((1.0, 2.0), (0.5, INF), (0.25, 0.5)):
        for name, factor in (("d", d), ("g", g)):
            run.backward((run(torch.ones(1, 2)) * factor).sum(), scaler=name)
        run.step()
    assert run.masters()[0].tolist() == [[-3.75, -3.75]]
    # An overflow anywhere skips for both; "d" itself was clean three times and grew at its second.
    assert {k: v for k, v in run.stats().items() if "scale" in k} == {"scale.d": 16.0, "scale.g": 4.0}
    assert run.skipped == 1
    with pytest.raises(SettingError, match="backward\\(scaler='x'\\): the declared losses are: d, g"):
        run.backward(run(torch.ones(1, 2)).sum(), scaler="x")
    with pytest.raises(SettingError, match="backward\\(scaler=None\\): the declared losses are: d, g"):
        run.backward(run(torch.ones(1, 2)).sum())


def test_two_runs_do_not_see_the_overflow_of_each_other() -> None:
    """One run each; a scaler each; neither sees the other's overflow."""
    runs = [one_weight(MASTER_FP16, scaler=functools.partial(LossScaler, 8.0))[1] for _ in range(2)]
    for run, value in zip(runs, (1.0, INF), strict=True):
        run.backward(run(torch.full((1, 1), value)).sum())
        run.step()
    assert [run.stats()["skipped"] for run in runs] == [0, 1]


def test_one_loss_that_overflowed_skips_the_step_of_both() -> None:
    """Also where the user mends the gradients of `unscaled`, in which it can no longer be seen."""
    model = nn.Linear(2, 1, bias=False)
    policy = replace(MASTER_FP16, loss_scale=512.0)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy, losses=("a", "b"))
    before = run.named_masters()["weight"].clone()
    run.backward(run(torch.ones(1, 2)).sum() * 60000.0, scaler="a")
    run.backward(run(torch.ones(1, 2)).sum(), scaler="b")
    for grad in run.unscaled().values():
        grad.nan_to_num_(1.0, 1.0, 1.0)
    run.step()
    assert torch.equal(run.named_masters()["weight"], before)
