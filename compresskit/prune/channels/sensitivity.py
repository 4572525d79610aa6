"""Sensitivity: what the metric loses when one group at a time is cut, and the allocation of ratios that follows from it."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from tqdm import tqdm

from compresskit.base.budget import Budget, takes_budget
from compresskit.base.errors import CheckpointError, SettingError
from compresskit.base.inputs import AnyInputs, calibration_inputs
from compresskit.base.task import Task
from compresskit.measure import evaluate
from compresskit.prune.channels.batchnorm import reestimate_batchnorm_
from compresskit.prune.channels.normalize import unscaled
from compresskit.prune.channels.plan_channels import NO_RATIOS, find, plan_channels
from compresskit.prune.channels.ranking import Ranking, Step
from compresskit.prune.channels.reconstruct import reconstruct_
from compresskit.prune.channels.resources import Limits
from compresskit.prune.channels.select import plan_of
from compresskit.prune.criteria import Criterion, l2
from compresskit.prune.scores import score_
from compresskit.prune.structure.plan import apply_


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Metric against ratio for every group. dense: the metric of the whole model.

    points: layer that makes the channels -> ((ratio, metric), ...) in order of ratios. prefix: where the groups' names begin.
    """

    dense: float
    points: dict[str, tuple[tuple[float, float], ...]]
    prefix: str = ""

    def __str__(self) -> str:
        rows = [f"  {name}: " + ", ".join(f"{r:.0%} -> {m:.4f}" for r, m in curve) for name, curve in self.points.items()]
        return "\n".join([f"{self.dense:.4f} with all channels", *rows])

    def drop(self, name: str, ratio: float) -> float:
        """What the metric loses at a ratio: straight lines between the points, never less than at a smaller ratio."""
        worst, known = 0.0, [(0.0, 0.0)]
        for r, metric in self.points[name]:
            worst = max(worst, self.dense - metric)
            known.append((r, worst))
        i = min(max(1, bisect_left([r for r, _ in known], ratio)), len(known) - 1)
        (r0, d0), (r1, d1) = known[i - 1], known[i]
        return d0 + (d1 - d0) * (ratio - r0) / (r1 - r0)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record; `from_json` reads it."""
        points = {name: [list(p) for p in curve] for name, curve in self.points.items()}
        return {"format": 1, "dense": self.dense, "prefix": self.prefix, "points": points}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Curves:
        """Curves from what `to_json` gave; CheckpointError where it is not that."""
        try:
            points = {str(n): tuple((float(r), float(m)) for r, m in curve) for n, curve in record["points"].items()}
            return Curves(dense=float(record["dense"]), prefix=str(record["prefix"]), points=points)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"not sensitivity curves: {type(error).__name__} {error}") from None


def channel_sensitivity(
    model: nn.Module,
    task: Task,
    *,
    ratios: tuple[float, ...] = (0.25, 0.5, 0.75),
    criterion: Criterion = l2,
    reconstruct: bool = False,
    samples: int = 3072,
    round_to: int = 8,
    ignore: tuple[str, ...] = (),
    inside: str | None = None,
) -> Curves:
    """The task's metric with one group of channels cut at a time, after re-estimating BatchNorm; the model is not changed.

    One evaluation for each group and ratio: give a task whose `val` is a part of the *training* data, and small.

    ratios: shares of a group's channels that go, rising, in (0, 1); rounded to widths that are multiples of `round_to`.
    reconstruct: also refit the layers that read them, as `Prune` does; curves are then of what that leaves.
    """
    if not ratios or list(ratios) != sorted(set(ratios)) or not 0 < ratios[0] <= ratios[-1] < 1:
        raise SettingError(f"channel_sensitivity(ratios=...): wanted rising shares in (0, 1), got {ratios}")
    limits = Limits(round_to=round_to, ratios=NO_RATIOS)
    limits.check("channel_sensitivity()")
    found, prefix, total = find(model, task.example(), ignore=ignore, inside=inside)
    score_(found.groups, model, prefix, criterion, unscaled, task, samples)
    dense, points = evaluate(model, task), {}
    with tqdm(total=len(found.groups) * len(ratios), desc="sensitivity", disable=None, leave=False) as bar:
        for group in found.groups:
            curve: dict[float, float] = {}
            for ratio in ratios:
                count = limits.count(group, ratio)
                if 0 < count < group.size and count / group.size not in curve:
                    group.removed = count
                    plan = plan_of(found, total, prefix)
                    cut = apply_(copy.deepcopy(model), plan)
                    if reconstruct:
                        reconstruct_(cut, model, plan, calibration_inputs(task, samples, "refit"))
                    reestimate_batchnorm_(cut, calibration_inputs(task, samples, "re-estimate BatchNorm"))
                    curve[count / group.size] = evaluate(cut, task)
                    group.removed = 0
                bar.update()
            if curve:
                points[prefix + group.layer] = tuple(sorted(curve.items()))
    return Curves(dense=dense, points=points, prefix=prefix)


def by_curves(curves: Curves) -> Ranking:
    """A ranking for `plan_channels`: the group whose metric falls least for each MAC (or parameter) saved is cut next.

    Groups that have no curve are not cut unless nothing else is left.
    """

    def price(step: Step) -> float:
        name = curves.prefix + step.group.layer
        if name not in curves.points:
            return 1e9 / step.useful
        before, after = step.group.removed / step.group.size, (step.group.removed + step.count) / step.group.size
        return (curves.drop(name, after) - curves.drop(name, before) + 1e-6) / step.useful

    return price


@takes_budget
def allocate(
    model: nn.Module,
    example: AnyInputs,
    curves: Curves,
    budget: Budget,
    **settings: Any,
) -> dict[str, float]:
    """Ratios of all groups that meet a budget at the least loss of the metric: layer -> share of its channels that goes.

    budget, settings: as in `plan_channels`, whose `ratios` takes the result, changed by hand if need be.
    """
    plan = plan_channels(model, example, budget, ranking=by_curves(curves), **settings)
    return {line.layer: 1 - line.keep / line.size for line in plan.lines}
