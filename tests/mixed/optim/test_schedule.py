"""Schedulers that a run steps."""

from __future__ import annotations

import pytest
import torch
from mixed_runs import FIXED_SCALE, INF, USER_WARNINGS, one_weight
from torch import nn

from compresskit.base.errors import SettingError
from compresskit.mixed import (
    FP32,
    prepare,
)

pytestmark = USER_WARNINGS


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("on", ["attempt", "success"])
def test_schedules_advance_at_attempts_or_at_successes(fused, on) -> None:
    """One halving a step; the skip is the third. Fused, "success" holds back one step later."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    run = prepare(model, optimizer, FIXED_SCALE)
    scheduler = run.schedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), on=on)
    rates = []
    for factor in (1.0, 1.0, INF, 1.0, 1.0):
        run.backward((run(torch.ones(1, 1)) * factor).sum())
        run.step()
        rates.append(scheduler.get_last_lr()[0])
    wanted = {
        ("attempt", False): [0.5, 0.25, 0.125, 0.0625, 0.03125],
        ("attempt", True): [0.5, 0.25, 0.125, 0.0625, 0.03125],
        ("success", False): [0.5, 0.25, 0.25, 0.125, 0.0625],
        ("success", True): [0.5, 0.25, 0.125, 0.125, 0.0625],
    }
    assert rates == wanted[on, fused]


@pytest.mark.filterwarnings("error")
@pytest.mark.filterwarnings("ignore:fp16 on a CPU:UserWarning")
def test_a_schedule_after_a_skipped_first_step_does_not_warn() -> None:
    _, run = one_weight(FIXED_SCALE)
    run.schedule(torch.optim.lr_scheduler.StepLR(run.optimizer, 1))
    run.backward(run(torch.full((1, 1), INF)).sum())
    run.step()
    assert run.stats()["skipped"] == 1
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)  # it advanced all the same


def test_what_is_no_scheduler_is_refused() -> None:
    _, run = one_weight(FP32)
    with pytest.raises(SettingError, match="on must be 'attempt' or 'success', got 'skip'"):
        run.schedule(torch.optim.lr_scheduler.StepLR(run.optimizer, 1), on="skip")
    with pytest.raises(SettingError, match=r"wanted a torch scheduler, got function without step\(\)"):
        run.schedule(lambda: 0)
