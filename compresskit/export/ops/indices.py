"""Indices of int32, which torch takes everywhere: ONNX's operators for several dimensions at once want int64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def index_translations() -> dict[Any, Any]:
    """Operator -> function that writes it with onnxscript, as torch's exporter does of indices of int64.

    Some operators come to these only when torch's exporter decomposes them, so that a rewrite of the captured graph is too early:
    `torch.istft` has indices of int32 that no code of the user made.
    """
    import onnx_ir as ir  # heavy, and only exporting needs them
    from onnxscript import opset18 as op
    from onnxscript.function_libs.torch_lib.ops.core import aten_index, aten_index_put

    def taken(index):  # type: ignore[no-untyped-def]
        if index is None or index.dtype != ir.DataType.INT32:
            return index
        wide: Any = op.Cast(index, to=ir.DataType.INT64)
        wide.shape, wide.dtype = index.shape, ir.DataType.INT64  # which the exporter asks for, and infers of no operator
        return wide

    def index(x, indices: Sequence[Any]):  # type: ignore[no-untyped-def]
        return aten_index(x, [taken(index) for index in indices])  # type: ignore[no-untyped-call]

    def index_put(x, indices: Sequence[Any], values, accumulate: bool = False):  # type: ignore[no-untyped-def]
        return aten_index_put(x, [taken(index) for index in indices], values, accumulate)  # type: ignore[no-untyped-call]

    aten = torch.ops.aten
    return {
        aten.index.Tensor: index,
        aten._unsafe_index.Tensor: index,
        aten.index_put.default: index_put,
        aten._unsafe_index_put.default: index_put,
    }
