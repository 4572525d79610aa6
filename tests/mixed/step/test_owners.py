"""Several optimizers on one model, a run each: a step ends the gradients of its own parameters."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from mixed_runs import FP16_ON_CPU
from torch import nn

from compresskit.base.errors import TrainingError
from compresskit.mixed import AMP_BF16, AMP_FP16, FP32, MASTER_BF16, prepare

POLICIES = pytest.mark.parametrize("policy", [FP32, AMP_BF16], ids=lambda policy: policy.name)
pytestmark = [FP16_ON_CPU, pytest.mark.filterwarnings("ignore:prepare. the optimizer does not have:UserWarning")]


def two_runs(policy, *, own_policy=None):
    """A model of two layers, and a run for each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    first = prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1), policy)
    return model, first, prepare(model, torch.optim.Adam(model[1].parameters(), lr=0.1), own_policy or policy)


def loss_of(run, factor=1.0):
    return (run(torch.linspace(-1, 1, 12).reshape(3, 4)) * factor).square().mean()


@POLICIES
def test_a_step_leaves_the_gradients_of_another_optimizer(policy) -> None:
    model, first, second = two_runs(policy)
    twin = copy.deepcopy(model)
    groups = torch.optim.SGD(twin[0].parameters(), lr=0.1), torch.optim.Adam(twin[1].parameters(), lr=0.1)
    for _ in range(4):
        first.backward(loss_of(first))
        first.step()
        assert all(p.grad is None for p in model[0].parameters())
        second.step()
        assert all(p.grad is None for p in model.parameters())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=policy is AMP_BF16):
            out = twin(torch.linspace(-1, 1, 12).reshape(3, 4))
        out.float().square().mean().backward()
        for optimizer in groups:
            optimizer.step()
            optimizer.zero_grad()
    for got, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(got, wanted)


@POLICIES
def test_runs_that_take_turns_do_not_get_the_loss_of_the_other(policy) -> None:
    model, first, second = two_runs(policy)
    only = copy.deepcopy(model)
    for layer in model[1].parameters():
        assert layer.grad is None
    first.backward(loss_of(first, 100.0))
    first.step()
    only[0].load_state_dict(model[0].state_dict())
    alone = prepare(only, torch.optim.Adam(only[1].parameters(), lr=0.1), policy)
    for run in (second, alone):
        run.backward(loss_of(run))
    for got, wanted in zip(model[1].parameters(), only[1].parameters(), strict=True):
        assert torch.equal(got.grad, wanted.grad)


def test_gradients_of_both_losses_are_summed_where_both_wait_for_their_step() -> None:
    model, first, second = two_runs(FP32)
    twin = copy.deepcopy(model)
    first.backward(loss_of(first))
    second.backward(loss_of(second, 2.0))
    first.step()
    (loss_of(twin) + loss_of(twin, 2.0)).backward()
    torch.testing.assert_close(model[1].weight.grad, twin[1].weight.grad)
    first.backward(loss_of(first))  # the second run's own pass waits on
    assert not torch.equal(model[1].weight.grad, twin[1].weight.grad)
    second.zero_grad()
    assert all(p.grad is None for p in model[1].parameters())
    assert model[0].weight.grad is not None


def test_gradients_that_no_optimizer_has_are_dropped_and_a_state_may_be_taken() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    first = prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1), FP32)
    second = prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1), FP32)
    first.backward(loss_of(first))
    first.step()
    assert model[2].weight.grad is None
    assert model[1].weight.grad is not None
    first.state_dict()
    second.step()
    assert second.unscaled() == {}
    second.finish()
    first.backward(loss_of(first))
    first.step()
    assert all(p.grad is None for p in model.parameters())  # none is another run's any more


def test_a_submodule_may_have_a_run_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    first = prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1), FP32)
    second = prepare(model[1], torch.optim.SGD(model[1].parameters(), lr=0.1), FP32)
    before = model[1].weight.detach().clone()
    first.backward(loss_of(first))
    first.step()
    second.step()
    assert not torch.equal(before, model[1].weight)


def test_an_optimizer_that_is_prepared_again_and_a_run_that_is_gone_own_nothing() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = prepare(model, optimizer, FP32), prepare(model, optimizer, FP32)
    assert not first._weights.gradients.others
    assert not second._weights.gradients.others
    del first, second, optimizer
    gc.collect()
    head = prepare(model, torch.optim.SGD([model.bias], lr=0.1), FP32)
    head.backward(loss_of(head))
    head.step()
    assert model.weight.grad is None


@pytest.mark.parametrize(("policy", "own"), [(AMP_FP16, AMP_FP16), (AMP_FP16, FP32), (FP32, AMP_FP16)])
def test_gradients_in_the_loss_scale_of_another_run_are_refused(policy, own) -> None:
    _, first, second = two_runs(policy, own_policy=own)
    first.backward(loss_of(first))
    first.step()
    if policy is FP32:
        second.backward(loss_of(second))  # the other's were dropped first
        second.step()
        first.backward(loss_of(first))
        second.backward(loss_of(second))
    with pytest.raises(TrainingError, match="gave 1.weight gradients in another loss scale.*both as groups, or.*AMP_BF16"):
        second.step()


def test_runs_with_loss_scales_may_take_turns() -> None:
    model, first, second = two_runs(AMP_FP16)
    before = copy.deepcopy(model)
    for _ in range(3):
        for run in (first, second):
            run.backward(loss_of(run))
            run.step()
    assert not torch.equal(before[0].weight, model[0].weight)
    assert not torch.equal(before[1].weight, model[1].weight)
    assert not first.skipped
    assert not second.skipped


def test_parameters_of_another_run_are_not_said_to_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    kept = [prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1), FP32)]
    with pytest.warns(UserWarning, match=r"does not have 2.weight \(2 parameters in all\).*or prepare their own optimizer too"):
        kept.append(prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1), FP32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept.append(prepare(model, torch.optim.SGD(model[2].parameters(), lr=0.1), FP32))
    for run in kept:
        run.finish()
    alone = nn.Linear(2, 2)
    run = prepare(alone, torch.optim.SGD(alone.parameters(), lr=0.1), MASTER_BF16)
    assert run.finish() is alone
