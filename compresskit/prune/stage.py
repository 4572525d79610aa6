"""The stage: plan, prove, cut, re-estimate BatchNorm, fine-tune."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from compresskit.errors import SettingError
from compresskit.prune.batchnorm import reestimate_batchnorm_
from compresskit.prune.channels import plan_channels
from compresskit.prune.collect import calibration
from compresskit.prune.criteria import Criterion, l2
from compresskit.prune.plan import apply_
from compresskit.surgery import frozen_copy
from compresskit.task import PROPERTIES, Task
from compresskit.train import Train, fit_

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Remove channels.

    macs: share of the multiply-accumulates that stays.
    criterion: scores channels, see `compresskit.prune`.
    finetune: training after the cut, with a schedule of its own; None leaves it at re-estimated BatchNorm statistics.
    samples: samples for criteria that read more than weights, and for BatchNorm statistics.
    round_to: widths stay multiples of this.
    ignore: dotted names of modules that are not cut. inside: prune only this submodule.
    """

    needs: ClassVar[frozenset[str]] = PROPERTIES
    keeps: ClassVar[frozenset[str]] = PROPERTIES

    macs: float
    criterion: Criterion = l2
    finetune: Train | None = None
    samples: int = 3072
    round_to: int = 8
    ignore: tuple[str, ...] = ()
    inside: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.criterion):
            raise SettingError(f"Prune(criterion=...): wanted a function such as prune.l2, got {self.criterion!r}")
        if not isinstance(self.macs, int | float) or not 0 < self.macs <= 1:
            raise SettingError(f"Prune(macs=...): wanted the share of MACs that stays, in (0, 1], got {self.macs}")
        if self.round_to < 1:
            raise SettingError(f"Prune(round_to=...): wanted a whole number >= 1, got {self.round_to}")
        if self.samples < 1:
            raise SettingError(f"Prune(samples=...): wanted a whole number >= 1, got {self.samples}")

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model = model.to(task.device)
        dense = frozen_copy(model)
        plan = plan_channels(
            model,
            task.example(),
            macs=self.macs,
            criterion=self.criterion,
            task=task,
            samples=self.samples,
            round_to=self.round_to,
            ignore=self.ignore,
            inside=self.inside,
        )
        log.info("%s", plan)
        apply_(model, plan)
        reestimate_batchnorm_(model, calibration(task, self.samples, "re-estimate BatchNorm"))
        if self.finetune is not None:
            goal = task if task.reference is not None else replace(task, reference=dense)
            fit_(model, goal, self.finetune, label="fine-tune")
        return model.eval()
