"""Ratio schedules: how much of a model is removed at each point of a training or of several pruning steps.

Constant      the whole ratio from the first step
Linear        in a straight line
Cubic         fast while there is much to choose from, slow at the end (AGP)
Exponential   the same fraction of what remains in equal times
Cyclic        removes weights and lets them grow again, several times
Function      a function of the user
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compresskit.base.errors import SettingError


class RatioSchedule(ABC):
    """Maps progress to the ratio that is removed by then; never more than the final ratio, and exactly that at the end.

    A schedule of one's own subclasses it and defines `ratio`.
    """

    def __call__(self, done: float, *, end: float) -> float:
        """The ratio to remove.

        Args:
            done: progress, in [0, 1].
            end: the ratio that is removed when `done` is 1, in [0, 1).

        Returns a ratio in [0, end], whatever `ratio` returns, and `end` where `done` is 1.
        """
        return end if done >= 1 else min(max(0.0, self.ratio(done, end=end)), end)

    @abstractmethod
    def ratio(self, done: float, *, end: float) -> float:
        """The ratio for `done` in [0, 1); values outside [0, end] are clamped."""


@dataclass(frozen=True, kw_only=True)
class Constant(RatioSchedule):
    """`end` throughout; with regrowth, the schedule of RigL (Evci et al., 1911.11134)."""

    def ratio(self, done: float, *, end: float) -> float:
        return end


class _Rising(RatioSchedule):
    """Check of schedules that begin at a ratio `start`."""

    start: float

    def __post_init__(self) -> None:
        if isinstance(self.start, bool) or not isinstance(self.start, int | float) or not 0 <= self.start < 1:
            raise SettingError(f"{type(self).__name__}(start=...): wanted a ratio in [0, 1), got {self.start!r}")


@dataclass(frozen=True, kw_only=True)
class Linear(_Rising):
    """From `start` to `end` in a straight line."""

    start: float = 0.0

    def ratio(self, done: float, *, end: float) -> float:
        return self.start + (end - self.start) * done


@dataclass(frozen=True, kw_only=True)
class Cubic(_Rising):
    """`end + (start - end) * (1 - done)^3`: automated gradual pruning (Zhu & Gupta, 1710.01878, eq. 1)."""

    start: float = 0.0

    def ratio(self, done: float, *, end: float) -> float:
        return end + (self.start - end) * (1 - done) ** 3


@dataclass(frozen=True, kw_only=True)
class Exponential(_Rising):
    """What remains falls by equal factors in equal times: 1 - (1 - start) * ((1 - end) / (1 - start))^done."""

    start: float = 0.0

    def ratio(self, done: float, *, end: float) -> float:
        return 1 - (1 - self.start) * ((1 - end) / (1 - self.start)) ** done


@dataclass(frozen=True, kw_only=True)
class Cyclic(_Rising):
    """`Cubic` from `start` to `end`, `cycles` times (cyclical pruning, Srinivas et al., 2202.01290).

    Between two cycles weights grow again, those with the largest gradients first.
    """

    start: float = 0.0
    cycles: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.cycles, bool) or not isinstance(self.cycles, int) or self.cycles < 1:
            raise SettingError(f"Cyclic(cycles=...): wanted a whole number >= 1, got {self.cycles!r}")

    def ratio(self, done: float, *, end: float) -> float:
        return Cubic(start=self.start).ratio(done * self.cycles % 1, end=end)


@dataclass(frozen=True)
class Function(RatioSchedule):
    """A function `(done, *, end) -> ratio` of the user."""

    function: Callable[..., float]

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise SettingError(f"Function(...): wanted a function (done, *, end) -> ratio, got {self.function!r}")

    def ratio(self, done: float, *, end: float) -> float:
        return self.function(done, end=end)


def check_schedule(schedule: Any, where: str) -> None:
    """Raise SettingError for what is no ratio schedule; learning-rate schedules are none."""
    if not isinstance(schedule, RatioSchedule):
        raise SettingError(
            f"{where}(schedule=...): wanted a ratio schedule such as prune.schedules.Cubic(), got {schedule!r}; learning-rate"
            " schedules belong to Train(schedule=...), a function (done, *, end) -> ratio goes into prune.schedules.Function(...)"
        )
