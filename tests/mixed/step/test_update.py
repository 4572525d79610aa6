"""The update: clipping and unscaling as one factor, and fused optimizers that skip on the device."""

from __future__ import annotations

import functools
from dataclasses import replace

import oracles
import pytest
import torch
from mixed_runs import FIXED_SCALE, FP16_ON_CPU, INF, linear_steps, two_weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from compresskit.mixed import (
    AMP_FP16,
    FP32,
    MASTER_FP16,
    prepare,
)
from compresskit.mixed.step.scaler import total_norm
from compresskit.mixed.step.update import UnscaleAndClip

pytestmark = FP16_ON_CPU
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
}


class HostReads(TorchDispatchMode):
    """Counts reads of the device by the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default or func is torch.ops.aten.nonzero.default
        return func(*args, **(kwargs or {}))


def test_clipping_is_on_unscaled_gradients() -> None:
    for policy in (FP32, replace(MASTER_FP16, loss_scale=512.0)):
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), policy, clip=0.5)
        run.backward(run(torch.tensor([[3.0, 4.0, 0.0, 0.0]])).sum())
        run.step()
        assert run.stats()["grad_norm"] == pytest.approx(5.0)
        run.finish()
        assert model.weight.norm().item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_unscaling_and_clipping_are_one_factor(fused) -> None:
    gradients = []
    for clip in (None, 0.5, 1e6):
        model = nn.Linear(4, 3, bias=False)
        nn.init.zeros_(model.weight)
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=fused), FIXED_SCALE, clip=clip)
        run.backward(run(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).sum())
        run.step()
        gradients.append(-run.finish().weight.detach())
        if clip is not None:
            assert run.stats()["grad_norm"] == pytest.approx(gradients[0].norm().item(), rel=1e-6)
    torch.testing.assert_close(gradients[1], gradients[0] * 0.5 / gradients[0].norm(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[2], gradients[0])


def test_the_norm_shows_an_overflow() -> None:
    for fused in (False, True):
        for bad in (INF, float("nan")):
            _, run = two_weights(FIXED_SCALE, functools.partial(torch.optim.SGD, lr=1.0, fused=fused), clip=1.0)
            linear_steps(run, [bad])
            assert run.skipped == 1
            assert run.masters()[0].tolist() == [[0, 0]]


def test_norms_of_half_gradients_are_summed_in_fp32() -> None:
    grads = [torch.full((200_000,), 60000.0).half()]
    assert torch._foreach_norm(grads)[0] == INF  # the naive way
    assert total_norm(grads, torch.device("cpu")).item() == pytest.approx(60000 * 200_000**0.5, rel=1e-3)


def test_norms_of_float64_gradients_are_computed_in_float64() -> None:
    fine = torch.tensor([1 + 2.0**-40, 0.0], dtype=torch.float64)
    got = total_norm([fine], torch.device("cpu"))
    assert got.dtype == torch.float64
    assert got.item() == fine[0].item()
    half, plain, turned = torch.full((3,), 2.0).half(), torch.full((2,), 3.0), torch.tensor([3 + 4j], dtype=torch.cdouble)
    mixed = total_norm([half, fine, plain, turned], torch.device("cpu"))
    assert mixed.item() == pytest.approx((12 + fine[0].item() ** 2 + 18 + 25) ** 0.5, rel=1e-6)  # the others' in fp32
    assert total_norm([half, plain], torch.device("cpu")).dtype == torch.float32


@pytest.mark.parametrize("fused", [False, True])
def test_float64_models_are_clipped_as_torch_clips_them(fused) -> None:
    models = [nn.Linear(3, 2).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours, theirs = (torch.optim.Adam(model.parameters(), lr=0.1, fused=fused) for model in models)
    run = prepare(models[0], ours, FP32, clip=0.5)
    x = torch.linspace(-3, 3, 12, dtype=torch.float64).reshape(4, 3)
    for _ in range(3):
        loss = run(x).square().sum()
        (loss.detach() * 0 + models[1](x).square().sum()).backward()
        run.backward(loss)
        norm = nn.utils.clip_grad_norm_(models[1].parameters(), 0.5)
        run.step()
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(run.grad_norm, norm, rtol=1e-6, atol=0)
    for got, wanted in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_fused_optimizers_need_no_host_sync(name, clip) -> None:
    def syncs(fused):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        run = prepare(model, OPTIMIZERS[name](model.parameters(), fused=fused), MASTER_FP16, clip=clip)
        run.backward(run(torch.randn(8, 4)).square().mean())
        with HostReads() as counter:
            run.step()
        return counter.count

    assert syncs(fused=True) == 0
    # Unfused reads the flag, once; torch's own unfused Adagrad and AdamW read their step counters besides.
    assert syncs(fused=False) >= 1


@pytest.mark.parametrize(
    "policy", [replace(MASTER_FP16, loss_scale=8.0), replace(AMP_FP16, loss_scale=8.0)], ids=lambda p: p.name
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_and_unfused_agree_through_overflows(name, policy) -> None:
    factors = [1.0, INF, -0.5, INF, INF, 0.25]
    weights = []
    for fused in (False, True):
        model, run = two_weights(policy, functools.partial(OPTIMIZERS[name], fused=fused))
        linear_steps(run, factors)
        assert run.stats()["skipped"] == 3
        weights.append(run.finish().weight.detach())
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-6)


def test_fused_adam_counts_real_steps_only() -> None:
    model, run = two_weights(FIXED_SCALE, functools.partial(torch.optim.AdamW, lr=0.1, fused=True))
    linear_steps(run, [INF, 1.0, INF, 1.0])
    assert [state["step"].item() for state in run.optimizer.state.values()] == [2]


def fill_free_memory():
    """Fill the allocator's free blocks with values that a new buffer must not have."""
    junk = [torch.full((2,), 3e38) for _ in range(2000)]
    del junk


def test_fused_sgd_survives_a_skipped_first_step() -> None:
    """torch 2.15 allocates the momentum without values and returns early; the next step then uses garbage."""
    factors = [INF, INF, 1.0, -0.5]
    model, run = two_weights(FIXED_SCALE, functools.partial(OPTIMIZERS["sgd"], fused=True))
    fill_free_memory()
    linear_steps(run, factors)
    gradients = [None if f == INF else torch.full((1, 2), f) for f in factors]
    wanted = oracles.sgd(torch.zeros(1, 2), gradients, lr=0.1, momentum=0.9)
    torch.testing.assert_close(run.finish().weight.double(), wanted, atol=1e-6, rtol=1e-6)


def test_fused_sgd_has_zero_buffers_before_a_step_that_may_be_skipped() -> None:
    """Garbage may happen to be zero, so the buffer after the skip is checked as well."""
    model, run = two_weights(FIXED_SCALE, functools.partial(OPTIMIZERS["sgd"], fused=True))
    empty_like, filled = torch.empty_like, []

    def garbage(*args, **kwargs):
        filled.append(1)
        return empty_like(*args, **kwargs).fill_(3e38)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", garbage)
        linear_steps(run, [INF])
    assert not filled
    assert all(not state["momentum_buffer"].any() for state in run.optimizer.state.values())


def test_fused_sgd_with_dampening_takes_the_whole_first_gradient() -> None:
    """With dampening a zero buffer would be wrong: (1 - dampening) * gradient; it takes the unfused path."""
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    weights = []
    for fused in (False, True):
        _, run = two_weights(FIXED_SCALE, functools.partial(make, fused=fused))
        linear_steps(run, [INF, 1.0, 1.0])
        weights.append(run.finish().weight.detach())
    torch.testing.assert_close(*weights)


def test_an_overflow_skips_the_step_though_the_user_mends_the_gradients() -> None:
    """As `unscaled` says; also where the norm is clipped, which is finite then."""
    model = nn.Linear(2, 1, bias=False)
    policy = replace(MASTER_FP16, loss_scale=512.0)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy, clip=1.0)
    before = run.named_masters()["weight"].clone()
    run.backward(run(torch.ones(1, 2)).sum() * 60000.0)
    grads = run.unscaled()
    assert not grads["weight"].isfinite().all()
    for grad in grads.values():
        grad.nan_to_num_(1.0, 1.0, 1.0)
    run.step()
    assert torch.equal(run.named_masters()["weight"], before)
    assert run.stats()["skipped"] == 1


def test_float64_gradients_are_clipped_in_float64() -> None:
    torch.manual_seed(0)
    grad = torch.randn(100, dtype=torch.float64) * 10
    parameter = nn.Parameter(torch.zeros(100, dtype=torch.float64))
    parameter.grad = grad.clone()
    nn.utils.clip_grad_norm_([parameter], 1.0)
    UnscaleAndClip([grad], None, None, 1.0, [grad]).apply_()
    torch.testing.assert_close(grad, parameter.grad, rtol=1e-14, atol=0)
