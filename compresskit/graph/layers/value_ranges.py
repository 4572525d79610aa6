"""Which values a node of a captured graph can have, from the operators before it; activations that change none of them go."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from compresskit.graph.normalize import IDENTITIES, Node, aten, functional_form, is_inplace

Range = tuple[float, float]

EVERYTHING: Range = (-math.inf, math.inf)
UNIT: Range = (0.0, 1.0)
_FRACTIONS = frozenset({aten.sigmoid.default, aten.hardsigmoid.default, aten.softmax.int, aten._softmax.default})
#: Operators whose results are some of the values that they read.
_SELECTIONS = frozenset({aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default, aten.reshape.default})
_SELECTIONS |= {aten.flatten.using_ints, aten.permute.default, aten.transpose.int, aten.slice.Tensor, aten.select.int}
_SELECTIONS |= {aten.unsqueeze.default, aten.squeeze.dim, aten.channel_shuffle.default, aten.view.default, *IDENTITIES}
#: Operators whose results are means of the values that they read, zeros of a padding among them.
_AVERAGES = frozenset({aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default, aten.mean.dim})
_AVERAGES |= {aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default}
FARTHEST = 64  # operators that are looked through


def clipped_to(node: Node) -> Range | None:
    """The range to which an operator clips values, and inside of which it changes none: (0, inf) of a ReLU; None for others."""
    target = _functional(node)
    if target is aten.relu.default:
        return 0.0, math.inf
    if target is aten.relu6.default:
        return 0.0, 6.0
    if target in (aten.hardtanh.default, aten.clamp.default, aten.clamp_min.default):
        given, default = list(node.args[1:]), [-1.0, 1.0] if target is aten.hardtanh.default else [None, None]
        low, high = [*given, *default[len(given) :]][:2]
        if {type(v) for v in (low, high)} <= {int, float, type(None)} and not node.kwargs:
            return -math.inf if low is None else low, math.inf if high is None else high
    return None


def _functional(node: Node) -> Any:
    return functional_form(node.target) if is_inplace(node) else node.target


def range_of(node: Any, depth: int = FARTHEST) -> Range:
    """Bounds of the values of a node, as far as the operators before it tell; of a graph that is normalized or not."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or not depth:
        return EVERYTHING
    read: Any = node.args[0] if node.args else None
    target = _functional(node)
    if (clip := clipped_to(node)) is not None:
        low, high = range_of(read, depth - 1)
        return min(max(low, clip[0]), clip[1]), max(min(high, clip[1]), clip[0])
    if target in _FRACTIONS:
        return UNIT
    if target in _SELECTIONS:
        return range_of(read, depth - 1)
    if target in _AVERAGES:
        low, high = range_of(read, depth - 1)
        return min(low, 0.0), max(high, 0.0)
    if target is aten.cat.default and isinstance(read, list | tuple):
        parts = [range_of(part, depth - 1) for part in read]
        return min(low for low, _ in parts), max(high for _, high in parts)
    return EVERYTHING


def changes_nothing(activation: Node, values: Range) -> bool:
    """Whether an activation gives back every value of a range as it is."""
    clip = clipped_to(activation)
    return clip is not None and clip[0] <= values[0] and values[1] <= clip[1]


def idle_activations(graph: fx.Graph) -> list[Node]:
    """The activations of a graph that change none of the values that they can read, as a ReLU of a ReLU."""
    return [node for node in graph.nodes if clipped_to(node) is not None and changes_nothing(node, range_of(node.args[0]))]


def drop_idle_activations_(module: fx.GraphModule) -> None:
    """Take activations that change nothing out of a normalized graph.

    A module that takes the place of two layers may leave the activation that stood between them, on what the first one read.
    """
    idle = idle_activations(module.graph)
    for node in idle:
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
    if idle:
        module.recompile()
