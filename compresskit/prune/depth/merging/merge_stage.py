"""`Merge`: the stage that merges convolutions: plan, remove activations, re-estimate BatchNorm, fine-tune, merge."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from compresskit.base.budget import Budget, Budgeted, Quantity
from compresskit.base.distributed import on_rank_zero, world_size
from compresskit.base.errors import SettingError
from compresskit.base.inputs import calibration_inputs
from compresskit.base.settings import check_field_types
from compresskit.base.stage import PROPERTIES, Stage
from compresskit.base.task import Task
from compresskit.graph.surgery import frozen_copy
from compresskit.prune.depth.merging.merge_costs import MergeCost, saved_milliseconds
from compresskit.prune.depth.merging.merge_importance import MergeImportance, merged_error
from compresskit.prune.depth.merging.merge_plan import MergePlan
from compresskit.prune.depth.merging.plan_merges import MERGE_QUANTITIES, check_merging, plan_merges
from compresskit.prune.depth.merging.prove_merges import merge_checked_
from compresskit.train.batchnorm import norms_with_statistics, reestimate_batchnorm_
from compresskit.train.train import Train, fit_

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Merge(Budgeted, Stage):
    """Remove activations, re-estimate BatchNorm, fine-tune, and make one convolution of the layers around each.

    The fine-tuning trains the layers apart, more weights than are left in the end, as in DepthShrinker (Fu et al., 2206.00843).

    Args:
        budget: how much stays, such as `ck.keep(latency=0.7)`; also macs or parameters.
        runs: in the place of a budget, how many runs of convolutions to merge, or their names.
        importance, cost, longest, shrink, ignore: which runs are merged, see `plan_merges`.
        finetune: training without the activations, with a learning-rate schedule of its own; None trains nothing.
        samples: samples that the importance reads. repair: samples for BatchNorm statistics.
    """

    quantities: ClassVar[tuple[Quantity, ...]] = MERGE_QUANTITIES
    needs: ClassVar[frozenset[str]] = PROPERTIES

    budget: Budget | None = None
    runs: int | tuple[str, ...] | None = None
    importance: MergeImportance = merged_error
    cost: MergeCost = saved_milliseconds
    longest: int = 3
    shrink: bool = False
    finetune: Train | None = None
    samples: int = 256
    repair: int = 3072
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_merging(self.budget, self.runs, self.importance, self.longest, self.samples, "Merge")
        check_field_types(self)
        if self.repair < 1:
            raise SettingError(f"Merge(repair=...): wanted a whole number >= 1, got {self.repair!r}")
        if not callable(self.cost):
            raise SettingError(f"Merge(cost=...): wanted a function of prune.depth.merging, got {self.cost!r}")

    def calibration_samples(self, model: nn.Module) -> int:
        return max(self.samples, self.repair if norms_with_statistics(model) else 0)

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model = model.to(task.device)
        guided = task if task.reference is not None else replace(task, reference=frozen_copy(model))
        plan = self._plan(model, task)
        log.info("%s", plan)
        plan.apply_(model, merge=False)
        reestimate_batchnorm_(model, calibration_inputs(task, self.repair, "re-estimate BatchNorm"))
        if self.finetune is not None:
            fit_(model, guided, self.finetune, label="fine-tune")
        return merge_checked_(model, task.example()).eval()

    def _plan(self, model: nn.Module, task: Task) -> MergePlan:
        def made() -> dict[str, Any]:
            return plan_merges(
                model,
                task.example(),
                self.budget,
                runs=self.runs,
                importance=self.importance,
                cost=self.cost,
                longest=self.longest,
                shrink=self.shrink,
                task=task,
                samples=self.samples,
                ignore=self.ignore,
            ).to_json()

        if task.progress is not None:  # times differ from run to run: a resumed stage keeps the plan that was measured
            return MergePlan.from_json(task.progress.decide(made))
        return MergePlan.from_json(made() if world_size() == 1 else on_rank_zero(made))
