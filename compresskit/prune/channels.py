"""Plan which channels go: score groups of channels found on the graph, and cut where a MAC saved costs least."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.errors import ModelError, SettingError
from compresskit.graph import Captured, aten, capture, parameter_name
from compresskit.measure import count_macs
from compresskit.prune.criteria import Criterion, NeedsGradients, Slices, l2
from compresskit.prune.plan import Line, Plan
from compresskit.prune.prove import prove
from compresskit.prune.walk import Walk
from compresskit.surgery import get_tensor
from compresskit.task import Inputs, batch_size

#: Gives the gradients of a batch to the model's parameters each time it is advanced.
Backwards = Iterable[None]


@dataclass(kw_only=True)
class Group:
    """Units that touch the same dimensions of the same tensors, and so can be ranked against one another.

    places: (tensor, dim, role) -> (units, k) the k indices that vanish with each unit.
    """

    places: dict[tuple[str, int, str], Tensor]
    shapes: list[tuple[int, ...]]
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
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
        makers = [tensor for tensor, _, role in self.places if role == "out"]
        return (makers or [tensor for tensor, _, _ in self.places])[0].rpartition(".")[0]

    def slices(self, model: nn.Module, prefix: str, *, gradients: bool) -> Slices:
        """Every weight of a matrix or a filter that vanishes with each unit, in rows."""
        rows, grads, reads = [], [], []
        for (name, dim, role), indices in self.places.items():
            tensor = get_tensor(model, prefix + name)
            if tensor.ndim < 2 or not isinstance(tensor, nn.Parameter):
                continue
            for source, into in ((tensor.detach(), rows), (tensor.grad if gradients else None, grads)):
                if source is not None:
                    part = source.float().movedim(dim, 0)[indices.to(source.device)].reshape(self.size, -1)
                    into.append(part)
            reads.append(torch.full((rows[-1].shape[1],), role == "in", device=rows[-1].device))
        if gradients and len(grads) < len(rows):
            grads = [torch.zeros_like(r) for r in rows]  # a frozen layer has no gradient: removing it costs nothing known
        weight = torch.cat(rows, 1)
        return Slices(weight=weight, reads=torch.cat(reads), grad=torch.cat(grads, 1) if gradients else None)


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
        places = {key: torch.tensor([unit[key] for unit in same]) for key in same[0]}
        groups.append(Group(places=places, shapes=[captured_shape(captured, t) for t, _, _ in places]))
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


def plan_channels(
    model: nn.Module,
    example: Inputs,
    *,
    macs: float,
    criterion: Criterion = l2,
    backwards: Callable[[], Backwards] | None = None,
    round_to: int = 8,
    ignore: tuple[str, ...] = (),
    inside: str | None = None,
) -> Plan:
    """Decide which channels to remove; pure: the model is not changed.

    Args:
        model: a float model, captured in eval mode.
        example: its inputs.
        macs: share of the multiply-accumulates that stays, in (0, 1]; the plan comes out at or just below it.
        criterion: scores channels.
        backwards: for criteria that read gradients: makes an iterator that leaves the gradients of one batch in the
            parameters each time it is advanced. Scores are averaged over the batches.
        round_to: widths stay multiples of this, which runs faster than the last bit of choice is worth (ragged widths run
            1.2 to 1.4 times faster at half the MACs, multiples of 8 1.5 times; ResNet-20 in ONNX Runtime).
        ignore: dotted names of modules that are never cut.
        inside: prune only this submodule.

    The plan is proved on a copy before it is handed back: removed equals zeroed, in float64. Raises SettingError for a share
    outside (0, 1], ModelError where the share cannot be reached: it says what can, and what holds the rest.
    """
    if not 0 < macs <= 1:
        raise SettingError(f"plan_channels(macs=...): wanted the share that stays, in (0, 1], got {macs}")
    if round_to < 1:
        raise SettingError(f"plan_channels(round_to=...): wanted a whole number >= 1, got {round_to}")
    _check_dtypes(model)
    captured = capture(model, example, inside=inside)
    prefix = f"{captured.prefix}." if captured.prefix else ""
    part = model.get_submodule(captured.prefix)
    total = count_macs(part, captured.example)
    for wary in (False, True):
        found = find_groups(captured, total, ignore=ignore, wary=wary)
        _score_(found.groups, model, prefix, criterion, backwards)
        _choose_(found, macs, total, round_to, type(model).__name__)
        plan = _plan(found, total, prefix)
        failure = prove(model, plan, example)
        if failure is None:
            return plan
    raise ModelError(f"{type(model).__name__} cannot be pruned safely: {failure}; nothing was changed")


def _check_dtypes(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if p.dtype in (torch.float16, torch.bfloat16):
            raise ModelError(f"{name} is {p.dtype}; prune the fp32 model (model.float(), or run.finish() of mixed precision)")
        if not p.is_floating_point():
            raise ModelError(f"{name} is {p.dtype}; a quantized model cannot be pruned, prune before quantizing")


def _score_(
    groups: list[Group], model: nn.Module, prefix: str, criterion: Criterion, backwards: Callable[[], Backwards] | None
) -> None:
    try:
        raw = [criterion(g.slices(model, prefix, gradients=False)) for g in groups]
    except NeedsGradients:
        if backwards is None:
            raise SettingError("this criterion reads gradients; pass plan_channels(backwards=...)") from None
        raw = [torch.zeros(g.size) for g in groups]
        for _ in backwards():
            raw = [r + criterion(g.slices(model, prefix, gradients=True)).cpu() for r, g in zip(raw, groups, strict=True)]
    for group, score in zip(groups, raw, strict=True):
        if score.shape != (group.size,) or not bool(torch.isfinite(score).all()):
            raise ModelError(f"{group.title}: the criterion gave scores of shape {tuple(score.shape)}, or not all finite")
        # Layers differ in scale for reasons that say nothing about importance; within a group the mean becomes 1.
        group.scores = (score / score.mean().clamp(min=1e-30)).double().cpu()


def _steps(group: Group, round_to: int) -> int:
    """Units to cut at once so that widths stay multiples of `round_to`; finer where a layer is too narrow for that."""
    step = round_to
    while step > 1 and group.size < 2 * step:
        step //= 2
    left = (group.size - group.gone) % step
    return left or step


def _choose_(found: Found, share: float, total: int, round_to: int, name: str) -> None:
    """Cut blocks of the least important channels, the cheapest loss of score for a MAC first, until the target is met."""
    widths = Widths(found)
    # left[i][n]: what is left of the scores of group i once its n lowest units are gone.
    left = [g.scores.sort(descending=True).values.cumsum(0).flip(0) for g in found.groups]
    current = widths.macs()
    while current > share * total * (1 + 1e-9):
        best: tuple[float, int, int, float] | None = None
        for i, group in enumerate(found.groups):
            count = _steps(group, round_to)
            if group.gone + count >= group.size:
                continue
            saved = widths.saving(group, count)
            if saved <= 0:
                continue
            # The share lost of what is left, for every layer that loses it: a residual stream is in many layers.
            loss = group.layers * math.log(float(left[i][group.gone]) / max(float(left[i][group.gone + count]), 1e-300))
            # What lies below the target is given away for nothing.
            useful = min(saved, current - share * total)
            if best is None or loss / useful < best[0]:
                best = (loss / useful, i, count, saved)
        if best is None:
            locks = "; ".join(f"{count} channels: {reason}" for reason, count in list(found.locked.items())[:6])
            raise ModelError(
                f"{name}: wanted {share:.1%} of the MACs, only {current / total:.1%} can be reached; locked: {locks or 'none'}"
            )
        widths.cut(found.groups[best[1]], best[2])
        current -= best[3]


def _plan(found: Found, total: int, prefix: str) -> Plan:
    remove: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    lines = []
    widths = Widths(found)
    for group in found.groups:
        count, group.gone = group.gone, 0
        widths.cut(group, count)
        lowest = group.scores.argsort()[:count]
        for (tensor, dim, _), indices in group.places.items():
            if count:
                remove[prefix + tensor][dim].update(indices[lowest].flatten().tolist())
        along = [f"{t.rpartition('.')[0]}[in]" if role == "in" else t.rpartition(".")[0] for t, _, role in group.places]
        others = tuple(dict.fromkeys(prefix + a for a in along if a != group.title))
        lines.append(Line(title=prefix + group.title, size=group.size, keep=group.size - count, along=others))
    return Plan(
        remove={n: {d: tuple(sorted(i)) for d, i in sorted(dims.items())} for n, dims in remove.items()},
        sizes={n: found.shapes[n.removeprefix(prefix)] for n in remove},
        lines=tuple(lines),
        macs=round(widths.macs()),
        macs_before=total,
        locked=found.locked,
    )
