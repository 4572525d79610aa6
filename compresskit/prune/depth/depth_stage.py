"""`Depth`: the stage that removes residual blocks: plan, remove, fit the layers that are left, re-estimate norms, fine-tune."""

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
from compresskit.prune.channels.candidates import Form
from compresskit.prune.depth.block_plan import BlockPlan
from compresskit.prune.depth.costs import Cost, milliseconds
from compresskit.prune.depth.importance import Importance, after_training
from compresskit.prune.depth.plan_blocks import BLOCK_QUANTITIES, check_depth, check_measures, plan_blocks
from compresskit.prune.depth.refit_stream import refit_stream_
from compresskit.train.batchnorm import norms_with_statistics, reestimate_batchnorm_
from compresskit.train.train import Train, fit_

log = logging.getLogger(__name__)

FITTED_SAMPLES = 2048  # fewer where they are large, see `refit_stream_`


@dataclass(frozen=True, kw_only=True)
class Depth(Budgeted, Stage):
    """Remove residual blocks, whole layers of a transformer among them, fit the layers that are left, and fine-tune.

    Args:
        budget: how much stays, such as `ck.keep(latency=0.7)`; also macs, parameters or bytes.
        blocks: in the place of a budget, how many blocks to remove, or their dotted names.
        importance, cost, form, ignore: which block is removed next, see `plan_blocks`.
        reconstruct: fit the layers that write into the stream again by least squares, on calibration inputs without labels, see
            `refit_stream_`; `benchmarks/refit_blocks.md` has what it is worth without a training.
        finetune: training afterwards, with a learning-rate schedule of its own; None trains nothing.
        samples: samples that the importance reads.
        repair: samples for BatchNorm statistics; the fit reads as many, up to 2048.
    """

    quantities: ClassVar[tuple[Quantity, ...]] = BLOCK_QUANTITIES
    needs: ClassVar[frozenset[str]] = PROPERTIES

    budget: Budget | None = None
    blocks: int | tuple[str, ...] | None = None
    importance: Importance = after_training
    cost: Cost = milliseconds
    form: Form | None = None
    reconstruct: bool = True
    finetune: Train | None = None
    samples: int = 256
    repair: int = 3072
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_depth(self.budget, self.blocks, self.samples, "Depth")
        check_field_types(self)
        if self.repair < 1:
            raise SettingError(f"Depth(repair=...): wanted a whole number >= 1, got {self.repair!r}")
        check_measures("Depth", importance=self.importance, cost=self.cost, form=self.form)

    def calibration_samples(self, model: nn.Module) -> int:
        fitted = min(self.repair, FITTED_SAMPLES) if self.reconstruct else 0
        return max(self.samples, self.repair if norms_with_statistics(model) else fitted)

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model = model.to(task.device)
        dense = frozen_copy(model)
        guided = task if task.reference is not None else replace(task, reference=dense)
        plan = self._plan(model, task)
        log.info("%s", plan)
        plan.apply_(model)
        if self.reconstruct:
            refit_stream_(model, dense, plan.paths, calibration_inputs(task, min(self.repair, FITTED_SAMPLES), "refit"))
        reestimate_batchnorm_(model, calibration_inputs(task, self.repair, "re-estimate BatchNorm"))
        if self.finetune is not None:
            fit_(model, guided, self.finetune, label="fine-tune")
        return model.eval()

    def _plan(self, model: nn.Module, task: Task) -> BlockPlan:
        def made() -> dict[str, Any]:
            return plan_blocks(
                model,
                task.example(),
                self.budget,
                blocks=self.blocks,
                importance=self.importance,
                cost=self.cost,
                form=self.form,
                task=task,
                samples=self.samples,
                ignore=self.ignore,
            ).to_json()

        if task.progress is not None:  # times differ from run to run: a resumed stage keeps the plan that was measured
            return BlockPlan.from_json(task.progress.decide(made))
        return BlockPlan.from_json(made() if world_size() == 1 else on_rank_zero(made))
