"""Rules of normalisations. Those that mix channels are noted: their statistics are over fewer channels after a cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compresskit.graph.normalize import Node, aten
from compresskit.prune.structure.channel_sets import spread, varying
from compresskit.prune.structure.rules.base import Raw, Rule, argument, rules_of
from compresskit.prune.structure.rules.contract import summed
from compresskit.prune.structure.rules.layers import uniform

if TYPE_CHECKING:
    from compresskit.prune.structure.propagate import Walk

NORMS: dict[Any, Rule] = {}
rule = rules_of(NORMS)


@rule(aten.batch_norm.default, aten.instance_norm.default)
def channel_norm(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Each channel by itself, with up to four tensors of one entry a channel."""
    labels = walk.along(args[0], 1)
    for tensor in args[1:5]:
        if isinstance(tensor, Raw):
            walk.vector(tensor, labels, node)
    if not any(isinstance(tensor, Raw) for tensor in args[1:5]):
        walk.mirror(node, "num_features", labels)
    return spread(labels, 1, walk.shape(node))


@rule(aten.group_norm.default)
def group_norm(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """(N, C, ...) in groups: the same position of every group is one unit, and statistics are over what stays."""
    x, groups = args[:2]
    labels = walk.along(x, 1)
    if groups == len(labels) > 1:
        return walk.give_up(node, f"{walk.where(node)} has as many groups as channels; use InstanceNorm, which can be cut")
    uniform(walk, labels, groups)
    for name in ("weight", "bias"):
        tensor = argument(node, args, kwargs, name)
        if isinstance(tensor, Raw):
            walk.vector(tensor, labels, node)
    walk.mirror(node, "num_channels", labels)
    walk.statistic(node, labels, 1)
    return spread(labels, 1, walk.shape(node))


@rule(aten.layer_norm.default, aten.rms_norm.default)
def layer_norm(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Over the last dimensions, one of which may be that of the channels; statistics are over what stays."""
    x, shape = args[:2]
    if not isinstance(x, Tensor):
        return walk.give_up(node, f"{walk.where(node)} normalises a parameter")
    first = x.ndim - len(shape)
    inside = [d for d in varying(x) if d >= first]
    if not inside:
        return x
    if len(inside) > 1:
        return walk.give_up(node, f"{walk.where(node)} normalises over several dimensions of channels")
    labels = walk.along(x, inside[0])
    for name in ("weight", "bias"):
        tensor = argument(node, args, kwargs, name)
        if isinstance(tensor, Raw):
            walk.vector(tensor, labels, node, inside[0] - first)
    walk.mirror(node, "normalized_shape", labels, inside[0] - first)
    walk.statistic(node, labels, inside[0])
    return spread(labels, inside[0], walk.shape(node))


@rule(aten.prelu.default)
def prelu(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """One slope for all, or one a channel."""
    x, slope = args
    if not isinstance(slope, Raw):
        return walk.give_up(node, f"the slope of {walk.where(node)} is computed in the forward pass")
    if slope.numel > 1:
        walk.vector(slope, walk.along(x, 1), node)
    return x  # type: ignore[no-any-return]


@rule(aten._weight_norm.default)
def weight_norm(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`g v / |v|`: a weight with the layout of v, whose dimension `dim` is also that of g."""
    v, g = args[:2]
    dim = args[2] if len(args) > 2 else 0
    if not isinstance(v, Raw) or not isinstance(g, Raw) or v.moved or g.moved or dim < 0:
        return walk.give_up(node, f"{walk.where(node)} could not be followed")
    if len(g.shape) != len(v.shape):
        return walk.give_up(node, f"{walk.where(node)} could not be followed")
    return Raw.of(v.name, v.shape, also=((g.name, tuple(d if d == dim else None for d in range(len(v.shape)))),))


@rule(aten.linalg_vector_norm.default)
def vector_norm(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A norm of finite order is a sum: what is removed adds nothing to it."""
    x = args[0]
    order, dims = argument(node, args, kwargs, "ord"), argument(node, args, kwargs, "dim")
    if not isinstance(x, Tensor) or dims is None or not 0 < float(order) < float("inf"):
        return walk.give_up(node, f"{walk.where(node)} could not be followed")
    dims = [d % x.ndim for d in ([dims] if isinstance(dims, int) else dims)]
    result = summed(walk, x, dims, node)
    shape = walk.shape(node)
    kept = [n for d, n in enumerate(x.shape) if d not in dims]
    return result if len(shape) == x.ndim else torch.squeeze(result, dims).reshape(kept)
