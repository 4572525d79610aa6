"""QuantizeLinear and DequantizeLinear as operators of torch, so that a captured graph can hold them.

torch's own `fake_quantize_*` cannot be translated to ONNX with a dynamic batch (pytorch#167063); these can, and they keep
weights as integers in the file. Their arithmetic is ONNX's: round half to even, saturate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("compresskit::quantize_linear", mutates_args=())
def quantize_linear(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """fp32 to the integer dtype of `zero_point`: saturate(round(x / scale) + zero_point); scale is a scalar."""
    limits = torch.iinfo(zero_point.dtype)
    return (torch.round(x / scale) + zero_point).clamp(limits.min, limits.max).to(zero_point.dtype)


@quantize_linear.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=zero_point.dtype)


@torch.library.custom_op("compresskit::dequantize_linear", mutates_args=())
def dequantize_linear(q: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    """Integers to fp32: (q - zero_point) * scale, with a scalar scale or one entry for each index of `axis`."""
    shape = [-1 if dim == axis else 1 for dim in range(q.ndim)]
    shift = 0 if zero_point is None else (zero_point.view(shape) if zero_point.ndim else zero_point).to(torch.int32)
    return (q.to(torch.int32) - shift).float() * (scale.view(shape) if scale.ndim else scale)


@dequantize_linear.register_fake
def _(q: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    return torch.empty_like(q, dtype=torch.float32)


def translations() -> dict[Any, Any]:
    """How the ONNX exporter writes them, and those of `blocks`."""
    from onnxscript import opset20 as op  # heavy, and only exporting needs it

    from compresskit.export.blocks import block_translations

    def quantize(x, scale, zero_point):  # type: ignore[no-untyped-def]
        return op.QuantizeLinear(x, scale, zero_point)

    def dequantize(q, scale, zero_point, axis: int):  # type: ignore[no-untyped-def]
        return op.DequantizeLinear(q, scale, zero_point, axis=axis)

    table = torch.ops.compresskit
    return {table.quantize_linear.default: quantize, table.dequantize_linear.default: dequantize} | block_translations()
