"""Accumulation, schedules, averages: what goes on around a step."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from compresskit.base.errors import SettingError
from compresskit.mixed import AMP_FP16, FP32, KAHAN_BF16, MASTER_BF16, MASTER_FP16, PURE_BF16, SPLIT_BF16, LossScaler, prepare

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")
INF = float("inf")
EIGHT = replace(MASTER_FP16, loss_scale=8.0)


def line(policy, **settings):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), policy, **settings)


def summed(policy, count, *, native=True):
    _, run = line(policy)
    if not native:
        run._weights.use_fp32_gradients_(enabled=False)  # as under DDP, or on a torch without Tensor.grad_dtype
    with run.accumulate(count):
        for _ in range(count):
            run.backward(run(torch.ones(1, 1)).sum())
    run.step()
    return -run.masters()[0].item()


@pytest.mark.parametrize("policy", [MASTER_BF16, SPLIT_BF16, KAHAN_BF16, PURE_BF16, FP32], ids=lambda p: p.name)
@pytest.mark.parametrize("native", [True, False])
def test_b18_accumulation_is_in_fp32(policy, native) -> None:
    """1000 micro-batches of 1/1000 sum to 0.50 in bf16; the addend itself is rounded to bf16, the sum is not."""
    naive = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1000):
        naive += torch.tensor(1 / 1000).bfloat16()
    assert naive.item() < 0.6
    if native and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    assert summed(policy, 1000, native=native) == pytest.approx(1.0, rel=2**-8)


def test_b18_accumulated_equals_one_large_batch() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    weights = []
    for parts in (1, 4):
        torch.manual_seed(1)
        model = nn.Linear(4, 2)
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), replace(AMP_FP16, loss_scale=64.0), clip=0.1)
        with run.accumulate(parts):
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                run.backward((run(a) - b).square().mean())
        run.step()
        weights.append(run.finish().weight.detach())
    torch.testing.assert_close(*weights, atol=2e-4, rtol=2e-3)


def test_b18_accumulation_with_overflow_skips_the_whole_step() -> None:
    _, run = line(EIGHT)
    with run.accumulate(2):
        run.backward(run(torch.full((1, 1), INF)).sum())
        run.backward(run(torch.ones(1, 1)).sum())
    run.step()
    assert run.masters()[0] == 0
    assert run.skipped == 1


def test_b18_accumulation_that_was_not_kept_is_refused() -> None:
    _, run = line(MASTER_BF16)
    with pytest.raises(SettingError, match=r"accumulate\(3\): 1 backward passes were made"), run.accumulate(3):
        run.backward(run(torch.ones(1, 1)).sum())
    for count in (0, 1.5):
        with (
            pytest.raises(SettingError, match=f"wanted a whole number >= 1 of backward passes, got {count}"),
            run.accumulate(count),
        ):
            pass
    with pytest.raises(SettingError, match="blocks do not nest"), run.accumulate(1), run.accumulate(1):
        pass


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("on", ["attempt", "success"])
def test_schedules_know_of_skipped_steps(fused, on) -> None:
    """One halving a step; the skip is the third. Fused, "success" holds back one step later."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    run = prepare(model, optimizer, EIGHT)
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
    _, run = line(EIGHT)
    run.schedule(torch.optim.lr_scheduler.StepLR(run.optimizer, 1))
    run.backward(run(torch.full((1, 1), INF)).sum())
    run.step()


def test_schedules_that_are_none() -> None:
    _, run = line(FP32)
    with pytest.raises(SettingError, match="on must be 'attempt' or 'success', got 'skip'"):
        run.schedule(torch.optim.lr_scheduler.StepLR(run.optimizer, 1), on="skip")
    with pytest.raises(SettingError, match=r"wanted a torch scheduler, got function without step\(\)"):
        run.schedule(lambda: 0)


@pytest.mark.parametrize("policy", [MASTER_FP16, MASTER_BF16, SPLIT_BF16], ids=lambda p: p.name)
def test_averages_are_of_the_masters(policy) -> None:
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
def test_a_skipped_step_weighs_nothing_in_the_average(fused) -> None:
    model = nn.Linear(1, 1, bias=False)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=fused), EIGHT)
    average = run.ema(0.5)
    run.backward(run(torch.ones(1, 1)).sum())
    run.step()
    before = average.values["weight"].clone()
    run.backward(run(torch.full((1, 1), INF)).sum())
    run.step()
    assert torch.equal(before, average.values["weight"])
    with pytest.raises(SettingError, match=r"decay must be in \[0, 1\), got 1"):
        run.ema(1)


def test_gradient_dtypes_are_not_left_set_after_finish() -> None:
    model, run = line(MASTER_BF16)
    run.finish()
    model.half()
    model(torch.ones(1, 1).half()).sum().backward()
    assert model.weight.grad.dtype == torch.float16


def test_b18_two_models_two_optimizers() -> None:
    """One run each; a scaler each; neither sees the other's overflow."""
    runs = [line(MASTER_FP16, scaler=functools.partial(LossScaler, 8.0))[1] for _ in range(2)]
    for run, value in zip(runs, (1.0, INF), strict=True):
        run.backward(run(torch.full((1, 1), value)).sum())
        run.step()
    assert [run.stats()["skipped"] for run in runs] == [0, 1]


def test_b16_wrapped_models_are_wrapped_afterwards(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        weights = []
        for wrap in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(4, 2)
            run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_BF16)
            if wrap:
                run.model = nn.parallel.DistributedDataParallel(run.model)
            with run.accumulate(2):
                for i in range(2):
                    run.backward(run(torch.ones(3, 4) * (i + 1)).square().mean())
            run.step()
            weights.append(run.masters()[0].clone())
            assert run.state_dict()["weights"].keys() == {"weight", "bias"}
            if wrap:
                with pytest.raises(Exception, match="wrap the model in DistributedDataParallel after prepare"):
                    prepare(run.model, run.optimizer, MASTER_BF16)
        torch.testing.assert_close(*weights, atol=1e-3, rtol=1e-2)
    finally:
        torch.distributed.destroy_process_group()
