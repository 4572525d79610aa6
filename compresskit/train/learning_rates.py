"""The learning rates of a training: set before every step by a schedule, or left to a scheduler of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from compresskit.base.errors import SettingError
from compresskit.base.task import Task
from compresskit.mixed.optim.schedule import RunScheduler
from compresskit.train.length import Length
from compresskit.train.lr import EachEpoch, LRSchedule, TorchScheduler


class LearningRates:
    """Sets the learning rates of an optimizer during a training.

    Args:
        optimizer: of the training; its own rates are those that a schedule multiplies.
        schedule: of `lr`.
        length: of the training.
        measured: the task, where its metric is measured during the training.

    Attributes:
        used: rates of the last step, one for each param group.

    Raises:
        SettingError: a scheduler of torch cannot be made, counts epochs of unknown length, or waits for a metric in vain.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: LRSchedule | TorchScheduler, length: Length, measured: Task | None
    ) -> None:
        self.optimizer, self.schedule, self.steps = optimizer, schedule, length.steps
        self.base = [float(group["lr"]) for group in optimizer.param_groups]
        self.used = list(self.base)
        self.scheduler: Any = None
        if isinstance(schedule, TorchScheduler):
            self.scheduler = schedule.build(optimizer, self._count(schedule, length))
            if isinstance(self.scheduler, ReduceLROnPlateau):
                _check_plateau(self.scheduler, measured)
            else:
                self._driver = RunScheduler(scheduler=self.scheduler, optimizer=optimizer)

    @staticmethod
    def _count(schedule: TorchScheduler, length: Length) -> int:
        """How many times a scheduler steps."""
        if not isinstance(schedule, EachEpoch):
            return length.steps
        if length.epochs is None:
            raise SettingError(
                "Train(schedule=...): lr.EachEpoch counts epochs, and the training data have no length; take lr.EachStep"
            )
        return length.epochs

    def before_step(self, step: int) -> None:
        """Set the rates of the next step, with `step` steps done."""
        if isinstance(self.schedule, LRSchedule):
            for group, rate in zip(self.optimizer.param_groups, self.base, strict=True):
                group["lr"] = rate * self.schedule(step / self.steps)
        self.used = [float(group["lr"]) for group in self.optimizer.param_groups]

    def after_step(self, metric: float | None) -> None:
        """Let a scheduler step after an optimizer step, or after a measurement of the metric, if it is of that kind."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if metric is not None:
                self.scheduler.step(metric)
        elif self.scheduler is not None and not isinstance(self.schedule, EachEpoch):
            self._driver.advance(skipped=False)

    def after_epoch(self) -> None:
        """Let a scheduler step after an epoch, if it is of that kind."""
        if isinstance(self.schedule, EachEpoch) and not isinstance(self.scheduler, ReduceLROnPlateau):
            self._driver.advance(skipped=False)

    def resume_state(self) -> dict[str, Any]:
        """Return the rates that were used, and the state of a scheduler of torch."""
        return {"used": self.used, "scheduler": None if self.scheduler is None else dict(self.scheduler.state_dict())}

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Continue from what `resume_state` returned; the optimizer's own state is restored before."""
        self.used = list(state["used"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])


def _check_plateau(scheduler: ReduceLROnPlateau, measured: Task | None) -> None:
    if measured is None:
        raise SettingError("Train(schedule=...): ReduceLROnPlateau waits for the metric; pass Task(val=...), and measure it")
    if measured.prefers_higher is not None and (scheduler.mode == "max") is not measured.prefers_higher:
        right = "max" if measured.prefers_higher else "min"
        raise SettingError(
            f"Train(schedule=...): ReduceLROnPlateau(mode={scheduler.mode!r}) waits for the wrong direction of the metric"
            f" {measured.metric_name}; pass mode={right!r}"
        )
