"""`soft_targets` for large vocabularies: computed a few rows at a time, with one stored gradient in the student's dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compresskit.base.errors import DataError
from compresskit.base.settings import check_whole_number
from compresskit.distill.losses.common import check_dim_of_classes, check_positive, check_weight

#: The stored gradient |q - p| <= 1 is multiplied by this, so that in fp16 the tail of a vocabulary stays a normal number.
GRADIENT_SCALE = 4096.0


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, weight: Tensor, temperature: float, chunk: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64 if student.device.type == "cpu" else torch.float32, device=student.device)
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        for start in range(0, len(student), chunk):
            part = slice(start, start + chunk)
            (s, q, log_s), (t, p, log_t) = (_softmax_terms(v[part], temperature) for v in (student, teacher))
            w = weight[part]
            # sum p (log p - log q) = sum p (t - s) - log Z_t + log Z_s; each row's maximum is already taken off.
            t.sub_(s).mul_(p).masked_fill_(p == 0, 0)  # of -inf in both networks too
            total += (w * (t.sum(1) + (log_s - log_t))).sum()
            if gradient is not None:
                gradient[part] = q.sub_(p).mul_(w.unsqueeze(1) * GRADIENT_SCALE)
        counted = weight.sum()
        scale = temperature / torch.where(counted > 1e-30, counted, 1.0)  # all weights 0: loss 0, gradient 0
        ctx.chunk = chunk
        if gradient is not None:
            ctx.save_for_backward(gradient, scale)
        return (total * scale * temperature).float()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:
        gradient, scale = ctx.saved_tensors
        factor = outer[0].float() * scale / GRADIENT_SCALE
        if gradient.dtype == torch.float32:
            gradient.mul_(factor)
        else:
            for part in gradient.split(ctx.chunk):
                part.copy_(part.float() * factor)
        return gradient, None, None, None, None


def _softmax_terms(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Shifted logits (rows, C), their softmax (rows, C) and the log of its denominator (rows,), from one exponential."""
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
    """Compute `soft_targets` and its gradient `chunk` rows at a time, for vocabularies, where the plain loss keeps five copies.

    Beside its inputs it holds one gradient of the student's shape and dtype. The backward pass scales it in place and returns
    it, so autograd refuses a second backward pass through the same value.

    Args:
        student, teacher: logits (N, C, ...), classes in `dim`, any floating dtype.
        temperature: T, a positive number.
        weight: weights of the positions, in the shape of the logits without the classes.
        dim: the dimension of the classes.
        chunk: rows that are computed at once; fewer rows take less memory.

    Returns: an fp32 scalar.
    Raises: DataError for shapes that do not fit; SettingError for a temperature or a chunk that is not positive.
    """
    check_positive("chunked_soft_targets", "temperature", temperature)
    check_whole_number(chunk, "chunked_soft_targets(chunk=...)")
    check_dim_of_classes("chunked_soft_targets", student, teacher, dim)
    s, t = (v.movedim(dim, -1) for v in (student, teacher.detach()))
    if weight is None:
        weight = torch.ones(s.shape[:-1], device=s.device)
    check_weight("chunked_soft_targets", weight)
    if weight.shape != s.shape[:-1]:
        raise DataError(f"chunked_soft_targets(weight=...): wanted shape {tuple(s.shape[:-1])}, got {tuple(weight.shape)}")
    s, t = (v.reshape(-1, v.shape[-1]) for v in (s, t))
    return _ChunkedKL.apply(s, t, weight.detach().float().reshape(-1), temperature, chunk)  # type: ignore[no-untyped-call]
