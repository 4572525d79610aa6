"""Parts along a dimension that varies, and turns of it, written as slices: ONNX's exporter writes sequences or lists of numbers
for them, on which it fails.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compresskit.graph.normalize import Node, aten, insert_call

_CHUNKS = frozenset({aten.chunk.default, aten.unsafe_chunk.default})
_SPLITS = frozenset({aten.split.Tensor, aten.unsafe_split.Tensor})
_ROUNDED_UP = {aten.fft_fftshift.default: 1, aten.fft_ifftshift.default: 0}  # added to a size before it is halved


def write_parts_(module: fx.GraphModule) -> None:
    """Replace `chunk` along a dimension that varies, `split` by a size that does, and `roll` and `fftshift` by one, by slices."""
    for node in list(module.graph.nodes):
        if not node.args or not isinstance(node.args[0], fx.Node) or "val" not in node.args[0].meta:
            continue  # a parameter, whose sizes are known
        if node.target in _CHUNKS or node.target in _SPLITS:
            _write_slices(module.graph, node)
        elif node.target is aten.roll.default and any(isinstance(shift, fx.Node) for shift in node.args[1]):
            _replace_by(node, _turned_roll)
        elif node.target in _ROUNDED_UP and _is_unwritten(node.args[0].meta["val"]):
            _replace_by(node, _halves_exchanged)


def _is_unwritten(x: Tensor) -> bool:
    """Whether halves of it cannot be exchanged by an operator for it: its sizes vary, or it is complex."""
    return x.is_complex() or not all(type(size) is int for size in x.shape)


def _write_slices(graph: fx.Graph, node: Node) -> None:
    """Of `chunk`, the last part takes what is left; those of `split` have their size, and there may be more of them."""
    x, count, dim = (*node.args, 0)[:3]
    size = x.meta["val"].shape[dim]
    readers = list(node.users)
    varies = isinstance(count, fx.Node) if node.target in _SPLITS else not isinstance(size, int)
    if not varies or any(user.target is not operator.getitem for user in readers):
        return
    parts = len(node.meta["val"])
    with graph.inserting_before(node):
        each = count
        if node.target in _CHUNKS:
            rounded = insert_call(node, operator.add, insert_call(node, aten.sym_size.int, x, dim), count - 1)
            each = insert_call(node, operator.floordiv, rounded, count)
        known = parts + 1 if node.target in _SPLITS else parts
        bounds = [0, *(insert_call(node, operator.mul, each, i) for i in range(1, known)), sys.maxsize]
        for user in readers:
            i = user.args[1]
            part = graph.call_function(aten.slice.Tensor, (x, dim, bounds[i], bounds[i + 1]))
            part.meta = dict(user.meta)
            user.replace_all_uses_with(part)
            graph.erase_node(user)
    graph.erase_node(node)


def _replace_by(node: Node, write: Any) -> None:
    with node.graph.inserting_before(node):
        by = write(node)
    by.meta["val"] = node.meta["val"]  # its sizes are sums, which torch does not always simplify
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _halves_exchanged(node: Node) -> Node:
    x, dims = (*node.args, None)[:2]
    rank = x.meta["val"].ndim
    for dim in [dims] if isinstance(dims, int) else range(rank) if dims is None else dims:
        x = _rotated(node, x, dim, _half(node, x, dim, _ROUNDED_UP[node.target]))
    return x


def _half(node: Node, x: Node, dim: int, more: int) -> Any:
    size = x.meta["val"].shape[dim]
    if type(size) is int:
        return (size + more) // 2
    whole = insert_call(node, aten.sym_size.int, x, dim)
    return insert_call(node, operator.floordiv, insert_call(node, operator.add, whole, more) if more else whole, 2)


def _turned_roll(node: Node) -> Node:
    x, shifts, dims = (*node.args, ())[:3]
    if dims:
        return _turned_by(node, x, shifts, dims)
    sizes = [insert_call(node, aten.sym_size.int, x, dim) for dim in range(x.meta["val"].ndim)]
    flat = _turned_by(node, insert_call(node, aten.reshape.default, x, [-1]), shifts, [0])
    return insert_call(node, aten.reshape.default, flat, sizes)


def _turned_by(node: Node, x: Node, shifts: Sequence[Any], dims: Sequence[int]) -> Node:
    for shift, dim in zip(shifts, dims, strict=True):
        size = insert_call(node, aten.sym_size.int, x, dim)
        back = insert_call(node, operator.neg, shift) if isinstance(shift, fx.Node) else -shift
        x = _rotated(node, x, dim, insert_call(node, operator.mod, back, size))
    return x


def _rotated(node: Node, x: Node, dim: int, start: Any) -> Node:
    """What stands from a position on along a dimension, and then what stands before it."""
    value = x.meta["val"]
    halves = [insert_call(node, aten.slice.Tensor, x, dim, *bounds) for bounds in ((start, sys.maxsize), (0, start))]
    turned = node.graph.call_function(aten.cat.default, (halves, dim))
    turned.meta = {**node.meta, "val": torch.empty_like(value)}
    return turned
