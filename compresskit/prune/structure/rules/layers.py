"""Rules of layers that make channels: convolution, linear, embedding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compresskit.graph.normalize import Node, aten
from compresskit.prune.structure.channel_sets import spread
from compresskit.prune.structure.rules.base import Raw, Rule, argument, rules_of

if TYPE_CHECKING:
    from compresskit.prune.structure.propagate import Walk

LAYERS: dict[Any, Rule] = {}
rule = rules_of(LAYERS)

_CONVS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_PADDED = (aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)


@rule(*_CONVS, *_PADDED)
def conv(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """(N, I, ...) with weight (O, I/groups, ...): outputs are new units; a depthwise output belongs to its input."""
    x, weight = args[:2]
    if not isinstance(weight, Raw) or (own := _matrix(weight)) is None:
        return walk.give_up(node, f"the weight of {walk.where(node)} is computed in the forward pass")
    bias, groups = argument(node, args, kwargs, "bias"), argument(node, args, kwargs, "groups")
    channels = len(walk.shape(node)) - weight_spatial(weight) - 1
    inputs = walk.along(x, channels)
    outputs, per_group = weight.shape[:2]
    depthwise = groups > 1 and per_group == 1
    if groups == 1:
        walk.reads(weight, own[1], inputs, "in")
        made = walk.units.fresh(outputs)
    elif depthwise:
        made = inputs.repeat_interleave(outputs // groups)
    else:
        walk.reads(weight, own[1], uniform(walk, inputs, groups)[0], "in")
        made = uniform(walk, walk.units.fresh(outputs), groups).reshape(-1)
    walk.reads(weight, own[0], made, "with" if depthwise else "out")
    walk.bias(bias, made, node)
    macs = math.prod(walk.shape(node)) * math.prod(weight.shape[1:])
    walk.cost(macs, made, inputs if groups == 1 else None if depthwise else inputs[: len(inputs) // groups])
    return spread(made, channels, walk.shape(node))


def weight_spatial(weight: Raw) -> int:
    """Number of dimensions over which a filter moves."""
    return len(weight.shape) - 2


def _matrix(weight: Raw) -> tuple[tuple[int, Tensor], tuple[int, Tensor]] | None:
    """Where the first two dimensions of a weight come from, as (dimension, indices) of its tensor."""
    if not weight.moved:
        return (0, torch.arange(weight.shape[0])), (1, torch.arange(weight.shape[1]))
    first, second = weight.axis(0), weight.axis(1)
    if weight.shape[1] == 1 and second is None:
        second = (1, torch.arange(1))
    return None if first is None or second is None or first[0] == second[0] else (first, second)


def uniform(walk: Walk, labels: Tensor, groups: int) -> Tensor:
    """(groups * n,) to (groups, n) with the same position of every group made one unit, so that groups stay equal."""
    rows = labels.view(groups, -1)
    walk.units.join(rows[:1], rows, "a grouped layer needs equal groups, and one of them cannot be cut here")
    return rows


@rule(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def conv_transpose(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """(N, I, ...) with weight (I, O/groups, ...)."""
    x, weight = args[:2]
    groups = argument(node, args, kwargs, "groups")
    if not isinstance(weight, Raw) or weight.moved:
        return walk.give_up(node, f"the weight of {walk.where(node)} is computed in the forward pass")
    channels = len(walk.shape(node)) - weight_spatial(weight) - 1
    inputs = walk.along(x, channels)
    per_group = weight.shape[1]
    depthwise = groups == len(inputs) and groups > 1
    if depthwise:
        made = inputs.repeat_interleave(per_group)
        per = None
    else:
        uniform(walk, inputs, groups)
        rows = uniform(walk, walk.units.fresh(per_group * groups), groups)
        walk.units.member(weight.name, 1, rows[0], "out")
        made, per = rows.reshape(-1), rows[0]
    walk.units.member(weight.name, 0, inputs, "with" if depthwise else "in")
    walk.bias(argument(node, args, kwargs, "bias"), made, node)
    positions = math.prod(x.shape if isinstance(x, Tensor) else ()) * math.prod(weight.shape[1:])
    walk.cost(positions, inputs, per)
    return spread(made, channels, walk.shape(node))


@rule(aten.linear.default)
def linear(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """(..., I) with weight (O, I)."""
    x, weight = args[:2]
    if not isinstance(weight, Raw) or (own := _matrix(weight)) is None:
        return walk.give_up(node, f"the weight of {walk.where(node)} is computed in the forward pass")
    inputs = walk.along(x, len(x.shape) - 1)
    walk.reads(weight, own[1], inputs, "in")
    made = walk.units.fresh(weight.shape[0])
    walk.reads(weight, own[0], made, "out")
    walk.bias(argument(node, args, kwargs, "bias"), made, node)
    walk.made_from(made, inputs)
    walk.cost(math.prod(walk.shape(node)) * weight.shape[1], made, inputs)
    return spread(made, len(walk.shape(node)) - 1, walk.shape(node))


@rule(aten.embedding.default, aten.embedding_bag.default, aten._embedding_bag.default)
def embedding(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whole numbers with weight (rows, width): the width is made of new units, rows stay since numbers name them."""
    weight = args[0]
    if not isinstance(weight, Raw) or (own := _matrix(weight)) is None or node.name not in walk.shapes:
        return walk.give_up(node, f"{walk.where(node)} could not be followed")
    made = walk.units.fresh(weight.shape[1])
    walk.reads(weight, own[1], made, "out")
    walk.units.member(weight.name, own[0][0], torch.zeros(weight.shape[0], dtype=torch.long), "with")
    return spread(made, len(walk.shape(node)) - 1, walk.shape(node))
