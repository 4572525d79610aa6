"""Soft targets of the k largest logits."""

from __future__ import annotations

import pytest
import torch

from compresskit import distill as kd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_top_k_soft_targets_are_finite_and_zero_for_equal_logits(dtype) -> None:
    logits = torch.randn(6, 10).to(dtype)
    assert kd.losses.top_k_soft_targets(logits, kd.losses.top_k.top_k(logits, 3)).item() == pytest.approx(0, abs=1e-6)
    for size in (30.0, 150.0, 1e4):
        sure = torch.zeros(4, 10, dtype=dtype)
        sure[:, 0] = size
        wrong = sure.roll(1, 1).requires_grad_()
        value = kd.losses.top_k_soft_targets(wrong, kd.losses.top_k.top_k(sure, 2, temperature=1.0))
        value.backward()
        assert torch.isfinite(value)
        assert torch.isfinite(wrong.grad).all()
