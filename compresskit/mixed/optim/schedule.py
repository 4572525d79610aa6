"""A torch learning-rate scheduler that a run steps, at every attempt or only after steps that were not skipped."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch

from compresskit.base.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class RunScheduler:
    """A torch scheduler and when it steps.

    optimizer: the run's, which the scheduler must be of.
    on: "attempt" steps it after every `run.step()`, so that the schedule ends where the loop does. "success" leaves out steps
        that were skipped. With a fused optimizer the host learns of a skip one step late, so the schedule waits one step later:
        deterministic, and the same total except for the very last step.
    """

    scheduler: Any
    optimizer: torch.optim.Optimizer
    on: Literal["attempt", "success"] = "attempt"

    def __post_init__(self) -> None:
        if self.on not in ("attempt", "success"):
            raise SettingError(f"schedule: on must be 'attempt' or 'success', got {self.on!r}")
        for method in ("step", "state_dict", "load_state_dict"):
            if not callable(getattr(self.scheduler, method, None)):
                raise SettingError(f"schedule: wanted a torch scheduler, got {type(self.scheduler).__name__} without {method}()")
        kind = type(self.scheduler).__name__
        required = [
            name
            for name, parameter in inspect.signature(self.scheduler.step).parameters.items()
            if parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if required:
            raise SettingError(
                f"schedule: {kind}.step wants {required[0]}, which run.step does not know; leave run.schedule out and call"
                f" scheduler.step({required[0]}) yourself, such as after each epoch"
            )
        if self.scheduler.optimizer is not self.optimizer:
            raise SettingError(f"schedule: this {kind} is of another optimizer than the run's; make it of run.optimizer")

    def advance(self, *, skipped: bool) -> None:
        """Step the scheduler after a step of the run, unless it leaves skipped ones out."""
        if self.on == "attempt" or not skipped:
            # torch warns of a scheduler that steps before its optimizer, which a skipped first step looks like.
            self.scheduler.optimizer.__dict__["_opt_called"] = True
            self.scheduler.step()
