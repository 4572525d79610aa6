"""Store integers of few bits packed: int4 (opset 21) and int2 (opset 25).

int8 initializer whose values fit   -> int4 or int2 initializer, Cast to int8

A runtime computes the Cast of a constant once, when it loads the file, so its integer kernels of 8 bits run as before. Reading
int4 in DequantizeLinear takes ONNX Runtime 1.31 back to a float convolution, and it does not read int2 there.
"""

from __future__ import annotations

import ml_dtypes
import onnx_ir as ir

from compresskit.base.errors import ExportError
from compresskit.export.rewrite.opset import first_unknown

SMALLEST_PACKED = 64  # values below which the Cast takes more bytes than packing saves
INT4_OPSET, INT2_OPSET = 21, 25


def knows_int2() -> bool:
    """Whether the installed onnx and onnx-ir have the type int2."""
    from onnx import TensorProto

    return hasattr(TensorProto, "INT2") and hasattr(ir.DataType, "INT2") and hasattr(ml_dtypes, "int2")


def pack_few_bits(model: ir.Model, opset: int) -> None:
    """Store int8 initializers in the narrowest type of an opset that holds their values."""
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.dtype is not ir.DataType.INT8 or tensor.size < SMALLEST_PACKED or value.is_graph_output():
            continue
        integers = tensor.numpy()
        kind = _narrowest(int(integers.min()), int(integers.max()), opset)
        if kind is None:
            continue
        packed = ir.tensor(integers.astype(kind), name=name)
        stored = ir.Value(name=name, shape=value.shape, type=ir.TensorType(packed.dtype), const_value=packed)
        cast = ir.Node("", "Cast", [stored], {"to": ir.AttrInt64("to", ir.DataType.INT8.value)})
        cast.outputs[0].name = f"{name}_int8"
        cast.outputs[0].shape, cast.outputs[0].type = value.shape, value.type
        model.graph.insert_before(model.graph[0], cast)
        value.replace_all_uses_with(cast.outputs[0])
        del model.graph.initializers[name]
        model.graph.register_initializer(stored)


def _narrowest(low: int, high: int, opset: int) -> type | None:
    if opset >= INT2_OPSET and low >= -2 and high <= 1 and knows_int2():
        return ml_dtypes.int2
    return ml_dtypes.int4 if opset >= INT4_OPSET and low >= -8 and high <= 7 else None


def raise_opset_(model: ir.Model, opset: int) -> None:
    """Declare a newer opset than torch's exporter writes, in place.

    Raises ExportError where an operator has another form in it.
    """
    from onnx import helper

    if unknown := first_unknown(model, opset):
        raise ExportError(unknown)
    model.graph.opset_imports[""] = opset
    known = {version: ir_version for (domain, version), ir_version in helper.OP_SET_ID_VERSION_MAP.items() if domain == "ai.onnx"}
    if opset not in known:
        raise ExportError(f"opset {opset} needs a newer onnx: the installed one knows {max(known)}")
    model.ir_version = known[opset]
