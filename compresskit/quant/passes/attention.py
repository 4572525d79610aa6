"""Find outputs of attention whose channels can be shifted through the bias of v.

Rows of softmax sum to one, so a constant added to v is added to the output of attention, too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.graph.capture import Captured, parameter_name
from compresskit.graph.interpreter import run_graph
from compresskit.graph.layers.stored import LAYOUT_OPERATORS
from compresskit.graph.normalize import Node, aten

_SOFTMAX = frozenset({aten.softmax.int, aten._softmax.default})


def attended(captured: Captured, bases: Sequence[Node]) -> dict[Node, tuple[str, Tensor]]:
    """For each value that is an output of attention: the name of v's bias, and the index in it of each channel of the value.

    Indices are found by moving the numbers 0, 1, 2, ... of the bias's entries through the layout operators before and after
    the attention.
    """
    candidates = {base: parts for base in bases if (parts := _parts(base)) is not None}
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


def _parts(base: Node) -> tuple[str, Node, list[Node], Node, list[Node]] | None:
    """(name of v's bias, v's layer, layout operators up to the attention, the attention, those from it to the value)."""
    after, value = _back(base)
    if value.target is aten.scaled_dot_product_attention.default and not (len(value.args) > 4 and value.args[4]):
        v = value.args[2]
    elif value.target is aten.matmul.default and isinstance(value.args[0], fx.Node) and _sums_to_one(value.args[0]):
        v = value.args[1]
    else:
        return None
    if len(value.users) != 1 or any(len(node.users) != 1 for node in after[:-1]):
        return None
    before, linear = _back(v)
    if linear.target is not aten.linear.default or len(linear.args) < 3:
        return None
    name = parameter_name(linear.args[2])
    # Between v and the operator where q and k branch off, no other operator may read the value.
    alone = all(len(node.users) == 1 for node in before if node.target is not operator.getitem)
    if name is None or len(linear.args[2].users) != 1 or not (alone or _splits(before)):
        return None
    return name, linear, before, value, after


def _splits(before: list[Node]) -> bool:
    """Whether v is a slice of a layer that computes q, k and v at once, and no other operator reads that slice."""
    for i, node in enumerate(before):
        if node.target in (aten.select.int, aten.slice.Tensor, operator.getitem):
            return all(len(later.users) == 1 for later in before[i:])
    return False


def _sums_to_one(node: Node) -> bool:
    while node.target in LAYOUT_OPERATORS:
        node = node.args[0]
    return node.target in _SOFTMAX and node.args[1] in (-1, node.meta["val"].ndim - 1)


def _back(value: Node) -> tuple[list[Node], Node]:
    """(layout operators before a value in the order of execution, the node that they start from)."""
    moves = []
    while value.target in LAYOUT_OPERATORS or value.target is operator.getitem or value.target in _CUTS:
        moves.append(value)
        value = value.args[0]
    return moves[::-1], value


_CUTS = frozenset({aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})


def _moved_tensor(x: Any, source: Node, moves: list[Node], sizes: dict[Node, Any]) -> Tensor | None:
    """Apply layout operators to a tensor instead of the value of `source`; None where one of them reads other values."""
    values: dict[Node, Any] = {**sizes, source: x}
    for node in moves:
        if any(n not in values for n in node.all_input_nodes):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
    result = values[moves[-1]] if moves else x
    return result if isinstance(result, Tensor) else None
