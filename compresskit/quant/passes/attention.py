"""Find outputs of attention whose channels can be shifted through the bias of v.

Rows of softmax sum to one, so a constant added to v is added to the output of attention, too.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.graph.capture import Captured, parameter_name
from compresskit.graph.interpreter import read_count, run_graph
from compresskit.graph.layers.stored import LAYOUT_OPERATORS, parameter_reads
from compresskit.graph.normalize import Node, aten
from compresskit.quant.passes.channel_scaling import keeps_last_dimension

_SOFTMAX = frozenset({aten.softmax.int, aten._softmax.default})


def attended(captured: Captured, bases: Sequence[Node]) -> dict[Node, tuple[str, Tensor]]:
    """For each value that is an output of attention: the name of v's bias, and the index in it of each channel of the value.

    Indices are found by moving the numbers 0, 1, 2, ... of the bias's entries through the layout operators before and after
    the attention.
    """
    reads = parameter_reads(captured.module)
    candidates = {base: parts for base in bases if (parts := _parts(base, reads)) is not None}
    if not candidates:
        return {}
    sizes: dict[Node, Any] = {}  # numbers that other operators take

    def keep_number(node: Node, value: Any) -> None:
        if isinstance(value, int | float):
            sizes[node] = value

    with torch.no_grad():
        run_graph(captured.module, pytree.tree_leaves(captured.example), keep_number)
    placed = {}
    for base, (bias, linear, before, attention, after) in candidates.items():
        count = captured.shapes[linear.name][-1]
        numbers = torch.arange(float(count)).expand(captured.shapes[linear.name])
        v = _moved_tensor(numbers, linear, before, sizes)
        if v is None or v.ndim < 2 or not bool((v == v[..., :1, :]).all()):
            continue  # tokens differ: the operators have mixed them with channels
        in_v = torch.zeros(count, dtype=torch.bool)
        in_v[v.reshape(-1).long()] = True
        if _is_read_elsewhere(linear, numbers, in_v, [*before, attention], sizes):
            continue
        shape = captured.shapes[attention.name]
        if v.shape[:-2] != shape[:-2] or v.shape[-1] != shape[-1]:
            continue  # heads that share one v
        places = _moved_tensor(v[..., :1, :].expand(shape), attention, after, sizes)
        if places is None:
            continue
        rows = places.reshape(-1, places.shape[-1])
        if bool((rows == rows[0]).all()) and len(rows[0].unique()) == rows.shape[1]:
            placed[base] = (bias, rows[0].long())
    return placed


def _parts(base: Node, reads: Mapping[str, int]) -> tuple[str, Node, list[Node], Node, list[Node]] | None:
    """(name of v's bias, v's layer, layout operators up to the attention, the attention, those from it to the value)."""
    after, value = _back(base)
    if value.target is aten.scaled_dot_product_attention.default and not (len(value.args) > 4 and value.args[4]):
        v = value.args[2]
    elif value.target is aten.matmul.default and isinstance(value.args[0], fx.Node) and _sums_to_one(value.args[0]):
        v = value.args[1]
    else:
        return None
    if any(read_count(node) != 1 for node in [value, *after[:-1]]):
        return None
    before, linear = _back(v)
    if linear.target is not aten.linear.default or len(linear.args) < 3:
        return None
    name = parameter_name(linear.args[2])
    if name is None or reads[name] != 1:
        return None
    return name, linear, before, value, after


def _is_read_elsewhere(linear: Node, numbers: Tensor, in_v: Tensor, way: list[Node], sizes: dict[Node, Any]) -> bool:
    """Whether anything but an attention, in the place of its v, reads entries of a layer's output that v has.

    The layer may compute q and k, too, which are cut out of other entries.

    numbers: the output, with the number of each entry in its place. in_v: (entries,), whether v has it. way: the layout
    operators from the layer to v, and the attention. sizes: numbers that operators take.
    """
    v = way[-2] if len(way) > 1 else linear
    pending: list[tuple[Node, Any]] = [(linear, numbers)]
    while pending:
        node, value = pending.pop()
        reads_twice = read_count(node) > len(node.users)
        for user in node.users:
            if _is_move(user) and user.args[0] is node and not reads_twice:
                if (moved := _moved(value, node, [user], sizes)) is None:
                    return True  # it cannot be told
                pending.append((user, moved))
            elif node is not v or user is not way[-1] or reads_twice:
                parts = [value] if isinstance(value, Tensor) else value
                if any(bool(in_v[part.long()].any()) for part in parts):
                    return True
    return False


def _sums_to_one(node: Node) -> bool:
    while node.target in LAYOUT_OPERATORS:
        if not keeps_last_dimension(node):
            return False  # columns do not sum to one, nor do some entries of a row
        node = node.args[0]
    return node.target in _SOFTMAX and node.args[1] in (-1, node.meta["val"].ndim - 1)


def _back(value: Node) -> tuple[list[Node], Node]:
    """(layout operators before a value in the order of execution, the node that they start from)."""
    moves = []
    while _is_move(value):
        moves.append(value)
        value = value.args[0]
    return moves[::-1], value


def _is_move(node: Node) -> bool:
    return node.target in LAYOUT_OPERATORS or node.target is operator.getitem or node.target in _CUTS


_CUTS = frozenset({aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})


def _moved_tensor(x: Tensor, source: Node, moves: list[Node], sizes: dict[Node, Any]) -> Tensor | None:
    """Apply layout operators to a tensor instead of the value of `source`; None where one of them reads other values."""
    result = _moved(x, source, moves, sizes)
    return result if isinstance(result, Tensor) else None


def _moved(x: Any, source: Node, moves: list[Node], sizes: dict[Node, Any]) -> Any:
    """Apply operators to what `source` may be, a tensor or several; None where one of them reads other values."""
    values: dict[Node, Any] = {**sizes, source: x}
    for node in moves:
        if any(n not in values for n in node.all_input_nodes):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
    return values[moves[-1]] if moves else x
