"""Operators that torch's ONNX exporter has no translation for, written as others: rrelu, cdist, cumprod, median, kthvalue,
isin, searchsorted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from compresskit.graph.normalize import Node, aten, insert_call, is_inplace

#: Up to so many values of each point, or points on each side, distances are written as norms of differences: exactly, with as
#: many times the memory. Past that, as torch does past 25 points, by products of matrices.
_FEW_VALUES, _FEW_POINTS = 8, 25


def write_composed_(module: fx.GraphModule) -> None:
    """Write operators of the table below as others; those whose form there is none for stay as they are."""
    for node in list(module.graph.nodes):
        write = _WRITTEN.get(node.target)
        if write is None or any("val" not in value.meta for value in node.all_input_nodes):
            continue
        with module.graph.inserting_before(node):
            written = write(node)
        if written is None:
            continue
        if isinstance(written, tuple):
            for user in list(node.users):  # each takes one result
                user.replace_all_uses_with(written[user.args[1]])
                module.graph.erase_node(user)
        else:
            node.replace_all_uses_with(written)
        module.graph.erase_node(node)


def _arguments(node: Node, *defaults: Any) -> list[Any]:
    """The arguments of a node, with what the last ones are by default where they are left out."""
    required = sum(not argument.has_default_value() for argument in node.target._schema.arguments)
    return [*node.args, *defaults[len(node.args) - required :]]


def _leaky_relu(node: Node) -> Node | None:
    """A rrelu draws no slopes in eval mode: it takes the mean of both."""
    x, lower, upper, training, *_ = _arguments(node, 0.125, 1 / 3, False)
    like = aten.leaky_relu_.default if is_inplace(node) else aten.leaky_relu.default  # others may read what it writes
    return None if training else insert_call(node, like, x, (lower + upper) / 2)


def _between_points(node: Node) -> Node:
    """Distances (..., P, R) of points (..., P, M) and (..., R, M)."""
    a, b, p, mode = _arguments(node, 2.0, None)
    rows, values = a.meta["val"].shape[-2], a.meta["val"].shape[-1]
    few = all(type(n) is int and n <= _FEW_POINTS for n in (rows, b.meta["val"].shape[-2]))
    narrow = type(values) is int and values <= _FEW_VALUES
    if p == 2 and mode != 2 and not narrow and (mode == 1 or not few):
        products = insert_call(node, aten.matmul.default, a, insert_call(node, aten.transpose.int, b, -1, -2))
        squares = [
            insert_call(node, aten.sum.dim_IntList, insert_call(node, aten.mul.Tensor, x, x), [-1], keep)
            for x, keep in ((a, True), (b, False))
        ]
        of_both = insert_call(node, aten.add.Tensor, squares[0], insert_call(node, aten.unsqueeze.default, squares[1], -2))
        squared = insert_call(node, aten.sub.Tensor, of_both, insert_call(node, aten.mul.Tensor, products, 2))
        return insert_call(node, aten.sqrt.default, insert_call(node, aten.clamp.default, squared, 0.0))
    apart = [insert_call(node, aten.unsqueeze.default, x, dim) for x, dim in ((a, -2), (b, -3))]
    return insert_call(node, aten.linalg_vector_norm.default, insert_call(node, aten.sub.Tensor, *apart), p, [-1])


def _cumulative_product(node: Node) -> Node | None:
    """Products of ever longer runs: doubling runs of a length that is known, else by logarithms, signs apart."""
    x, dim = node.args
    value = x.meta["val"]
    if node.meta["val"].dtype != value.dtype or not value.ndim:
        return None
    size, dim = value.shape[dim], dim % value.ndim
    if type(size) is int:
        step = 1
        while step < size:
            ones = [0, 0] * (value.ndim - 1 - dim) + [step, 0]
            before = insert_call(node, aten.slice.Tensor, x, dim, 0, size - step)
            x = insert_call(node, aten.mul.Tensor, x, insert_call(node, aten.constant_pad_nd.default, before, ones, 1.0))
            step *= 2
        return x
    if not value.is_floating_point():
        return None
    logarithms = insert_call(node, aten.log.default, insert_call(node, aten.abs.default, x))
    sizes = insert_call(node, aten.exp.default, insert_call(node, aten.cumsum.default, logarithms, dim))
    negative = insert_call(node, aten.to.dtype, insert_call(node, aten.lt.Scalar, x, 0), torch.int64)
    odd = insert_call(node, aten.remainder.Scalar, insert_call(node, aten.cumsum.default, negative, dim), 2)
    signs = insert_call(node, aten.sub.Tensor, 1.0, insert_call(node, aten.mul.Tensor, odd, 2.0))
    return insert_call(node, aten.mul.Tensor, sizes, insert_call(node, aten.to.dtype, signs, value.dtype))


def _median_of_all(node: Node) -> Node:
    flat = insert_call(node, aten.reshape.default, node.args[0], [-1])
    return _in_order(node, flat, None, 0, False)[0]


def _median(node: Node) -> tuple[Node, Node] | None:
    x, dim, keepdim = _arguments(node, False)
    return _in_order(node, x, None, dim, keepdim) if x.meta["val"].ndim else None


def _kth_value(node: Node) -> tuple[Node, Node] | None:
    x, k, dim, keepdim = _arguments(node, -1, False)
    return _in_order(node, x, k, dim, keepdim) if x.meta["val"].ndim else None


def _in_order(node: Node, x: Node, k: Any, dim: int, keepdim: bool) -> tuple[Node, Node]:
    """The k-th smallest value over a dimension, and its index; of None, the lower one of those in the middle."""
    size = x.meta["val"].shape[dim]
    if k is None:
        k = (size + 1) // 2 if type(size) is int else _halved(node, x, dim)
    found = insert_call(node, aten.topk.default, x, k, dim, False)
    last = [insert_call(node, operator.getitem, found, i) for i in (0, 1)]
    taken = [insert_call(node, aten.slice.Tensor, values, dim, -1) for values in last]
    if not keepdim:
        taken = [insert_call(node, aten.squeeze.dim, values, dim) for values in taken]
    return taken[0], taken[1]


def _halved(node: Node, x: Node, dim: int) -> Node:
    size = insert_call(node, aten.sym_size.int, x, dim)
    return insert_call(node, operator.floordiv, insert_call(node, operator.add, size, 1), 2)


def _membership(node: Node) -> Node:
    """Whether each value is one of others: compared with each of them."""
    x, others = insert_call(node, aten.unsqueeze.default, node.args[0], -1), node.args[1]
    others = insert_call(node, aten.reshape.default, others, [-1])
    found = insert_call(node, aten.any.dim, insert_call(node, aten.eq.Tensor, x, others), -1)
    inverted = node.kwargs.get("invert", False) or (*node.args, False, False)[3]
    return insert_call(node, aten.logical_not.default, found) if inverted else found


def _places_in_order(node: Node) -> Node | None:
    """How many of the sorted numbers (N,) or (..., N) are less than each value, or not more with right=True."""
    numbers, values = node.args[:2]
    given = dict(zip(("out_int32", "right"), node.args[2:], strict=False)) | dict(node.kwargs)
    if given.get("sorter") is not None or not values.meta["val"].ndim:
        return None
    rank = numbers.meta["val"].ndim
    table = insert_call(node, aten.unsqueeze.default, numbers, -2) if rank > 1 else numbers
    compare = aten.le.Tensor if given.get("right") or given.get("side") == "right" else aten.lt.Tensor
    before = insert_call(node, compare, table, insert_call(node, aten.unsqueeze.default, values, -1))
    count = insert_call(node, aten.sum.dim_IntList, insert_call(node, aten.to.dtype, before, torch.int64), [-1])
    return insert_call(node, aten.to.dtype, count, torch.int32) if given.get("out_int32") else count


_WRITTEN: dict[Any, Callable[[Node], Node | tuple[Node, Node] | None]] = {
    aten.rrelu.default: _leaky_relu,
    aten.rrelu_.default: _leaky_relu,
    aten.cdist.default: _between_points,
    aten.cumprod.default: _cumulative_product,
    aten.median.default: _median_of_all,
    aten.median.dim: _median,
    aten.kthvalue.default: _kth_value,
    aten.isin.Tensor_Tensor: _membership,
    aten.searchsorted.Tensor: _places_in_order,
}
