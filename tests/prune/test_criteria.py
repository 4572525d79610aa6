"""Every criterion: the contract, and the formula where there is one."""

from __future__ import annotations

from functools import partial

import networks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import build, images_task

import compresskit as ck
from compresskit.errors import SettingError
from compresskit.prune import CRITERIA, Prune, Slices, l2, plan_channels, taylor


def slices(channels=6, values=10, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight, grad = torch.randn(2, channels, values, generator=g)
    return Slices(weight=weight, grad=grad, reads=torch.arange(values) >= 5)


@pytest.mark.parametrize("criterion", CRITERIA, ids=lambda c: c.__name__)
@given(seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_contract(criterion, seed) -> None:
    s = slices(seed=seed)
    scores = criterion(s)
    assert scores.shape == (6,)
    assert torch.isfinite(scores).all()
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    moved = Slices(weight=s.weight[order], grad=s.grad[order], reads=s.reads)
    torch.testing.assert_close(criterion(moved), scores[order])
    dead = Slices(weight=s.weight * (torch.arange(6) != 2)[:, None], grad=s.grad, reads=s.reads)
    assert criterion(dead).argmin() == 2


def test_l2_is_the_norm() -> None:
    s = slices()
    for row, score in zip(s.weight.tolist(), l2(s).tolist(), strict=True):
        assert score == pytest.approx(sum(v * v for v in row) ** 0.5)


def test_taylor_predicts_the_change_of_the_loss() -> None:
    """For a small channel the score is the squared change of the loss that removing it makes."""
    model = build(networks.Chain).double()
    x = networks.image(8)[0].double()
    with torch.no_grad():
        model.b[0].weight[:, 4] *= 1e-4  # what reads channel 4
    model(x).square().sum().backward()
    weight = model.b[0].weight
    rows = Slices(
        weight=weight.detach().movedim(1, 0).flatten(1),
        grad=weight.grad.movedim(1, 0).flatten(1),
        reads=torch.ones(32 * 9, dtype=torch.bool),
    )
    with torch.no_grad():
        before = model(x).square().sum()
        weight[:, 4] = 0
        change = model(x).square().sum() - before
    assert taylor(rows)[4].item() == pytest.approx(change.item() ** 2, rel=1e-2)


def test_taylor_without_gradients_says_so() -> None:
    with pytest.raises(SettingError, match="reads gradients"):
        plan_channels(build(networks.Chain), networks.image(2), macs=0.5, criterion=taylor)


@pytest.mark.parametrize("criterion", CRITERIA, ids=lambda c: c.__name__)
def test_stage(criterion) -> None:
    model, task = build(networks.Residual), images_task(ck, samples=128, classes=4)
    adam = partial(torch.optim.Adam, lr=3e-3)
    ck.Train(epochs=15, optimizer=adam)(model, task)
    before = ck.count_macs(model, task.example())
    flags = [p.requires_grad for p in model.parameters()]
    tune = ck.Train(epochs=5, optimizer=adam, objective=ck.imitate())
    pruned = Prune(macs=0.6, criterion=criterion, round_to=4, finetune=tune)(model, task)
    assert ck.count_macs(pruned, task.example()) <= 0.6 * before
    assert ck.evaluate(pruned, task) > 0.8
    assert [p.requires_grad for p in pruned.parameters()] == flags
    assert type(pruned) is networks.Residual


def test_batchnorm_is_reestimated() -> None:
    model, task = build(networks.Chain), images_task(ck)
    norm = model.a[1]
    norm.running_mean += 5
    count = ck.prune.reestimate_batchnorm_(model, (batch[:1] for batch in task.train))
    assert count == 2
    assert not model.training
    assert norm.momentum == 0.1
    with torch.no_grad():
        seen = torch.cat([model.a[0](x) for x, _ in task.train])
    torch.testing.assert_close(norm.running_mean, seen.mean((0, 2, 3)), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(norm.running_var, seen.var((0, 2, 3)), atol=0.1, rtol=0.1)


def test_settings_matter() -> None:
    """Every knob of the planner changes the plan."""
    model = build(networks.Concat)
    base = dict(macs=0.65, round_to=4)
    plan = plan_channels(model, networks.image(2), **base)
    for change in ({"macs": 0.8}, {"round_to": 1}, {"ignore": ("a",)}, {"criterion": lambda s: -l2(s) + 100}):
        assert plan_channels(model, networks.image(2), **(base | change)).remove != plan.remove


@pytest.mark.parametrize("settings", [{"macs": 0}, {"macs": 2}, {"macs": 0.5, "round_to": 0}, {"macs": 0.5, "samples": 0}])
def test_bad_settings(settings) -> None:
    with pytest.raises(SettingError, match=r"Prune\(.*wanted.*got"):
        Prune(**settings)
