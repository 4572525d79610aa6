"""`LowRank`: the stage that factors layers: plan ranks, factor, re-estimate BatchNorm, fine-tune."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from compresskit.base.budget import Budget, Budgeted, Quantity
from compresskit.base.errors import SettingError
from compresskit.base.inputs import calibration_inputs
from compresskit.base.settings import check_field_types
from compresskit.base.stage import PROPERTIES, Stage
from compresskit.base.task import Task
from compresskit.graph.surgery import frozen_copy
from compresskit.prune.low_rank.plan_ranks import RANK_QUANTITIES, Method, check_ranks, plan_ranks
from compresskit.train.batchnorm import reestimate_batchnorm_
from compresskit.train.train import Train, fit_

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LowRank(Budgeted, Stage):
    """Replace linear layers and convolutions by products of low rank, re-estimate BatchNorm, and fine-tune.

    Args:
        budget: how much stays, `ck.keep(macs=0.6)` or `ck.keep(parameters=0.6)`.
        finetune: training afterwards, with a learning-rate schedule of its own; None trains nothing.
        samples: samples of inputs that the factors are fitted to and BatchNorm is re-estimated on; 0 fits the weights alone.
        round_to, ignore, method: see `plan_ranks`.
    """

    quantities: ClassVar[tuple[Quantity, ...]] = RANK_QUANTITIES
    needs: ClassVar[frozenset[str]] = PROPERTIES

    budget: Budget
    finetune: Train | None = None
    samples: int = 1024
    round_to: int = 8
    ignore: tuple[str, ...] = ()
    method: Method = "tucker"

    def __post_init__(self) -> None:
        check_ranks(self.budget, self.round_to, self.method, "LowRank")
        check_field_types(self)
        if self.samples < 0:
            raise SettingError(f"LowRank(samples=...): wanted a whole number >= 0, got {self.samples!r}")

    def calibration_samples(self, model: nn.Module) -> int:
        return self.samples

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model = model.to(task.device)
        guided = task if task.reference is not None else replace(task, reference=frozen_copy(model))
        batches = list(calibration_inputs(task, self.samples, "read layers")) if self.samples else None
        plan = plan_ranks(
            model,
            task.example(),
            self.budget,
            batches=batches,
            round_to=self.round_to,
            ignore=self.ignore,
            method=self.method,
        )
        log.info("%s", plan)
        plan.apply_(model, batches)
        if batches is not None:
            reestimate_batchnorm_(model, batches)
        if self.finetune is not None:
            fit_(model, guided, self.finetune, label="fine-tune")
        return model.eval()
