"""What a training minimises: named losses of a model on a batch.

A plain function `(model, batch) -> {name: scalar}` is enough where nothing has to be prepared or remembered. An `Objective` can
also read the task, add modules to the model while it is trained, follow the training's progress, and be saved in checkpoints:

    rehearse(model, predictions)   before a run, of the incoming model
    bind(model, task)              once, before the first step; returns the objective that is used
    advance(done)                  before every batch
    __call__(model, batch)         for every batch
    resume_state, resume_from_     when a checkpoint is written, and when a training is resumed from it
    close()                        once, after the last step, also where the training fails
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from compresskit.base.errors import SettingError
from compresskit.base.task import Task

OfBind = TypeVar("OfBind")
Losses = dict[str, Tensor]
LossFunction = Callable[[Callable[..., Any], Any], Losses]


class Objective(ABC):
    """What a training minimises: the sum of the named losses that it returns for a batch.

    Subclasses define `__call__`; the other methods do nothing by default.
    """

    @property
    def reads_target(self) -> bool:
        """Whether it reads the targets of batches; where it says so, a run refuses batches without them at its start."""
        return False

    @abstractmethod
    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        """Compute the losses of one batch.

        Args:
            model: the model under its precision policy; call it in place of the module.
            batch: what the training loader yields; `Task.split` makes inputs and target of it.

        Returns:
            Scalars by name; their sum is minimised.
        """

    def for_task(self, task: Task) -> Objective:
        """Return the objective whose `rehearse` is called before a run on `task`; by default itself."""
        return self

    def rehearse(self, model: nn.Module, predictions: Any) -> None:  # noqa: B027  by default nothing
        """Raise an error where it is plain before a run that this cannot train its model.

        Args:
            model: the incoming model of the run, whose predictions a later stage's have the classes of; it must not be changed.
            predictions: what `Task.predict` gives of it.
        """

    def bind(self, model: nn.Module, task: Task) -> Objective:
        """Prepare for training `model` on `task`; the training loop calls this once and uses the objective it returns."""
        return self

    def advance(self, done: float) -> None:  # noqa: B027  by default nothing
        """Take note of the fraction of the training, in [0, 1], that is done; called before every batch."""

    def resume_state(self) -> Any:
        """State that is not on the model, as tensors and plain values in dicts and lists; None where there is none."""
        return None

    def resume_from_(self, state: Any) -> None:  # noqa: B027  by default nothing
        """Take over a state that `resume_state` returned; not called for None."""

    def close(self) -> None:  # noqa: B027  by default nothing
        """Remove what `bind` added to the model, such as adapters and hooks."""


class Wrapper(Objective):
    """Base of objectives that add a loss to those of `objective`; what the training loop and a run ask is forwarded to it.

    Subclasses define `__call__`, and `bind`, which binds the inner objective.
    """

    objective: Objective

    @property
    def reads_target(self) -> bool:
        """Whether the inner objective does."""
        return self.objective.reads_target

    def rehearse(self, model: nn.Module, predictions: Any) -> None:
        """Let the inner objective raise an error where it cannot train its model."""
        self.objective.rehearse(model, predictions)

    def advance(self, done: float) -> None:
        """Pass the fraction of the training that is done to the inner objective."""
        self.objective.advance(done)

    def resume_state(self) -> Any:
        """State of the inner objective."""
        return self.objective.resume_state()

    def resume_from_(self, state: Any) -> None:
        """Restore the inner objective from `resume_state()`."""
        self.objective.resume_from_(state)

    def close(self) -> None:
        """Close the inner objective."""
        self.objective.close()


def bound(value: OfBind | None, objective: Objective) -> OfBind:
    """Return what `bind` gave an objective, such as its task.

    Raises:
        SettingError: the objective was called without `bind`.
    """
    if value is None:
        raise SettingError(
            f"{type(objective).__name__}: it was called before bind; in a loop of your own write"
            " objective = objective.bind(model, task) before the first batch, and objective.close() after the last"
        )
    return value


@dataclass(frozen=True)
class FunctionObjective(Objective):
    """A plain function `(model, batch) -> losses` as an `Objective`."""

    function: LossFunction

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        return self.function(model, batch)


def as_objective(value: Objective | LossFunction) -> Objective:
    """Return an `Objective` as it is, and wrap a plain function into one.

    Raises:
        SettingError: `value` cannot be called, or has methods of an `Objective` without being one: they would not be called.
    """
    if isinstance(value, Objective):
        return value
    if not callable(value):
        raise SettingError(f"objective: wanted an Objective or a function (model, batch) -> losses, got {type(value).__name__}")
    if methods := {"bind", "advance", "close", "resume_state", "resume_from_"}.intersection(dir(value)):
        raise SettingError(
            f"objective: {type(value).__name__} has {', '.join(sorted(methods))} but is no Objective; subclass ck.Objective"
        )
    return FunctionObjective(value)
