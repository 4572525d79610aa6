"""Pooling that torch's ONNX exporter drops a part of, or writes with the windows of the example."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from compresskit.base.errors import ModelError
from compresskit.graph.normalize import Node, aten

_POOLS = frozenset({aten.avg_pool2d.default, aten.avg_pool3d.default})


def replace_divisors_(module: fx.GraphModule) -> None:
    """Replace `divisor_override` of average pooling by a factor: ONNX's exporter would drop it.

    Raises ModelError with `ceil_mode=True`, where the windows at the border are of another size.
    """
    for node in list(module.graph.nodes):
        divisor = (*node.args, *[None] * 7)[6] if node.target in _POOLS else None
        if divisor is None:
            continue
        x, kernel, stride, padding, ceil_mode, _, _ = node.args
        if ceil_mode:
            raise ModelError(
                f"{node.target} with divisor_override={divisor} and ceil_mode=True has no form in ONNX: pad the input and leave"
                " out ceil_mode, or divide by a number after pooling"
            )
        spatial = 2 if node.target is aten.avg_pool2d.default else 3
        count = math.prod(kernel) if len(kernel) > 1 else kernel[0] ** spatial
        node.args = (x, kernel, stride, padding)  # zeros of the padding count, every window has `count` values
        with module.graph.inserting_after(node):
            scaled = module.graph.call_function(aten.mul.Tensor, (node, count / divisor))
        scaled.meta = dict(node.meta)
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)


_ADAPTIVE_MAX_POOLS = {
    aten.adaptive_max_pool1d.default: aten.max_pool1d.default,
    aten.adaptive_max_pool2d.default: aten.max_pool2d.default,
}
_ADAPTIVE_AVERAGES = frozenset(
    {aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default}
)


def replace_adaptive_max_pools_(module: fx.GraphModule) -> None:
    """Replace adaptive max pooling: by pooling where all windows have one size, else by the largest value of each window.

    Raises ModelError where the positions of the largest values are read and not all windows have one known size.
    """
    for node in list(module.graph.nodes):
        if node.target not in _ADAPTIVE_MAX_POOLS:
            continue
        x, sizes = node.args
        shape = list(x.meta["val"].shape[-len(sizes) :])
        even = all(type(n) is int and type(size) is int and n % size == 0 for n, size in zip(shape, sizes, strict=True))
        positions_are_read = any(user.args[1] != 0 and user.users for user in node.users)
        if even and positions_are_read:
            continue  # the exporter of newer releases of torch writes it
        if positions_are_read:
            raise ModelError(
                f"{node.target} to {list(sizes)} of {shape} positions has no form in ONNX where its indices are read: pool with"
                " nn.MaxPool2d, or leave the dimension out of dynamic="
            )
        with module.graph.inserting_before(node):
            if even:
                windows = [n // size for n, size in zip(shape, sizes, strict=True)]
                pooled = module.graph.call_function(_ADAPTIVE_MAX_POOLS[node.target], (x, windows, windows))
            else:
                pooled = _pooled_in_windows(module.graph, x, sizes, aten.amax.default)
        for user in list(node.users):
            if user.args[1] == 0:
                pooled.meta = {**user.meta}
                user.replace_all_uses_with(pooled)
            module.graph.erase_node(user)
        module.graph.erase_node(node)


def replace_adaptive_averages_(module: fx.GraphModule) -> None:
    """Replace adaptive average pooling of an input that varies in size by the mean of each window, and any over three dimensions.

    The exporter would write a pooling whose windows are those of the example.
    """
    for node in list(module.graph.nodes):
        if node.target not in _ADAPTIVE_AVERAGES:
            continue
        x, sizes = node.args
        sizes = list(sizes)
        shape = x.meta["val"].shape[-len(sizes) :]
        known = all(type(n) is int for n in shape) and len(sizes) < 3
        if known or all(type(size) is int and size == 1 for size in sizes):
            continue
        with module.graph.inserting_before(node):
            pooled = _pooled_in_windows(module.graph, x, sizes, aten.mean.dim)
        pooled.meta = {**node.meta}
        node.replace_all_uses_with(pooled)
        module.graph.erase_node(node)


def _pooled_in_windows(graph: fx.Graph, x: Node, sizes: list[Any], reduce: Any) -> Node:
    """Each of `sizes` windows over the last dimensions reduced to one value, one dimension at a time.

    sizes: integers, or nodes: sizes of dimensions that stay as they are, or numbers of windows that are computed of sizes.
    """

    def add(target: Any, *args: Any) -> Node:
        made = graph.call_function(target, args)
        with enable_python_dispatcher():
            made.meta = {**x.meta, "val": target(*fx.map_arg(args, lambda a: a.meta["val"]))}
        return made

    def boundary(length: Any, size: int, i: int, up: int) -> Any:
        """The i-th of `size` boundaries, rounded down, or up with size - 1."""
        if type(length) is int:
            return (i * length + up) // size
        return add(operator.floordiv, add(operator.add, add(operator.mul, length, i), up), size)

    rank = x.meta["val"].ndim
    for dim, size in zip(range(rank - len(sizes), rank), sizes, strict=True):
        if isinstance(size, fx.Node):
            if str(size.meta["val"]) != str(x.meta["val"].shape[dim]):  # as text, it adds no guard
                x = _averaged_in_windows(add, x, dim, size)
            continue
        if size == 1:
            x = add(reduce, x, [dim], True)
            continue
        length = x.meta["val"].shape[dim]
        length = length if type(length) is int else add(aten.sym_size.int, x, dim)
        windows = [(boundary(length, size, i, 0), boundary(length, size, i + 1, size - 1)) for i in range(size)]
        parts = [add(reduce, add(aten.slice.Tensor, x, dim, *window), [dim], True) for window in windows]
        x = add(aten.cat.default, parts, dim)
    return x


def made_of_size(x: Node, target: Any, number: Node, dtype: torch.dtype = torch.int64) -> Node:
    """What an operator makes of a size, on the device of x, where the graph's insertion point stands."""
    settings = {"dtype": dtype, "device": x.meta["val"].device}
    made = number.graph.call_function(target, (number,), settings)
    with enable_python_dispatcher(), x.meta["val"].fake_mode:  # nothing else says that the size may vary
        made.meta = {**x.meta, "val": target(number.meta["val"], **settings)}
    return made


def _averaged_in_windows(add: Callable[..., Node], x: Node, dim: int, count: Node) -> Node:
    """The means of a number of windows over a dimension that is computed of sizes: differences of sums up to each boundary."""
    rank, numbers = x.meta["val"].ndim, made_of_size(x, aten.arange.default, count)
    sizes = (add(aten.sym_size.int, x, dim), count)
    length, windows = (made_of_size(x, aten.scalar_tensor.default, size) for size in sizes)  # torch's exporter promotes no sizes
    starts = add(aten.floor_divide.default, add(aten.mul.Tensor, numbers, length), windows)
    behind = add(aten.mul.Tensor, add(aten.add.Tensor, numbers, 1), length)
    behind = add(aten.add.Tensor, behind, add(aten.sub.Tensor, windows, 1))  # rounded up
    ends = add(aten.floor_divide.default, behind, windows)
    sums = add(aten.constant_pad_nd.default, add(aten.cumsum.default, x, dim), [0, 0] * (rank - 1 - dim) + [1, 0])
    total = add(aten.sub.Tensor, *(add(aten.index_select.default, sums, dim, at) for at in (ends, starts)))
    lengths = add(aten.to.dtype, add(aten.sub.Tensor, ends, starts), x.meta["val"].dtype)
    return add(aten.div.Tensor, total, add(aten.view.default, lengths, [-1] + [1] * (rank - 1 - dim)))
