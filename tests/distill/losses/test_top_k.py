"""Soft targets of the k largest logits."""

from __future__ import annotations

import math

import pytest
import torch

from compresskit import distill as kd
from compresskit.base.errors import DataError
from compresskit.distill.losses.top_k import top_k


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_top_k_soft_targets_are_finite_and_zero_for_equal_logits(dtype) -> None:
    logits = torch.randn(6, 10).to(dtype)
    assert kd.losses.top_k_soft_targets(logits, top_k(logits, 3)).item() == pytest.approx(0, abs=1e-6)
    for size in (30.0, 150.0, 1e4):
        sure = torch.zeros(4, 10, dtype=dtype)
        sure[:, 0] = size
        wrong = sure.roll(1, 1).requires_grad_()
        value = kd.losses.top_k_soft_targets(wrong, top_k(sure, 2, temperature=1.0))
        value.backward()
        assert torch.isfinite(value)
        assert torch.isfinite(wrong.grad).all()


@pytest.mark.parametrize("k", [3, 5])
def test_masked_classes_do_not_count(k) -> None:
    """Also where they are among those that are kept, or all of the rest."""
    student, teacher = torch.randn(4, 6), torch.randn(4, 6)
    student[:, 4:] = teacher[:, 4:] = -math.inf
    student.requires_grad_()
    value = kd.losses.top_k_soft_targets(student, top_k(teacher, k))
    wanted = kd.losses.soft_targets(student[:, :4], teacher[:, :4])
    if k == 3:
        wanted = kd.losses.top_k_soft_targets(student[:, :4], top_k(teacher[:, :4], k))
    torch.testing.assert_close(value, wanted)
    assert torch.autograd.grad(value, student)[0].isfinite().all()


def test_other_predictions_of_a_teacher_are_refused() -> None:
    with pytest.raises(DataError, match="top_k_soft_targets: wanted a TopK of the teacher, got Tensor"):
        kd.losses.top_k_soft_targets(torch.randn(4, 6), torch.randn(4, 6))
