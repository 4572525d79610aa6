"""Translations for torch's ONNX exporter: of this library's operators, and of some that it translates otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import compresskit.export.ops.lstm
import compresskit.export.ops.quantize  # noqa: F401  these two make the operators

DOMAIN = "compresskit"  # of operators that `rewrite.recurrent` replaces before the file is written


def translations() -> dict[Any, Any]:
    """Operator -> function that writes it with onnxscript."""
    from onnxscript import opset20 as op  # heavy, and only exporting needs it

    from compresskit.export.ops.blocks import block_translations
    from compresskit.export.ops.deformable import deformable_translations
    from compresskit.export.ops.elementary import elementary_translations
    from compresskit.export.ops.indices import index_translations
    from compresskit.export.ops.sizes import size_translations

    def quantize(x, scale, zero_point):  # type: ignore[no-untyped-def]
        return op.QuantizeLinear(x, scale, zero_point)

    def dequantize(q, scale, zero_point, axis: int):  # type: ignore[no-untyped-def]
        return op.DequantizeLinear(q, scale, zero_point, axis=axis)

    def dynamic(x):  # type: ignore[no-untyped-def]
        return op.DynamicQuantizeLinear(x)

    def matmul(a, b, zero_point, b_zero_point=None):  # type: ignore[no-untyped-def]
        return op.MatMulInteger(a, b, zero_point, b_zero_point)

    def conv(  # type: ignore[no-untyped-def]
        x, weight, zero_point, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
    ):
        pads = [*padding, *padding]
        return op.ConvInteger(x, weight, zero_point, strides=stride, pads=pads, dilations=dilation, group=groups)

    table = torch.ops.compresskit
    return {
        table.quantize_linear.default: quantize,
        table.dequantize_linear.default: dequantize,
        table.dynamic_quantize.default: dynamic,
        table.matmul_integer.default: matmul,
        table.conv_integer.default: conv,
        **_recurrent_translations(),
        **block_translations(),
        **deformable_translations(),
        **elementary_translations(),
        **index_translations(),
        **size_translations(),
    }


def _recurrent_translations() -> dict[Any, Any]:
    """The same for recurrent layers."""
    from onnxscript.values import Opset

    _register()
    own = Opset(DOMAIN, 1)

    def recurrent(  # type: ignore[no-untyped-def]
        x,
        state: Sequence[Any],
        weights: Sequence[Any],
        kind: str,
        has_biases: bool,
        layers: int,
        bidirectional: bool,
        batch_first: bool,
    ):
        flags = {"has_biases": int(has_biases), "bidirectional": int(bidirectional), "batch_first": int(batch_first)}
        return own.Recurrent(x, *state, *weights, kind=kind, layers=layers, integer=0, **flags)

    def dynamic_lstm(  # type: ignore[no-untyped-def]
        x,
        state: Sequence[Any],
        weights: Sequence[Any],
        has_biases: bool,
        layers: int,
        bidirectional: bool,
        batch_first: bool,
        floating: Sequence[int],  # the weights of these layers are no integers, which says the same
    ):
        flags = {"has_biases": int(has_biases), "bidirectional": int(bidirectional), "batch_first": int(batch_first)}
        return own.Recurrent(x, *state, *weights, kind="lstm", layers=layers, integer=1, **flags)

    table = torch.ops.compresskit
    return {table.recurrent.default: recurrent, table.dynamic_lstm.default: dynamic_lstm}


def _register() -> None:
    """Register the schema of the operator that represents a recurrent layer: torch's exporter only writes operators with one."""
    import onnx

    if onnx.defs.has("Recurrent", DOMAIN):
        return
    schema = onnx.defs.OpSchema
    many = schema.FormalParameterOption.Variadic
    attributes = [schema.Attribute("kind", schema.AttrType.STRING)]
    names = ("has_biases", "layers", "bidirectional", "batch_first", "integer")
    attributes += [schema.Attribute(name, schema.AttrType.INT) for name in names]
    onnx.defs.register_schema(
        schema(
            "Recurrent",
            DOMAIN,
            1,
            inputs=[schema.FormalParameter("inputs", "T", param_option=many, is_homogeneous=False)],
            outputs=[schema.FormalParameter(name, "T") for name in ("y", "h", "c")],
            type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(double)"], "")],
            attributes=attributes,
        )
    )
