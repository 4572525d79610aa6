"""The traps of loss scaling; each test fails on the naive way, which most of them run beside ours."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import oracles
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from compresskit.base.errors import CheckpointError, ModelError, SettingError
from compresskit.mixed import AMP_FP16, MASTER_BF16, MASTER_FP16, LossScaler, prepare
from compresskit.mixed.step.scaler import total_norm

pytestmark = pytest.mark.filterwarnings("ignore:fp16 on a CPU:UserWarning")  # what it warns of is meant here
INF = float("inf")
#: Loss scale 8: the default 65536 is beyond fp16 itself, so that a gradient of 1 would overflow.
EIGHT = replace(MASTER_FP16, loss_scale=8.0)
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
}


class Syncs(TorchDispatchMode):
    """Counts reads of the device by the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default or func is torch.ops.aten.nonzero.default
        return func(*args, **(kwargs or {}))


def follow(run, factors):
    """Steps whose gradient on every weight is the factor (inf overflows); the loss is linear, so it is exact in half."""
    for factor in factors:
        run.backward((run(torch.ones(1, 2)) * factor).sum())
        run.step()


def line(policy, make, **settings):
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, prepare(model, make(model.parameters()), policy, **settings)


@pytest.mark.parametrize("hysteresis", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_b9_b10_the_scale_moves_as_a_plain_loop_says(seed, hysteresis) -> None:
    dice = random.Random(seed)
    overflows = [dice.random() < 0.2 for _ in range(500)]
    settings = dict(interval=4, hysteresis=hysteresis, ceiling=2.0**12)
    scaler = LossScaler(2.0**10, **settings)
    seen = []
    for overflow in overflows:
        scaler.found_inf.fill_(overflow)
        scaler.update()
        seen.append(scaler.scale.item())
    assert seen == oracles.loss_scales(overflows, start=2.0**10, **settings)
    assert scaler.skipped == sum(overflows)


def test_n8_the_scale_moves_as_torch_moves_it() -> None:
    dice = random.Random(0)
    scaler = LossScaler(interval=20, floor=2.0**-60, ceiling=2.0**60)
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for _ in range(500):
        found = torch.tensor(float(dice.random() < 0.1))
        scaler.found_inf.copy_(found)
        scaler.update()
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 20)
        assert (scaler.scale, scaler.clean) == (scale, tracker)


def test_n5_n6_n7_the_seeds_scales_can_be_set() -> None:
    static = LossScaler.fixed(512.0)  # S0, S2
    static.found_inf.fill_(1)
    static.update()
    assert (static.scale, static.skipped) == (512.0, 1)
    for settings in (dict(scale=2.0**24, interval=500), dict(scale=2.0**16), dict(scale=2.0**32, interval=1000, ceiling=2.0**32)):
        LossScaler(**settings)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_fused_optimizers_need_no_host_sync(name, clip) -> None:
    def syncs(fused):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        run = prepare(model, OPTIMIZERS[name](model.parameters(), fused=fused), MASTER_FP16, clip=clip)
        run.backward(run(torch.randn(8, 4)).square().mean())
        with Syncs() as counter:
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
        model, run = line(policy, functools.partial(OPTIMIZERS[name], fused=fused))
        follow(run, factors)
        assert run.stats()["skipped"] == 3
        weights.append(run.finish().weight.detach())
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-6)


def test_fused_adam_counts_real_steps_only() -> None:
    model, run = line(EIGHT, functools.partial(torch.optim.AdamW, lr=0.1, fused=True))
    follow(run, [INF, 1.0, INF, 1.0])
    assert [state["step"].item() for state in run.optimizer.state.values()] == [2]


def dirty():
    """Fill the allocator's free blocks with what a fresh buffer must not show."""
    junk = [torch.full((2,), 3e38) for _ in range(2000)]
    del junk


def test_fused_sgd_survives_a_skipped_first_step() -> None:
    """torch 2.15 allocates the momentum without values and returns early; the next step then uses garbage."""
    factors = [INF, INF, 1.0, -0.5]
    model, run = line(EIGHT, functools.partial(OPTIMIZERS["sgd"], fused=True))
    dirty()
    follow(run, factors)
    gradients = [None if f == INF else torch.full((1, 2), f) for f in factors]
    wanted = oracles.sgd(torch.zeros(1, 2), gradients, lr=0.1, momentum=0.9)
    torch.testing.assert_close(run.finish().weight.double(), wanted, atol=1e-6, rtol=1e-6)


def test_fused_sgd_has_zero_buffers_before_a_step_that_may_be_skipped() -> None:
    """The same trap without luck: garbage may happen to be zero, so the buffer after the skip is looked at, too."""
    model, run = line(EIGHT, functools.partial(OPTIMIZERS["sgd"], fused=True))
    empty_like, filled = torch.empty_like, []

    def garbage(*args, **kwargs):
        filled.append(1)
        return empty_like(*args, **kwargs).fill_(3e38)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", garbage)
        follow(run, [INF])
    assert not filled
    assert all(not state["momentum_buffer"].any() for state in run.optimizer.state.values())


def test_fused_sgd_with_dampening_takes_the_whole_first_gradient() -> None:
    """With dampening a zero buffer would be wrong: (1 - dampening) * gradient; it goes by the unfused way."""
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    weights = []
    for fused in (False, True):
        _, run = line(EIGHT, functools.partial(make, fused=fused))
        follow(run, [INF, 1.0, 1.0])
        weights.append(run.finish().weight.detach())
    torch.testing.assert_close(*weights)


def test_the_scale_never_reaches_zero() -> None:
    """torch's GradScaler writes inf after 144 skips in a row and nan after 166; ours is usable after 200."""
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for _ in range(200):
        torch._amp_update_scale_(scale, tracker, torch.tensor(1.0), 2.0, 0.5, 2000)
    assert scale == 0
    model, run = line(MASTER_FP16, functools.partial(torch.optim.SGD, lr=0.1))
    follow(run, [INF] * 200 + [1.0])
    assert run.scaler is not None
    assert run.scaler.scale == 1
    assert run.finish().weight.tolist() == [[pytest.approx(-0.1)] * 2]


@pytest.mark.parametrize("fused", [False, True])
def test_at_the_floor_stats_name_the_parameters(fused) -> None:
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


def test_the_growth_step_is_unscaled_by_the_scale_of_its_backward() -> None:
    """DeepSpeed grows first and divides by twice the scale; with lr 1 and gradient 1 every step must move by 1."""
    for fused in (False, True):
        model, run = line(
            MASTER_FP16,
            functools.partial(torch.optim.SGD, lr=1.0, fused=fused),
            scaler=functools.partial(LossScaler, 4.0, interval=1),
        )
        for i in range(1, 5):
            follow(run, [1.0])
            assert run.masters()[0].tolist() == [[-i, -i]]
        assert run.scaler.scale == 64


@pytest.mark.parametrize("fused", [False, True])
def test_b13_unscale_and_clip_are_one_number(fused) -> None:
    gradients = []
    for clip in (None, 0.5, 1e6):
        model = nn.Linear(4, 3, bias=False)
        nn.init.zeros_(model.weight)
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=fused), EIGHT, clip=clip)
        run.backward(run(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).sum())
        run.step()
        gradients.append(-run.finish().weight.detach())
        if clip is not None:
            assert run.stats()["grad_norm"] == pytest.approx(gradients[0].norm().item(), rel=1e-6)
    torch.testing.assert_close(gradients[1], gradients[0] * 0.5 / gradients[0].norm(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[2], gradients[0])


def test_b13_an_overflow_is_seen_by_the_norm() -> None:
    for fused in (False, True):
        for bad in (INF, float("nan")):
            _, run = line(EIGHT, functools.partial(torch.optim.SGD, lr=1.0, fused=fused), clip=1.0)
            follow(run, [bad])
            assert run.skipped == 1
            assert run.masters()[0].tolist() == [[0, 0]]


def test_norms_of_half_gradients_are_summed_in_fp32() -> None:
    grads = [torch.full((200_000,), 60000.0).half()]
    assert torch._foreach_norm(grads)[0] == INF  # the naive way
    assert total_norm(grads, torch.device("cpu")).item() == pytest.approx(60000 * 200_000**0.5, rel=1e-3)


def test_fp16_parameters_are_never_silently_accepted() -> None:
    """torch's fused optimizers take them without a word, and there are no masters."""
    model = nn.Linear(2, 2).half()
    with pytest.raises(ModelError, match="weight is torch.float16; give an fp32 model"):
        prepare(model, torch.optim.AdamW(model.parameters(), fused=True), AMP_FP16)


@pytest.mark.parametrize("fused", [False, True])
def test_b18_several_losses_have_a_scale_each(fused) -> None:
    """An overflow of one loss skips the step and backs only its own scale off; gradients add up unscaled."""
    model, run = line(MASTER_FP16, functools.partial(torch.optim.SGD, lr=1.0, fused=fused), losses=("d", "g"),
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


def test_skips_are_reported_with_fused_optimizers() -> None:
    """accelerate sees whether `optimizer.step` ran, which a fused one always does."""
    _, run = line(EIGHT, functools.partial(torch.optim.SGD, lr=1.0, fused=True))
    follow(run, [1.0, INF, 1.0])
    assert run.skipped.item() == 1
    assert run.stats()["skipped"] == 1
    _, run = line(MASTER_BF16, functools.partial(torch.optim.SGD, lr=1.0))
    assert run.skipped.item() == 0


def test_settings_of_the_scaler_that_make_no_sense() -> None:
    with pytest.raises(SettingError, match="wanted hysteresis >= 1, got 0"):
        LossScaler(hysteresis=0)
    with pytest.raises(CheckpointError, match="holds scale, clean, tolerance and skipped, got 'device'"):
        LossScaler().load_state_dict({"device": torch.tensor(0)})
