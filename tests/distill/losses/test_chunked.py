"""Chunked soft targets: the same loss and gradient in less memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from compresskit.base.errors import DataError, SettingError
from compresskit.distill import losses

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_is_the_same_loss_and_gradient(dtype, chunk) -> None:
    student, teacher = (torch.randn(2, 20, 300) * 3).to(dtype)
    weight = torch.rand(20)
    values, grads = [], []
    for loss in (losses.soft_targets, partial(losses.chunked_soft_targets, chunk=chunk)):
        leaf = student.clone().requires_grad_()
        value = loss(leaf, teacher, weight=weight, temperature=2.0)
        (value * 1024).backward()
        values.append(value.detach())
        grads.append(leaf.grad)
    torch.testing.assert_close(values[1], values[0])
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(grads[1], grads[0], rtol=bound, atol=1e-6)


def test_chunked_refuses_a_second_backward_and_needs_no_gradient() -> None:
    student, teacher = torch.randn(2, 4, 9)
    value = losses.chunked_soft_targets(student.requires_grad_(), teacher)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    with torch.no_grad():
        torch.testing.assert_close(losses.chunked_soft_targets(student, teacher), value.detach())


def peak(loss, student, teacher) -> int:
    """Largest number of bytes that a forward and a backward hold at once, beside what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        loss(student, teacher).backward()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_peak_memory_of_chunked_soft_targets_and_of_rkd() -> None:
    student, teacher = torch.randn(2, 256, 2000)
    plain, chunked = (
        peak(loss, student.clone().requires_grad_(), teacher) for loss in (losses.soft_targets, losses.chunked_soft_targets)
    )
    assert chunked <= 1.3 * student.numel() * 4  # one gradient, and a few rows at a time
    assert chunked * 3 <= plain
    features = torch.randn(2, 64, 2048)
    assert peak(losses.rkd_angle, features[0].clone().requires_grad_(), features[1]) * 4 < 64 * 64 * 2048 * 4


def test_chunked_refuses_settings_that_do_not_fit() -> None:
    a = torch.zeros(2, 3)
    with pytest.raises(
        DataError, match=r"chunked_soft_targets: wanted logits of at least 2 dimensions with classes in dim 3, got \(2, 3\)"
    ):
        losses.chunked_soft_targets(a, a, dim=3)
    with pytest.raises(SettingError, match=r"chunk=\.\.\.\): wanted a whole number >= 1, got 0"):
        losses.chunked_soft_targets(a, a, chunk=0)


def test_classes_that_both_networks_mask_count_as_nothing() -> None:
    student, teacher = torch.tensor([[0.5, -torch.inf, 1.0]]), torch.tensor([[0.2, -torch.inf, 2.0]])
    value = losses.chunked_soft_targets(student, teacher)
    torch.testing.assert_close(value, losses.soft_targets(student[:, ::2], teacher[:, ::2]))
