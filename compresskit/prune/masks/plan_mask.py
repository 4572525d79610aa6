"""Plan which weights to remove: score units, rank them in all layers together or layer by layer, keep what the pattern allows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.budget import Budget, check_budget, takes_budget
from compresskit.base.distributed import world_size
from compresskit.base.errors import ModelError, SettingError
from compresskit.base.task import Task
from compresskit.graph.masks import Masks, masks_of
from compresskit.graph.surgery import owner
from compresskit.prune.allocations import Allocation, counts
from compresskit.prune.criteria import WEIGHT_EVIDENCE, Criterion, check_criterion, l2
from compresskit.prune.patterns import UNSTRUCTURED, Pattern, keep_largest
from compresskit.prune.scores import score_weights

#: Modules whose weights are masked, with the leaves that are weights.
MASKABLE_LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.Bilinear)


def check_pattern(pattern: Any, where: str) -> None:
    """Raise `SettingError` for what is no pattern."""
    if not isinstance(pattern, Pattern):
        raise SettingError(f"{where}(pattern=...): wanted a pattern such as prune.patterns.NM(n=2, m=4), got {pattern!r}")


def removed_fraction(budget: Budget | None, pattern: Pattern, where: str) -> float:
    """Fraction of the weights to remove, in [0, 1): the budget's, or that of the pattern where it prescribes one."""
    if budget is None and pattern.fixed is not None:
        return pattern.fixed
    budget = check_budget(budget, f"{where}(budget=...)", ("weights",))
    if pattern.fixed is None:
        return budget.removed
    if not math.isclose(budget.removed, pattern.fixed):
        raise SettingError(f"{where}(budget=...): {pattern} removes {pattern.fixed:g}, got {budget!r}; leave the budget out")
    return pattern.fixed


def maskable(model: nn.Module, protect: tuple[str, ...] = ()) -> dict[str, nn.Parameter]:
    """Weights that may be masked, by sorted name: of convolutions, linear layers, embeddings, recurrent layers and attention.

    protect: dotted names of tensors, or of modules with all that is in them. A tied weight is there once. Raises SettingError
    for a name that protects nothing.
    """
    modules = {path for path, _ in model.named_modules()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in protect:
        if name not in modules | every:
            raise SettingError(f"protect: {type(model).__name__} has no module or parameter {name!r}")
    found = {}
    shielded = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if _inside(n, protect)}
    for name, parameter in model.named_parameters():
        module, leaf = owner(model, name)
        kind = (isinstance(module, MASKABLE_LAYERS) and leaf == "weight") or (
            isinstance(module, nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention) and "weight" in leaf
        )
        if kind and parameter.ndim >= 2 and id(parameter) not in shielded:
            if not parameter.is_floating_point():
                raise ModelError(f"{name} is {parameter.dtype}; sparsify the float model, before quantizing")
            found[name] = parameter
    return dict(sorted(found.items()))


def _inside(name: str, protect: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in protect)


@takes_budget
def plan_mask(
    model: nn.Module,
    budget: Budget | None = None,
    *,
    pattern: Pattern = UNSTRUCTURED,
    criterion: Criterion = l2,
    allocation: Allocation | Mapping[str, float] | None = None,
    protect: tuple[str, ...] = (),
    task: Task | None = None,
    samples: int = 1024,
) -> Masks:
    """Decide which weights to remove. The model is not changed: `Masks.apply_` does that.

    Weights that the model's masks already remove stay removed, and count. The order in which a model names its parameters does
    not matter. Warns of layers that cannot have the pattern (they stay dense and are named in `Masks.unmasked`), that are all
    zero, or that lose all their weights.

    Args:
        model: a float model.
        budget: how many of the maskable weights to remove, such as `ck.remove(weights=0.9)`: exactly round(0.9 * n) of them, or
            the nearest number of blocks. Left out where the pattern (N:M) or the allocation prescribes ratios.
        pattern: which weights are removed together, see `prune.patterns`.
        criterion: scores units, larger = keep, see `prune.criteria`; `l2` is the magnitude.
        allocation: how the budget is distributed over layers: a function of `prune.allocations`, or a ratio for each tensor or
            module by name (those without one stay dense). None ranks the weights of all layers together.
        protect: dotted names of tensors or modules that stay dense.
        task: data and loss, for criteria that read more than weights.
        samples: how many samples such criteria read.

    Raises:
        SettingError: a setting is out of its range, or the model's masks already remove more.
        ModelError: no weight can be masked.
    """
    check_pattern(pattern, "plan_mask")
    check_criterion(criterion, "plan_mask", WEIGHT_EVIDENCE)
    ratios = by_tensor(model, allocation) if isinstance(allocation, Mapping) else None
    if ratios is not None and (budget is not None or pattern.fixed is not None):
        raise SettingError("plan_mask(allocation=...): a ratio for each layer leaves no room for budget= and N:M patterns")
    ratio = 0.0 if ratios is not None else removed_fraction(budget, pattern, "plan_mask")
    weights, unmasked = fitting(model, pattern, protect, ratios)
    for name, weight in weights.items():
        if not bool(weight.detach().any()):
            warnings.warn(f"{name}: all of its weights are zero already, so that nothing ranks them", stacklevel=3)
    scores = score_weights(model, weights, pattern, criterion, task, samples)
    old = masks_of(model)
    before = {} if old is None else {n: m.to(weights[n].device) for n, m in old.masks.items() if n in weights}
    scores = without(scores, before, pattern)
    if ratios is None and callable(allocation):
        ratios = allocation(weights, ratio)
    kept = keep_best(scores, ratio, pattern, ratios)
    _check_monotone(scores, kept)
    masks = {name: pattern.spread(kept[name], w.shape) & before.get(name, True) for name, w in weights.items()}
    masks = broadcast_masks(masks) | ({} if old is None else {n: m for n, m in old.masks.items() if n not in masks})
    _warn_of_empty_layers(masks)
    return Masks(dict(sorted(masks.items())), unmasked)


def _warn_of_empty_layers(masks: Mapping[str, Tensor]) -> None:
    for name, mask in masks.items():
        if not bool(mask.any()):
            warnings.warn(
                f"{name} loses all of its weights, and what reads it sees a constant; protect it, or distribute the budget with"
                " allocation=erk_ratios",
                stacklevel=4,
            )


def fitting(
    model: nn.Module, pattern: Pattern, protect: tuple[str, ...], given: Mapping[str, float] | None
) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Weights that can have the pattern, and why others cannot; of these it warns. ModelError where there is no weight at all."""
    weights = {name: w for name, w in maskable(model, protect).items() if given is None or name in given}
    left = {name: why for name, w in weights.items() if (why := pattern.fits(w.shape))}
    for name, why in left.items():
        warnings.warn(f"{name} is left dense: {why}", stacklevel=4)
    if len(left) == len(weights):
        raise ModelError(f"{type(model).__name__} has no weight that {pattern} can be put on, protected ones left out")
    return {name: w for name, w in weights.items() if name not in left}, left


def by_tensor(model: nn.Module, ratios: Mapping[str, float]) -> dict[str, float]:
    """A ratio for each tensor from ratios for tensors or modules; SettingError for a name or ratio that is none."""
    names = {name for name, _ in model.named_parameters()}
    found: dict[str, float] = {}
    for name, ratio in ratios.items():
        tensors = [n for n in maskable(model) if _inside(n, (name,))]
        if name not in names and not tensors:
            raise SettingError(f"plan_mask(allocation=...): {type(model).__name__} has no layer {name!r} with maskable weights")
        if not 0 <= ratio < 1:
            raise SettingError(f"plan_mask(allocation=...): {name}: wanted a ratio in [0, 1), got {ratio}")
        found |= dict.fromkeys(tensors, float(ratio))
    return found


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


def keep_best(
    scores: Mapping[str, Tensor], ratio: float, pattern: Pattern, ratios: Mapping[str, float] | None = None
) -> dict[str, Tensor]:
    """(units,) bool for each tensor: the units with the largest scores; ties go to the one named, or standing, later.

    ratios: for each tensor its own; without them all are ranked together, and round(ratio * units) go.
    """
    if pattern.fixed is not None:
        return {name: pattern.choose(s, ratio) for name, s in scores.items()}
    if ratios is not None:
        gone = counts(ratios, {name: len(s) for name, s in scores.items()})
        return {name: keep_largest(s, len(s) - gone[name]) for name, s in scores.items()}
    names = sorted(scores)
    sizes = [len(scores[name]) for name in names]
    every = torch.cat([scores[name].cpu() for name in names])
    kept = keep_largest(every, len(every) - round(ratio * len(every)))
    return {n: part.to(scores[n].device) for n, part in zip(names, kept.split(sizes), strict=True)}


def _check_monotone(scores: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    if back := [name for name, s in scores.items() if bool((kept[name] & s.isneginf()).any())]:
        gone = sum(int(s.isneginf().sum()) for s in scores.values()) / sum(len(s) for s in scores.values())
        raise SettingError(
            f"{back[0]}: the model's masks remove {gone:.1%} already, more than is asked for here; ask for more, or take them off"
            " first (Densify, masks.detach_)"
        )
