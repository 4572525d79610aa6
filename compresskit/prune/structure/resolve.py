"""Resolve the constraints once the whole graph has been seen: which part of a split stays, and which channels go together.

When (N, L, heads * width) is viewed as (N, L, heads, width), the code divides by a number that stays, so either all heads lose
the same inner positions or whole heads go. `q @ k.T`, (N, heads, L, L), goes with a head, not with an inner position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from compresskit.prune.structure.channel_sets import AxisLabels, ChannelSets, varying_dims
from compresskit.prune.structure.constraints import AxisSplit, DependsOnAll
from compresskit.prune.structure.rules.base import ChannelPropagation

_ROLES = ("out", "in", "with")


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Decisions about a model's code that its graph does not show: found by trial, or set by the user.

    whole_heads: modules in which whole heads go. tied_heads: modules whose heads are together as wide as their input.
    attributes: attributes of modules, as (path, name), that follow a width. one_width: those that several layers read, which then
    have to have the same width. locked_sizes: numbers of the sizes given in the code that stay -> why.
    locked_axes: dimensions of tensors, as (name, dimension), that stay -> why.
    fixed_cuts: numbers of the cuts of channels whose places do not follow the width.
    rescaled: whether queries make up for 1 / sqrt(width) of a width that shrinks.
    """

    whole_heads: frozenset[str] = frozenset()
    tied_heads: frozenset[str] = frozenset()
    attributes: frozenset[tuple[str, str]] = frozenset()
    one_width: frozenset[tuple[str, str]] = frozenset()
    locked_sizes: Mapping[int, str] = field(default_factory=dict)
    locked_axes: Mapping[tuple[str, int], str] = field(default_factory=dict)
    fixed_cuts: frozenset[int] = frozenset()
    rescaled: bool = True


@dataclass(frozen=True, kw_only=True)
class ResolvedChannels:
    """The final channel sets, and for each (tensor, dimension) the sets that its indices belong to."""

    sets: ChannelSets
    axes: dict[tuple[str, int], AxisLabels]


def resolve_constraints(propagation: ChannelPropagation, assumptions: Assumptions) -> ResolvedChannels:
    """Join and lock channel sets until every constraint holds; the propagation itself is not changed."""
    sets = propagation.sets.copy()
    axes = _merge_axes(sets)
    for split in propagation.splits:
        module = propagation.trace.module.get_submodule(split.path)
        if split.path in assumptions.tied_heads or isinstance(module, nn.MultiheadAttention):
            _tie_heads(propagation, assumptions, sets, split)
    for number, why in assumptions.locked_sizes.items():
        size = propagation.hard_coded_sizes[number]
        sets.lock(size.labels, f"{size.reason}{why}")
    for number in assumptions.fixed_cuts:
        sets.lock(propagation.cuts[number].labels, propagation.cuts[number].reason)
    for key, reason in assumptions.locked_axes.items():
        if key in axes:
            sets.lock(axes[key].labels, reason)
    _join_dependencies(sets, propagation.dependencies)
    before = -1
    while before != sets.unions:
        before = sets.unions
        for split in propagation.splits:
            if _join_split(sets, split, split.path in assumptions.whole_heads):
                _join_dependencies(sets, propagation.dependencies)
        for path, name in assumptions.one_width & assumptions.attributes:
            _join_widths(propagation, sets, path, name)
    for dependency in propagation.dependencies:
        _, uniform = _common_set(sets, dependency)
        sets.lock(torch.where(uniform, -1, dependency.results), dependency.reason)
    return ResolvedChannels(sets=sets, axes=axes)


def _merge_axes(sets: ChannelSets) -> dict[tuple[str, int], AxisLabels]:
    """Join the labels of tensors that are read more than once: an index of a dimension belongs to one set."""
    axes: dict[tuple[str, int], AxisLabels] = {}
    for axis in sets.axes:
        key = (axis.tensor, axis.dim)
        if (first := axes.get(key)) is not None:
            reason = f"{axis.tensor} is used twice, once where it cannot be cut"
            labels = sets.join(first.labels, axis.labels, reason)
            axes[key] = replace(first, labels=labels, role=min(first.role, axis.role, key=_ROLES.index))
        else:
            axes[key] = axis
    return axes


def _join_dependencies(sets: ChannelSets, dependencies: list[DependsOnAll]) -> None:
    """Join results with their parts where all the parts of a result are one set."""
    before = -1
    while before != sets.unions:
        before = sets.unions
        for dependency in dependencies:
            roots, uniform = _common_set(sets, dependency)
            if bool((uniform & (roots != sets.roots(dependency.results))).any()):
                results = torch.where(uniform, dependency.results, -1)
                sets.join(results, torch.where(uniform, roots, -1), dependency.reason)


def _common_set(sets: ChannelSets, dependency: DependsOnAll) -> tuple[Tensor, Tensor]:
    """(the set of each result's parts, whether they all are that set), in the shape of the results."""
    roots, results = sets.roots(dependency.parts), dependency.results
    low, high = roots, roots
    for dim in range(roots.ndim):
        if results.shape[dim] == 1:
            low, high = low.amin(dim, keepdim=True), high.amax(dim, keepdim=True)
    return high, (low == high) & (high > 0) & (results > 0)


def _join_split(sets: ChannelSets, split: AxisSplit, whole_heads: bool) -> bool:
    """Let only one of the dimensions of a split shrink; returns whether there was more than one."""
    moving = varying_dims(sets.roots(split.labels))
    if len(moving) < 2:
        return False
    shrinks = moving[-2] if whole_heads else moving[-1]
    first = split.labels
    for dim in moving:
        if dim != shrinks:
            first = first.narrow(dim, 0, 1)
    sets.join(first, split.labels, split.reason)
    return True


def _join_widths(propagation: ChannelPropagation, sets: ChannelSets, path: str, name: str) -> None:
    """Join, position by position, the widths that the code of a module takes from one of its attributes."""
    width, first = getattr(propagation.trace.module.get_submodule(path), name), None
    for size in propagation.hard_coded_sizes:
        if size.path != path:
            continue
        roots = sets.roots(size.labels)
        moving = varying_dims(roots)
        if len(moving) == 1 and size.shape[moving[0]] == width:
            labels = roots.movedim(moving[0], 0).reshape(width, -1)[:, 0]
            first = (
                labels if first is None else sets.join(first, labels, f"as wide as {name} of {path or 'the model'}, which stays")
            )


def _tie_heads(propagation: ChannelPropagation, assumptions: Assumptions, sets: ChannelSets, split: AxisSplit) -> None:
    """Join the channels of a module's heads with those of its input: the code computes one width from the other."""
    in_module = [torch.unique(s.labels) for s in propagation.splits if s.path == split.path]
    inside = f"{split.path}." if split.path else ""
    layers = [
        (made, inputs)
        for path, made, inputs in propagation.linear_layers
        if f"{path}.".startswith(inside) and any(bool(torch.isin(made, labels).any()) for labels in in_module)
    ]
    for made, _ in layers:
        inputs = layers[0][1]
        if bool(torch.isin(made, split.labels).any()) and len(made) % len(inputs) == 0:
            reason = f"as wide as the input of {split.path or 'the model'}, which stays"
            if split.path in assumptions.tied_heads and not bool(inputs.any()):  # whose sizes need not be equal: it cannot be cut
                reason = f"{split.reason}; a copy with narrower parts failed"
            sets.join(inputs[None], made.view(-1, len(inputs)), reason)
    viewed = [torch.unique(s.labels) for s in propagation.hard_coded_sizes if s.path == split.path]
    for path, made, read in propagation.conv_layers if layers else ():
        # Keys and values of fewer positions: what a convolution makes is viewed by the width of the input.
        if f"{path}.".startswith(inside) and len(made) == len(read) and any(bool(torch.isin(made, v).any()) for v in viewed):
            sets.join(read, made, f"as wide as the input of {split.path or 'the model'}, which stays")
