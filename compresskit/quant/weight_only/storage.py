"""How a file holds matrices that lie on grids: in standard operators, or in ONNX Runtime's own."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from compresskit.export.ops.blocks import dequantize_blocks, gather_nbits, gather_rows, matmul_nbits, pack_bits, rounded_blocks
from compresskit.export.ops.quantize import dequantize_linear
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor
from compresskit.quant.numerics.block_grid import BlockQuantizer
from compresskit.quant.numerics.operators import PRODUCTS
from compresskit.quant.numerics.quantizers import Quantizer

ROW = 128  # block size of a matrix with a scale for each row, where a runtime knows blocks only


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a file holds matrices.

    runtime: in ONNX Runtime's own operators, MatMulNBits and GatherBlockQuantized, packed to 2, 4 or 8 bits; else integers of
        4 or 8 bits behind DequantizeLinear, which every runtime of opset 21 reads.
    integers: MatMulNBits may round its inputs to int8, each block of each position to its own scale, and multiply in integers,
        which is faster; the model does the same.
    """

    runtime: bool = False
    integers: bool = False

    def stored_bits(self, bits: int) -> int:
        """Bits that an integer takes in the file."""
        return next(n for n in ((2, 4, 8) if self.runtime else (4, 8)) if bits <= n)

    def bytes(self, quantizer: BlockQuantizer) -> int:
        """Of a matrix in the file: integers, scales, zero points."""
        channels, inputs = quantizer.rows(torch.empty(quantizer.shape, device="meta")).shape
        bits, count = self.stored_bits(quantizer.blocks.bits), quantizer.scale.numel()
        if self.runtime and len(quantizer.shape) == 2:
            block = quantizer.blocks.block or ROW
            inputs = -(-inputs // block) * block
            count = channels * inputs // block
        zero_points = 0 if quantizer.blocks.symmetric else math.ceil(count * bits / 8)
        return math.ceil(channels * inputs * bits / 8) + 4 * count + zero_points


#: DequantizeLinear, in blocks; ONNX Runtime fuses it with the product behind it, and then rounds inputs in blocks as MatMulNBits
#: does (the session option `session.qdq_matmulnbits_accuracy_level` set to 1 keeps them in float).
DECODED = Form()
#: ONNX Runtime's operators, products in float.
NBITS = Form(runtime=True)
#: The same, products in integers.
NBITS_INT8 = Form(runtime=True, integers=True)


class InputQuantizer(Quantizer):
    """Rounds what a product reads as MatMulNBits does: each block of each position to its own int8 grid."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return rounded_blocks(x, self.block) if self.enabled else x


def insert_inputs_(body: fx.GraphModule) -> None:
    """Put an `InputQuantizer` before every product by a rounded matrix."""
    for node in [n for n in body.graph.nodes if n.target in PRODUCTS]:
        place, weight, _ = PRODUCTS[node.target]
        call = node.args[weight]
        module = body.get_submodule(str(call.target)) if isinstance(call, fx.Node) and call.op == "call_module" else None
        if not isinstance(module, BlockQuantizer):
            continue
        path = f"quantizers.input_{node.name}"
        body.add_submodule(path, InputQuantizer(module.blocks.block or ROW))
        with body.graph.inserting_before(node):
            rounded = body.graph.call_module(path, (node.args[place],))
        rounded.meta = dict(node.args[place].meta)
        node.update_arg(place, rounded)
    body.recompile()


class _Stored(nn.Module):
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


class _Decoded(_Stored):
    """A weight behind DequantizeLinear; block None has one scale for each index of `axis`."""

    def __init__(self, q: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block: int | None, narrow: bool) -> None:
        super().__init__(q, scale, zero_point, narrow=narrow)
        self.axis, self.block = axis, block

    def forward(self) -> Tensor:
        q, scale, zero_point = self.parts()
        if self.block is None:
            return dequantize_linear(q, scale, zero_point, self.axis)
        return dequantize_blocks(q, scale, zero_point, self.axis, self.block)


class _Rows(_Stored):
    """A table of which single rows are decoded."""

    def __init__(self, q: Tensor, scale: Tensor, zero_point: Tensor | None, block: int) -> None:
        super().__init__(q, scale, zero_point)
        self.block = block

    def forward(self, ids: Tensor) -> Tensor:
        return gather_rows(*self.parts(), ids, self.block)


class _Product(_Stored):
    """MatMulNBits."""

    def __init__(self, q: Tensor, scale: Tensor, zero_point: Tensor | None, sizes: tuple[int, int, int, int]) -> None:
        super().__init__(q, scale, zero_point)
        self.sizes = sizes

    def forward(self, x: Tensor) -> Tensor:
        return matmul_nbits(x, *self.parts(), *self.sizes)


class _Table(_Stored):
    """GatherBlockQuantized."""

    def __init__(self, q: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, block: int) -> None:
        super().__init__(q, scale, zero_point)
        self.bits, self.block = bits, block

    def forward(self, ids: Tensor) -> Tensor:
        return gather_nbits(*self.parts(), ids, self.bits, self.block)


def deploy_weights(body: fx.GraphModule, form: Form) -> fx.GraphModule:
    """A copy of a graph with block quantizers, in ONNX's terms."""
    shared = {id(tensor): tensor for tensor in (*body.parameters(), *body.buffers())}  # only read here: a copy would be dropped
    body = copy.deepcopy(body, shared).eval()  # type: ignore[arg-type]
    made: dict[tuple[str, str], str] = {}
    for node in list(body.graph.nodes):
        module = body.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, BlockQuantizer):
            weight = get_tensor(body, node.args[0].target).detach()
            for user in list(node.users):
                _read(body, node, user, (module, weight, form), made)
    body.graph.eliminate_dead_code()
    for node in reversed(list(body.graph.nodes)):
        if node.op in ("get_attr", "call_module") and not node.users:
            body.graph.erase_node(node)
    body.recompile()
    body.delete_all_unused_submodules()
    return body


def _read(
    body: fx.GraphModule,
    call: Node,
    user: Node,
    held: tuple[BlockQuantizer, Tensor, Form],
    made: dict[tuple[str, str], str],
) -> None:
    """Let one reader of a weight read its stored form."""
    quantizer, weight, form = held
    kind = "product" if user.target in PRODUCTS else "table" if user.target is aten.embedding.default else "conv"
    path = made.get((call.target, kind))
    if path is None:
        path = made[call.target, kind] = f"{call.target}_{kind}"
        body.add_submodule(path, _stored(quantizer, weight, form, kind))
    packs = isinstance(body.get_submodule(path), (_Product, _Table, _Rows))
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


def _stored(quantizer: BlockQuantizer, weight: Tensor, form: Form, kind: str) -> nn.Module:
    blocks, q = quantizer.blocks, quantizer.integers(weight)
    scale, zero_point = quantizer.scale.clone(), quantizer.zero_point.to(blocks.scheme.dtype)
    whole = kind != "table" or q.shape[1] * form.stored_bits(blocks.bits) % 8 == 0  # rows of whole bytes
    if form.runtime and kind != "conv" and whole:
        return _packed(quantizer, q, form, kind)
    narrow = form.stored_bits(blocks.bits) == 4
    given = zero_point
    if kind == "conv":
        return _Decoded(q.view(quantizer.shape), scale[:, 0], given[:, 0], 0, None, narrow)
    if kind == "table":
        width = blocks.width(q.shape[1])
        if not narrow:
            return _Rows(q, scale, None if blocks.symmetric else given, width)
        return _Decoded(q, scale, None if blocks.symmetric else given, 1, width, narrow)
    # (inputs, channels): what MatMul reads, and what ONNX Runtime fuses with it.
    q, scale, given = q.T.contiguous(), scale.T.contiguous(), given.T.contiguous()
    if blocks.block is None:
        return _Decoded(q, scale[0], given[0], 1, None, narrow)
    return _Decoded(q, scale, None if blocks.symmetric else given, 0, blocks.block, narrow)


def _packed(quantizer: BlockQuantizer, q: Tensor, form: Form, kind: str) -> nn.Module:
    """For the runtime's own operators: unsigned, 2, 4 or 8 bits, the middle of the grid where zero is."""
    blocks, inputs = quantizer.blocks, q.shape[1]
    bits, block = form.stored_bits(blocks.bits), blocks.block or ROW
    middle = 2 ** (bits - 1) if blocks.symmetric else 0
    count = -(-inputs // block)
    scale = quantizer.scale if blocks.block else quantizer.scale.expand(-1, count)
    zero = quantizer.zero_point if blocks.block else quantizer.zero_point.expand(-1, count)
    points = None if blocks.symmetric else pack_bits(zero, bits)
    unsigned = q.to(torch.int32) + middle
    if kind == "table":
        return _Table(pack_bits(unsigned, bits), scale.contiguous(), points, bits, block)
    fill = zero[:, -1:] + middle  # what is beyond the last input counts nothing, whatever it is
    unsigned = torch.cat([unsigned, fill.expand(-1, count * block - inputs)], 1).unflatten(1, (count, block))
    return _Product(pack_bits(unsigned, bits), scale.contiguous(), points, (inputs, bits, block, 4 if form.integers else 1))
