"""Groups of channels that may be cut, what the layers cost, and how wide everything still is."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import SettingError
from compresskit.graph.surgery import get_tensor, owner
from compresskit.prune.criteria import Slices
from compresskit.prune.evidence import Evidence, values_of
from compresskit.prune.structure.propagate import Walk
from compresskit.prune.structure.resolve import Choices, Settled, settle

#: Layers whose factors say how strong a channel is.
NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


@dataclass(kw_only=True)
class ChannelGroup:
    """Units that touch the same dimensions of the same tensors, and so can be ranked against one another.

    indices: (tensor, dim, role) -> (units, k) the k indices that vanish with each unit.
    scores: of the units, larger = keep. sorted_scores: the same, sorted. remaining[n]: their sum once the n lowest are gone.
    pooled_scores: scores of all groups of the same kind, sorted.
    roots: (units,) the number of each unit. costs: how many entries of each width that MACs depend on vanish with a unit.
    """

    indices: dict[tuple[str, int, str], Tensor]
    shapes: list[tuple[int, ...]]
    roots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    costs: dict[int, int] = field(default_factory=dict)
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    sorted_scores: list[float] = field(default_factory=list)
    remaining: list[float] = field(default_factory=list)
    pooled_scores: list[float] = field(default_factory=list)
    removed: int = 0

    @cached_property
    def size(self) -> int:
        """Number of units."""
        return len(next(iter(self.indices.values())))

    @cached_property
    def layers(self) -> int:
        """Number of dimensions of matrices and filters that get narrower with each unit."""
        return sum(len(shape) > 1 for shape in self.shapes)

    @property
    def layer(self) -> str:
        """The layer that makes the channels."""
        return (self.producers or [tensor.rpartition(".")[0] for tensor, _, _ in self.indices])[0]

    @property
    def producers(self) -> list[str]:
        """The layers that make the channels."""
        return [tensor.rpartition(".")[0] for tensor, _, role in self.indices if role == "out"]

    @property
    def architecture(self) -> tuple[tuple[str, int, int], ...]:
        """What the group is built of, whatever its size: kinds of tensors, each in its role."""
        places = zip(self.indices, self.shapes, strict=True)
        return tuple(sorted((role, dim, len(shape)) for (_, dim, role), shape in places))

    def slices(self, model: nn.Module, prefix: str, evidence: Evidence | None = None) -> Slices:
        """Every weight of a matrix or a filter that vanishes with each unit, in rows, and what data showed of the units."""
        evidence = evidence or Evidence()
        rows: list[Tensor] = []
        grads: list[Tensor] = []
        sample_grads: list[Tensor] = []
        reads: list[Tensor] = []
        scales: list[Tensor] = []
        for (name, dim, role), indices in self.indices.items():
            tensor, index = get_tensor(model, prefix + name), indices.to(get_tensor(model, prefix + name).device)
            if not isinstance(tensor, nn.Parameter):
                continue
            if tensor.ndim < 2:
                module, leaf = owner(model, prefix + name)
                if leaf == "weight" and isinstance(module, NORM_LAYERS):
                    scales.append(tensor.detach().float()[index])
                continue
            rows.append(tensor.detach().float().movedim(dim, 0)[index].reshape(self.size, -1))
            reads.append(torch.full((rows[-1].shape[1],), role == "in", device=rows[-1].device))
            if evidence.grads is not None:
                grads.append(evidence.grads[prefix + name].float().movedim(dim, 0)[index].reshape(self.size, -1))
            if evidence.sample_grads is not None:
                each = evidence.sample_grads[prefix + name].float().movedim(dim + 1, 1)[:, index]
                sample_grads.append(each.reshape(len(each), self.size, -1))
        counts = torch.tensor([r.shape[1] for r in rows])
        return Slices(
            weight=torch.cat(rows, 1),
            reads=torch.cat(reads),
            layers=torch.arange(len(rows)).repeat_interleave(counts).to(rows[0].device),
            scales=torch.cat(scales, 1) if scales else None,
            grad=torch.cat(grads, 1) if grads else None,
            sample_grad=torch.cat(sample_grads, 2) if sample_grads else None,
            activations=None if evidence.inputs is None else values_of(model, self.indices, prefix, evidence),
            loss=None if evidence.loss is None else partial(evidence.loss, self.indices),
        )


@dataclass(frozen=True, kw_only=True)
class ChannelAnalysis:
    """What the walk found: groups that may be cut, why others may not, and what the layers cost.

    costs: MACs of an operator, and the widths that they are a product of, by number. sizes: of those widths.
    fixed: MACs that no width changes. shapes: of the tensors in groups.
    """

    groups: list[ChannelGroup]
    locked: dict[str, int]
    costs: list[tuple[float, list[int]]]
    sizes: list[int]
    fixed: float
    shapes: dict[str, tuple[int, ...]]
    propagation: Walk
    resolved: Settled
    assumptions: Choices


def find_groups(
    walk: Walk, model_macs: int, *, ignore: tuple[str, ...] = (), assumptions: Choices | None = None
) -> ChannelAnalysis:
    """Collect units into groups.

    ignore: dotted paths of modules whose parameters are never cut. choices: what the graph leaves open.
    """
    choices = assumptions or Choices()
    prefix = f"{walk.recorded.prefix}." if walk.recorded.prefix else ""
    settled = settle(walk, choices)
    units, vectors = settled.units, settled.vectors
    paths = {key: prefix + key[0] for key in vectors}
    if unknown := [name for name in ignore if not any(path.startswith(f"{name}.") for path in paths.values())]:
        raise SettingError(f"ignore={unknown}: no layer with channels stands in a module of that name")
    for key, member in vectors.items():
        if any(paths[key].startswith(f"{name}.") for name in ignore):
            units.lock(member.labels, "ignored by the user")
    of_unit: dict[int, dict[tuple[str, int, str], list[int]]] = defaultdict(lambda: defaultdict(list))
    for (tensor, dim), member in vectors.items():
        for index, root in enumerate(units.roots(member.labels).tolist()):
            if root:
                of_unit[root][(tensor, dim, member.role)].append(index)
    costs, sizes, cost_of = _costs(walk, settled)
    locked: Counter[str] = Counter()
    by_signature: dict[Any, list[int]] = defaultdict(list)
    for root, places in of_unit.items():
        if root in units.locks:
            locked[units.locks[root]] += 1
        else:
            signature = tuple((key, len(indices)) for key, indices in places.items())
            by_signature[signature, tuple(cost_of[root].items())].append(root)
    groups = []
    for same in by_signature.values():
        indices = {key: torch.tensor([of_unit[root][key] for root in same]) for key in of_unit[same[0]]}
        shapes = [_shape(walk, t) for t, _, _ in indices]
        group = ChannelGroup(indices=indices, shapes=shapes, roots=torch.tensor(same), costs=dict(cost_of[same[0]]))
        if group.layers and group.size > 1:
            groups.append(group)
        elif group.layers:
            locked["a layer of one channel, or one whose channels only go together"] += 1
    return ChannelAnalysis(
        groups=groups,
        locked=dict(locked.most_common()),
        costs=costs,
        sizes=sizes,
        fixed=max(0, model_macs - sum(c for c, _ in costs)),
        shapes={t: _shape(walk, t) for g in groups for t, _, _ in g.indices},
        propagation=walk,
        resolved=settled,
        assumptions=choices,
    )


def _shape(walk: Walk, tensor: str) -> tuple[int, ...]:
    return tuple(get_tensor(walk.recorded.module, tensor).shape)


def _costs(walk: Walk, settled: Settled) -> tuple[list[tuple[float, list[int]]], list[int], dict[int, dict[int, int]]]:
    """MACs with the numbers of their widths, the sizes of those, and how many entries of each every unit has."""
    numbers: dict[Any, int] = {}
    sizes: list[int] = []
    of_unit: dict[int, dict[int, int]] = defaultdict(dict)
    costs = []
    for macs, along in walk.costs:
        keys = []
        for labels in along:
            roots, counts = torch.unique(settled.units.roots(labels.reshape(-1)), return_counts=True)
            entries = tuple(zip(roots.tolist(), counts.tolist(), strict=True))
            if entries not in numbers:
                numbers[entries] = number = len(sizes)
                sizes.append(labels.numel())
                for root, count in entries:
                    of_unit[root][number] = count
            keys.append(numbers[entries])
        costs.append((macs, keys))
    return costs, sizes, of_unit


class MacCounter:
    """How wide every dimension of every tensor still is, and what the model then costs."""

    def __init__(self, found: ChannelAnalysis) -> None:
        self.found = found
        self.gone: dict[int, int] = defaultdict(int)
        self.touching: dict[int, set[int]] = defaultdict(set)
        self.costs = [cost for cost, _ in found.costs]
        self._of_group: dict[int, list[tuple[int, list[int]]]] = {}
        for i, (_, keys) in enumerate(found.costs):
            for key in keys:
                self.touching[key].add(i)

    def share(self, key: int, extra: int = 0) -> float:
        """Share of a width that stays when `extra` more entries go."""
        return 1 - (self.gone[key] + extra) / self.found.sizes[key]

    def macs(self) -> float:
        """MACs of one sample."""
        return self.found.fixed + sum(self.costs)

    def saving(self, group: ChannelGroup, count: int) -> float:
        """MACs saved by `count` units fewer."""
        stays = {}
        for key, each in group.costs.items():
            now = self.share(key)
            stays[key] = self.share(key, each * count) / now if now else 0.0
        return sum(self.costs[i] * (1 - math.prod([stays[key] for key in keys])) for i, keys in self._affected(group))

    def _affected(self, group: ChannelGroup) -> list[tuple[int, list[int]]]:
        """The operators that get cheaper with a group, each with its widths that the group is in."""
        if id(group) not in self._of_group:
            touched = {i for key in group.costs for i in self.touching.get(key, ())}
            self._of_group[id(group)] = [(i, [k for k in self.found.costs[i][1] if k in group.costs]) for i in sorted(touched)]
        return self._of_group[id(group)]

    def cut(self, group: ChannelGroup, count: int) -> None:
        """Note that `count` more units go."""
        for key, each in group.costs.items():
            self.gone[key] += each * count
        for i, _ in self._affected(group):
            cost, keys = self.found.costs[i]
            self.costs[i] = cost * math.prod([self.share(key) for key in keys])
        group.removed += count
