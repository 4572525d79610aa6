"""Groups of channels that may be cut, what the layers cost, and how wide everything still is."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.errors import SettingError
from compresskit.graph import Captured, parameter_name
from compresskit.normalize import aten
from compresskit.prune.collect import Evidence, values_of
from compresskit.prune.criteria import Slices
from compresskit.prune.walk import Walk
from compresskit.surgery import get_tensor, owner
from compresskit.task import batch_size

#: Layers whose factors say how strong a channel is.
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


@dataclass(kw_only=True)
class Group:
    """Units that touch the same dimensions of the same tensors, and so can be ranked against one another.

    places: (tensor, dim, role) -> (units, k) the k indices that vanish with each unit.
    scores: of the units, larger = keep. ascending: the same, sorted. left[n]: their sum once the n lowest are gone.
    pool: scores of all groups of the same kind, sorted.
    """

    places: dict[tuple[str, int, str], Tensor]
    shapes: list[tuple[int, ...]]
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    ascending: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    pool: list[float] = field(default_factory=list)
    gone: int = 0

    @property
    def size(self) -> int:
        """Number of units."""
        return len(next(iter(self.places.values())))

    @property
    def layers(self) -> int:
        """Number of dimensions of matrices and filters that get narrower with each unit."""
        return sum(len(shape) > 1 for shape in self.shapes)

    @property
    def title(self) -> str:
        """The layer that makes the channels."""
        return (self.makers or [tensor.rpartition(".")[0] for tensor, _, _ in self.places])[0]

    @property
    def makers(self) -> list[str]:
        """The layers that make the channels."""
        return [tensor.rpartition(".")[0] for tensor, _, role in self.places if role == "out"]

    @property
    def kind(self) -> tuple[tuple[str, int, int], ...]:
        """What the group is built of, whatever its size: kinds of tensors, each in its role."""
        places = zip(self.places, self.shapes, strict=True)
        return tuple(sorted((role, dim, len(shape)) for (_, dim, role), shape in places))

    def slices(self, model: nn.Module, prefix: str, evidence: Evidence | None = None) -> Slices:
        """Every weight of a matrix or a filter that vanishes with each unit, in rows, and what data showed of the units."""
        evidence = evidence or Evidence()
        rows: list[Tensor] = []
        grads: list[Tensor] = []
        sample_grads: list[Tensor] = []
        reads: list[Tensor] = []
        scales: list[Tensor] = []
        for (name, dim, role), indices in self.places.items():
            tensor, index = get_tensor(model, prefix + name), indices.to(get_tensor(model, prefix + name).device)
            if not isinstance(tensor, nn.Parameter):
                continue
            if tensor.ndim < 2:
                module, leaf = owner(model, prefix + name)
                if leaf == "weight" and isinstance(module, NORMS):
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
            activations=None if evidence.inputs is None else values_of(model, self.places, prefix, evidence),
            loss=None if evidence.loss is None else partial(evidence.loss, self.places),
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the walk found: groups that may be cut, why others may not, and what the layers cost."""

    groups: list[Group]
    locked: dict[str, int]
    costs: list[tuple[int, list[tuple[str, int]]]]  # MACs of a layer, and the (tensor, dim) whose widths they follow
    fixed: int
    shapes: dict[str, tuple[int, ...]]


def find_groups(captured: Captured, model_macs: int, *, ignore: tuple[str, ...] = (), wary: bool = False) -> Found:
    """Walk the graph and collect units into groups.

    ignore: dotted paths of modules whose parameters are never cut.
    wary: also keep what code with sizes written as constants looks at.
    """
    walk = Walk(captured)
    units = walk.run()
    if wary:
        for labels, reason in walk.suspects:
            units.lock(labels, reason)
    paths = [f"{captured.prefix}.{m.tensor}" if captured.prefix else m.tensor for m in units.members]
    if unknown := [name for name in ignore if not any(path.startswith(f"{name}.") for path in paths)]:
        raise SettingError(f"ignore={unknown}: no layer with channels stands in a module of that name")
    for member in units.members:
        path = f"{captured.prefix}.{member.tensor}" if captured.prefix else member.tensor
        if any(path.startswith(f"{name}.") for name in ignore):
            units.lock(member.labels, "ignored by the user")
    # A tensor that is read twice has two label vectors for one dimension: its indices make them one.
    vectors: dict[tuple[str, int], tuple[Tensor, str]] = {}
    for member in units.members:
        key = (member.tensor, member.dim)
        if key in vectors:
            units.join(vectors[key][0], member.labels, f"{member.tensor} is used twice, once where it cannot be cut")
        vectors.setdefault(key, (member.labels, member.role))
    of_unit: dict[int, dict[tuple[str, int, str], list[int]]] = defaultdict(lambda: defaultdict(list))
    for (tensor, dim), (labels, role) in vectors.items():
        for index, root in enumerate(units.roots(labels).tolist()):
            if root:
                of_unit[root][(tensor, dim, role)].append(index)
    locked: Counter[str] = Counter()
    by_signature: dict[Any, list[dict[tuple[str, int, str], list[int]]]] = defaultdict(list)
    for root, places in of_unit.items():
        if root in units.locks:
            locked[units.locks[root]] += 1
        else:
            by_signature[tuple((key, len(indices)) for key, indices in places.items())].append(places)
    groups = []
    for same in by_signature.values():
        indices = {key: torch.tensor([unit[key] for unit in same]) for key in same[0]}
        groups.append(Group(places=indices, shapes=[captured_shape(captured, t) for t, _, _ in indices]))
    groups = [g for g in groups if g.layers]
    costs = _costs(captured)
    shapes = {t: captured_shape(captured, t) for g in groups for t, _, _ in g.places}
    return Found(
        groups=groups,
        locked=dict(locked.most_common()),
        costs=costs,
        fixed=max(0, model_macs - sum(c for c, _ in costs)),
        shapes=shapes,
    )


def captured_shape(captured: Captured, tensor: str) -> tuple[int, ...]:
    """Shape of a parameter or buffer of the captured module."""
    return tuple(get_tensor(captured.module, tensor).shape)


_WEIGHTED = {aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.linear.default}
_WEIGHTED |= {aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input}


def _costs(captured: Captured) -> list[tuple[int, list[tuple[str, int]]]]:
    costs = []
    batch = batch_size(captured.example)
    for node in captured.module.graph.nodes:
        name = parameter_name(node.args[1]) if node.target in _WEIGHTED else None
        if name is None:
            continue
        weight, out = captured_shape(captured, name), captured.shapes[node.name]
        if node.target is aten.linear.default:
            macs = math.prod(out) * weight[1]
        elif "transpose" in str(node.target):
            macs = math.prod(captured.shapes[node.args[0].name]) * math.prod(weight[1:])
        else:
            macs = math.prod(out) * math.prod(weight[1:])
        costs.append((macs // batch, [(name, 0), (name, 1)]))
    return costs


class Widths:
    """How wide every dimension of every tensor still is, and what the model then costs."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.gone: dict[tuple[str, int], int] = defaultdict(int)
        self.touching: dict[tuple[str, int], list[int]] = defaultdict(list)
        for i, (_, dims) in enumerate(found.costs):
            for key in dims:
                self.touching[key].append(i)

    def share(self, key: tuple[str, int], extra: int = 0) -> float:
        """Share of a dimension that stays when `extra` more indices go."""
        shape = self.found.shapes.get(key[0])
        return 1.0 if shape is None else 1 - (self.gone[key] + extra) / shape[key[1]]

    def macs(self) -> float:
        """MACs of one sample."""
        return self.found.fixed + sum(cost * math.prod(self.share(k) for k in dims) for cost, dims in self.found.costs)

    def saving(self, group: Group, count: int) -> float:
        """MACs saved by `count` units fewer."""
        extra = {(t, d): indices.shape[1] * count for (t, d, _), indices in group.places.items()}
        affected = {i for key in extra for i in self.touching.get(key, ())}
        saved = 0.0
        for i in affected:
            cost, dims = self.found.costs[i]
            now = math.prod(self.share(k) for k in dims)
            saved += cost * (now - math.prod(self.share(k, extra.get(k, 0)) for k in dims))
        return saved

    def cut(self, group: Group, count: int) -> None:
        """Note that `count` more units go."""
        for (tensor, dim, _), indices in group.places.items():
            self.gone[(tensor, dim)] += indices.shape[1] * count
        group.gone += count
