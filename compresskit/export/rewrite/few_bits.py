"""Store integers of few bits packed, in the narrowest form of an opset that holds their values.

4 bits        int4 (opset 21), Cast to int8
2 bits        int2 (opset 25), Cast to int8, where the runtime reads it
1, 3, 5, 6    bit planes (opset 18), see `bit_planes.py`; 2 and 4 bits, too, where there is no type for them
7, 8 bits     int8

A runtime computes what follows from constants once, when it loads the file, so its integer kernels of 8 bits run as before.
Reading int4 in DequantizeLinear takes ONNX Runtime 1.31 back to a float convolution, and it does not read int2 there.
"""

from __future__ import annotations

from collections import defaultdict

import ml_dtypes
import onnx_ir as ir

from compresskit.base.errors import ExportError
from compresskit.export.rewrite.bit_planes import PLANES_OPSET, Packed, bits_needed, store_bit_planes
from compresskit.export.rewrite.opset import first_unknown

SMALLEST_PACKED = 64  # values below which the Cast takes more bytes than packing saves
LEAST_SAVED = 800  # bytes that the bit planes of one width must save: the operators that read them take about as many
MOST_PACKED = 6  # bits: an eighth less is not worth a file that other tools cannot read weights from
INT4_OPSET, INT2_OPSET = 21, 25


def knows_int2() -> bool:
    """Whether the installed onnx and onnx-ir have the type int2."""
    from onnx import TensorProto

    return hasattr(TensorProto, "INT2") and hasattr(ir.DataType, "INT2") and hasattr(ml_dtypes, "int2")


def pack_few_bits(model: ir.Model, opset: int, *, ending: str = "", int2: bool = True) -> None:
    """Store int8 initializers whose names end in `ending` in the narrowest form of an opset that holds their values.

    int2: whether the runtime reads constants of 2 bits.
    """
    types = {4: ml_dtypes.int4} if opset >= INT4_OPSET else {}
    types |= {2: ml_dtypes.int2} if int2 and opset >= INT2_OPSET and knows_int2() else {}
    planes: dict[int, list[Packed]] = defaultdict(list)
    for value in [v for name, v in model.graph.initializers.items() if name.endswith(ending)]:
        tensor = value.const_value
        if tensor is None or tensor.dtype is not ir.DataType.INT8 or tensor.size < SMALLEST_PACKED or value.is_graph_output():
            continue
        found = Packed(value, tensor.numpy(), bits_needed(tensor.numpy()))
        if found.bits in types:
            _store_as(model, found, types[found.bits])
        elif found.bits <= MOST_PACKED:
            planes[found.bits].append(found)
    for bits, alike in sorted(planes.items()):
        kind = types.get(4) if bits < 4 else None
        otherwise = 8 if kind is None else 4
        saved = sum(found.integers.size for found in alike) * (otherwise - bits) // 8
        if opset >= PLANES_OPSET and saved >= LEAST_SAVED:
            store_bit_planes(model, alike)
        elif kind is not None:
            for found in alike:
                _store_as(model, found, kind)


def _store_as(model: ir.Model, tensor: Packed, kind: type) -> None:
    """Store an initializer in a narrower type, with a Cast to int8 behind it."""
    value, name = tensor.value, str(tensor.value.name)
    packed, shape = ir.tensor(tensor.integers.astype(kind), name=name), ir.Shape(tensor.integers.shape)
    stored = ir.Value(name=name, shape=shape, type=ir.TensorType(packed.dtype), const_value=packed)
    cast = ir.Node("", "Cast", [stored], {"to": ir.AttrInt64("to", ir.DataType.INT8.value)})
    cast.outputs[0].name = f"{name}_int8"
    cast.outputs[0].shape, cast.outputs[0].type = shape, value.type
    model.graph.insert_before(model.graph[0], cast)
    value.replace_all_uses_with(cast.outputs[0])
    del model.graph.initializers[name]
    model.graph.register_initializer(stored)


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
