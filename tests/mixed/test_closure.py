"""Steps with a closure, for optimizers that evaluate the loss themselves."""

from __future__ import annotations

import functools

import pytest
import torch
from mixed_runs import FIXED_SCALE, INF, USER_WARNINGS
from torch import nn

from compresskit.base.errors import SettingError, TrainingError
from compresskit.mixed import (
    FP32,
    MASTER_BF16,
    MASTER_FP16,
    PURE_BF16,
    SPLIT_BF16,
    prepare,
)

pytestmark = USER_WARNINGS


def fitted(policy, make, *, closure):
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    model = nn.Linear(3, 1)
    run = prepare(model, make(model.parameters()), policy)

    def evaluate():
        loss = (run(x) - y).square().mean()
        run.backward(loss)
        return loss

    for _ in range(5):
        if closure:
            run.step(evaluate)
        else:
            evaluate()
            run.step()
    return run.finish().weight.detach()


def test_lbfgs_fits_by_its_closure() -> None:
    make = functools.partial(torch.optim.LBFGS, max_iter=5)
    torch.testing.assert_close(fitted(FP32, make, closure=True), torch.tensor([[1.0, -2.0, 0.5]]), atol=1e-4, rtol=0)
    with pytest.raises(SettingError, match=r"step: LBFGS evaluates the loss itself; give run.step\(closure\)"):
        fitted(FP32, make, closure=False)


@pytest.mark.parametrize("policy", [FP32, MASTER_BF16, FIXED_SCALE, PURE_BF16], ids=lambda p: p.name)
def test_a_closure_makes_the_same_step(policy) -> None:
    make = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    assert torch.equal(*(fitted(policy, make, closure=closure) for closure in (False, True)))


def test_closures_under_dynamic_scales_and_without_separate_weights_are_refused() -> None:
    make = functools.partial(torch.optim.SGD, lr=0.05)
    with pytest.raises(SettingError, match="a dynamic loss scale would change between evaluations"):
        fitted(MASTER_FP16, make, closure=True)
    with pytest.raises(SettingError, match="the optimizer needs separate weights between evaluations"):
        fitted(SPLIT_BF16, make, closure=True)
    model = nn.Linear(1, 1)
    run = prepare(model, make(model.parameters()), FIXED_SCALE)

    def overflowing():
        loss = run(torch.full((1, 1), INF)).sum()
        run.backward(loss)
        return loss

    with pytest.raises(TrainingError, match="a gradient overflowed under the fixed loss scale 8.0"):
        run.step(overflowing)


def test_an_optimizer_with_parameters_outside_its_groups_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(SettingError, match="LBFGS holds weight in its attribute _params, outside its param_groups"):
        prepare(model, torch.optim.LBFGS(model.parameters()), MASTER_BF16)
