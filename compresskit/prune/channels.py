"""Plan which channels go: score groups of channels found on the graph, and cut where a MAC saved costs least."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import nn

from compresskit.errors import ModelError, SettingError
from compresskit.measure import count_macs
from compresskit.prune.criteria import Criterion, NeedsGradients, l2
from compresskit.prune.groups import Found, Group, Widths
from compresskit.prune.plan import Line, Plan
from compresskit.prune.search import Search, consequences
from compresskit.task import Inputs

SLACK = 0.02  # share of the MACs by which a plan may fall below its target for the sake of aligned widths

#: Gives the gradients of a batch to the model's parameters each time it is advanced.
Backwards = Iterable[None]


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
    whole_heads: bool = False,
) -> Plan:
    """Decide which channels to remove; pure: the model is not changed.

    Args:
        model: a float model, recorded in eval mode.
        example: its inputs.
        macs: share of the multiply-accumulates that stays, in (0, 1]; the plan comes out at or just below it, as far as the
            widths allow.
        criterion: scores channels.
        backwards: for criteria that read gradients: makes an iterator that leaves the gradients of one batch in the
            parameters each time it is advanced. Scores are averaged over the batches.
        round_to: widths stay multiples of this, which runs faster than the last bit of choice is worth (ragged widths run
            1.2 to 1.4 times faster at half the MACs, multiples of 8 1.5 times; ResNet-20 in ONNX Runtime).
        ignore: dotted names of modules that are never cut.
        inside: prune only this submodule.
        whole_heads: cut attention by whole heads instead of the same inner positions of every head.

    The plan is proved on a copy before it is handed back: removed equals zeroed, in float64. Raises SettingError for a share
    outside (0, 1], ModelError where the share cannot be reached: it says what can, and what holds the rest.
    """
    if not callable(criterion):
        raise SettingError(f"plan_channels(criterion=...): wanted a function such as prune.l2, got {criterion!r}")
    if not 0 < macs <= 1:
        raise SettingError(f"plan_channels(macs=...): wanted the share that stays, in (0, 1], got {macs}")
    if round_to < 1:
        raise SettingError(f"plan_channels(round_to=...): wanted a whole number >= 1, got {round_to}")
    _check_dtypes(model)
    search = Search(model, example, inside=inside, ignore=ignore, whole_heads=whole_heads)
    prefix, total = search.prefix, count_macs(search.recorded.module, search.recorded.example)
    found = search.start(total)
    while True:
        _score_(found.groups, model, prefix, criterion, backwards)
        _choose_(found, macs, total, round_to, type(model).__name__)
        plan = _plan(found, total, prefix)
        failure = search.check(plan, found)
        if failure is None:
            return plan
        found = search.retreat(failure, found, plan)


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
        best: tuple[float, int, int] | None = None
        for i, group in enumerate(found.groups):
            count = _steps(group, round_to)
            if group.gone + count >= group.size:
                continue
            saved = widths.saving(group, count)
            if saved <= 0:
                continue
            # The share lost of what is left, for every layer that loses it: a residual stream is in many layers.
            before, after = float(left[i][group.gone]), max(float(left[i][group.gone + count]), 1e-300)
            loss = group.layers * math.log(before / after) if before > 0 else 0.0
            # What lies below the target is given away for nothing.
            useful = min(saved, current - share * total)
            if best is None or loss / useful < best[0]:
                best = (loss / useful, i, count)
        if best is None:
            locks = "; ".join(f"{count} channels: {reason}" for reason, count in list(found.locked.items())[:6])
            raise ModelError(
                f"{name}: wanted {share:.1%} of the MACs, only {current / total:.1%} can be reached; locked: {locks or 'none'}"
            )
        group, count = found.groups[best[1]], best[2]
        # The last cut may be finer than the alignment where the target would be missed by far.
        while count > 1 and current - widths.saving(group, count) < (share - SLACK) * total:
            if current - widths.saving(group, count // 2) > share * total:
                break
            count //= 2
        current -= widths.saving(group, count)
        widths.cut(group, count)


def _plan(found: Found, total: int, prefix: str) -> Plan:
    remove: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    lines = []
    widths = Widths(found)
    roots: set[int] = set()
    for group in found.groups:
        count, group.gone = group.gone, 0
        widths.cut(group, count)
        lowest = group.scores.argsort()[:count]
        roots.update(group.roots[lowest].tolist())
        for (tensor, dim, _), indices in group.places.items():
            if count:
                remove[prefix + tensor][dim].update(indices[lowest].flatten().tolist())
        along = [f"{t.rpartition('.')[0]}[in]" if role == "in" else t.rpartition(".")[0] for t, _, role in group.places]
        others = tuple(dict.fromkeys(prefix + a for a in along if a != group.title))
        lines.append(Line(title=prefix + group.title, size=group.size, keep=group.size - count, along=others))
    attributes, scales = consequences(found, roots, prefix)
    return Plan(
        remove={n: {d: tuple(sorted(i)) for d, i in sorted(dims.items())} for n, dims in remove.items()},
        sizes={n: found.shapes[n.removeprefix(prefix)] for n in remove},
        lines=tuple(lines),
        macs=round(widths.macs()),
        macs_before=total,
        locked=found.locked,
        attributes=attributes,
        scales=scales,
    )
