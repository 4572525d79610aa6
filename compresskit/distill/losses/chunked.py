"""Soft targets for large vocabularies: a few rows at a time, one gradient in the student's dtype and nothing else kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compresskit.base.errors import DataError, SettingError
from compresskit.distill.losses.common import positive, same_shape

#: The stored gradient |q - p| <= 1 is kept this much larger, so that in fp16 a vocabulary's tail stays a normal number.
GUARD = 4096.0


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, weight: Tensor, temperature: float, chunk: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64 if student.device.type == "cpu" else torch.float32, device=student.device)
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(student) if wanted else None
        for start in range(0, len(student), chunk):
            part = slice(start, start + chunk)
            (s, q, log_s), (t, p, log_t) = (_softmax(v[part], temperature) for v in (student, teacher))
            w = weight[part]
            # sum p (log p - log q) = sum p (t - s) - log Z_t + log Z_s; each row's maximum is already taken off.
            t.sub_(s).mul_(p)
            total += (w * (t.sum(1) + (log_s - log_t))).sum()
            if gradient is not None:
                gradient[part] = q.sub_(p).mul_(w.unsqueeze(1) * GUARD)
        share = temperature / weight.sum().clamp(min=1e-30)
        ctx.chunk = chunk
        if gradient is not None:
            ctx.save_for_backward(gradient, share)
        return (total * share * temperature).float()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:
        gradient, share = ctx.saved_tensors
        factor = outer[0].float() * share / GUARD
        if gradient.dtype == torch.float32:
            gradient.mul_(factor)
        else:
            for part in gradient.split(ctx.chunk):
                part.copy_(part.float() * factor)
        return gradient, None, None, None, None


def _softmax(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Shifted logits, their softmax and the log of its sum, (rows, C), (rows, C), (rows,), from one exponential."""
    z = logits.float() / temperature
    z -= z.amax(1, keepdim=True)
    p = z.exp()
    total = p.sum(1, keepdim=True)
    p /= total
    return z, p, total.log().squeeze(1)


def chunked_soft_targets(
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 4.0,
    weight: Tensor | None = None,
    dim: int = 1,
    chunk: int = 8,
) -> Tensor:
    """`soft_targets` and its gradient, `chunk` rows at a time; for vocabularies, where the plain one keeps five copies.

    student, teacher: logits (N, C, ...), classes in `dim`; weight: shape of the logits without the classes. Beside its inputs
    it holds one gradient of the student's shape and dtype, which the backward pass scales in place and hands over; a second
    backward pass through the same value is therefore refused by autograd.
    """
    positive("chunked_soft_targets", "temperature", temperature)
    if chunk < 1:
        raise SettingError(f"chunked_soft_targets(chunk=...): wanted a whole number >= 1, got {chunk}")
    same_shape("chunked_soft_targets", student, teacher)
    if student.ndim < 2 or not -student.ndim <= dim < student.ndim:
        raise DataError(f"chunked_soft_targets: wanted logits with classes in dim {dim}, got {tuple(student.shape)}")
    s, t = (v.movedim(dim, -1) for v in (student, teacher.detach()))
    if weight is None:
        weight = torch.ones(s.shape[:-1], device=s.device)
    elif weight.shape != s.shape[:-1]:
        raise DataError(f"chunked_soft_targets(weight=...): wanted shape {tuple(s.shape[:-1])}, got {tuple(weight.shape)}")
    s, t = (v.reshape(-1, v.shape[-1]) for v in (s, t))
    return _ChunkedKL.apply(s, t, weight.detach().float().reshape(-1), temperature, chunk)  # type: ignore[no-untyped-call]
