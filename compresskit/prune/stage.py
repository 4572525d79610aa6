"""The stage: plan, prove, cut, re-estimate BatchNorm, fine-tune."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn
from tqdm import tqdm

from compresskit.errors import SettingError
from compresskit.prune.batchnorm import reestimate_batchnorm_
from compresskit.prune.channels import plan_channels
from compresskit.prune.criteria import Criterion, l2
from compresskit.prune.plan import apply_
from compresskit.surgery import frozen_copy, mode
from compresskit.task import PROPERTIES, Inputs, Task, batch_size
from compresskit.train import Train, bound, fit_

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Remove channels.

    macs: share of the multiply-accumulates that stays.
    criterion: scores channels, see `compresskit.prune`.
    finetune: training after the cut, with a schedule of its own; None leaves it at re-estimated BatchNorm statistics.
    samples: training samples for the scores of gradient criteria and for BatchNorm statistics.
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
            backwards=lambda: self._backwards(model, task),
            round_to=self.round_to,
            ignore=self.ignore,
            inside=self.inside,
        )
        log.info("%s", plan)
        apply_(model, plan)
        reestimate_batchnorm_(model, self._inputs(task, "re-estimate BatchNorm"))
        if self.finetune is not None:
            goal = task if task.reference is not None else replace(task, reference=dense)
            fit_(model, goal, self.finetune, label="fine-tune")
        return model.eval()

    def _batches(self, task: Task, which: str, label: str) -> Iterator[object]:
        seen = 0
        with tqdm(total=self.samples, desc=label, disable=None, leave=False, unit="sample") as bar:
            for batch in task.batches(which):
                yield batch
                rows = batch_size(task.split(batch)[0])
                seen += rows
                bar.update(rows)
                if seen >= self.samples:
                    return

    def _inputs(self, task: Task, label: str) -> Iterator[Inputs]:
        return (task.split(batch)[0] for batch in self._batches(task, "calibration", label))

    def _backwards(self, model: nn.Module, task: Task) -> Iterator[None]:
        """The gradients of the task's loss, a batch at a time, in eval mode."""
        objective = bound(None, model, task)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        try:
            with mode(model, training=False), torch.enable_grad():
                for parameter in frozen:
                    parameter.requires_grad_(True)
                for batch in self._batches(task, "train", "score"):
                    model.zero_grad(set_to_none=True)
                    torch.stack(list(objective(model, batch).values())).sum().backward()
                    yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
            model.zero_grad(set_to_none=True)
