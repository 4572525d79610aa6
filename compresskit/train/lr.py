"""Learning-rate schedules: the factor on the learning rate as a function of the fraction of the training that is done.

    Train(epochs=30, schedule=lr.OneCycle(warmup=0.1))
    Train(epochs=30, schedule=lr.Function(lambda done: 1 - done))

Those of torch step an optimizer instead, after every step or after every epoch:

    Train(epochs=30, schedule=lr.EachEpoch(partial(MultiStepLR, milestones=[15, 25])))
    Train(epochs=30, schedule=lr.EachStep(partial(OneCycleLR, max_lr=0.1)))

They are not interchangeable with `prune.schedules`, which give a pruning ratio.
"""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import lr_scheduler

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


#: Parameters of a function that makes a scheduler to which the length of the schedule is passed, where they are not given.
LENGTHS = ("total_steps", "T_max", "steps")
#: Schedulers of torch that are made to step after every optimizer step.
BATCHWISE = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)


@dataclass(frozen=True)
class TorchScheduler:
    """A scheduler of torch, which the training makes for its optimizer; see `EachStep` and `EachEpoch`.

    Args:
        make: `(optimizer) -> scheduler`, such as `partial(torch.optim.lr_scheduler.StepLR, step_size=30)`. The length of the
            schedule, in optimizer steps or in epochs, is passed to its parameter `total_steps`, `T_max` or `steps`, where it has
            one without a value. ReduceLROnPlateau steps after every measurement of the metric.
    """

    make: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.make):
            raise SettingError(
                f"lr.{type(self).__name__}(...): wanted a function (optimizer) -> scheduler, such as partial(StepLR,"
                f" step_size=30), got {type(self.make).__name__}"
            )

    def build(self, optimizer: torch.optim.Optimizer, length: int) -> Any:
        """Return the scheduler of an optimizer.

        Args:
            optimizer: it is given to `make`.
            length: how many times the scheduler steps in the whole training.

        Raises:
            SettingError: `make` returns no scheduler, or one of another optimizer.
        """
        given = self.make.keywords if isinstance(self.make, functools.partial) else {}
        parameters = inspect.signature(self.make).parameters.values()
        unset = [p.name for p in parameters if p.name in LENGTHS and p.default in (p.empty, None) and p.name not in given]
        own = {"epochs", "steps_per_epoch"} <= given.keys()  # OneCycleLR computes its length of these
        scheduler = self.make(optimizer, **({} if own else dict.fromkeys(unset, length)))
        if not isinstance(scheduler, lr_scheduler.LRScheduler) or scheduler.optimizer is not optimizer:
            of_another = " of another optimizer" if isinstance(scheduler, lr_scheduler.LRScheduler) else ""
            raise SettingError(
                f"lr.{type(self).__name__}(...): wanted a scheduler of the optimizer that its function is given, got"
                f" {type(scheduler).__name__}{of_another}"
            )
        return scheduler


@dataclass(frozen=True)
class EachStep(TorchScheduler):
    """A scheduler of torch that steps after every optimizer step: `EachStep(partial(OneCycleLR, max_lr=0.1))`."""


@dataclass(frozen=True)
class EachEpoch(TorchScheduler):
    """A scheduler of torch that steps after every epoch: `EachEpoch(partial(StepLR, step_size=30))`."""


#: What `Train(schedule=...)` takes; of the functions those that make a `BATCHWISE` scheduler.
AnySchedule = LRSchedule | TorchScheduler | Callable[..., Any]


def as_schedule(schedule: AnySchedule) -> LRSchedule | TorchScheduler:
    """Return a schedule that `check_lr_schedule` has checked; a function that makes a scheduler as `EachStep`."""
    return schedule if isinstance(schedule, LRSchedule | TorchScheduler) else EachStep(schedule)


def tail_of(schedule: AnySchedule, start: float) -> Tail:
    """Return the rest of a schedule from a fraction of its training on; SettingError for a scheduler of torch."""
    if isinstance(schedule, LRSchedule):
        return Tail(schedule=schedule, start=start)
    raise SettingError(
        f"rewind: {schedule!r} cannot begin in its middle; train with a schedule of the fraction done, such as lr.Cosine()"
    )


def check_lr_schedule(schedule: Any, where: str) -> None:
    """Raise `SettingError`, which begins with `where`, for anything but a learning-rate schedule."""
    if isinstance(schedule, LRSchedule | TorchScheduler):
        return
    kind = schedule.func if isinstance(schedule, functools.partial) else schedule
    if isinstance(kind, type) and issubclass(kind, BATCHWISE):
        return
    of_torch = kind if isinstance(kind, type) else type(kind)
    if issubclass(of_torch, lr_scheduler.LRScheduler):
        name, kept = (
            of_torch.__name__,
            "" if isinstance(kind, type) else "; a scheduler that is made already is of another optimizer",
        )
        raise SettingError(
            f"{where}: wanted to know when {name} steps: lr.EachEpoch(partial({name}, ...)) steps it after every epoch,"
            f" lr.EachStep(partial({name}, ...)) after every optimizer step{kept}"
        )
    hint = "; wrap a function (done) -> factor in lr.Function(...), prune.schedules are for ratios" if callable(schedule) else ""
    raise SettingError(f"{where}: wanted a learning-rate schedule such as lr.Cosine() or lr.OneCycle(), got {schedule!r}{hint}")


def _check_factor(schedule: str, name: str, value: float) -> None:
    if not value >= 0:
        raise SettingError(f"lr.{schedule}({name}=...): wanted a factor >= 0, got {value}")
