"""Plan which channels go: score groups of channels found on the graph, and cut where a MAC saved costs least."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

from compresskit.errors import DataError, ModelError, SettingError
from compresskit.graph import capture
from compresskit.measure import count_macs
from compresskit.prune.collect import collect
from compresskit.prune.criteria import (
    Criterion,
    Needs,
    NeedsActivations,
    NeedsGradients,
    NeedsLosses,
    NeedsSampleGradients,
    l2,
)
from compresskit.prune.groups import Found, Group, Widths, find_groups
from compresskit.prune.plan import Line, Plan
from compresskit.prune.prove import prove
from compresskit.task import Inputs, Task

SLACK = 0.02  # share of the MACs by which a plan may fall below its target for the sake of aligned widths

#: What a criterion may ask for, in words.
NEEDED: dict[type[Needs], str] = {
    NeedsGradients: "gradients",
    NeedsSampleGradients: "gradients of single samples",
    NeedsActivations: "activations",
    NeedsLosses: "losses without channels",
}


def plan_channels(
    model: nn.Module,
    example: Inputs,
    *,
    macs: float,
    criterion: Criterion = l2,
    task: Task | None = None,
    samples: int = 3072,
    round_to: int = 8,
    ignore: tuple[str, ...] = (),
    inside: str | None = None,
) -> Plan:
    """Decide which channels to remove; pure: the model is not changed.

    Args:
        model: a float model, captured in eval mode.
        example: its inputs.
        macs: share of the multiply-accumulates that stays, in (0, 1]; the plan comes out at or just below it, as far as the
            widths allow.
        criterion: scores channels.
        task: data and loss for criteria that read more than weights. Scores are averaged over its batches.
        samples: how many samples such criteria see.
        round_to: widths stay multiples of this, which runs faster than the last bit of choice is worth (ragged widths run
            1.2 to 1.4 times faster at half the MACs, multiples of 8 1.5 times; ResNet-20 in ONNX Runtime).
        ignore: dotted names of modules that are never cut.
        inside: prune only this submodule.

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
    captured = capture(model, example, inside=inside)
    prefix = f"{captured.prefix}." if captured.prefix else ""
    part = model.get_submodule(captured.prefix)
    total = count_macs(part, captured.example)
    for wary in (False, True):
        found = find_groups(captured, total, ignore=ignore, wary=wary)
        _score_(found.groups, model, prefix, criterion, task, samples)
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


def _score_(groups: list[Group], model: nn.Module, prefix: str, criterion: Criterion, task: Task | None, samples: int) -> None:
    needs: set[type[Needs]] = set()
    while True:
        try:
            raw = _scores(groups, model, prefix, criterion, task, samples, needs)
            break
        except Needs as need:
            if task is None:
                raise SettingError(
                    f"this criterion reads {NEEDED[type(need)]}, which needs data; pass plan_channels(task=...)"
                ) from None
            needs.add(type(need))
    for group, score in zip(groups, raw, strict=True):
        if score.shape != (group.size,) or not bool(torch.isfinite(score).all()):
            raise ModelError(f"{group.title}: the criterion gave scores of shape {tuple(score.shape)}, or not all finite")
        # Layers differ in scale for reasons that say nothing about importance; within a group the mean becomes 1.
        group.scores = (score / score.mean().clamp(min=1e-30)).double().cpu()


def _scores(
    groups: list[Group], model: nn.Module, prefix: str, criterion: Criterion, task: Task | None, samples: int,
    needs: set[type[Needs]],
) -> list[Tensor]:  # fmt: skip
    if not needs or task is None:
        return [criterion(g.slices(model, prefix)) for g in groups]
    raw, seen = [torch.zeros(g.size, dtype=torch.double) for g in groups], 0
    for rows, evidence in collect(model, [g.places for g in groups], prefix, task, needs=needs, samples=samples):
        for i, group in enumerate(groups):
            score = criterion(group.slices(model, prefix, evidence)).cpu()
            raw[i] = raw[i] + rows * score if score.shape == raw[i].shape else score
        seen += rows
    if not seen:
        raise DataError("scoring channels: the loader gave no batch")
    return [r / seen for r in raw]


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
