"""How an ONNX file stores weights of few bits: with standard operators, or with ONNX Runtime's own.

deploy_weights(graph, storage)    a copy of a graph with block quantizers whose weights are stored as integers
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from compresskit.export.ops.blocks import (
    INDICES,
    LEAST_SHARED,
    dequantize_blocks,
    gather_nbits,
    gather_rows,
    look_up,
    matmul_nbits,
    pack_bits,
    rounded_blocks,
)
from compresskit.export.ops.quantize import dequantize_linear
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import free_name, get_tensor
from compresskit.quant.numerics.block_grid import BlockQuantizer, MatrixQuantizer
from compresskit.quant.numerics.operators import PRODUCTS
from compresskit.quant.numerics.palette import PaletteQuantizer
from compresskit.quant.numerics.quantizers import Quantizer
from compresskit.quant.passes.quantizer_names import add_quantizer_

ROW_BLOCK = 128  # block size of a weight with one scale per row, where the operator knows blocks only


@dataclass(frozen=True, kw_only=True)
class WeightStorage:
    """How an ONNX file stores rounded weights: `DEQUANTIZE_LINEAR`, `MATMUL_NBITS` or `MATMUL_NBITS_INT8`.

    onnxruntime: with ONNX Runtime's own operators, MatMulNBits and GatherBlockQuantized, packed to 2, 4 or 8 bits; False for
        integers of 4 or 8 bits and DequantizeLinear, which every runtime of opset 21 reads.
    int8_inputs: MatMulNBits rounds its inputs to int8, with one scale per block and position, and multiplies in integers, which
        is faster; the PyTorch model does the same.
    """

    onnxruntime: bool = False
    int8_inputs: bool = False

    def stored_bits(self, bits: int) -> int:
        """How many bits a weight of `bits` bits takes in the file."""
        return next(n for n in ((2, 4, 8) if self.onnxruntime else (4, 8)) if bits <= n)

    def decodes_rows(self, quantizer: MatrixQuantizer) -> bool:
        """Whether the rows of a table that are looked up are decoded, not all in every call: what is no whole bytes cannot be."""
        if not isinstance(quantizer, BlockQuantizer) or self.stored_bits(quantizer.scheme.bits) != 4:
            return True
        return self.onnxruntime and quantizer.shape[1] % 2 == 0

    def bytes(self, quantizer: MatrixQuantizer, *, multiplied: bool = True, looked_up: bool = False) -> int:
        """Size of a weight in the file in bytes: integers, scales and zero points; indices and centroids.

        multiplied, looked_up: whether products, and lookups of rows, read it. What both read is stored once where it is the same
            numbers (`export.rewrite.compact`), and enough of them: the integers of MatMulNBits are others where its last block is
            filled up.
        """
        if isinstance(quantizer, PaletteQuantizer):
            return quantizer.stored_bytes
        assert isinstance(quantizer, BlockQuantizer)
        product, table = (self._sizes(quantizer, looked_up=kind) for kind in (False, True))
        if not (multiplied and looked_up):
            return sum(table if looked_up else product)
        packed = self.packs(quantizer, looked_up=False)
        # What is in one shape, too, as scales and zero points of MatMulNBits are, needs no operator.
        least = (LEAST_SHARED, 0 if packed else LEAST_SHARED, 0 if packed else LEAST_SHARED)
        once = [a == b and a >= size for a, b, size in zip(product, table, least, strict=True)]
        once[2] = once[2] and self.packs(quantizer, looked_up=True) == packed
        return sum(product) + sum(size for size, shared in zip(table, once, strict=True) if not shared)

    def packs(self, quantizer: BlockQuantizer, *, looked_up: bool) -> bool:
        """Whether products, or lookups, read a weight with ONNX Runtime's operators; lookups take rows of whole bytes."""
        bits = self.stored_bits(quantizer.scheme.bits)
        return self.onnxruntime and len(quantizer.shape) == 2 and not (looked_up and quantizer.shape[1] * bits % 8)

    def _sizes(self, quantizer: BlockQuantizer, *, looked_up: bool) -> tuple[int, int, int]:
        """Bytes of (integers, scales, zero points) of a weight as products and convolutions, or lookups, read it."""
        scheme, bits = quantizer.scheme, self.stored_bits(quantizer.scheme.bits)
        channels, inputs = quantizer.rows(torch.empty(quantizer.shape, device="meta")).shape
        packed = self.packs(quantizer, looked_up=looked_up)
        bits = bits if packed or bits == 4 else 8
        block = scheme.block_size or (ROW_BLOCK if packed else inputs)
        count = -(-inputs // block)
        points = channels * math.ceil(count * bits / 8) if packed else math.ceil(channels * count * bits / 8)
        if scheme.block_size is None and not packed and not looked_up:
            points = 4 * channels  # floats, see `export.rewrite.constant_weights`
        width = count * block if packed and not looked_up else inputs
        return math.ceil(channels * width * bits / 8), 4 * channels * count, 0 if scheme.symmetric else points


#: Standard ONNX: integers and DequantizeLinear, in blocks. ONNX Runtime fuses it with the product that reads it, and then rounds
#: the inputs in blocks as MatMulNBits does; the session option `session.qdq_matmulnbits_accuracy_level=1` keeps them float.
DEQUANTIZE_LINEAR = WeightStorage()
#: ONNX Runtime's operators MatMulNBits and GatherBlockQuantized, products in float.
MATMUL_NBITS = WeightStorage(onnxruntime=True)
#: The same, with inputs rounded to int8 and products in integers.
MATMUL_NBITS_INT8 = WeightStorage(onnxruntime=True, int8_inputs=True)


class InputQuantizer(Quantizer):
    """Rounds the input of a product as MatMulNBits does: to int8, with one scale per block and position."""

    of_activations = True

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return rounded_blocks(x, self.block) if self.enabled else x


def insert_input_quantizers_(body: fx.GraphModule) -> None:
    """Insert an `InputQuantizer` before every product by a rounded weight."""
    for node in [n for n in body.graph.nodes if n.target in PRODUCTS]:
        place, weight, _ = PRODUCTS[node.target]
        call = node.args[weight]
        module = body.get_submodule(str(call.target)) if isinstance(call, fx.Node) and call.op == "call_module" else None
        if not isinstance(module, BlockQuantizer):
            continue
        path = add_quantizer_(body, f"input_{node.name}", InputQuantizer(module.scheme.block_size or ROW_BLOCK))
        with body.graph.inserting_before(node):
            rounded = body.graph.call_module(path, (node.args[place],))
        rounded.meta = dict(node.args[place].meta)
        node.update_arg(place, rounded)
    body.recompile()


class _StoredWeight(nn.Module):
    """Integers, scales and zero points as buffers; 4-bit ones under the names that `export.blocks.pack_nibbles` knows."""

    def __init__(self, q: Tensor, scale: Tensor, zero_point: Tensor | None, *, narrow: bool = False) -> None:
        super().__init__()
        kind = ("uint4" if q.dtype is torch.uint8 else "int4") if narrow else "integers"
        self.names = (kind, f"zero_point_{kind}")
        self.register_buffer(kind, q)
        self.register_buffer("scale", scale)
        self.register_buffer(self.names[1], zero_point)

    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(integers, scale, zero point)."""
        return getattr(self, self.names[0]), self.scale, getattr(self, self.names[1])  # type: ignore[return-value]


class _DecodedWeight(_StoredWeight):
    """A weight behind DequantizeLinear; block None has one scale for each index of `axis`."""

    def __init__(self, q: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block: int | None, narrow: bool) -> None:
        super().__init__(q, scale, zero_point, narrow=narrow)
        self.axis, self.block = axis, block

    def forward(self) -> Tensor:
        q, scale, zero_point = self.parts()
        if self.block is None:
            return dequantize_linear(q, scale, zero_point, self.axis)
        return dequantize_blocks(q, scale, zero_point, self.axis, self.block)


class _DecodedRows(_StoredWeight):
    """A table of which single rows are decoded."""

    def __init__(self, q: Tensor, scale: Tensor, zero_point: Tensor | None, block: int) -> None:
        super().__init__(q, scale, zero_point)
        self.block = block

    def forward(self, ids: Tensor) -> Tensor:
        return gather_rows(*self.parts(), ids, self.block)


class _MatMulNBits(_StoredWeight):
    """MatMulNBits."""

    def __init__(self, q: Tensor, scale: Tensor, zero_point: Tensor | None, sizes: tuple[int, int, int, int]) -> None:
        super().__init__(q, scale, zero_point)
        self.sizes = sizes

    def forward(self, x: Tensor) -> Tensor:
        return matmul_nbits(x, *self.parts(), *self.sizes)


class _GatherBlockQuantized(_StoredWeight):
    """GatherBlockQuantized."""

    def __init__(self, q: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, block: int) -> None:
        super().__init__(q, scale, zero_point)
        self.bits, self.block = bits, block

    def forward(self, ids: Tensor) -> Tensor:
        return gather_nbits(*self.parts(), ids, self.bits, self.block)


class _LookedUpWeight(nn.Module):
    """A weight as indices into a table of centroids."""

    def __init__(self, indices: Tensor, table: Tensor, places: Tensor) -> None:
        super().__init__()
        for name, value in ((INDICES, indices), ("centroids", table), ("places", places)):
            self.register_buffer(name, value)

    def forward(self) -> Tensor:
        return look_up(self.get_buffer(INDICES), self.get_buffer("centroids"), self.get_buffer("places"))


def deploy_weights(body: fx.GraphModule, storage: WeightStorage) -> fx.GraphModule:
    """Return a copy of a graph with quantized weights in ONNX's terms: weights stored as integers, or indices of a palette."""
    shared = {id(tensor): tensor for tensor in (*body.parameters(), *body.buffers())}  # only read here: a copy would be dropped
    body = copy.deepcopy(body, shared).eval()  # type: ignore[arg-type]
    made: dict[tuple[str, str], str] = {}
    for node in list(body.graph.nodes):
        module = body.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, BlockQuantizer):
            weight = get_tensor(body, node.args[0].target).detach()
            for user in list(node.users):
                _replace_reader(body, node, user, (module, weight, storage), made)
        elif isinstance(module, PaletteQuantizer):
            key = (node.target, "palette")
            if key not in made:
                made[key] = free_name(body, f"{node.target}_palette")
                body.add_submodule(made[key], _LookedUpWeight(*module.stored(get_tensor(body, node.args[0].target).detach())))
            with body.graph.inserting_before(node):
                stored = body.graph.call_module(made[key])
            stored.meta = dict(node.meta)
            node.replace_all_uses_with(stored)
    body.graph.eliminate_dead_code()
    for node in reversed(list(body.graph.nodes)):
        if node.op in ("get_attr", "call_module") and not node.users:
            body.graph.erase_node(node)
    body.recompile()
    body.delete_all_unused_submodules()
    return body


def _replace_reader(
    body: fx.GraphModule,
    call: Node,
    user: Node,
    source: tuple[BlockQuantizer, Tensor, WeightStorage],
    made: dict[tuple[str, str], str],
) -> None:
    """Let one reader of a rounded weight read the stored integers instead."""
    quantizer, weight, storage = source
    kind = "product" if user.target in PRODUCTS else "table" if user.target is aten.embedding.default else "conv"
    path = made.get((call.target, kind))
    if path is None:
        path = made[call.target, kind] = free_name(body, f"{call.target}_{kind}")
        body.add_submodule(path, _stored_weight(quantizer, weight, storage, kind))
    packs = isinstance(body.get_submodule(path), (_MatMulNBits, _GatherBlockQuantized, _DecodedRows))
    graph = body.graph
    with graph.inserting_before(user):
        if kind == "product":
            place = PRODUCTS[user.target][0]
            x = user.args[place]
            if x.op == "call_module" and isinstance(body.get_submodule(x.target), InputQuantizer):
                x = x.args[0]  # the runtime's operator rounds by itself
            new = (
                graph.call_module(path, (x,)) if packs else graph.call_function(aten.matmul.default, (x, graph.call_module(path)))
            )
            bias = user.args[0] if user.target is aten.addmm.default else None
            if user.target is aten.linear.default and len(user.args) > 2:
                bias = user.args[2]
            if bias is not None:
                new = graph.call_function(aten.add.Tensor, (new, bias))
        elif kind == "table":
            ids = user.args[1]
            new = graph.call_module(path, (ids,)) if packs else graph.call_function(
                aten.embedding.default, (graph.call_module(path), ids))  # fmt: skip
        else:
            user.replace_input_with(call, graph.call_module(path))
            return
    new.meta = dict(user.meta)
    user.replace_all_uses_with(new)
    graph.erase_node(user)


def _stored_weight(quantizer: BlockQuantizer, weight: Tensor, storage: WeightStorage, kind: str) -> nn.Module:
    scheme, q = quantizer.scheme, quantizer.integers(weight)
    scale, zero_point = quantizer.scale.clone(), quantizer.zero_point.to(scheme.grid.dtype)
    if storage.packs(quantizer, looked_up=kind == "table"):
        return _packed(quantizer, q, storage, kind)
    narrow = storage.stored_bits(scheme.bits) == 4
    if kind == "conv":
        return _DecodedWeight(q.view(quantizer.shape), scale[:, 0], zero_point[:, 0], 0, None, narrow)
    if kind == "table":
        width = scheme.width(q.shape[1])
        if not narrow:
            return _DecodedRows(q, scale, None if scheme.symmetric else zero_point, width)
        return _DecodedWeight(q, scale, None if scheme.symmetric else zero_point, 1, width, narrow)
    # (inputs, channels): what MatMul reads, and what ONNX Runtime fuses with it.
    q, scale, zero_point = q.T.contiguous(), scale.T.contiguous(), zero_point.T.contiguous()
    if scheme.block_size is None:
        return _DecodedWeight(q, scale[0], zero_point[0], 1, None, narrow)
    return _DecodedWeight(q, scale, None if scheme.symmetric else zero_point, 0, scheme.block_size, narrow)


def _packed(quantizer: BlockQuantizer, q: Tensor, storage: WeightStorage, kind: str) -> nn.Module:
    """Pack a weight for ONNX Runtime's own operators: unsigned, 2, 4 or 8 bits, zero in the middle of a symmetric grid."""
    scheme, inputs = quantizer.scheme, q.shape[1]
    bits, block = storage.stored_bits(scheme.bits), scheme.block_size or ROW_BLOCK
    middle = 2 ** (bits - 1) if scheme.symmetric else 0
    count = -(-inputs // block)
    scale = quantizer.scale if scheme.block_size else quantizer.scale.expand(-1, count)
    zero = quantizer.zero_point if scheme.block_size else quantizer.zero_point.expand(-1, count)
    points = None if scheme.symmetric else pack_bits(zero, bits)
    unsigned = q.to(torch.int32) + middle
    if kind == "table":
        return _GatherBlockQuantized(pack_bits(unsigned, bits), scale.contiguous(), points, bits, block)
    fill = zero[:, -1:] + middle  # the padding after the last input decodes to zero
    unsigned = torch.cat([unsigned, fill.expand(-1, count * block - inputs)], 1).unflatten(1, (count, block))
    return _MatMulNBits(
        pack_bits(unsigned, bits), scale.contiguous(), points, (inputs, bits, block, 4 if storage.int8_inputs else 1)
    )
