"""Attention of queries whose mask leaves them no key: 0 in the file as in torch, whichever operators the file is written in.

`scaled_dot_product_attention` gives 0 where a mask is False, or -inf, for every key: of a padded query before the first token,
of a memory without entries. Softmax, which the exporter writes up to opset 22, gives the mean of all values there, or NaN; so do
older kernels of ONNX's Attention. Newer ones give 0, but also where a mask of floats has the lowest number of its dtype for
every key, of which torch gives the mean.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from compresskit.graph.layers.stored import LAYOUT_OPERATORS
from compresskit.graph.normalize import IDENTITIES, Node, aten, insert_call, is_inplace

_HAS_ATTENTION = 23  # the first opset that has Attention
_PRODUCT_ATTENTION = aten.scaled_dot_product_attention.default
_FARTHEST = 64  # operators that are looked through
_SAME = frozenset({*IDENTITIES, aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.expand.default})
_CHOICES = frozenset({aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar})
#: Operators that make a tensor of one number -> that number.
_FILLED: dict[Any, Callable[[Node], Any]] = {
    aten.full.default: lambda node: node.args[1],
    aten.full_like.default: lambda node: node.args[1],
    aten.new_full.default: lambda node: node.args[2],
    aten.scalar_tensor.default: lambda node: node.args[0],
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda node: 1),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), lambda node: 0),
}


def keep_rows_without_keys_(program: ExportedProgram, opset: int) -> None:
    """Make attention 0 where a query has no key, in place, by an operator behind it wherever a mask may leave a query none.

    Args:
        program: what a file is written of.
        opset: that the exporter writes. From 23 on, the lowest number in a mask of floats becomes the next higher one.
    """
    graph = program.graph_module.graph
    masks: dict[Node, tuple[Node, Node | None]] = {}
    for node in graph.find_nodes(op="call_function", target=_PRODUCT_ATTENTION):
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node) or not isinstance(mask.meta.get("val"), Tensor):
            continue
        if mask not in masks:  # one of all layers, in most transformers
            with graph.inserting_before(node):
                masks[mask] = _read_by_attention(mask, _best_key(program, mask), opset)
        read, empty = masks[mask]
        node.replace_input_with(mask, read)
        if empty is not None:
            with graph.inserting_after(node):
                kept = insert_call(node, aten.where.ScalarSelf, empty, 0.0, node)  # strides stay, which masked_fill changes
            program.graph_signature.replace_all_uses(node.name, kept.name)
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
    if masks:
        program.graph_module.recompile()


def _read_by_attention(mask: Node, best: float, opset: int) -> tuple[Node, Node | None]:
    """The mask that attention is to read, and where it leaves a query no key, (..., queries, 1); None where it nowhere does."""
    dtype, read, empty = mask.meta["val"].dtype, mask, None
    if best == -math.inf and dtype is torch.bool:
        empty = insert_call(mask, aten.logical_not.default, insert_call(mask, aten.any.dim, mask, -1, True))
    elif best == -math.inf:
        empty = insert_call(mask, aten.eq.Scalar, insert_call(mask, aten.amax.default, mask, [-1], True), -math.inf)
    if opset >= _HAS_ATTENTION and dtype.is_floating_point and best <= (lowest := torch.finfo(dtype).min):
        higher = torch.nextafter(torch.tensor(lowest, dtype=dtype), torch.zeros((), dtype=dtype)).item()
        read = insert_call(mask, aten.masked_fill.Scalar, mask, insert_call(mask, aten.eq.Scalar, mask, lowest), higher)
    return read, empty


def _best_key(program: ExportedProgram, mask: Node) -> float:
    """A number that the largest in every row of a mask of floats is surely not below; -inf where a row may be without a key.

    Flags are 0 where True, -inf where False. Nothing is known where an operator writes into memory that the mask is computed of:
    this shows in none of the mask's own operators.
    """
    before = _read_for(mask)
    if any(_writes_into(node, before) for node in program.graph.nodes):
        return -math.inf
    stored = _stored_values(program, before)
    values, first = _value_of_stored(program, mask, before, stored), _first_key(mask, stored, _FARTHEST)
    if values is not None:
        return float(_as_summand(values).amax(-1).min()) if values.numel() else -math.inf
    best = -math.inf if mask.meta["val"].dtype is torch.bool else _lowest(mask, _FARTHEST)
    return best if first is None else max(best, float(_as_summand(first)))


def _as_summand(values: Tensor) -> Tensor:
    return torch.where(values, 0.0, -math.inf) if values.dtype is torch.bool else values


def _read_for(node: Node) -> set[Node]:
    """A node and all that it is computed from."""
    pending, found = [node], {node}
    while pending:
        new = set(pending.pop().all_input_nodes) - found
        found |= new
        pending += new
    return found


def _writes_into(node: Node, values: set[Node]) -> bool:
    """Whether an in-place operator writes into one of these values, or into what may be a view of one."""
    if not is_inplace(node):
        return False
    while _may_be_a_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
        if node in values:
            return True
    return False


def _may_be_a_view(node: Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    returned = any(value.alias_info is not None for value in node.target._schema.returns)
    return returned or torch.Tag.maybe_aliasing_or_mutating in node.target.tags


def _stored_values(program: ExportedProgram, nodes: set[Node]) -> dict[Node, Tensor]:
    """The weights, buffers and constants among some nodes."""
    specs = program.graph_signature.input_specs
    names = {spec.arg.name: spec.target for spec in specs if spec.kind is not InputKind.USER_INPUT}
    values = {**program.constants, **program.state_dict}
    found = {node: values.get(names.get(node.name) or "") for node in nodes if node.op == "placeholder"}
    return {node: value.detach() for node, value in found.items() if isinstance(value, Tensor)}


def _value_of_stored(program: ExportedProgram, node: Node, before: set[Node], stored: dict[Node, Tensor]) -> Tensor | None:
    """The value of a node that depends on no input of the program; None of others."""
    values: dict[Node, Any] = {**stored}
    for other in (n for n in program.graph.nodes if n in before and n not in stored):
        if other.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(other.target, "tags", ()):
            return None
        args, kwargs = fx.map_arg((other.args, other.kwargs), lambda read: values[read])
        with torch.no_grad():
            values[other] = other.target(*args, **kwargs)
    result: Tensor = values[node]
    return result


def _lowest(node: Any, farthest: int) -> float:
    """A number that no value of a node is below; -inf where none is known."""
    if isinstance(node, int | float):
        return float(node)
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor) or farthest == 0:
        return -math.inf
    dtype, found = node.meta["val"].dtype, -math.inf
    if dtype is torch.bool:
        found = 0.0
    elif node.target in _FILLED:
        found = _lowest(_FILLED[node.target](node), farthest - 1)
    elif node.target in _CHOICES:
        found = min(_lowest(value, farthest - 1) for value in node.args[1:3])
    elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        found = min(_lowest(value, farthest - 1) for value in (node.args[0], node.args[2]))
    elif node.target in _SAME or node.target in LAYOUT_OPERATORS:
        found = _lowest(node.args[0], farthest - 1)
    # What is below the lowest number of a narrower dtype becomes -inf.
    return -math.inf if dtype.is_floating_point and found < torch.finfo(dtype).min else found


def _first_key(node: Any, stored: dict[Node, Tensor], farthest: int) -> Tensor | None:
    """The number that a mask, or a value it is made of, has for the first key, whatever the query; None where it is not known.

    It is what tells that a triangle of any size leaves a key to every query.
    """
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or farthest == 0:
        return None
    target, found = node.target, None
    if node in stored:
        column = (
            stored[node].reshape(-1, stored[node].shape[-1])[:, 0] if value.ndim and value.numel() else stored[node].flatten()
        )
        found = column[0] if column.numel() and bool((column == column[0]).all()) else None
    elif target in _FILLED and isinstance(number := _FILLED[target](node), bool | int | float):
        found = torch.tensor(number)
    elif target is aten.triu.default:
        found = torch.tensor(0) if _diagonal(node) >= 1 else None
    elif target in _SAME or (target is aten.tril.default and _diagonal(node) >= 0) or _keeps_first(node):
        found = _first_key(node.args[0], stored, farthest - 1)
    elif isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and not node.kwargs and not is_inplace(node):
        operands = [_first_key(x, stored, farthest - 1) if isinstance(x, fx.Node) else x for x in node.args]
        found = None if any(x is None for x in operands) else target(*operands)
    return None if found is None else found.to(value.dtype)


def _diagonal(node: Node) -> float:
    """Of a triangle; -inf where it is a size."""
    number = (*node.args, 0)[1]
    return number if isinstance(number, int) else -math.inf


def _keeps_first(node: Node) -> bool:
    """Whether a view has the first column of what it is of as its own first column."""
    if node.target is aten.unsqueeze.default:
        return node.args[1] not in (-1, node.args[0].meta["val"].ndim)
    if node.target is aten.slice.Tensor:
        dim, start = (*node.args, *(0, None)[len(node.args) - 1 :])[1:3]
        return dim not in (-1, node.args[0].meta["val"].ndim - 1) or start in (None, 0)
    return False
