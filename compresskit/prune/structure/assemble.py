"""Turn the channels chosen in every group into a plan, with all that changes beside the tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from compresskit.prune.structure.channel_sets import varying
from compresskit.prune.structure.groups import ChannelAnalysis
from compresskit.prune.structure.plan import Plan


def assemble_plan(found: ChannelAnalysis, chosen: Sequence[torch.Tensor], prefix: str, **settings: Any) -> Plan:
    """The plan that removes these units, (removed,) int64 for each group, and all that goes or changes with them."""
    remove: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    roots: set[int] = set()
    for group, units in zip(found.groups, chosen, strict=True):
        roots.update(group.roots[units].tolist())
        for (tensor, dim, _), indices in group.indices.items() if len(units) else ():
            remove[prefix + tensor][dim].update(indices[units].flatten().tolist())
    attributes, scales = consequences(found, roots, prefix)
    return Plan(
        remove={n: {d: tuple(sorted(i)) for d, i in sorted(dims.items())} for n, dims in remove.items()},
        sizes={n: found.shapes[n.removeprefix(prefix)] for n in remove},
        attributes=attributes,
        scales=scales,
        **settings,
    )


def consequences(
    found: ChannelAnalysis, roots: set[int], prefix: str
) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[float, tuple[int, ...]]]]:
    """What else changes when these units go: numbers that repeat a width, and queries that are scaled by one."""
    units, walk = found.resolved.units, found.propagation
    removed = torch.tensor(sorted(roots), dtype=torch.long)

    def stays(labels: torch.Tensor, dim: int) -> int:
        """How many indices of a dimension keep at least one entry."""
        kept = ~torch.isin(units.roots(labels), removed)
        return int(kept.movedim(dim, 0).reshape(kept.shape[dim], -1).any(1).sum())

    attributes: dict[str, tuple[Any, Any]] = {}

    def follow(path: str, name: str, after: int, position: int | None = None) -> None:
        key = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
        now = getattr(walk.recorded.module.get_submodule(path), name)
        old, new = attributes.get(key, (now, now))
        new = after if position is None else (*new[:position], after, *new[position + 1 :])
        if new != old:
            attributes[key] = (old, new)

    for suspect in walk.suspects:
        for path, name in found.assumptions.attributes:
            size = getattr(walk.recorded.module.get_submodule(path), name) if path == suspect.path else None
            for d in varying(suspect.labels):
                if size == suspect.shape[d]:
                    follow(path, name, stays(suspect.labels, d))
    for mirror in walk.mirrors:
        follow(mirror.path, mirror.attribute, stays(mirror.labels, 0), mirror.position)
    for split in walk.splits:
        module = walk.recorded.module.get_submodule(split.path)
        if isinstance(module, nn.MultiheadAttention) and split.path in found.assumptions.whole_heads:
            heads, all_heads = stays(split.labels, varying(split.labels)[-2]), split.labels.shape[varying(split.labels)[-2]]
            follow(split.path, "num_heads", module.num_heads * heads // all_heads)
    scales: dict[str, tuple[float, tuple[int, ...]]] = {}
    for scaling in walk.scalings if found.assumptions.rescaled else ():
        before, after = scaling.labels.shape[scaling.dim], stays(scaling.labels, scaling.dim)
        if after == before:
            continue
        for member in units.members:
            rows = torch.isin(member.labels, scaling.labels[scaling.labels > 0]).nonzero().flatten()
            if member.dim == 0 and member.role != "in" and len(rows):
                scales[prefix + member.tensor] = ((after / before) ** (0.25 if scaling.shared else 0.5), tuple(rows.tolist()))
    return attributes, scales
