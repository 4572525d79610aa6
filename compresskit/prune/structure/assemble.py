"""Assemble a plan from the channels chosen in every group, with the attributes and query scales that change with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.prune.structure.channel_sets import collapse_expanded, varying_dims
from compresskit.prune.structure.groups import ChannelAnalysis
from compresskit.prune.structure.plan import Plan, as_plan_value


def assemble_plan(analysis: ChannelAnalysis, chosen: Sequence[Tensor], **settings: Any) -> Plan:
    """The plan that removes these channels, (removed,) int64 for each group, and all that goes or changes with them.

    settings: the fields of `Plan` that do not follow from the channels (lines, macs, ...).
    """
    remove: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    roots: set[int] = set()
    for group, channels in zip(analysis.groups, chosen, strict=True):
        roots.update(group.roots[channels].tolist())
        for (tensor, dim, _), indices in group.indices.items() if len(channels) else ():
            remove[tensor][dim].update(indices[channels].flatten().tolist())
    removed, prefix = torch.tensor(sorted(roots), dtype=torch.long), analysis.prefix
    return Plan(
        remove={prefix + n: {d: tuple(sorted(i)) for d, i in sorted(dims.items())} for n, dims in remove.items()},
        sizes={prefix + n: analysis.shapes[n] for n in remove},
        attributes=_changed_attributes(analysis, removed),
        scales=_query_scales(analysis, removed),
        **settings,
    )


def _remaining_size(analysis: ChannelAnalysis, removed: Tensor, labels: Tensor, dim: int) -> int:
    """How many indices of a dimension keep at least one entry when the sets with these roots go."""
    small = collapse_expanded(labels)
    kept = ~torch.isin(analysis.resolved.sets.roots(small), removed)
    if small.shape[dim] != labels.shape[dim]:
        return labels.shape[dim] * bool(kept.any())
    return int(kept.movedim(dim, 0).reshape(kept.shape[dim], -1).any(1).sum())


def _changed_attributes(analysis: ChannelAnalysis, removed: Tensor) -> dict[str, tuple[Any, Any]]:
    """Attributes that repeat a width: dotted path -> (before, after)."""
    propagation = analysis.propagation
    module_at = propagation.trace.module.get_submodule
    changed: dict[str, tuple[Any, Any]] = {}

    def change(path: str, name: str, after: int, position: int | None = None) -> None:
        key = analysis.prefix + (f"{path}.{name}" if path else name)
        now = as_plan_value(getattr(module_at(path), name))
        old, new = changed.get(key, (now, now))
        new = after if position is None else (*new[:position], after, *new[position + 1 :])
        changed[key] = (old, new)

    for size in propagation.hard_coded_sizes:
        for name in [name for path, name in analysis.assumptions.attributes if path == size.path]:
            value = getattr(module_at(size.path), name)
            for d in varying_dims(size.labels):
                if value == size.shape[d]:
                    change(size.path, name, _remaining_size(analysis, removed, size.labels, d))
                elif isinstance(value, tuple | list) and size.shape[d] in value:
                    position = size.position if tuple(value) == size.sizes else value.index(size.shape[d])
                    change(size.path, name, _remaining_size(analysis, removed, size.labels, d), position)
    for attribute in propagation.size_attributes:
        after = _remaining_size(analysis, removed, attribute.labels, 0)
        change(attribute.path, attribute.attribute, after, attribute.position)
    for split in propagation.splits:
        module = module_at(split.path)
        if isinstance(module, nn.MultiheadAttention) and split.path in analysis.assumptions.whole_heads:
            dim = varying_dims(split.labels)[-2]
            heads = _remaining_size(analysis, removed, split.labels, dim)
            change(split.path, "num_heads", module.num_heads * heads // split.labels.shape[dim])
    return {key: (old, new) for key, (old, new) in changed.items() if new != old}


def _query_scales(analysis: ChannelAnalysis, removed: Tensor) -> dict[str, tuple[float, tuple[int, ...]]]:
    """Factors that make up for 1 / sqrt(width) of widths that shrink: tensor -> (factor, rows)."""
    scales: dict[str, tuple[float, tuple[int, ...]]] = {}
    scalings = analysis.propagation.width_scalings if analysis.assumptions.rescaled else ()
    made = [axis for axis in analysis.resolved.sets.axes if axis.dim == 0 and axis.role != "in"]
    if not scalings or not made:
        return scales
    labels = torch.cat([axis.labels for axis in made]).clamp(min=0)
    for scaling in scalings:
        before = scaling.labels.shape[scaling.dim]
        after = _remaining_size(analysis, removed, scaling.labels, scaling.dim)
        if after == before:
            continue
        factor = (after / before) ** (0.25 if scaling.shared else 0.5)
        scaled = torch.zeros(len(analysis.resolved.sets.parent), dtype=torch.bool)
        own = collapse_expanded(scaling.labels)
        scaled[own[own > 0]] = True
        parts = scaled[labels].split([len(axis.labels) for axis in made])
        for axis, part in zip(made, parts, strict=True):
            if bool(part.any()):
                scales[analysis.prefix + axis.tensor] = (factor, tuple(part.nonzero().flatten().tolist()))
    return scales
