"""Merge the branches of a sum that read the same value into one layer, on a captured graph: RepVGG, MobileOne, ACNet.

    conv3x3(x) + conv1x1(x) + scale * x + x + y  ->  conv(x) + y

A branch is a convolution or linear layer, a scale and shift for each channel (BatchNorm alone, say), or the value itself; see
`geometry.parallel` for what can be one, and Ding et al. (arXiv 2101.03697), Vasu et al. (2206.04040), Ding et al. (1908.03930).
Only what takes no more multiply-accumulates than the branches is merged. A branch that something else reads, too, stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from compresskit.graph.layers.channel_affine import ChannelAffine, affine_of
from compresskit.graph.layers.geometry import Geometry, parallel, placed, pointwise
from compresskit.graph.layers.merging import Merging, geometry_of, is_stored_layer, layer_axis, node_rank, set_geometry_
from compresskit.graph.layers.stored import bias_of, replace_weights_
from compresskit.graph.normalize import Node, aten, give_output_of_


@dataclass(frozen=True, kw_only=True)
class _Branch:
    """A summand as a layer of the value that it reads.

    node: the summand. sign: 1 or -1. kind: it is a layer, the scaled and shifted value, or the value itself. weight, bias: in
    float64. mask: of the weight, True where it may be other than zero; None for everywhere. macs: of one position. before: the
    operators between the value and the summand.
    """

    node: Node
    sign: int
    kind: Literal["layer", "scale", "value"]
    geometry: Geometry
    weight: Tensor
    bias: Tensor | None
    mask: Tensor | None
    macs: int
    before: tuple[Node, ...] = ()


def merge_branches_(merging: Merging) -> bool:
    """Merge parallel branches, in place; returns whether any were."""
    before = len(merging.done)
    for node in merging.nodes():
        if node.users and _is_plain_sum(node) and not _is_part_of_sum(node) and not _is_named(merging, node):
            summands = _summands(node, 1)
            removed = _merged_summands(merging, summands)
            if removed:
                _rewrite_sum(merging, node, summands, removed)
    return len(merging.done) > before


def _is_part_of_sum(node: Node) -> bool:
    """Whether a sum is nothing but a summand of another one."""
    return len(node.users) == 1 and _is_plain_sum(next(iter(node.users))) and _is_plain_sum(node)


def _is_named(merging: Merging, node: Node) -> bool:
    """Whether the user named the value of a sum, or of a sum in it, which merging would remove."""
    inside = [value for value in node.args if _is_plain_sum(value) and len(value.users) == 1]
    return node.name in merging.rules.skip or any(_is_named(merging, value) for value in inside)


def _is_plain_sum(node: Node) -> bool:
    """Whether a node adds or subtracts two values of its own shape."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or node.kwargs or len(node.args) != 2:
        return False
    values = [getattr(value, "meta", {}).get("val") for value in node.args]
    return all(isinstance(v, Tensor) and _same_kind(v, node.meta["val"]) for v in values)


def _same_kind(value: Tensor, other: Tensor) -> bool:
    sizes = [tuple(map(str, v.shape)) for v in (value, other)]  # as text, a comparison of symbols adds no guard
    return sizes[0] == sizes[1] and value.dtype == other.dtype


def _summands(node: Node, sign: int, *, top: bool = True) -> list[tuple[Node, int]]:
    """The values that a sum adds, each with its sign."""
    if not _is_plain_sum(node) or not (top or len(node.users) == 1):
        return [(node, sign)]
    other = -sign if node.target is aten.sub.Tensor else sign
    return _summands(node.args[0], sign, top=False) + _summands(node.args[1], other, top=False)


def _merged_summands(merging: Merging, summands: list[tuple[Node, int]]) -> dict[int, Node]:
    """Merge what can be; returns the place of each summand that is gone -> the layer that it was merged into."""
    gone: dict[int, Node] = {}
    nodes = [node for node, _ in summands]
    layers = [
        (i, node)
        for i, node in enumerate(nodes)
        if len(node.users) == 1 and nodes.count(node) == 1 and is_stored_layer(merging.module, node)
    ]
    for x, target in dict.fromkeys((node.args[0], node.target) for _, node in layers):
        own = [(i, node) for i, node in layers if node.args[0] is x and node.target is target and merging.is_alone(node)]
        if not own or sum(_is_of_value(merging, node, x) for node in nodes) < 2:
            continue
        branches = {i: _of_layer(merging, node, summands[i][1]) for i, node in own}
        for i, (node, sign) in enumerate(summands):
            if i not in branches and i not in gone and (branch := _of_value(merging, node, sign, x, own[0][1])) is not None:
                branches[i] = branch
        for places in _branch_groups(merging, branches):
            _merge_branches(merging, [branches[i] for i in places])
            gone |= dict.fromkeys(places, branches[places[0]].node)
    return gone


def _is_of_value(merging: Merging, node: Node, x: Node) -> bool:
    return node is x or x in node.all_input_nodes or _scaled_value(merging, node, x) is not None


def _scaled_value(merging: Merging, node: Node, x: Node) -> tuple[ChannelAffine, tuple[Node, ...]] | None:
    """The scale and shift of x that a summand is, by one operator or several, and those before the last one; None for others."""
    whole: ChannelAffine | None = None
    steps: list[Node] = []
    while node is not x or whole is None:
        affine = affine_of(merging.module, node, merging.constants) if len(node.users) == 1 else None
        whole = affine if affine is None or whole is None else affine.then(whole)
        if affine is None or whole is None:
            return None
        steps.append(node)
        node = affine.x
    return whole, tuple(steps[1:])


def _of_layer(merging: Merging, node: Node, sign: int) -> _Branch:
    geometry = geometry_of(merging.module, node)
    return _Branch(
        node=node,
        sign=sign,
        kind="layer",
        geometry=geometry,
        weight=merging.weight(node),
        bias=merging.value(bias_of(node)),
        mask=merging.mask(node),
        macs=geometry.macs,
    )


def _of_value(merging: Merging, node: Node, sign: int, x: Node, like: Node) -> _Branch | None:
    """A summand that is the value x itself, or its scale and shift, as a depthwise layer of size 1 beside the layer `like`."""
    channels = geometry_of(merging.module, like).inputs
    if node is x:
        return _pointwise(node, sign, merging.weight(like).new_ones(channels), None, like)
    found = _scaled_value(merging, node, x)
    if found is None or found[0].axis not in (None, layer_axis(like)):
        return None
    affine, before = found
    scale, shift = affine.expanded(channels)
    finite = bool(scale.isfinite().all()) and bool(shift.isfinite().all())
    if not merging.replays and (not finite or (affine.trains and not merging.trains(like))):
        return None
    return replace(_pointwise(node, sign, scale, shift if affine.shifts else None, like), before=before)


def _pointwise(node: Node, sign: int, scale: Tensor, bias: Tensor | None, like: Node) -> _Branch:
    channels, spatial = len(scale), 0 if like.target is aten.linear.default else node_rank(like) - 2
    if spatial:
        geometry, weight, mask = pointwise(channels, spatial), scale.reshape(-1, 1, *[1] * spatial), None
    else:  # a linear layer has no groups
        geometry, weight = replace(pointwise(channels, 0), groups=1), torch.diag(scale)
        mask = torch.eye(channels, dtype=torch.bool, device=scale.device)
    kind: Literal["scale", "value"] = "value" if bias is None and node is like.args[0] else "scale"
    macs = 0 if kind == "value" else channels
    return _Branch(node=node, sign=sign, kind=kind, geometry=geometry, weight=weight, bias=bias, mask=mask, macs=macs)


def _branch_groups(merging: Merging, branches: dict[int, _Branch]) -> list[list[int]]:
    """Places of the branches that become one layer each, the layer with the largest kernel first."""

    def rank(place: int) -> tuple[int, int, int]:
        branch = branches[place]
        kind = ("layer", "scale", "value").index(branch.kind)
        return kind, -math.prod(branch.geometry.kernel), -branch.macs

    groups: list[list[int]] = []
    for place in sorted(branches, key=rank):
        joined = next((g for g in groups if _may_join(merging, [branches[i] for i in g], branches[place])), None)
        if joined is not None:
            joined.append(place)
        elif branches[place].kind == "layer":
            groups.append([place])
    return [group for group in groups if len(group) > 1]


def _may_join(merging: Merging, group: Sequence[_Branch], branch: _Branch) -> bool:
    into, is_layer = group[0].node, branch.kind == "layer"
    if not merging.may_join("branch", into, branch.node, layer=is_layer):
        return False
    if not merging.replays:
        if not all(merging.may_join("branch", into, step, layer=False) for step in branch.before):
            return False
        if is_layer and (merging.trains(branch.node) != merging.trains(into) or merging.has_levels(branch.node)):
            return False
        if merging.has_levels(into):
            return False
    whole, alone = parallel([*(b.geometry for b in group), branch.geometry]), parallel([b.geometry for b in group])
    if whole is None or alone is None or whole.macs > alone.macs + branch.macs:
        return False
    return merging.replays or _may_be_rounded(merging, group, branch, whole)


def _may_be_rounded(merging: Merging, group: Sequence[_Branch], branch: _Branch, whole: Geometry) -> bool:
    rules, weight = merging.rules, _summed([*group, branch], whole)
    if rules.least_decibels is not None and _decibels_in_eight_bits(weight) < rules.least_decibels:
        return False
    is_lone = branch.kind == "value" and len(group) < 2
    return not is_lone or rules.takes_identity is None or rules.takes_identity(group[0].node, weight)


def _summed(group: Sequence[_Branch], whole: Geometry) -> Tensor:
    """The weight of the sum of branches."""
    return torch.stack([b.sign * placed(b.weight, b.geometry, whole) for b in group]).sum(0)


def _decibels_in_eight_bits(weight: Tensor) -> float:
    """Signal-to-noise ratio in dB of a weight, (channels, ...), with eight bits and one scale for each channel.

    One weight that is much larger than the others of its channel, as the one of an identity, makes their grid coarse: networks of
    such branches lose most of their accuracy in eight bits once these are merged (Chu et al., arXiv 2212.01593).
    """
    rows = weight.flatten(1)
    steps = rows.abs().amax(1) / 127
    noise = float(((rows != 0).sum(1) * steps.square() / 12).sum())
    return math.inf if noise == 0 else 10 * math.log10(float(rows.square().sum()) / noise)


def _merge_branches(merging: Merging, group: Sequence[_Branch]) -> None:
    """Give the first branch, a layer, the weight of the sum of all."""
    whole = parallel([branch.geometry for branch in group])
    assert whole is not None
    layer = group[0].node
    weight = _summed(group, whole)
    biases = [b.sign * b.bias for b in group if b.bias is not None]
    mask = None
    if any(b.mask is not None for b in group if b.kind == "layer"):
        kept = [torch.ones_like(b.weight) if b.mask is None else b.mask.to(b.weight) for b in group]
        parts = [placed(values, b.geometry, whole) for values, b in zip(kept, group, strict=True)]
        mask = torch.stack(parts).sum(0) > 0
    for branch in group:
        merging.forget_fold_(branch.node)
    replace_weights_(merging.module, layer, weight, torch.stack(biases).sum(0) if biases else None, mask)
    set_geometry_(layer, whole)
    merging.joined("branch", layer, [branch.node for branch in group[1:]])


def _rewrite_sum(merging: Merging, root: Node, summands: list[tuple[Node, int]], gone: dict[int, Node]) -> None:
    """Add the merged layers, whose weights have their signs, and the summands that are left, in the place of a sum."""
    layers = list(dict.fromkeys(gone.values()))
    left = [(node, 1) for node in layers] + [pair for i, pair in enumerate(summands) if i not in gone]
    for node in layers:
        give_output_of_(node, root)
    left.sort(key=lambda pair: -pair[1])  # begin with one that is added
    value = left[0][0]
    graph = merging.module.graph
    for node, sign in left[1:]:
        with graph.inserting_before(root):
            result = graph.call_function(aten.add.Tensor if sign > 0 else aten.sub.Tensor, (value, node))
        result.meta = dict(root.meta)
        value = result
    root.replace_all_uses_with(value)
    graph.erase_node(root)
    graph.eliminate_dead_code()
