"""Learning-rate schedules that know of skipped steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from compresskit.base.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """A torch scheduler and when it advances.

    "attempt": after every `run.step()`, so that the schedule ends where the loop does.
    "success": not for a step that was skipped. Where the optimizer is fused the host learns of a skip one step late, and the
    schedule waits one step later instead: deterministic, and the same total but for the very last step.
    """

    scheduler: Any
    on: Literal["attempt", "success"] = "attempt"

    def __post_init__(self) -> None:
        if self.on not in ("attempt", "success"):
            raise SettingError(f"schedule: on must be 'attempt' or 'success', got {self.on!r}")
        for method in ("step", "state_dict", "load_state_dict"):
            if not callable(getattr(self.scheduler, method, None)):
                raise SettingError(f"schedule: wanted a torch scheduler, got {type(self.scheduler).__name__} without {method}()")

    def advance(self, *, skipped: bool) -> None:
        """Step the scheduler, if it is to."""
        if self.on == "attempt" or not skipped:
            # torch warns of a scheduler that steps before its optimizer, which a skipped first step looks like.
            self.scheduler.optimizer.__dict__["_opt_called"] = True
            self.scheduler.step()
