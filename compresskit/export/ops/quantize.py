"""Torch operators that compute what ONNX's quantization operators do, so that a captured graph can contain them.

torch's own `fake_quantize_*` cannot be translated to ONNX with a dynamic batch (pytorch#167063); these can, and they keep
weights as integers in the file. Their arithmetic is ONNX's: round half to even, saturate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("compresskit::quantize_linear", mutates_args=())
def quantize_linear(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """fp32 to the integer dtype of `zero_point`: saturate(round(x / scale) + zero_point); scale is a scalar."""
    limits = torch.iinfo(zero_point.dtype)
    return (torch.round(x / scale) + zero_point.to(x.dtype)).clamp(limits.min, limits.max).to(zero_point.dtype)


@quantize_linear.register_fake
def _quantize_linear_shape(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=zero_point.dtype)


@torch.library.custom_op("compresskit::dequantize_linear", mutates_args=())
def dequantize_linear(q: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    """Integers to fp32: (q - zero_point) * scale, with a scalar scale or one entry for each index of `axis`."""
    shape = [-1 if dim == axis else 1 for dim in range(q.ndim)]
    shift = 0 if zero_point is None else (zero_point.view(shape) if zero_point.ndim else zero_point).to(torch.int32)
    return (q.to(torch.int32) - shift).float() * (scale.view(shape) if scale.ndim else scale)


@dequantize_linear.register_fake
def _dequantize_linear_shape(q: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    return torch.empty_like(q, dtype=torch.float32)


def dynamic_qparams(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point, both fp32 scalars, of the uint8 grid over the range that x has now and zero: DynamicQuantizeLinear.

    >>> scale, zero_point = dynamic_qparams(torch.tensor([-1.0, 0.5, 1.55]))
    >>> round(scale.item(), 6), zero_point.item()
    (0.01, 100.0)
    """
    if isinstance(x.numel(), int) and not x.numel():  # rows that code picks may be none
        return torch.ones((), device=x.device), torch.zeros((), device=x.device)
    low, high = x.detach().float().aminmax()
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    scale = torch.where(high > low, (high - low) / 255.0, torch.ones_like(low))
    return scale, torch.round((-low / scale).clamp(0.0, 255.0))


class _RoundDynamically(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale, zero_point = dynamic_qparams(x)
        y = torch.round(x.float() / scale).add_(zero_point).clamp_(0.0, 255.0).sub_(zero_point).mul_(scale)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad  # nothing lies outside the range


def round_dynamically(x: Tensor) -> Tensor:
    """Round x to the uint8 grid over its own range and back; the gradient passes."""
    return _RoundDynamically.apply(x)  # type: ignore[no-any-return]


@torch.library.custom_op("compresskit::dynamic_quantize", mutates_args=())
def dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """DynamicQuantizeLinear: uint8 values of x's shape, scale, zero point (uint8)."""
    scale, zero_point = dynamic_qparams(x)
    return (torch.round(x / scale) + zero_point).clamp(0, 255).to(torch.uint8), scale, zero_point.to(torch.uint8)


@dynamic_quantize.register_fake
def _dynamic_quantize_shape(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.uint8), x.new_empty(()), x.new_empty((), dtype=torch.uint8)


@torch.library.custom_op("compresskit::matmul_integer", mutates_args=())
def matmul_integer(a: Tensor, b: Tensor, zero_point: Tensor, b_zero_point: Tensor | None) -> Tensor:
    """MatMulInteger: (..., K) uint8 less its zero point, times (K, N) int8 less its own, a scalar or (N,); int32."""
    shift = 0 if b_zero_point is None else b_zero_point.double()
    # Sums of products of 8-bit integers are exact in fp64; a CPU multiplies integers many times slower.
    return ((a.double() - zero_point.double()) @ (b.double() - shift)).to(torch.int32)


@matmul_integer.register_fake
def _matmul_integer_shape(a: Tensor, b: Tensor, zero_point: Tensor, b_zero_point: Tensor | None) -> Tensor:
    return a.new_empty([*a.shape[:-1], b.shape[1]], dtype=torch.int32)


@torch.library.custom_op("compresskit::conv_integer", mutates_args=())
def conv_integer(
    x: Tensor, weight: Tensor, zero_point: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """ConvInteger: uint8 less its zero point, with int8 weights (zero point 0); int32."""
    conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.ndim]
    return conv(x.double() - zero_point.double(), weight.double(), None, stride, padding, dilation, groups).to(torch.int32)


@conv_integer.register_fake
def _conv_integer_shape(
    x: Tensor, weight: Tensor, zero_point: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.ndim]
    return conv(x.float(), weight.float(), None, stride, padding, dilation, groups).to(torch.int32)
