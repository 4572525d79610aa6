"""Hardsigmoids that a model writes by hand, as one operator: clamp(x + 3, 0, 6) / 6 or clamp(x / 6 + 1/2, 0, 1)."""

from __future__ import annotations

import torch
from torch import fx

from compresskit.graph.layers.value_ranges import Range, clipped_to
from compresskit.graph.normalize import Node, aten, insert_call


def write_hardsigmoids_(module: fx.GraphModule) -> None:
    """Write each as `aten.hardsigmoid`, in place; y * clamp(x + 3, 0, 6) / 6 as y * hardsigmoid(x).

    Where a number is another one, 0.1667 for 1/6 say, or something else reads a value on the way, the operators stay.
    """
    for node in list(module.graph.nodes):
        scaled = _sixth(node)
        if (x := _hardsigmoid_of(node, scaled)) is not None and x.meta["val"].dtype == node.meta["val"].dtype:
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(insert_call(node, aten.hardsigmoid.default, x))
        elif scaled is not None and scaled.target is aten.mul.Tensor and _is_read_by_one(scaled):
            _divide_factor(node, scaled)
    module.graph.eliminate_dead_code()
    module.recompile()


def _hardsigmoid_of(node: Node, scaled: Node | None) -> Node | None:
    """The x of a node that is hardsigmoid(x), by either formula; `scaled` is what it is a sixth of. None of others."""
    if scaled is None:
        return _sixth(_shifted(node, (0, 1), 1 / 2))
    return _shifted(scaled, (0, 6), 3) if _is_read_by_one(scaled) else None


def _divide_factor(node: Node, product: Node) -> None:
    """Take the division of a product by 6 into the factor that it makes a hardsigmoid; where none is one, it stays."""
    for factor in product.args:
        x = _shifted(factor, (0, 6), 3)
        if x is None or not _is_read_by_one(factor) or product.args[0] is product.args[1]:
            continue
        if x.meta["val"].dtype == factor.meta["val"].dtype == node.meta["val"].dtype:
            with node.graph.inserting_before(product):
                product.replace_input_with(factor, insert_call(factor, aten.hardsigmoid.default, x))
            node.replace_all_uses_with(product)
            return


def _shifted(node: Node, bounds: Range, number: float) -> Node | None:
    """The x of a node that is clamp(x + number, *bounds), where nothing else reads the sum; None of others."""
    clip = _clip(node)
    total = clip[0] if clip is not None and clip[1] == bounds else None
    if total is None or not _is_read_by_one(total) or not _has_number(total, aten.add.Tensor, number):
        return None
    return total.args[0]


def _clip(node: Node) -> tuple[Node, Range] | None:
    """What a clamp reads, or a clamp of a clamp that only it reads, and the range; None of others."""
    clip = clipped_to(node) if isinstance(node, fx.Node) else None
    if clip is None:
        return None
    read = node.args[0]
    inner = clipped_to(read) if isinstance(read, fx.Node) and _is_read_by_one(read) else None
    if inner is None:
        return read, clip
    return read.args[0], (max(clip[0], inner[0]), min(clip[1], inner[1]))


def _sixth(node: Node | None) -> Node | None:
    """The x of a node that is x / 6 or x * (1 / 6); None of others."""
    if node is None or not (_has_number(node, aten.div.Tensor, 6) or _has_number(node, aten.mul.Tensor, 1 / 6)):
        return None
    return node.args[0]


def _has_number(node: Node, target: object, number: float) -> bool:
    """Whether a node is an operator of a value and a number, with the accuracy of the value, and no other arguments."""
    if node.target is not target or len(node.args) != 2 or node.kwargs:
        return False
    value, given = node.args
    if not isinstance(value, fx.Node) or type(given) not in (int, float):
        return False
    dtype = node.meta["val"].dtype
    return dtype.is_floating_point and bool(torch.tensor(given, dtype=dtype) == torch.tensor(number, dtype=dtype))


def _is_read_by_one(node: Node) -> bool:
    return len(node.users) == 1
