"""The default objective, the task's own loss, and `bind_objective`, which prepares any objective for training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from compresskit.base.objective import Losses, LossFunction, Objective, as_objective
from compresskit.base.task import Task, call, check_labels
from compresskit.mixed.formats.parallel import reshard_


@dataclass(frozen=True)
class Supervised(Objective):
    """The task's loss of the model's predictions."""

    task: Task | None = None

    def bind(self, model: nn.Module, task: Task) -> Supervised:
        """Return the same objective for `task`."""
        return Supervised(task)

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        task = self.task
        assert task is not None, "bind first"
        inputs, target = task.split(batch)
        return {"loss": supervised_loss(task, task.predict(call(model, inputs)), target)}


def supervised_loss(task: Task, predictions: Tensor, target: Any) -> Tensor:
    """Return the task's loss, a scalar.

    Args:
        task: has the loss.
        predictions: (N, C, ...) of the model.
        target: what the loss takes, such as class indices (N, ...).

    Raises:
        DataError: the loss fails because labels lie outside the classes; the message names one.
    """
    try:
        return task.loss(predictions, target)
    except IndexError:
        if isinstance(target, Tensor) and predictions.ndim == target.ndim + 1 and not target.is_floating_point():
            check_labels(target, predictions.shape[1], "training data")
        raise


def bind_objective(objective: Objective | LossFunction | None, model: nn.Module, task: Task) -> Objective:
    """Return an objective that is ready for use on `model`; the task's loss where `objective` is None."""
    bound = (Supervised() if objective is None else as_objective(objective)).bind(model, task)
    reshard_(model)  # `bind` may have run the model
    return bound
