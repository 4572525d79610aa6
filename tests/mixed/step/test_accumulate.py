"""Accumulation: gradients of several passes are summed in fp32, and can be read before the step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mixed_runs import FIXED_SCALE, INF, USER_WARNINGS, one_weight
from torch import nn

from compresskit.base.errors import SettingError
from compresskit.mixed import (
    AMP_FP16,
    FP32,
    KAHAN_BF16,
    MASTER_BF16,
    PURE_BF16,
    SPLIT_BF16,
    prepare,
)

pytestmark = USER_WARNINGS


def summed(policy, count, *, native=True):
    _, run = one_weight(policy)
    if not native:
        run._weights.use_fp32_gradients_(enabled=False)  # as under DDP, or on a torch without Tensor.grad_dtype
    with run.accumulate(count):
        for _ in range(count):
            run.backward(run(torch.ones(1, 1)).sum())
    run.step()
    return -run.masters()[0].item()


@pytest.mark.matrix
@pytest.mark.parametrize("policy", [MASTER_BF16, SPLIT_BF16, KAHAN_BF16, PURE_BF16, FP32], ids=lambda p: p.name)
@pytest.mark.parametrize("native", [True, False])
def test_accumulation_is_in_fp32(policy, native) -> None:
    """1000 micro-batches of 1/1000 sum to 0.50 in bf16; the addend itself is rounded to bf16, the sum is not."""
    naive = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1000):
        naive += torch.tensor(1 / 1000).bfloat16()
    assert naive.item() < 0.6
    if native and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    assert summed(policy, 1000, native=native) == pytest.approx(1.0, rel=2**-8)


def test_accumulated_batches_equal_one_large_batch() -> None:
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


def test_an_overflow_in_one_batch_skips_the_whole_step() -> None:
    _, run = one_weight(FIXED_SCALE)
    with run.accumulate(2):
        run.backward(run(torch.full((1, 1), INF)).sum())
        run.backward(run(torch.ones(1, 1)).sum())
    run.step()
    assert run.masters()[0] == 0
    assert run.skipped == 1


def test_another_number_of_passes_than_announced_is_refused() -> None:
    _, run = one_weight(MASTER_BF16)
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


def test_passes_of_one_loss_are_unscaled_once_at_the_step() -> None:
    """apex's `delay_unscale`: passes of one loss add up scaled, in fp32, and are checked and divided once."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), FIXED_SCALE)
    for _ in range(3):
        run.backward(run(torch.ones(1, 1)).sum())
    assert not hasattr(torch.Tensor, "grad_dtype") or model.weight.grad.item() == 24
    run.step()
    assert run.masters()[0].item() == -3


@pytest.mark.parametrize("policy", [FP32, FIXED_SCALE, replace(AMP_FP16, loss_scale=8.0), MASTER_BF16], ids=lambda p: p.name)
@pytest.mark.parametrize("settings", [{}, {"flat": True}], ids=str)
def test_unscaled_gradients_can_be_read_and_changed_before_the_step(policy, settings) -> None:
    """`inspect_master_grad_data` and `clip_master_grads` of FP16_Optimizer: fp32, unscaled, by name, and what `step` takes."""
    weights = []
    for factor in (None, 1.0, 0.5):
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), policy, **settings)
        run.backward(run(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).sum())
        if factor is not None:
            grads = run.unscaled()
            assert {name: (g.tolist(), g.dtype) for name, g in grads.items()} == {"weight": ([[1, 2, 3, 4]], torch.float32)}
            grads["weight"].mul_(factor)
        run.backward(run(torch.ones(1, 4)).sum())  # a pass after the look adds to it
        run.step()
        weights.append(run.finish().weight.tolist())
    assert weights == [[[-2, -3, -4, -5]], [[-2, -3, -4, -5]], [[-1.5, -2, -2.5, -3]]]


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_that_was_read_still_skips_the_step(fused) -> None:
    model = nn.Linear(2, 1, bias=False)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=fused), FIXED_SCALE, clip=1.0)
    before = run.masters()[0].clone()
    run.backward(run(torch.full((1, 2), INF)).sum())
    assert not torch.isfinite(run.unscaled()["weight"]).any()
    run.step()
    assert run.skipped == 1
    assert torch.equal(before, run.masters()[0])
    run.backward(run(torch.ones(1, 2)).sum())
    run.step()
    assert run.skipped == 1


@pytest.mark.parametrize("policy", [FP32, MASTER_BF16, SPLIT_BF16, AMP_FP16], ids=lambda p: p.name)
@pytest.mark.parametrize("passes", [1, 3])
def test_a_block_that_an_error_ends_leaves_no_gradients(policy, passes) -> None:
    """One with a wrong number of passes, too: made again, it would make a step of the sum of both."""
    _, run = one_weight(replace(policy, loss_scale=8.0) if policy.loss_scale else policy)
    with pytest.raises(KeyError if passes == 1 else SettingError), run.accumulate(2):
        for _ in range(passes):
            run.backward(run(torch.ones(1, 1)).sum() * 4)
        if passes == 1:
            raise KeyError("a batch")
    with run.accumulate(2):
        for _ in range(2):
            run.backward(run(torch.ones(1, 1)).sum())
    run.step()
    assert run.masters()[0].item() == -1
