"""BatchNorm of a layer's scaled output, by the statistics of a batch or by frozen ones, with the gradients of its training.

See `passes.unfold_batchnorm`, which says why.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PULL = 0.3  # part of the gradient along mean and scale of a layer's output that its weight gets with frozen statistics
CONSTANT = 0.01  # fraction of eps below which a variance is that of a channel that is constant


class ScaledBatchNorm(torch.autograd.Function):
    """BatchNorm of y / k for x = y: weight (y - mean) / sqrt(variance + eps k^2) + bias, without computing y / k.

    A channel whose weights all round to zero is constant: its variance is none, and the gradient of BatchNorm, which divides by
    sqrt(eps), hundreds of times too large. Of such a channel the usual variance takes the place of eps.

    Its values are computed again where the backward pass of a quantizer needs them (see `round_to_grid`).
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, eps: Tensor, usual: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Ten times as fast as var_mean, whose reduction over the outer dimensions is not vectorised on CPUs.
        # Given statistics that are fp32, and none of it: of a half value it would return them in half otherwise.
        like = torch.zeros_like(usual), torch.zeros_like(usual)
        mean, variance = torch.batch_norm_update_stats(y, *like, 0.0)
        spread = variance + torch.where(variance < CONSTANT * eps, torch.maximum(eps, usual), eps)
        ctx.save_for_backward(y, weight, bias, mean, spread)
        ctx.computed_again = _normalized_again
        ctx.unpacked = None
        ctx.mark_non_differentiable(mean, variance)
        return _normalize(y, mean, spread, weight, bias), mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, bias, mean, spread = ctx.saved_tensors if ctx.unpacked is None else ctx.unpacked
        ctx.unpacked = None
        needed = [True, weight is not None, bias is not None]
        scale = torch.rsqrt(spread)
        found = torch.ops.aten.native_batch_norm_backward(grads[0], y, weight, None, None, mean, scale, True, 0.0, needed)
        return found[0], None, None, *(value if wanted else None for value, wanted in zip(found[1:], needed[1:], strict=True))


class ShiftedOnly(torch.autograd.Function):
    """y + shift, with a gradient of y that has less of what changes its mean and scale (see `passes.unfold_batchnorm`).

    weight: of the BatchNorm, which y is proportional to, and which gets the gradient of that.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, eps: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        like = torch.zeros_like(eps), torch.zeros_like(eps)
        mean, variance = torch.batch_norm_update_stats(y, *like, 0.0)
        ctx.save_for_backward(y, weight, shift, mean, (variance + eps).clamp_min(torch.finfo(eps.dtype).tiny))
        ctx.computed_again = _shifted_again
        ctx.unpacked = None
        return _shift(y, shift)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, shift, mean, spread = ctx.saved_tensors if ctx.unpacked is None else ctx.unpacked
        ctx.unpacked = None
        deviation, scale = spread.sqrt(), torch.rsqrt(spread)
        needed = [True, True, True]
        # Of normalized values times their deviation, the gradient is in the scale of y.
        of_y, of_normalized, of_sum = torch.ops.aten.native_batch_norm_backward(
            grads[0], y, deviation, None, None, mean, scale, True, 0.0, needed
        )
        nonzero = torch.where(weight.abs() > 1e-8, weight, torch.ones_like(weight))
        of_weight = (deviation * of_normalized + mean * of_sum) / nonzero
        return torch.lerp(of_y, grads[0], PULL), None, of_weight.to(weight.dtype), of_sum.to(shift.dtype)


def _shift(y: Tensor, shift: Tensor) -> Tensor:
    return y + shift.to(y.dtype).view([1, -1, *[1] * (y.ndim - 2)])


def _shifted_again(ctx: Any) -> Tensor:
    """The output of a `ShiftedOnly` to the bit, see `_normalized_again`."""
    ctx.unpacked = ctx.saved_tensors
    y, _, shift, _, _ = ctx.unpacked
    return _shift(y, shift)


def keeps_statistics(y: Tensor, mean: Tensor) -> bool:
    """Whether statistics of a value have the dtype of the running ones: those of a half value, under autocast, are fp32."""
    halves = (torch.bfloat16, torch.float16)
    return y.dtype not in halves if mean.dtype == y.dtype else mean.dtype == torch.float32 and y.dtype in halves


def _normalized_again(ctx: Any) -> Tensor:
    """The output of a `ScaledBatchNorm` to the bit; what was saved is unpacked once, as `torch.utils.checkpoint` wants it."""
    ctx.unpacked = ctx.saved_tensors
    y, weight, bias, mean, spread = ctx.unpacked
    return _normalize(y, mean, spread, weight, bias)


def _normalize(y: Tensor, mean: Tensor, spread: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Batch norm by given statistics, whose variance holds the eps already: `F.batch_norm` of torch 2.11 refuses an eps of 0."""
    return torch.batch_norm(y, weight, bias, mean, spread, False, 0.0, 0.0, torch.backends.cudnn.enabled)
