"""Plan which weights to remove: score units, rank them in all layers together or layer by layer, keep what the pattern allows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.budget import Budget, Quantity, check_budget, takes_budget
from compresskit.base.distributed import world_size
from compresskit.base.errors import SettingError
from compresskit.base.task import Task
from compresskit.graph.masks import Masks, masks_of
from compresskit.graph.surgery import check_is_module
from compresskit.prune.allocations import Allocation, check_allocation, counts
from compresskit.prune.criteria import WEIGHT_EVIDENCE, Criterion, check_criterion, l2
from compresskit.prune.masks.maskable import by_tensor, fitting, unmasked_weights
from compresskit.prune.patterns import UNSTRUCTURED, Pattern, keep_largest
from compresskit.prune.scores import score_weights

MASK_QUANTITIES: tuple[Quantity, ...] = ("weights",)  # that a budget of masks may be one of


def check_pattern(pattern: Any, where: str) -> None:
    """Raise `SettingError` for what is no pattern."""
    if not isinstance(pattern, Pattern):
        raise SettingError(f"{where}(pattern=...): wanted a pattern such as prune.patterns.NM(n=2, m=4), got {pattern!r}")


def removed_fraction(budget: Budget | None, pattern: Pattern, where: str) -> float:
    """Fraction of the weights to remove, in [0, 1): the budget's, or that of the pattern where it prescribes one."""
    if budget is None and pattern.fixed is not None:
        return pattern.fixed
    budget = check_budget(budget, f"{where}(budget=...)", MASK_QUANTITIES)
    if pattern.fixed is None:
        return budget.removed
    if not math.isclose(budget.removed, pattern.fixed):
        raise SettingError(f"{where}(budget=...): {pattern} removes {pattern.fixed:g}, got {budget!r}; leave the budget out")
    return pattern.fixed


@takes_budget(*MASK_QUANTITIES)
def plan_mask(
    model: nn.Module,
    budget: Budget | None = None,
    *,
    pattern: Pattern = UNSTRUCTURED,
    criterion: Criterion = l2,
    allocation: Allocation | Mapping[str, float] | None = None,
    protect: tuple[str, ...] = (),
    include: tuple[str, ...] = (),
    task: Task | None = None,
    samples: int = 1024,
) -> Masks:
    """Decide which weights to remove. The model is not changed: `Masks.apply_` does that.

    Weights that the model's masks already remove stay removed, and count. The order in which a model names its parameters does
    not matter. Masked are the weights of torch's own layers and what `include` names. Warns of other matrices, of layers that
    cannot have the pattern (both stay dense, see `Masks.unmasked`), that are all zero, or that lose all their weights.

    Args:
        model: a float model.
        budget: how many of the maskable weights to remove, such as `ck.remove(weights=0.9)`: exactly round(0.9 * n) of them, or
            the nearest number in whole blocks. Left out where the pattern (N:M) or the allocation prescribes ratios.
        pattern: which weights are removed together, see `prune.patterns`.
        criterion: scores units, larger = keep, see `prune.criteria`; `l2` is the magnitude.
        allocation: how the budget is distributed over layers: a function of `prune.allocations`, or a ratio for each tensor or
            module by name (those without one stay dense). None ranks the weights of all layers together.
        protect: dotted names of tensors or modules that stay dense.
        include: dotted names of tensors or modules whose matrices are masked too though they are no weights of torch's layers,
            such as stacked experts or a linear layer of one's own. Patterns read their dimensions as outputs, inputs, positions.
        task: data and loss, for criteria that read more than weights.
        samples: how many samples such criteria read.

    Raises:
        SettingError: a setting is out of its range, or the model's masks already remove more.
        ModelError: no weight can be masked.
    """
    check_is_module(model, "plan_mask")
    check_pattern(pattern, "plan_mask")
    check_criterion(criterion, "plan_mask", WEIGHT_EVIDENCE)
    check_allocation(allocation, "plan_mask")
    ratios = by_tensor(model, allocation, include) if isinstance(allocation, Mapping) else None
    if ratios is not None and (budget is not None or pattern.fixed is not None):
        raise SettingError("plan_mask(allocation=...): a ratio for each layer leaves no room for budget= and N:M patterns")
    ratio = 0.0 if ratios is not None else removed_fraction(budget, pattern, "plan_mask")
    weights, unmasked = fitting(model, pattern, protect, include, ratios)
    for name, weight in weights.items():
        if not bool(weight.detach().any()):
            warnings.warn(f"{name}: all of its weights are zero already, so that nothing ranks them", stacklevel=3)
    scores = score_weights(model, weights, pattern, criterion, task, samples, where="plan_mask")
    old = masks_of(model)
    before = {} if old is None else {n: m.to(weights[n].device) for n, m in old.masks.items() if n in weights}
    scores = without(scores, before, pattern)
    if allocation is not None and not isinstance(allocation, Mapping):
        ratios = allocation(weights, ratio)
    kept = keep_best(scores, ratio, pattern, ratios, unit_sizes(scores, weights))
    _check_monotone(scores, kept)
    masks = {name: pattern.spread(kept[name], w.shape) & before.get(name, True) for name, w in weights.items()}
    masks = broadcast_masks(masks) | ({} if old is None else {n: m for n, m in old.masks.items() if n not in masks})
    _warn_of_empty_layers(masks)
    return Masks(dict(sorted(masks.items())), unmasked, unmasked_weights(model, masks))


def _warn_of_empty_layers(masks: Mapping[str, Tensor]) -> None:
    for name, mask in masks.items():
        if not bool(mask.any()):
            warnings.warn(
                f"{name} loses all of its weights, and what reads it sees a constant; protect it, or distribute the budget with"
                " allocation=erk_ratios",
                stacklevel=4,  # the line that calls `plan_mask`, which is wrapped
            )


def broadcast_masks(masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first process's masks on every process, where there are several."""
    if world_size() > 1:
        for name in sorted(masks):
            sent = masks[name].to(torch.uint8)
            torch.distributed.broadcast(sent, 0)
            masks[name] = sent.bool()
    return masks


def without(scores: dict[str, Tensor], masks: Mapping[str, Tensor], pattern: Pattern) -> dict[str, Tensor]:
    """Scores below all others for units of which nothing is left."""
    lost = {name: ~pattern.rows(mask).any(1) for name, mask in masks.items()}
    return {n: s.masked_fill(lost[n].to(s.device), -math.inf) if n in lost else s for n, s in scores.items()}


def unit_sizes(scores: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, int]:
    """How many weights one unit of each tensor has."""
    return {name: weights[name].numel() // len(s) for name, s in scores.items()}


def keep_best(
    scores: Mapping[str, Tensor],
    ratio: float,
    pattern: Pattern,
    ratios: Mapping[str, float] | None = None,
    widths: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """(units,) bool for each tensor: the units with the largest scores; ties go to the one named, or standing, later.

    ratios: for each tensor its own; without them all are ranked together, and round(ratio * weights) weights go.
    widths: how many weights a unit of each tensor has; the same everywhere if None.
    """
    if pattern.fixed is not None:
        return {name: pattern.choose(s, ratio) for name, s in scores.items()}
    if ratios is not None:
        gone = counts(ratios, {name: len(s) for name, s in scores.items()})
        return {name: keep_largest(s, len(s) - gone[name]) for name, s in scores.items()}
    names = sorted(scores)
    sizes = [len(scores[name]) for name in names]
    every = torch.cat([scores[name].cpu() for name in names])
    removed = round(ratio * len(every))
    if widths is not None and len({widths[name] for name in names}) > 1:
        each = torch.cat([torch.full((size,), widths[name]) for name, size in zip(names, sizes, strict=True)])
        removed = _units_to_remove(every, each, ratio)
    kept = keep_largest(every, len(every) - removed)
    return {n: part.to(scores[n].device) for n, part in zip(names, kept.split(sizes), strict=True)}


def _units_to_remove(scores: Tensor, widths: Tensor, ratio: float) -> int:
    """How many units of (units,) scores go, the worst first, until the number of weights in them is nearest to the ratio."""
    removed = widths[scores.argsort(stable=True)].cumsum(0)
    wanted = ratio * int(removed[-1])
    return int((removed - wanted).abs().argmin()) + 1 if wanted > int(removed[0]) / 2 else 0


def _check_monotone(scores: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    if back := [name for name, s in scores.items() if bool((kept[name] & s.isneginf()).any())]:
        gone = sum(int(s.isneginf().sum()) for s in scores.values()) / sum(len(s) for s in scores.values())
        raise SettingError(
            f"{back[0]}: the model's masks remove {gone:.1%} already, more than is asked for here; ask for more, or take them off"
            " first (Densify, masks.detach_)"
        )
