"""Torch operators for block-wise quantized weights, their translation to ONNX, and the packing of 4-bit integers.

dequantize_blocks   DequantizeLinear with a block size (opset 21)
look_up             Gather of centroids (palettes); `rewrite.palettes` writes it
gather_rows         Gather of integers and of their scales, then DequantizeLinear: only the selected rows are dequantized
matmul_nbits        com.microsoft MatMulNBits     gather_nbits     com.microsoft GatherBlockQuantized

torch has no 4-bit type: such integers go through it as int8 or uint8 buffers named `int4` or `uint4`, and `pack_nibbles` stores
them in half the bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

INDICES = "palette_indices"  # how the name of a buffer of indices into a palette ends
PALETTE_OPERATOR = "Palette"  # name of the operator that `rewrite.palettes` replaces before the file is written
NARROW = "int4"  # how the name of a 4-bit buffer ends, with a `u` before it or without
LEAST_SHARED = 1024  # bytes of what `rewrite.compact` stores once for a lookup and a product: fewer are not worth an operator


def repeat_blocks(values: Tensor, axis: int, block: int, size: int) -> Tensor:
    """Repeat values `block` times along `axis`, and cut the result to `size`: one value per block to one per index."""
    return values.repeat_interleave(block, axis).narrow(axis, 0, size)


@torch.library.custom_op("compresskit::dequantize_blocks", mutates_args=())
def dequantize_blocks(q: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block: int) -> Tensor:
    """Integers to fp32: (q - zero_point) * scale, with one entry for each `block` neighbours along `axis`; the last may be
    shorter.
    """
    size = q.shape[axis]
    shift = 0 if zero_point is None else repeat_blocks(zero_point.to(torch.int32), axis, block, size)
    return (q.to(torch.int32) - shift).float() * repeat_blocks(scale, axis, block, size)


@dequantize_blocks.register_fake
def _dequantize_blocks_shape(q: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block: int) -> Tensor:
    return torch.empty_like(q, dtype=torch.float32)


@torch.library.custom_op("compresskit::look_up", mutates_args=())
def look_up(indices: Tensor, table: Tensor, places: Tensor) -> Tensor:
    """Entries table[indices + places], fp32 in the shape of `indices` (int8); see `PaletteQuantizer.stored`."""
    return table[indices.to(torch.int32) + places]


@look_up.register_fake
def _look_up_shape(indices: Tensor, table: Tensor, places: Tensor) -> Tensor:
    return torch.empty_like(indices, dtype=torch.float32)


@torch.library.custom_op("compresskit::gather_rows", mutates_args=())
def gather_rows(q: Tensor, scale: Tensor, zero_point: Tensor | None, ids: Tensor, block: int) -> Tensor:
    """Rows `ids` of a table (words, width) as fp32, (*ids, width)."""
    shift = None if zero_point is None else F.embedding(ids, zero_point)
    return dequantize_blocks(F.embedding(ids, q), F.embedding(ids, scale), shift, ids.ndim, block)


@gather_rows.register_fake
def _gather_rows_shape(q: Tensor, scale: Tensor, zero_point: Tensor | None, ids: Tensor, block: int) -> Tensor:
    return torch.empty((*ids.shape, q.shape[1]), dtype=torch.float32, device=q.device)


def unpack_bits(pack_bits: Tensor, bits: int) -> Tensor:
    """Bytes (..., n) to integers (..., n * 8 / bits), the lowest bits first."""
    parts = [(pack_bits >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2)


def pack_bits(integers: Tensor, bits: int) -> Tensor:
    """The reverse of `unpacked`; the last byte is filled up with zeros."""
    many = 8 // bits
    integers = F.pad(integers, (0, -integers.shape[-1] % many)).unflatten(-1, (-1, many)).to(torch.int32)
    shifts = torch.arange(0, 8, bits, device=integers.device)
    return (integers << shifts).sum(-1).to(torch.uint8)


@torch.library.custom_op("compresskit::matmul_nbits", mutates_args=())
def matmul_nbits(
    x: Tensor, q: Tensor, scale: Tensor, zero_point: Tensor | None, inputs: int, bits: int, block: int, accuracy: int
) -> Tensor:
    """X (..., inputs) times a weight of (channels, inputs), stored as q (channels, blocks, bytes of a block).

    scale: (channels, blocks). zero_point: (channels, bytes of all blocks), pack_bits as q; None for the middle of the grid.
    accuracy: 4 where the runtime may round x to int8, each block of it to its own scale; see `rounded_blocks`.
    """
    integers = unpack_bits(q, bits).int()
    middle = 2 ** (bits - 1)
    shift = middle if zero_point is None else unpack_bits(zero_point, bits)[:, : q.shape[1], None].int()
    weight = ((integers - shift).float() * scale[..., None]).flatten(1)[:, :inputs]
    return (rounded_blocks(x, block) if accuracy == 4 else x) @ weight.T


@matmul_nbits.register_fake
def _matmul_nbits_shape(
    x: Tensor, q: Tensor, scale: Tensor, zero_point: Tensor | None, inputs: int, bits: int, block: int, accuracy: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], q.shape[0]))


def rounded_blocks(x: Tensor, block: int) -> Tensor:
    """X (..., inputs) with each block of each row on its own int8 grid of [-127, 127]: what MatMulNBits multiplies in integers.

    The gradient passes straight through.
    """
    values = F.pad(x.detach(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
    scale = values.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, scale.reciprocal(), torch.zeros_like(scale))
    rounded = (torch.round(values * inverse) * scale).flatten(-2)[..., : x.shape[-1]]
    return x + (rounded - x.detach()) if x.requires_grad else rounded


@torch.library.custom_op("compresskit::gather_nbits", mutates_args=())
def gather_nbits(q: Tensor, scale: Tensor, zero_point: Tensor | None, ids: Tensor, bits: int, block: int) -> Tensor:
    """Rows `ids` of a table stored as pack_bits bytes (words, width * bits / 8), as fp32; `zero_point` is pack_bits, too."""
    integers = unpack_bits(F.embedding(ids, q), bits).int()
    width, count = integers.shape[-1], scale.shape[1]
    shift: Any = 2 ** (bits - 1)
    if zero_point is not None:
        shift = repeat_blocks(unpack_bits(F.embedding(ids, zero_point), bits)[..., :count].int(), ids.ndim, block, width)
    return (integers - shift).float() * repeat_blocks(F.embedding(ids, scale), ids.ndim, block, width)


@gather_nbits.register_fake
def _gather_nbits_shape(q: Tensor, scale: Tensor, zero_point: Tensor | None, ids: Tensor, bits: int, block: int) -> Tensor:
    return torch.empty((*ids.shape, q.shape[1] * 8 // bits), dtype=torch.float32, device=q.device)


def block_translations() -> dict[Any, Any]:
    """Translations of these operators for torch's ONNX exporter."""
    from onnxscript import opset21 as op  # heavy, and only exporting needs it

    product = _runtime_operator("MatMulNBits", ("A", "B", "scales"), ("K", "N", "bits", "block_size", "accuracy_level"))
    lookup = _runtime_operator(
        "GatherBlockQuantized", ("data", "indices", "scales"), ("gather_axis", "quantize_axis", "bits", "block_size")
    )

    palette = _palette_operator()

    def look_up_centroids(indices, table, places):  # type: ignore[no-untyped-def]
        return palette(indices, table, places)

    def dequantize(q, scale, zero_point, axis: int, block: int):  # type: ignore[no-untyped-def]
        return op.DequantizeLinear(q, scale, zero_point, axis=axis, block_size=block)

    def gather(q, scale, zero_point, ids, block: int):  # type: ignore[no-untyped-def]
        rows = [None if table is None else op.Gather(table, ids, axis=0) for table in (q, scale, zero_point)]
        return op.DequantizeLinear(*rows, axis=-1, block_size=block)  # type: ignore[type-var]

    def matmul(x, q, scale, zero_point, inputs: int, bits: int, block: int, accuracy: int):  # type: ignore[no-untyped-def]
        channels = q.shape[0]
        sizes = {"K": inputs, "N": int(channels), "bits": bits, "block_size": block, "accuracy_level": accuracy}
        return product(x, q, scale, zero_point, **sizes)

    def gather_packed(q, scale, zero_point, ids, bits: int, block: int):  # type: ignore[no-untyped-def]
        sizes = {"gather_axis": 0, "quantize_axis": 1, "bits": bits, "block_size": block}
        return lookup(q, ids, scale, zero_point, **sizes)

    table = torch.ops.compresskit
    return {
        table.look_up.default: look_up_centroids,
        table.dequantize_blocks.default: dequantize,
        table.gather_rows.default: gather,
        table.matmul_nbits.default: matmul,
        table.gather_nbits.default: gather_packed,
    }


def _palette_operator() -> Any:
    """Our operator for a palette, until `rewrite.palettes`: the exporter would compute a Gather of constants."""
    from onnx import defs
    from onnxscript import values

    schema = defs.OpSchema
    made = schema(
        PALETTE_OPERATOR,
        "compresskit",
        1,
        inputs=[schema.FormalParameter(name, kind) for name, kind in (("indices", "I"), ("table", "T"), ("places", "P"))],
        outputs=[schema.FormalParameter("weight", "T")],
        type_constraints=[("I", ["tensor(int8)"], ""), ("T", ["tensor(float)"], ""), ("P", ["tensor(int32)"], "")],
    )
    return values.Op(values.Opset("compresskit", 1), PALETTE_OPERATOR, made)


def _runtime_operator(name: str, inputs: tuple[str, ...], sizes: tuple[str, ...]) -> Any:
    """An operator of ONNX Runtime that onnx has no schema of: its inputs, then optional zero points."""
    from onnx import defs
    from onnxscript import values

    schema = defs.OpSchema
    kinds = ["tensor(float)", "tensor(uint8)", "tensor(int32)", "tensor(int64)"]
    given = [schema.FormalParameter(n, f"T{i}") for i, n in enumerate(inputs)]
    given.append(schema.FormalParameter("zero_points", "T1", param_option=schema.FormalParameterOption.Optional))
    made = schema(
        name,
        "com.microsoft",
        1,
        inputs=given,
        outputs=[schema.FormalParameter("Y", f"T{len(inputs)}")],
        type_constraints=[(f"T{i}", kinds, "") for i in range(len(inputs) + 1)],
        attributes=[schema.Attribute(size, schema.AttrType.INT, required=False) for size in sizes],
    )
    return values.Op(values.Opset("com.microsoft", 1), name, made)


def pack_nibbles(model: Any) -> None:
    """Store the integers of an onnx-ir model whose names end in `int4` or `uint4` in 4 bits each.

    torch's exporter merges equal tensors of up to 1024 values, whatever they are called: what something reads as bytes, too, such
    as packed zero points, stays as it is and gets a copy of 4 bits; and integers that lost their name to others are decoded with
    a part that has its own.
    """
    made: dict[int, Any] = {}
    decoders = [node for node in model.graph.all_nodes() if node.op_type == "DequantizeLinear"]
    decoders = [node for node in decoders if _decodes_nibbles(node)]
    inputs = {(id(node), index) for node in decoders for index in (0, 2)}
    for node in decoders:
        for index, value in _integer_inputs(node):
            if id(value) not in made:
                alone = all((id(user), place) in inputs for user, place in value.uses())
                made[id(value)] = _stored_in_nibbles(model.graph, value, copied=not alone)
            node.replace_input_with(index, made[id(value)])


def _integer_inputs(node: Any) -> list[tuple[int, Any]]:
    """The integers and zero points of a DequantizeLinear, each with its place."""
    return [(i, node.inputs[i]) for i in (0, 2) if i < len(node.inputs) and node.inputs[i] is not None]


def _decodes_nibbles(node: Any) -> bool:
    """Whether a DequantizeLinear reads integers or zero points of 4 bits, and all that it reads fits them."""
    values = [value for _, value in _integer_inputs(node)]
    if not any(str(value.name).endswith(NARROW) for value in values) or not all(value.is_initializer() for value in values):
        return False
    arrays = [value.const_value.numpy() for value in values]
    ends = {np.dtype(np.uint8): (0, 15), np.dtype(np.int8): (-8, 7)}
    return all(a.dtype in ends and (not a.size or (ends[a.dtype][0] <= a.min() and a.max() <= ends[a.dtype][1])) for a in arrays)


def _stored_in_nibbles(graph: Any, value: Any, *, copied: bool) -> Any:
    """An initializer of bytes in 4 bits each: itself, or a copy."""
    import ml_dtypes
    import onnx_ir as ir  # heavy, and only exporting needs it

    array = np.asarray(value.const_value.numpy())
    name = str(value.name)
    while copied and name in graph.initializers:
        name = f"nibbles_of_{name}"
    tensor = ir.tensor(array.astype(ml_dtypes.uint4 if array.dtype == np.uint8 else ml_dtypes.int4), name=name)
    if copied:
        value = ir.Value(name=name, shape=value.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.register_initializer(value)
    else:
        value.const_value, value.type = tensor, ir.TensorType(tensor.dtype)
    return value
