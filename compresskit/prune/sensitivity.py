"""Sensitivity: what the model loses when one group of channels, or one tensor under a mask, is pruned and nothing else.

The curves give a ranking or ratios for `plan_channels`, and an allocation for `plan_mask`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeVar

from torch import nn

from compresskit.base.budget import Budget
from compresskit.base.errors import CheckpointError, DataError, SettingError
from compresskit.base.files import FORMAT
from compresskit.base.inputs import AnyInputs, calibration_inputs, some_batches
from compresskit.base.progress import progress_bar
from compresskit.base.task import Task, batch_size
from compresskit.graph.surgery import copy_model
from compresskit.measure import evaluate
from compresskit.prune.allocations import Allocation, measured_ratios
from compresskit.prune.channels.plan_channels import NO_RATIOS, analyze_channels, plan_channels
from compresskit.prune.channels.reconstruct import reconstruct_
from compresskit.prune.channels.resources import Limits
from compresskit.prune.channels.selector import plan_of
from compresskit.prune.criteria import CHANNEL_EVIDENCE, WEIGHT_EVIDENCE, Criterion, check_criterion, l2
from compresskit.prune.evidence import mean_loss, restored_after
from compresskit.prune.masks.maskable import maskable
from compresskit.prune.masks.plan_mask import check_pattern, keep_best
from compresskit.prune.normalizers import unscaled
from compresskit.prune.patterns import UNSTRUCTURED, Pattern
from compresskit.prune.rankings import Ranking, Step
from compresskit.prune.scores import score_groups_, score_weights
from compresskit.prune.structure.plan import apply_
from compresskit.train.batchnorm import reestimate_batchnorm_

Point = TypeVar("Point")


@dataclass(frozen=True, kw_only=True)
class SensitivityCurves:
    """A measured value against the ratio that is removed, for each layer. dense: the value of the whole model.

    points: layer or tensor -> ((ratio, value), ...) with rising ratios.
    """

    dense: float
    points: dict[str, tuple[tuple[float, float], ...]]

    def __str__(self) -> str:
        rows = [f"  {name}: " + ", ".join(f"{r:.0%} -> {v:.4f}" for r, v in curve) for name, curve in self.points.items()]
        return "\n".join([f"{self.dense:.4f} for the whole model", *rows])

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record; `from_json` reads it."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Curves from what `to_json` gave; raises CheckpointError where it is not that."""
        try:
            points = {str(n): tuple((float(r), float(v)) for r, v in curve) for n, curve in record["points"].items()}
            other = {key: value for key, value in record.items() if key not in ("format", "dense", "points")}
            return cls(dense=float(record["dense"]), points=points, **other)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"not sensitivity curves: {type(error).__name__} {error}") from None


@dataclass(frozen=True, kw_only=True)
class ChannelSensitivity(SensitivityCurves):
    """The task's metric against the ratio of one layer's channels that is removed.

    prefix: where the names of layers begin. higher_is_better: whether a larger metric is better.
    """

    prefix: str = ""
    higher_is_better: bool = True

    def drop(self, name: str, ratio: float) -> float:
        """Drop of the metric at a ratio: linear between the points, never less than at a smaller ratio."""
        worst, known = 0.0, [(0.0, 0.0)]
        for r, metric in self.points[name]:
            worst = max(worst, self.dense - metric if self.higher_is_better else metric - self.dense)
            known.append((r, worst))
        i = min(max(1, bisect_left([r for r, _ in known], ratio)), len(known) - 1)
        (r0, d0), (r1, d1) = known[i - 1], known[i]
        return d0 + (d1 - d0) * (ratio - r0) / (r1 - r0)

    def ranking(self) -> Ranking:
        """A ranking for `plan_channels`: prune next the group whose metric falls least for each unit of the budget saved.

        Groups without a curve are pruned only if nothing else is left.
        """

        def price(step: Step) -> float:
            name = self.prefix + step.group.layer
            if name not in self.points:
                return 1e9 / step.useful
            before, after = step.group.removed / step.group.size, (step.group.removed + step.count) / step.group.size
            return (self.drop(name, after) - self.drop(name, before) + 1e-6) / step.useful

        return price

    def ratios(self, model: nn.Module, example: AnyInputs, budget: Budget, **settings: Any) -> dict[str, float]:
        """Ratios of all layers that meet a budget at the least loss of the metric: layer -> ratio of its channels to remove.

        budget, settings: as in `plan_channels`, whose `ratios` takes the result, changed by hand if need be.
        """
        plan = plan_channels(model, example, budget, ranking=self.ranking(), **settings)
        return {line.layer: 1 - line.keep / line.size for line in plan.lines}


@dataclass(frozen=True, kw_only=True)
class MaskSensitivity(SensitivityCurves):
    """The mean loss against the ratio of one tensor's weights that is removed. samples: how many the loss is the mean of."""

    samples: int

    def allocation(self) -> Allocation:
        """An allocation for `plan_mask`: the ratios at which the measured loss rises least."""
        return measured_ratios({name: {0.0: self.dense, **dict(curve)} for name, curve in self.points.items()})


def channel_sensitivity(
    model: nn.Module,
    task: Task,
    *,
    ratios: Sequence[float] = (0.25, 0.5, 0.75),
    criterion: Criterion = l2,
    reconstruct: bool = False,
    samples: int = 3072,
    round_to: int = 8,
    ignore: tuple[str, ...] = (),
    inside: str | None = None,
) -> ChannelSensitivity:
    """Measure the task's metric with one group of channels pruned at a time and BatchNorm re-estimated.

    One evaluation for each group and ratio: give a task whose `val` is a part of the *training* data, and small. The model is not
    changed.

    Args:
        model: a float model.
        task: metric and data; `higher_is_better=False` where the metric is an error.
        ratios: fractions of a group's channels to remove, in (0, 1); rounded to widths that are multiples of `round_to`.
        criterion: scores channels.
        reconstruct: also refit the layers that read them, as `Prune` does.
        samples: samples for the criterion, for refitting and for BatchNorm statistics.
        round_to, ignore, inside: as in `plan_channels`.
    """
    _check_ratios(ratios, "channel_sensitivity")
    check_criterion(criterion, "channel_sensitivity", CHANNEL_EVIDENCE)
    limits = Limits(round_to=round_to, ratios=NO_RATIOS)
    limits.check("channel_sensitivity()")
    where = "channel_sensitivity"
    analysis, prefix, total = analyze_channels(model, task.example(), where=where, ignore=ignore, inside=inside)
    score_groups_(analysis.groups, model, prefix, criterion, unscaled, task, samples, where=where)
    dense = evaluate(model, task)
    points: dict[str, dict[float, float]] = {}
    for group, ratio in _with_progress(itertools.product(analysis.groups, sorted(ratios)), len(analysis.groups) * len(ratios)):
        count, curve = limits.count(group, ratio), points.setdefault(prefix + group.layer, {})
        if 0 < count < group.size and count / group.size not in curve:
            group.removed = count
            plan = plan_of(analysis, total, prefix)
            pruned = apply_(copy_model(model), plan)
            if reconstruct:
                reconstruct_(pruned, model, plan, calibration_inputs(task, samples, "refit"))
            reestimate_batchnorm_(pruned, calibration_inputs(task, samples, "re-estimate BatchNorm"))
            curve[count / group.size] = evaluate(pruned, task)
            group.removed = 0
    curves = {name: tuple(sorted(curve.items())) for name, curve in points.items() if curve}
    higher_is_better = _higher_is_better(task, dense, [curve[-1][1] for curve in curves.values()])
    return ChannelSensitivity(dense=dense, points=curves, prefix=prefix, higher_is_better=higher_is_better)


def _higher_is_better(task: Task, dense: float, pruned: Sequence[float]) -> bool:
    """What the task says; SettingError where it says nothing and the metric grows with what is removed."""
    if task.prefers_higher is not None or not pruned:
        return task.prefers_higher is not False
    mean = sum(pruned) / len(pruned)
    if mean > dense:
        raise SettingError(
            f"channel_sensitivity: the metric grows from {dense:.4g} to {mean:.4g} on average where channels are removed; set"
            " Task(higher_is_better=False) where it is an error such as RMSE, True where it is not"
        )
    return True


def mask_sensitivity(
    model: nn.Module,
    task: Task,
    *,
    ratios: Sequence[float] = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
    pattern: Pattern = UNSTRUCTURED,
    criterion: Criterion = l2,
    protect: tuple[str, ...] = (),
    include: tuple[str, ...] = (),
    samples: int = 512,
) -> MaskSensitivity:
    """Measure the mean loss with one tensor sparse at a time, in eval mode on training samples, without fine-tuning.

    The model is left as it was.

    Args:
        model: a float model.
        task: training data and loss.
        ratios: fractions of the tensor's weights to remove, in (0, 1).
        pattern: a pattern without a ratio of its own; tensors that cannot have it are left out.
        criterion: scores weights.
        protect: dotted names of tensors or modules that are left out.
        include: dotted names of matrices that are no weights of torch's layers, see `plan_mask`.
        samples: how many samples the loss is measured on, and how many the criterion sees.
    """
    _check_ratios(ratios, "mask_sensitivity")
    check_pattern(pattern, "mask_sensitivity")
    check_criterion(criterion, "mask_sensitivity", WEIGHT_EVIDENCE)
    if pattern.fixed is not None:
        raise SettingError(f"mask_sensitivity(pattern=...): {pattern} has one ratio, {pattern.fixed:g}; there is no curve")
    weights = {name: w for name, w in maskable(model, protect, include).items() if not pattern.fits(w.shape)}
    scores = score_weights(model, weights, pattern, criterion, task, samples, where="mask_sensitivity")
    batches = list(some_batches(task, "train", samples, "read samples"))
    seen = sum(batch_size(task.inputs(batch)) for batch in batches)
    if not batches:
        raise DataError("mask_sensitivity: the training loader gave no batch")
    dense = mean_loss(model, task, batches)
    points: dict[str, dict[float, float]] = {name: {} for name in weights}
    for name, ratio in _with_progress(itertools.product(weights, sorted(ratios)), len(weights) * len(ratios)):
        mask = pattern.spread(keep_best({name: scores[name]}, ratio, pattern)[name], weights[name].shape)
        with restored_after(model, [name]):
            weights[name].masked_fill_(~mask, 0)
            points[name][ratio] = mean_loss(model, task, batches)
    return MaskSensitivity(dense=dense, points={name: tuple(curve.items()) for name, curve in points.items()}, samples=seen)


def _check_ratios(ratios: Sequence[float], where: str) -> None:
    if not ratios or any(not 0 < ratio < 1 for ratio in ratios) or len(set(ratios)) != len(ratios):
        raise SettingError(f"{where}(ratios=...): wanted different fractions in (0, 1), got {tuple(ratios)}")


def _with_progress(points: Iterator[Point], total: int) -> Iterator[Point]:
    yield from progress_bar(points, total=total, desc="sensitivity")
