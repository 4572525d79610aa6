"""Master weights: what the optimizer owns and updates, and the fp32 model after `finish`."""

from __future__ import annotations

from dataclasses import replace

import oracles
import pytest
import torch
from mixed_runs import FIXED_SCALE, USER_WARNINGS, one_weight
from torch import nn

from compresskit.base.errors import SettingError
from compresskit.mixed import (
    KAHAN_BF16,
    MASTER_BF16,
    MASTER_FP16,
    PURE_BF16,
    PURE_FP16,
    SR_BF16,
    Policy,
    prepare,
)

pytestmark = USER_WARNINGS


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), lr=0.1, **settings)


@pytest.mark.parametrize(("policy", "step"), [(replace(MASTER_FP16, loss_scale=512.0), 5), (MASTER_BF16, 40)])
def test_small_updates_are_kept_by_masters(policy, step) -> None:
    """1 + 1e-4 is 1 in fp16; with masters the half copy moves once the sum is half a step."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), policy)
    moved = 0
    for i in range(1, 60):
        run.backward(-run(torch.ones(1, 1)).sum())
        run.step()
        if not moved and model.weight.item() != 1.0:
            moved = i
    assert moved == step
    run.finish()
    assert model.weight.item() == pytest.approx(1 + 59e-4, rel=1e-4)


@pytest.mark.filterwarnings("ignore:pure has no masters:UserWarning")
def test_small_updates_are_lost_without_masters() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    pure = Policy(name="pure", param_dtype=torch.float16)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), pure)
    for _ in range(59):
        run.backward(-run(torch.ones(1, 1)).sum())
        run.step()
    assert model.weight.item() == 1.0


def test_masters_are_updated_by_the_formula_of_adamw() -> None:
    model = nn.Linear(3, 1, bias=False)
    start = model.weight.detach().clone()
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), MASTER_BF16)
    gradients = [torch.tensor([[1.0, -0.5, 0.25]]) * (i + 1) for i in range(5)]  # exact in bf16
    for g in gradients:
        run.backward((model.weight * g.bfloat16()).sum())
        run.step()
    run.finish()
    torch.testing.assert_close(model.weight.double(), oracles.adamw(start, gradients, lr=1e-2), atol=1e-6, rtol=1e-5)


def test_groups_frozen_and_tied_parameters_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[1].weight
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    groups = [{"params": [model[0].bias], "lr": 0.0}, {"params": [model[1].weight, model[1].bias, model[2].bias]}]
    bias = model[0].bias.detach().clone()
    run = prepare(model, torch.optim.SGD(groups, lr=0.1), MASTER_BF16)
    for _ in range(3):
        run.backward(run(torch.randn(8, 4)).square().sum())
        run.step()
    run.finish()
    assert model[2].weight is model[1].weight
    assert torch.equal(model[0].weight, frozen)
    assert torch.equal(model[0].bias, bias)


def test_masters_keep_the_groups_and_frozen_weights_do_not_move() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    groups = [{"params": list(model[0].parameters()), "lr": 0.5}, {"params": list(model[1].parameters()), "weight_decay": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    run = prepare(model, optimizer, MASTER_BF16)
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(2, 0.5, 0), (2, 0.1, 0.1)]
    before = run.named_masters()["0.weight"].clone()
    for frozen in (True, False):  # unfreezing later needs nothing else
        model[0].weight.requires_grad_(not frozen)
        run.backward(run(torch.randn(4, 2)).square().sum())
        run.step()
        assert torch.equal(before, run.named_masters()["0.weight"]) is frozen


def test_a_missing_gradient_does_not_move_the_master() -> None:
    """Zeros in its place would let weight decay and momentum move it."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    run = prepare(model, sgd(model, weight_decay=0.5), MASTER_BF16)
    before = run.named_masters()["1.weight"].clone()
    run.backward(model[0](torch.ones(1, 2).bfloat16()).sum())
    run.step()
    assert torch.equal(before, run.named_masters()["1.weight"])


def test_masters_are_copied_back_and_gradients_dropped() -> None:
    model = nn.Linear(4, 2)
    run = prepare(model, sgd(model), FIXED_SCALE)
    run.backward(run(torch.randn(3, 4)).sum())
    assert model.weight.grad is not None
    run.step()
    assert all(p.grad is None for p in model.parameters())
    for name, master in run.named_masters().items():
        assert torch.equal(model.get_parameter(name), master.half())


def test_finish_returns_the_masters() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), MASTER_BF16)
    for _ in range(4):
        run.backward(-run(torch.ones(1, 1)).sum())
        run.step()
    assert model.weight.item() == 1.0
    assert run.finish().weight.item() == pytest.approx(1.0004, abs=1e-7)


def test_gradient_dtypes_are_reset_by_finish() -> None:
    model, run = one_weight(MASTER_BF16)
    run.finish()
    model.half()
    model(torch.ones(1, 1).half()).sum().backward()
    assert model.weight.grad.dtype == torch.float16


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def go(run, steps):
    for i in steps:
        run.backward(run(torch.randn(8, 4, generator=torch.Generator().manual_seed(i))).square().mean())
        run.step()


def test_parametrized_weights_get_masters() -> None:
    model = net()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05), MASTER_BF16)
    assert {name for name in run.named_masters() if name.startswith("0.p")} == {
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
    }
    before = run.named_masters()["0.parametrizations.weight.original0"].clone()
    go(run, range(3))
    run.finish()
    assert model[0].weight.dtype == torch.float32
    assert not torch.equal(before, model[0].parametrizations.weight.original0)


@pytest.mark.parametrize("policy", [PURE_BF16, PURE_FP16], ids=lambda policy: policy.name)
def test_an_optimizer_with_a_pair_of_eps_is_prepared(policy) -> None:
    model = nn.Linear(2, 2)
    run = prepare(model, torch.optim.Adafactor(model.parameters()), policy)  # its eps is (None, 0.001)
    run.backward(run(torch.randn(4, 2)).square().mean())
    run.step()
    assert all(bool(p.isfinite().all()) for p in run.finish().parameters())


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_pure_fp16_refuses_an_eps_that_is_zero(make) -> None:
    """The naive way gives nan and inf at the first step: 1e-8 is 0 in fp16."""
    model = nn.Linear(2, 2)
    with pytest.raises(SettingError, match=f"eps=1e-08 of {make.__name__} is 0 in fp16"):
        prepare(model, make(model.parameters(), lr=0.1), PURE_FP16)
    run = prepare(model, make(model.parameters(), lr=0.1, eps=1e-4), PURE_FP16)
    run.backward(run(torch.ones(1, 2)).sum())
    run.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_pure_fp16_takes_fused_adam_and_returns_fp32() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    run = prepare(model, optimizer, PURE_FP16)
    assert model[1].weight.dtype == torch.float32
    run.backward(run(torch.randn(4, 2)).square().sum())
    run.step()
    run.finish()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert {v.dtype for s in optimizer.state.values() for v in s.values()} == {torch.float32}


def test_stochastic_rounding_draws_for_each_weight_of_the_model() -> None:
    """Equal layers with equal gradients must not be rounded alike: the errors would add up."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(2)])
    nn.init.ones_(model[0].weight)
    nn.init.ones_(model[1].weight)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=2**-9), SR_BF16)
    run.backward(sum(layer.weight.float().sum() for layer in model))
    run.step()
    first, second = (layer.weight.detach() for layer in model)
    assert 0.2 < float((first == 1).float().mean()) < 0.9
    assert not torch.equal(first, second)


def test_kahan_starts_with_sixteen_bits_of_each_weight() -> None:
    """Digits of a trained model that bf16 lacks are not lost by `prepare`."""
    torch.manual_seed(0)
    model = nn.Linear(64, 8)
    before = model.weight.detach().clone()
    error = (prepare(model, sgd(model), KAHAN_BF16).finish().weight - before).abs() / before.abs()
    assert error.max() <= 2**-16
    assert before.bfloat16().float().sub(before).div(before).abs().max() > 2**-10


def test_the_state_of_an_optimizer_that_stepped_half_weights_becomes_fp32() -> None:
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].dtype is torch.bfloat16
    run = prepare(model, optimizer, MASTER_BF16)
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {torch.float32}
    run.finish()
    assert optimizer.state[model.weight]["exp_avg"].dtype is torch.float32


def test_a_write_into_one_value_of_a_half_weight_leaves_the_masters_of_the_others() -> None:
    """The digits that bf16 lacks are kept for all values that nobody wrote."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), MASTER_BF16)
    before = run.named_masters()["weight"].clone()
    assert not torch.equal(before, before.bfloat16().float())
    with torch.no_grad():
        model.weight[0, 0] = 3.0
    run.backward(run(torch.ones(1, 8)).sum())
    run.step()
    before[0, 0] = 3.0
    assert torch.equal(run.named_masters()["weight"], before)
