"""How real numbers become integers: widths, signs, ranges -> scale and zero point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compresskit.base.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """An affine grid: real = (integer - zero_point) * scale.

    bits: width, 2 to 8. signed: int or uint. symmetric: zero point 0 and, signed, the same number of steps each side.
    per_channel: a scale for each index of the channel axis, else one for the tensor.
    narrow: a symmetric grid leaves out the most negative integer. Weights are stored so; an activation saturates where
        QuantizeLinear does, at all that the width holds.
    """

    bits: int = 8
    signed: bool = False
    symmetric: bool = False
    per_channel: bool = False
    narrow: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise SettingError(f"Scheme(bits=...): wanted 2..8, got {self.bits}; for 16 bits train in bf16 or fp16 instead")
        if self.symmetric and not self.signed:
            raise SettingError("Scheme(symmetric=True): needs signed=True; an unsigned grid has no middle to put 0 on")

    @property
    def low(self) -> int:
        """Smallest integer used."""
        left_out = int(self.symmetric and self.narrow)
        return left_out - 2 ** (self.bits - 1) if self.signed else 0

    @property
    def high(self) -> int:
        """Largest integer used."""
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 1

    @property
    def dtype(self) -> torch.dtype:
        """What the integers are stored as."""
        return torch.int8 if self.signed else torch.uint8


def affine(low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Ranges to (scale fp32, zero_point int32), each of the shape of `low`; 0 is always exactly representable.

    An empty range (all zeros) gets scale 1. Relations as in Jacob et al., 1712.05877, section 2.

    >>> scale, zero_point = affine(torch.tensor(0.0), torch.tensor(2.55), Scheme())
    >>> round(scale.item(), 6), zero_point.item()
    (0.01, 0)
    """
    low, high = low.float().clamp(max=0), high.float().clamp(min=0)
    if scheme.symmetric:
        scale = torch.maximum(-low, high) / scheme.high
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    else:
        scale = (high - low) / (scheme.high - scheme.low)
        zero_point = (scheme.low - torch.round(low / scale.clamp(min=_TINY))).clamp(scheme.low, scheme.high).to(torch.int32)
    # A denormal scale makes 1/scale infinite.
    return torch.where(scale > _TINY, scale, torch.ones_like(scale)), zero_point


def anchored(low: Tensor, high: Tensor, scheme: Scheme, anchor: float) -> tuple[Tensor, Tensor]:
    """As `affine`, for scalars, with `anchor` and `-anchor` on the grid: the range is widened to reach down to `-anchor`, and the
    scale is the next larger that divides it.

    >>> scale, zero_point = anchored(torch.tensor(-1.0), torch.tensor(9.0), Scheme(), 3.0)
    >>> round(3.0 / scale.item(), 4), zero_point.item()
    (63.0, 63)
    """
    low, high = low.float().clamp(max=-anchor), high.float().clamp(min=anchor)
    steps = torch.floor(anchor * (scheme.high - scheme.low) / (high - low)).clamp(min=1)
    scale = anchor / steps
    zero_point = (scheme.low - torch.round(low / scale)).clamp(scheme.low + steps, scheme.high - steps).to(torch.int32)
    return scale, zero_point


_TINY = 1e-30


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme, axis: int = 0, *, share: float = 1.0) -> Tensor:
    """Round x to the grid and back; the gradient passes where x is inside the range (straight-through estimator).

    scale, zero_point: scalars, or (channels,) along `axis`. The error is at most scale / 2 inside the range. A scale that wants
    a gradient gets that of a learned step (Esser et al., 1902.08153, equation 3) times `share`.
    """
    shape = [-1 if dim == axis else 1 for dim in range(x.ndim)]
    s, z = (scale.view(shape), zero_point.view(shape)) if scale.ndim else (scale, zero_point)
    return round_to_grid(x, s, z, scheme, share=share)


def round_to_grid(x: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme, *, share: float = 1.0) -> Tensor:
    """As `fake_quantize`, with a scale and zero point that have the dimensions of x, 1 where they are shared."""
    low, high = scheme.low - zero_point.to(scale.dtype), scheme.high - zero_point.to(scale.dtype)
    return _Rounding.apply(x, scale, low, high, share)  # type: ignore[no-any-return]


class _Rounding(torch.autograd.Function):
    """clamp(round(x / scale), low, high) * scale. torch's own kernels compute the same but for ties, thirty times slower on a
    CPU: a layer's activation of 2M values takes 24 ms there and back with `fake_quantize_per_tensor_affine` and 2 ms here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, low: Tensor, high: Tensor, share: float) -> Tensor:
        y = x.float() / scale  # as ONNX says: times the reciprocal, a tie of two steps may fall to the other side
        y.round_()
        torch.maximum(y, low, out=y)
        torch.minimum(y, high, out=y)
        y.mul_(scale)
        y = y.to(x.dtype)
        ctx.share = share
        ctx.save_for_backward(x, scale, low, high, y if ctx.needs_input_grad[1] else None)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, low, high, y = ctx.saved_tensors
        bottom, top = (low - 0.5) * scale, (high + 0.5) * scale
        if scale.ndim == 0 and x.device.type == "cpu":
            passed = torch.ops.aten.hardtanh_backward(grad, x, bottom.item(), top.item())
        else:
            passed = grad * ((x > bottom) & (x < top))
        if y is None:
            return passed, None, None, None, None
        # d/ds of what is inside: (y - x) / s; of what is clipped: y / s.
        slope = (grad.float() * y - passed.float() * x) if scale.ndim else None
        if slope is None:
            total = torch.dot(grad.reshape(-1).float(), y.reshape(-1).float())
            total = total - torch.dot(passed.reshape(-1).float(), x.reshape(-1).float())
        else:
            total = slope.sum([d for d in range(x.ndim) if scale.shape[d] == 1], keepdim=True)
        return passed, (total / scale * ctx.share).to(scale.dtype).view_as(scale), None, None, None


def to_integers(x: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme, axis: int = 0) -> Tensor:
    """The integers of the grid points that `fake_quantize` maps to, in `scheme.dtype`."""
    shape = [-1 if dim == axis else 1 for dim in range(x.ndim)]
    s, z = (scale.view(shape), zero_point.view(shape)) if scale.ndim else (scale, zero_point)
    return (torch.round(x / s) + z).clamp(scheme.low, scheme.high).to(scheme.dtype)
