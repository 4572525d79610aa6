"""Groups of channels that can be removed, what the layers cost, and what the model costs while channels go.

A group holds all channel sets that touch the same dimensions of the same tensors, so that they can be ranked against one another:
the channels of a convolution, or those of a residual stream with every layer on it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from compresskit.base.errors import SettingError
from compresskit.graph.surgery import get_tensor, owner
from compresskit.prune.criteria import Slices
from compresskit.prune.evidence import Evidence, values_of
from compresskit.prune.structure.channel_sets import ChannelSets
from compresskit.prune.structure.resolve import Assumptions, ResolvedChannels, resolve_constraints
from compresskit.prune.structure.rules.base import ChannelPropagation

#: Layers whose factors say how strong a channel is.
NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


@dataclass(kw_only=True)
class ChannelGroup:
    """Channel sets that touch the same dimensions of the same tensors; each is one "channel" of the group.

    indices: (tensor, dim, role) -> (channels, k): the k indices of that dimension that are removed with each channel.
    shapes: of the tensors in `indices`. roots: (channels,) root label of each channel set.
    costs: number of a width that MACs depend on -> how many of its entries go with one channel; see `ChannelAnalysis`.
    scores: (channels,), larger = keep. sorted_scores: the same, ascending. pooled_scores: sorted scores of all groups of the same
        architecture. remaining: remaining[n] is the sum of scores once the n lowest are removed.
    removed: how many channels, the lowest scores first, are removed so far while a plan is made.
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
        """Number of channels."""
        return len(next(iter(self.indices.values())))

    @cached_property
    def layers(self) -> int:
        """Number of dimensions of matrices and filters that get narrower with each channel."""
        return sum(len(shape) > 1 for shape in self.shapes)

    @property
    def layer(self) -> str:
        """The layer that makes the channels, by dotted name; the first of several."""
        return (self.producers or [tensor.rpartition(".")[0] for tensor, _, _ in self.indices])[0]

    @property
    def producers(self) -> list[str]:
        """All layers that make the channels."""
        return [tensor.rpartition(".")[0] for tensor, _, role in self.indices if role == "out"]

    @property
    def architecture(self) -> tuple[tuple[str, int, int], ...]:
        """(role, dimension, rank) of the group's tensors: equal for groups that are built of the same layers, of any size."""
        axes = zip(self.indices, self.shapes, strict=True)
        return tuple(sorted((role, dim, len(shape)) for (_, dim, role), shape in axes))

    def unscored(self) -> ChannelGroup:
        """The same channels, before any was scored or removed."""
        return ChannelGroup(indices=self.indices, shapes=self.shapes, roots=self.roots, costs=self.costs)

    def slices(self, model: nn.Module, prefix: str, evidence: Evidence | None = None) -> Slices:
        """Every weight of a matrix or filter that is removed with each channel, in rows, and what data showed of the channels."""
        evidence = evidence or Evidence()
        rows: list[Tensor] = []
        grads: list[Tensor] = []
        sample_grads: list[Tensor] = []
        reads: list[Tensor] = []
        scales: list[Tensor] = []
        for (tensor_name, dim, role), indices in self.indices.items():
            name = prefix + tensor_name
            tensor = get_tensor(model, name)
            if not isinstance(tensor, nn.Parameter):
                continue
            indices = indices.to(tensor.device)
            if tensor.ndim < 2:
                module, leaf = owner(model, name)
                if leaf == "weight" and isinstance(module, NORM_LAYERS):
                    scales.append(tensor.detach().float()[indices])
                continue
            rows.append(_indexed(tensor.detach(), dim, indices))
            columns = rows[-1].numel() // self.size
            reads.append(torch.full((columns,), role == "in", device=tensor.device))
            if evidence.grads is not None:
                grads.append(evidence.grads[name].float().movedim(dim, 0)[indices].reshape(self.size, -1))
            if evidence.sample_grads is not None:
                gradients = evidence.sample_grads[name].float().movedim(dim + 1, 1)[:, indices]
                sample_grads.append(gradients.reshape(len(gradients), self.size, -1))
        counts = torch.tensor([len(r) for r in reads])
        weight = torch.empty(self.size, int(counts.sum()), device=rows[0].device)
        for part, values in zip(weight.split(counts.tolist(), dim=1), rows, strict=True):
            part.unflatten(1, values.shape[1:]).copy_(values)
        return Slices(
            weight=weight,
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
    """The result of the analysis of a model: groups that can be pruned, why other channels cannot, and what the layers cost.

    locked: reason -> how many channels stay for it. shapes: of the tensors in groups.
    costs: MACs of an operator, and the numbers of the widths that they are a product of. sizes: of those widths, by number.
    fixed_macs: MACs that depend on no width.
    propagation, resolved, assumptions: what the groups were made from.
    """

    groups: list[ChannelGroup]
    locked: dict[str, int]
    costs: list[tuple[float, list[int]]]
    sizes: list[int]
    fixed_macs: float
    shapes: dict[str, tuple[int, ...]]
    propagation: ChannelPropagation
    resolved: ResolvedChannels
    assumptions: Assumptions

    @property
    def prefix(self) -> str:
        """Prefix of tensor names in the user's model: "", or the path of the traced part with a dot."""
        return self.propagation.trace.name_prefix

    def locked_by_macs(self) -> dict[str, int]:
        """`locked`, the reasons first whose channels the most MACs are a product of."""
        sets, held = self.resolved.sets, dict.fromkeys(self.locked, 0.0)
        for macs, along in self.propagation.costs:
            for labels in along:
                roots, counts = torch.unique(sets.roots(labels.reshape(-1)), return_counts=True)
                for root, count in zip(roots.tolist(), counts.tolist(), strict=True):
                    if (reason := sets.locks.get(root)) in held:
                        held[reason] += macs * count / labels.numel()
        return {reason: self.locked[reason] for reason in sorted(held, key=lambda reason: -held[reason])}


def _indexed(tensor: Tensor, dim: int, indices: Tensor) -> Tensor:
    """(units, k, ...) the entries at `indices`, (units, k), of a dimension; a view where that is all of it, in order."""
    moved = tensor.movedim(dim, 0)
    everything = torch.arange(len(moved), device=indices.device)
    if indices.numel() == len(moved) and torch.equal(indices.flatten(), everything):
        return moved.unflatten(0, indices.shape)
    return moved[indices]


def find_groups(
    propagation: ChannelPropagation, model_macs: int, *, ignore: tuple[str, ...] = (), assumptions: Assumptions | None = None
) -> ChannelAnalysis:
    """Resolve the constraints and collect the channel sets into groups.

    Args:
        propagation: of the model. model_macs: multiply-accumulates of one sample.
        ignore: dotted paths of modules whose parameters are never cut; SettingError where one has no layer with channels.
        assumptions: what the graph does not show.
    """
    assumptions = assumptions or Assumptions()
    resolved = resolve_constraints(propagation, assumptions)
    _lock_ignored(propagation, resolved, ignore)
    sets = resolved.sets
    costs, sizes, of_sets = _costs(propagation, sets)
    table = _ChannelTable(resolved, of_sets)
    locked: Counter[str] = Counter()
    alike: dict[bytes, list[int]] = defaultdict(list)
    for row, root in enumerate(table.roots):
        if root in sets.locks:
            if sets.locks[root]:
                locked[sets.locks[root]] += 1
        else:
            alike[table.signature(row)].append(row)

    def shape(tensor: str) -> tuple[int, ...]:
        return tuple(get_tensor(propagation.trace.module, tensor).shape)

    parameters = {name for name, _ in propagation.trace.module.named_parameters(remove_duplicate=False)}
    with_channels = {tensor for tensor, _ in resolved.axes}
    for tensor in propagation.unfollowed_weights - with_channels:
        locked[propagation.locked_tensors[tensor]] += shape(tensor)[0]

    groups = []
    for rows in alike.values():
        stacked, of_group = table.stacked(rows)
        shapes = [shape(tensor) for tensor, _, _ in stacked]
        if not any(len(size) > 1 and tensor in parameters for (tensor, _, _), size in zip(stacked, shapes, strict=True)):
            continue  # nothing that is learned: a stored table of positions
        roots = torch.tensor([table.roots[row] for row in rows])
        group = ChannelGroup(indices=stacked, shapes=shapes, roots=roots, costs=of_group)
        if group.layers and group.size > 1:
            groups.append(group)
        elif group.layers:
            locked[_reason_to_stay(group, propagation.trace.name_prefix)] += 1
    return ChannelAnalysis(
        groups=groups,
        locked=dict(locked.most_common()),
        costs=costs,
        sizes=sizes,
        fixed_macs=max(0, model_macs - sum(c for c, _ in costs)),
        shapes={tensor: shape(tensor) for g in groups for tensor, _, _ in g.indices},
        propagation=propagation,
        resolved=resolved,
        assumptions=assumptions,
    )


def _reason_to_stay(group: ChannelGroup, prefix: str) -> str:
    """Why a group that is one set of channels stays: without it nothing would be left of its layer."""
    if all(shape[dim] == 1 for (_, dim, role), shape in zip(group.indices, group.shapes, strict=True) if role == "out"):
        return "a layer of one channel"
    return f"channels of {prefix}{group.layer} that only go together"


def _lock_ignored(propagation: ChannelPropagation, resolved: ResolvedChannels, ignore: tuple[str, ...]) -> None:
    paths = {key: propagation.trace.name_prefix + key[0] for key in resolved.axes}
    if unknown := [name for name in ignore if not any(path.startswith(f"{name}.") for path in paths.values())]:
        raise SettingError(f"ignore={unknown}: no layer with channels stands in a module of that name")
    for key, axis in resolved.axes.items():
        if any(paths[key].startswith(f"{name}.") for name in ignore):
            resolved.sets.lock(axis.labels, "ignored by the user")


class _ChannelTable:
    """Which indices of which dimensions belong to each channel set, and how many entries of each width.

    A row is a channel set; rows are ordered by where their sets come first. The keys of a row are the dimensions that it has
    indices of, in the order of `resolved.axes`, and then the widths that it has entries of, ascending. In arrays: models have
    tens of thousands of indices.

    roots: root label of each row.
    """

    roots: list[int]

    def __init__(self, resolved: ResolvedChannels, of_sets: list[tuple[Tensor, Tensor]]) -> None:
        self.keys = [(tensor, dim, axis.role) for (tensor, dim), axis in resolved.axes.items()]
        each = [resolved.sets.roots(axis.labels) for axis in resolved.axes.values()]
        empty = torch.zeros(0, dtype=torch.long)
        roots = torch.cat([empty, *each])
        keys = torch.arange(len(each)).repeat_interleave(torch.tensor([len(r) for r in each], dtype=torch.long))
        places = torch.cat([empty, *(torch.arange(len(r)) for r in each)])
        roots, keys, places = (values[roots > 0] for values in (roots, keys, places))
        found, rows = torch.unique(roots, return_inverse=True)
        first = torch.full((len(found),), len(rows)).scatter_reduce_(0, rows, torch.arange(len(rows)), "amin")
        order = first.argsort()
        self.roots = found[order].tolist()
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        pairs, place = (rank[rows] * len(each) + keys).sort(stable=True)
        self.indices = places[place]
        pairs, counts = torch.unique_consecutive(pairs, return_counts=True)
        starts = counts.cumsum(0) - counts
        of_widths = _rows_of_widths(of_sets, dict(zip(self.roots, range(len(self.roots)), strict=True)), len(each))
        rows = torch.cat([pairs.div(max(1, len(each)), rounding_mode="floor"), of_widths[0]])
        by_row = rows.argsort(stable=True)
        entries = torch.stack([torch.cat([pairs % max(1, len(each)), of_widths[1]]), torch.cat([counts, of_widths[2]])], 1)
        self._entries = entries[by_row].numpy()
        self._starts = torch.cat([starts, torch.full_like(of_widths[0], -1)])[by_row]
        self._bounds = [0, *torch.bincount(rows, minlength=len(self.roots)).cumsum(0).tolist()]

    def signature(self, row: int) -> bytes:
        """The same for rows that have as many indices of the same dimensions, and entries of the same widths."""
        return self._entries[self._bounds[row] : self._bounds[row + 1]].tobytes()

    def stacked(self, rows: list[int]) -> tuple[dict[tuple[str, int, str], Tensor], dict[int, int]]:
        """Of rows with one signature: dimension -> (rows, k) indices, and width -> entries of one row."""
        bounds = torch.tensor([self._bounds[row] for row in rows])
        entries = self._entries[self._bounds[rows[0]] : self._bounds[rows[0] + 1]].tolist()
        indices, widths = {}, {}
        for offset, (key, count) in enumerate(entries):
            if key >= len(self.keys):
                widths[key - len(self.keys)] = count
            else:
                starts = self._starts[bounds + offset]
                indices[self.keys[key]] = self.indices[starts[:, None] + torch.arange(count)]
        return indices, widths


def _rows_of_widths(of_sets: list[tuple[Tensor, Tensor]], row_of: dict[int, int], first: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, keys that count from `first`, entries) of the sets that widths are made of; sets without a row are left out."""
    rows, keys, entries = [], [], []
    for number, (roots, counts) in enumerate(of_sets):
        for root, count in zip(roots.tolist(), counts.tolist(), strict=True):
            if (row := row_of.get(root)) is not None:
                rows.append(row)
                keys.append(first + number)
                entries.append(count)
    return torch.tensor(rows, dtype=torch.long), torch.tensor(keys, dtype=torch.long), torch.tensor(entries, dtype=torch.long)


def _costs(
    propagation: ChannelPropagation, sets: ChannelSets
) -> tuple[list[tuple[float, list[int]]], list[int], list[tuple[Tensor, Tensor]]]:
    """(MACs with the numbers of their widths, sizes of the widths, for each width its channel sets and the entries of each)."""
    numbers: dict[bytes, int] = {}
    sizes: list[int] = []
    of_sets: list[tuple[Tensor, Tensor]] = []
    costs = []
    for macs, along in propagation.costs:
        widths = []
        for labels in along:
            roots, counts = torch.unique(sets.roots(labels.reshape(-1)), return_counts=True)
            entries = torch.stack([roots, counts]).numpy().tobytes()
            if entries not in numbers:
                numbers[entries] = len(sizes)
                sizes.append(labels.numel())
                of_sets.append((roots, counts))
            widths.append(numbers[entries])
        costs.append((macs, widths))
    return costs, sizes, of_sets


class MacCounter:
    """Counts the MACs of a model while channels go. A *width* is a dimension of channels that MACs are a product of."""

    def __init__(self, analysis: ChannelAnalysis) -> None:
        self.analysis = analysis
        self.removed: dict[int, int] = defaultdict(int)
        self.operators: dict[int, set[int]] = defaultdict(set)
        self.costs = [cost for cost, _ in analysis.costs]
        self._of_group: dict[int, list[tuple[int, list[int]]]] = {}
        self._savings: dict[int, dict[int, float]] = {}  # of each group since an operator of it changed, by count
        for i, (_, widths) in enumerate(analysis.costs):
            for width in widths:
                self.operators[width].add(i)

    def fraction(self, width: int, extra: int = 0) -> float:
        """Fraction of a width that is left when `extra` more entries go."""
        return 1 - (self.removed[width] + extra) / self.analysis.sizes[width]

    def macs(self) -> float:
        """MACs of one sample."""
        return self.analysis.fixed_macs + sum(self.costs)

    def saving(self, group: ChannelGroup, count: int) -> float:
        """MACs saved by removing `count` more channels of a group."""
        known = self._savings.setdefault(id(group), {})
        if count not in known:
            shrink = {}
            for width, each in group.costs.items():
                now = self.fraction(width)
                shrink[width] = self.fraction(width, each * count) / now if now else 0.0
            costs = self.costs
            known[count] = sum(costs[i] * (1 - math.prod([shrink[w] for w in widths])) for i, widths in self._affected(group))
        return known[count]

    def _affected(self, group: ChannelGroup) -> list[tuple[int, list[int]]]:
        """The operators that get cheaper with a group, each with its widths that the group is in."""
        if id(group) not in self._of_group:
            operators = {i for width in group.costs for i in self.operators.get(width, ())}
            self._of_group[id(group)] = [
                (i, [w for w in self.analysis.costs[i][1] if w in group.costs]) for i in sorted(operators)
            ]
        return self._of_group[id(group)]

    def cut(self, group: ChannelGroup, count: int) -> None:
        """Remove `count` more channels of a group."""
        for width, each in group.costs.items():
            self.removed[width] += each * count
        for i, _ in self._affected(group):
            cost, widths = self.analysis.costs[i]
            self.costs[i] = cost * math.prod([self.fraction(w) for w in widths])
        changed = {i for i, _ in self._affected(group)}
        for other, known in self._savings.items():
            if known and not changed.isdisjoint(i for i, _ in self._of_group[other]):
                known.clear()
        group.removed += count
