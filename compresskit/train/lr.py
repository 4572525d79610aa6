"""Learning-rate schedules: the factor on the learning rate as a function of the fraction of the training that is done.

    Train(epochs=30, schedule=lr.OneCycle(warmup=0.1))
    Train(epochs=30, schedule=lr.Function(lambda done: 1 - done))

They are not interchangeable with `prune.schedules`, which give a pruning ratio.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compresskit.base.errors import SettingError


class LRSchedule(ABC):
    """A schedule of the learning rate; subclasses define `__call__`."""

    @abstractmethod
    def __call__(self, done: float) -> float:
        """Return the factor on the optimizer's learning rate.

        Args:
            done: fraction of the optimizer steps that are done, in [0, 1]; evaluated before every step.
        """


@dataclass(frozen=True)
class Constant(LRSchedule):
    """A constant learning rate: factor 1."""

    def __call__(self, done: float) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Cosine(LRSchedule):
    """Half a cosine from 1 to `end` (Loshchilov & Hutter, arXiv 1608.03983).

    Args:
        end: factor at the end of the training, at least 0.
    """

    end: float = 0.0

    def __post_init__(self) -> None:
        _check_factor("Cosine", "end", self.end)

    def __call__(self, done: float) -> float:
        return self.end + (1 - self.end) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True)
class OneCycle(LRSchedule):
    """Linear warm-up from `start` to 1, then half a cosine down to `end` (Smith, arXiv 1708.07120).

    Args:
        warmup: fraction of the training that is warm-up, in [0, 1).
        start: factor at the first step, at least 0.
        end: factor at the end of the training, at least 0.
    """

    warmup: float = 0.2
    start: float = 0.04
    end: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise SettingError(f"lr.OneCycle(warmup=...): wanted a number in [0, 1), got {self.warmup}")
        _check_factor("OneCycle", "start", self.start)
        _check_factor("OneCycle", "end", self.end)

    def __call__(self, done: float) -> float:
        if done < self.warmup:
            return self.start + (1 - self.start) * done / self.warmup
        return Cosine(end=self.end)((done - self.warmup) / (1 - self.warmup))


@dataclass(frozen=True)
class Function(LRSchedule):
    """Any function `(done) -> factor`.

    Args:
        function: takes the fraction of the training that is done, in [0, 1], and returns the factor.
    """

    function: Callable[[float], float]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise SettingError(f"lr.Function(...): wanted a function (done) -> factor, got {type(self.function).__name__}")

    def __call__(self, done: float) -> float:
        return self.function(done)


@dataclass(frozen=True, kw_only=True)
class Tail(LRSchedule):
    """The rest of another schedule over a whole training, to continue from a rewound state.

    Args:
        schedule: the schedule of the training before.
        start: fraction of that training at which this one begins, in [0, 1).
    """

    schedule: LRSchedule
    start: float

    def __call__(self, done: float) -> float:
        return self.schedule(self.start + (1 - self.start) * done)


def check_lr_schedule(schedule: Any, where: str) -> None:
    """Raise `SettingError`, which begins with `where`, for anything but a learning-rate schedule."""
    if isinstance(schedule, LRSchedule):
        return
    kind = schedule.func if isinstance(schedule, functools.partial) else schedule
    kind = kind if isinstance(kind, type) else type(kind)
    if kind.__module__ == "torch.optim.lr_scheduler":
        raise SettingError(
            f"{where}: {kind.__name__} steps an optimizer in a loop of its own;"
            " take a schedule such as lr.Cosine(), write its factor as lr.Function(lambda done: ...), or use it in your own loop"
            " with run.schedule of mixed.prepare"
        )
    hint = "; wrap a function (done) -> factor in lr.Function(...), prune.schedules are for ratios" if callable(schedule) else ""
    raise SettingError(f"{where}: wanted a learning-rate schedule such as lr.Cosine() or lr.OneCycle(), got {schedule!r}{hint}")


def _check_factor(schedule: str, name: str, value: float) -> None:
    if not value >= 0:
        raise SettingError(f"lr.{schedule}({name}=...): wanted a factor >= 0, got {value}")
