"""Affine quantization: number formats (`Scheme`), scale and zero point from a range, and rounding to a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from compresskit.base.errors import SettingError

LEARNED_DOWN_TO = 1 / 64  # of its first value a learned scale has at least: at zero no step of training would reach it any more
#: What the gradient of a smaller scale is divided by, which then moves more slowly under gradient descent: that of a tiny one
#: would be larger than all others together, and leave nothing of them where they are clipped by their norm.
LEAST_UNIT = 1 / 16


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """An integer format: real = (integer - zero_point) * scale.

    Args:
        bits: width, 1 to 16. One bit is 0 and 1 (uint), or -1 and 1 (int, symmetric).
        signed: int or uint.
        symmetric: zero point 0, and the same number of steps on each side of it. Needs `signed`.
        per_channel: one scale per index of the channel axis, else one scale for the tensor.
        narrow: leave out the most negative integer of a symmetric format. Weights are stored so; activations saturate where
            QuantizeLinear does, at the full range of the width.

    Raises SettingError for other widths, and for a symmetric unsigned format.
    """

    bits: int = 8
    signed: bool = False
    symmetric: bool = False
    per_channel: bool = False
    narrow: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise SettingError(f"Scheme(bits=...): wanted 1..16, got {self.bits}")
        if self.bits == 1 and self.signed and not self.symmetric:
            raise SettingError("Scheme(bits=1, signed=True): the two integers are -1 and 1; write symmetric=True")
        if self.symmetric and not self.signed:
            raise SettingError("Scheme(symmetric=True): needs signed=True; an unsigned grid has no middle to put 0 on")

    @property
    def binary(self) -> bool:
        """Whether the integers are -1 and 1, so that a value is rounded to its sign; 0 to 1."""
        return self.bits == 1 and self.signed

    @property
    def low(self) -> int:
        """Smallest integer used."""
        if self.binary:
            return -1
        left_out = int(self.symmetric and self.narrow)
        return left_out - 2 ** (self.bits - 1) if self.signed else 0

    @property
    def high(self) -> int:
        """Largest integer used."""
        if self.binary:
            return 1
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 1

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest type of torch that holds the integers."""
        narrow, wide = (torch.int8, torch.int16) if self.signed else (torch.uint8, torch.uint16)
        return narrow if self.bits <= 8 else wide


def affine(low: Tensor, high: Tensor, scheme: Scheme, *, empty: float = 1.0) -> tuple[Tensor, Tensor]:
    """Scale and zero point of ranges, such that 0 is exactly representable (Jacob et al., arXiv 1712.05877, section 2).

    Args:
        low, high: ends of the ranges, any shape.
        scheme: number format.
        empty: scale of a range of zeros.

    Returns (scale fp32, zero_point int32), each of the shape of `low`.

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
    return torch.where(scale > _TINY, scale, empty), zero_point


def anchored(low: Tensor, high: Tensor, scheme: Scheme, anchor: float) -> tuple[Tensor, Tensor]:
    """As `affine`, for scalars, with `anchor` and `-anchor` exactly representable.

    The range is widened to contain both, and the scale rounded up to the next that divides `anchor`.

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


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    scheme: Scheme,
    axis: int = 0,
    *,
    gradient_scale: float = 1.0,
    rounded: Tensor | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """Round values to the grid and back; the gradient passes where x is inside the range (straight-through estimator).

    The error is at most scale / 2 inside the range. A scale that requires a gradient gets that of LSQ (Esser et al., arXiv
    1902.08153, equation 3) times `gradient_scale`.

    Args:
        x: any shape and floating dtype.
        scale, zero_point: scalars, or (channels,) along `axis`.
        scheme: number format.
        axis: the channel dimension of x.
        rounded: the integers of x less the zero point, fp32, where they are known already.
        offset: the end of the range, a scalar from which the zero point was made. Where it requires a gradient it gets that of
            LSQ+ (Bhalgat et al., arXiv 2004.09576, equation 7) times `gradient_scale`: the sum over clipped values.

    Returns values of the shape and dtype of x.
    """
    s, z = (channelwise(v, x, axis) for v in (scale, zero_point))
    if scheme.binary:
        return _RoundToSign.apply(x, s, gradient_scale)  # type: ignore[no-any-return, no-untyped-call]
    return round_to_grid(x, s, z, scheme, gradient_scale=gradient_scale, rounded=rounded, offset=offset)


def round_to_grid(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    scheme: Scheme,
    *,
    gradient_scale: float = 1.0,
    rounded: Tensor | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """As `fake_quantize`, with a scale and zero point that broadcast to x (size 1 in the dimensions that share them).

    The backward pass needs x. Where the autograd node that made x has an attribute `computed_again`, a function of the node that
    returns x to the bit, it is computed again then, and takes no memory until then.
    """
    low, high = _bounds(zero_point, scale, scheme)
    return _RoundToGrid.apply(x, scale, low, high, gradient_scale, rounded, _cheap_source(x), offset)  # type: ignore[no-any-return]


def _cheap_source(x: Tensor) -> Any:
    """The autograd node that can compute x again, or None."""
    if torch.compiler.is_compiling():
        return None
    node = x.grad_fn
    return node if isinstance(node, BackwardCFunction) and x.output_nr == 0 and "computed_again" in vars(node) else None


def _bounds(zero_point: Tensor, scale: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor] | tuple[float, float]:
    """The first and last step of a grid from 0; numbers where they are one for all and cost no wait, since they save a pass."""
    if scheme.symmetric and zero_point.numel() > 1:
        return scheme.low, scheme.high
    if zero_point.numel() == 1 and zero_point.device.type == "cpu" and not torch.compiler.is_compiling():
        middle = int(zero_point)
        return scheme.low - middle, scheme.high - middle
    return scheme.low - zero_point.to(scale.dtype), scheme.high - zero_point.to(scale.dtype)


class _RoundToGrid(torch.autograd.Function):
    """clamp(round(x / scale), low, high) * scale.

    torch's own kernels compute the same, except halfway between two steps, and are slower on a CPU: forward and backward of an
    activation of 2M values take 24 ms with `fake_quantize_per_tensor_affine` and 2 ms here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        low: Tensor | float,
        high: Tensor | float,
        gradient_scale: float,
        rounded: Tensor | None,
        source: Any,
        offset: Tensor | None,
    ) -> Tensor:
        if rounded is None:
            # Divided as in ONNX: by the reciprocal, values halfway between steps may round differently.
            y = x / scale if x.dtype == torch.float32 else x.float().div_(scale)
            y.round_()
            y.clamp_(low, high)  # type: ignore[arg-type]  # two numbers, or two tensors
            y.mul_(scale)
        else:
            y = rounded * scale
        y = y.to(x.dtype)
        ctx.gradient_scale, ctx.bounds, ctx.source = gradient_scale, (low, high), source
        ctx.save_for_backward(x if source is None else None, scale, y if ctx.needs_input_grad[1] else None)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, y = ctx.saved_tensors
        if x is None:
            x = ctx.source.computed_again(ctx.source)
        grad = _laid_out_as(x, grad)
        low, high = ctx.bounds
        step = scale.item() if scale.ndim == 0 and x.device.type == "cpu" else scale
        bottom, top = (low - 0.5) * step, (high + 0.5) * step
        if scale.ndim == 0 and x.device.type == "cpu":
            passed = torch.ops.aten.hardtanh_backward(grad, x, float(bottom), float(top))
        else:
            passed = grad * ((x > bottom) & (x < top))
        end = None
        if ctx.needs_input_grad[7]:
            end = (grad.sum(dtype=torch.float32) - passed.sum(dtype=torch.float32)).to(scale.dtype) * ctx.gradient_scale
        if y is None:
            return passed, *(None,) * 6, end
        # d/ds inside the range: (y - x) / s; of clipped values: y / s.
        slope = (grad.float() * y - passed.float() * x) if scale.ndim else None
        if slope is None:
            grads, outputs, gone, inputs = (row_of(v) for v in (grad, y, passed, x))
            total = torch.dot(grads.float(), outputs.float()) - torch.dot(gone.float(), inputs.float())
        else:
            total = slope.sum([d for d in range(x.ndim) if scale.shape[d] == 1], keepdim=True)
        return passed, (total / scale * ctx.gradient_scale).to(scale.dtype).view_as(scale), *(None,) * 5, end


def _laid_out_as(x: Tensor, grad: Tensor) -> Tensor:
    """A gradient in the memory format of its images: kernels of two formats at once take several times as long."""
    if x.ndim != 4 or grad.stride() == x.stride():
        return grad
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return grad.contiguous(memory_format=torch.channels_last) if last else grad


def row_of(value: Tensor) -> Tensor:
    """All values in one dimension, without a copy of images in `torch.channels_last`."""
    last = value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last)
    return value.movedim(1, -1).reshape(-1) if last else value.reshape(-1)


class _RoundToSign(torch.autograd.Function):
    """scale where x >= 0, else -scale. The gradient passes where |x| < 1.5 scale, as it does where values are rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, gradient_scale: float) -> Tensor:
        y = torch.where(x >= 0, scale, -scale).to(x.dtype)
        ctx.gradient_scale = gradient_scale
        ctx.save_for_backward(x, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        passed = grad * (x.abs() < 1.5 * scale)
        if not ctx.needs_input_grad[1]:
            return passed, None, None
        slope = torch.where(x >= 0, grad, -grad).float()
        total = slope.sum([d for d in range(x.ndim) if scale.shape[d] == 1], keepdim=True) if scale.ndim else slope.sum()
        return passed, (total * ctx.gradient_scale).to(scale.dtype).view_as(scale), None


def learned_scale(ratio: Tensor, first: Tensor, unit: Tensor | None = None) -> Tensor:
    """A scale that is learned as its ratio to its first value, and is kept above 1/64 of it: ratio * first.

    The steps of Adam are as large as its rate, however small the gradient, and a scale of 8 bits is as small as such a step: the
    rate must be relative to it (Jain et al., 1903.08066, learn the logarithm for this reason). The gradient is that of the scale,
    divided by `first` and not multiplied, so that gradient descent makes the steps that it makes with the scale itself.

    Args:
        ratio, first: (channels,) or a scalar, 1 and the scale before the training.
        unit: of the shape of `first`, positive, what the values are multiplied by before they are rounded: the steps are those
            of the scale of the values before that, first / unit. None where they are not.
    """
    return _LearnedScale.apply(ratio, first, unit)  # type: ignore[no-any-return, no-untyped-call]


class _LearnedScale(torch.autograd.Function):
    """max(ratio, 1/64) * first, for which torch's own gradient is 0 below: a scale that gets there would never come back."""

    @staticmethod
    def forward(ctx: Any, ratio: Tensor, first: Tensor, unit: Tensor | None) -> Tensor:
        divisor = first.clamp(min=LEAST_UNIT) if unit is None else (first / unit).clamp(min=LEAST_UNIT) / unit
        ctx.save_for_backward(ratio < LEARNED_DOWN_TO, divisor)
        return first * ratio.clamp(min=LEARNED_DOWN_TO)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        below, divisor = ctx.saved_tensors
        grad = grad / divisor
        return torch.where(below, grad.clamp(max=0), grad), None, None


def signs(x: Tensor) -> Tensor:
    """1 where x >= 0, else -1, in the dtype of x."""
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def to_integers(x: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme, axis: int = 0) -> Tensor:
    """The integers that `fake_quantize` rounds to.

    Args: as in `fake_quantize`. Returns a tensor of the shape of x and of `scheme.dtype`.
    """
    if scheme.binary:
        return signs(x).to(scheme.dtype)
    steps = torch.round(x / channelwise(scale, x, axis)) + channelwise(zero_point, x, axis)
    return steps.clamp(scheme.low, scheme.high).to(scheme.dtype)


def channelwise(values: Tensor, tensor: Tensor, dim: int) -> Tensor:
    """A vector in the shape that broadcasts along one dimension of a tensor; a scalar as it is."""
    return values.view([-1 if d == dim else 1 for d in range(tensor.ndim)]) if values.ndim else values
