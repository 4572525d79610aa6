"""Param groups that are added while training, and hooks that change masters after an update."""

from __future__ import annotations

import functools

import pytest
import torch
from mixed_runs import HAS_COMPILER, USER_WARNINGS
from torch import nn

from compresskit.base.errors import SettingError
from compresskit.mixed import (
    FP32,
    KAHAN_BF16,
    MASTER_BF16,
    MASTER_FP16,
    SPLIT_BF16,
    SR_BF16,
    LossScaler,
    prepare,
)

pytestmark = [
    USER_WARNINGS,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch.compile's own machinery
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FULL = [FP32, MASTER_BF16, MASTER_FP16, SPLIT_BF16, KAHAN_BF16, SR_BF16]


def together(*compiled):
    """Policies with layouts and backends that go with them; the compiled backend for one of them, as it takes seconds."""
    cases = [(policy, {}) for policy in FULL] + [(policy, {"flat": True}) for policy in FULL if policy.bf16_format is None]
    cases += [(policy, {"backend": "compiled"}) for policy in compiled if HAS_COMPILER]
    return [pytest.param(policy, settings, id=f"{policy.name} {settings}") for policy, settings in cases]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def go(run, steps):
    for i in steps:
        run.backward(run(torch.randn(8, 4, generator=torch.Generator().manual_seed(i))).square().mean())
        run.step()


def start(policy, model, parameters, **settings):
    scaler = functools.partial(LossScaler, 64.0) if policy.loss_scale else None
    return prepare(model, torch.optim.AdamW(parameters, lr=0.05), policy, scaler=scaler, **settings)


def plain(steps):
    model = net()
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.05)
    for i in steps:
        if i == 3:
            model.zero_grad()
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(("policy", "settings"), together(SPLIT_BF16))
def test_a_group_added_later_trains_like_one_that_was_there(policy, settings) -> None:
    """FP32 against a plain loop of torch; the others by their masters, and by a resume."""
    model = net()
    late = start(policy, model, model[2].parameters(), **settings)
    average = late.ema(0.5)
    go(late, range(3))
    late.add_group({"params": list(model[0].parameters()), "lr": 0.05})
    go(late, range(3, 6))
    if policy is FP32 and not settings:
        assert all(torch.equal(a, b) for a, b in zip(late.masters(), plain(range(6)), strict=True))
    assert [len(group["params"]) for group in late.optimizer.param_groups] == ([1, 1] if settings.get("flat") else [2, 2])
    before = net()[0].weight
    assert (late.named_masters()["0.weight"] - before).abs().max() > 0.05
    if policy.master or policy.bf16_format:
        assert {m.dtype for m in late.masters()} == {torch.float32}
        assert model[0].weight.dtype == policy.param_dtype
    assert set(average.values) == set(late.named_masters())
    state = late.state_dict()
    again = start(policy, third := net(), third[2].parameters(), **settings)
    again.ema(0.5)
    again.add_group({"params": list(third[0].parameters())})
    again.load_state_dict(state)
    for run in (late, again):
        go(run, range(6, 8))
    assert all(torch.equal(a, b) for a, b in zip(late.masters(), again.masters(), strict=True))
    late.finish()
    owned = [p for group in late.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in owned} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("policy", [FP32, MASTER_BF16, SPLIT_BF16], ids=lambda p: p.name)
def test_a_new_head_is_cast_and_gets_masters(policy) -> None:
    model = net()
    run = start(policy, model, list(model.parameters()))
    go(run, range(2))
    head = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    start_values = head[0].weight.detach().clone()
    model.append(head)
    run.add_group({"params": head.parameters(), "lr": 0.1})
    assert torch.equal(run.named_masters()["3.0.weight"], start_values)
    assert head[0].weight.dtype == (policy.param_dtype or torch.float32)
    assert head[1].weight.dtype == torch.float32
    go(run, range(2, 4))
    assert not torch.equal(run.named_masters()["3.0.weight"], start_values)
    assert {p.dtype for p in run.finish().parameters()} == {torch.float32}


def test_groups_that_cannot_be_added_are_refused() -> None:
    model = net()
    run = start(MASTER_BF16, model, model[2].parameters())
    with pytest.raises(SettingError, match="the optimizer has 2.weight already; leave it out"):
        run.add_group({"params": [model[2].weight]})
    for params in ([], [nn.Parameter(torch.zeros(2))]):
        with pytest.raises(SettingError, match="with parameters of the prepared model; add a new module to it first"):
            run.add_group({"params": params})
    run.backward(run(torch.ones(2, 4)).sum())
    with pytest.raises(SettingError, match="gradients wait for their step; call it after step"):
        run.add_group({"params": model[0].weight})


@pytest.mark.filterwarnings("error")
def test_parameters_outside_the_optimizer_are_named_in_a_warning() -> None:
    model = net()
    with pytest.warns(
        UserWarning, match=r"does not have 0.weight \(2 parameters in all\) that require gradients: they will not move"
    ):
        prepare(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    model = net()
    model[0].requires_grad_(False)
    prepare(model, torch.optim.SGD(model[2].parameters(), lr=0.1))  # frozen on purpose: nothing to say


@pytest.mark.parametrize(("policy", "settings"), together(KAHAN_BF16))
def test_masks_applied_after_the_update_hold_masters_and_remainders(policy, settings) -> None:
    """Momentum and decay revive a pruned weight where only its half copy is masked."""
    model = net()
    run = start(policy, model, model.parameters(), **settings)
    go(run, range(2))  # momentum first
    mask = torch.rand(8, 4, generator=torch.Generator().manual_seed(0)) > 0.5

    def apply_mask():
        run.named_masters()["0.weight"].mul_(mask)

    run.after_update.append(apply_mask)
    go(run, range(2, 6))
    for values in (
        model[0].weight,
        run.named_masters()["0.weight"],
        *(h.remainder for h in run._weights.halves[:1] if h.remainder is not None),
    ):
        assert not values.detach().float()[~mask].any()
    assert model[0].weight.detach()[mask].float().abs().min() > 0
    assert not run.finish()[0].weight[~mask].any()


def test_masks_on_the_half_weight_alone_do_not_hold() -> None:
    """Masking without the hook."""
    model = net()
    run = start(MASTER_BF16, model, model.parameters())
    go(run, range(2))
    model[0].weight.data[0] = 0
    go(run, range(2, 3))
    assert model[0].weight[0].all()
