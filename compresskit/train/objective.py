"""The default objective, the task's own loss, and `bind_objective`, which prepares any objective for training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from compresskit.base.errors import CompressError, DataError, SettingError, first_line, is_out_of_memory
from compresskit.base.objective import Losses, LossFunction, Objective, as_objective, bound
from compresskit.base.task import Task, call, check_labels, shapes_of
from compresskit.measure import checked_shapes
from compresskit.mixed.formats.parallel import reshard_


@dataclass(frozen=True)
class Supervised(Objective):
    """The task's loss of the model's predictions."""

    task: Task | None = None

    @property
    def reads_target(self) -> bool:
        """True: every loss of a task takes targets."""
        return True

    def bind(self, model: nn.Module, task: Task) -> Supervised:
        """Return the same objective for `task`."""
        return Supervised(task)

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        task = bound(self.task, self)
        inputs, target = task.split(batch)
        return {"loss": supervised_loss(task, task.predict(call(model, inputs)), target)}


def supervised_loss(task: Task, predictions: Any, target: Any) -> Tensor:
    """Return the task's loss, a scalar.

    Args:
        task: has the loss.
        predictions: (N, C, ...) of the model; or what else `Task.predict` gives, which the loss gets as it is.
        target: what the loss takes, such as class indices (N, ...).

    Raises:
        DataError: the loss fails because labels lie outside the classes, returns no scalar tensor, compares each prediction with
            every target, or is cross-entropy of one channel, which is 0 whatever the model gives; the message says which.
    """
    if not isinstance(predictions, Tensor):
        return _scalar(task.loss(predictions, target))
    if (
        predictions.shape[1:2] == (1,)
        and _is_cross_entropy(task.loss)
        and isinstance(target, Tensor)
        and target.is_floating_point()
    ):
        raise DataError(
            f"the model gives one channel, {tuple(predictions.shape)}, of which cross-entropy is 0 whatever it holds; pass"
            " Task(loss=F.mse_loss) for numbers, or F.binary_cross_entropy_with_logits for yes or no"
        )
    try:
        with checked_shapes(predictions, target):
            loss = task.loss(predictions, target)
    except IndexError:
        if isinstance(target, Tensor) and predictions.ndim == target.ndim + 1 and not target.is_floating_point():
            check_labels(target, predictions.shape[1], "training data", task.ignore_index)
        raise
    return _scalar(loss)


def _scalar(loss: Any) -> Tensor:
    """A loss; DataError where it is no number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise DataError(
            f"Task(loss=...): wanted a scalar tensor, got {got}; let the loss return one number with a gradient, such as the mean"
            " over the batch"
        )
    return loss


def check_losses_are_fixed(
    objective: Objective | LossFunction | None, task: Task, *, reads_task_loss: bool, model: nn.Module | None = None
) -> None:
    """Raise SettingError where a loss is a module, or a method or a partial of one, with parameters that no training would move.

    Args:
        objective: is minimised; None for the task's loss.
        task: has the loss.
        reads_task_loss: whether it is minimised, or an `Objective` reads it.
        model: is trained; None where that is a copy.
    """
    own = objective is not None and not isinstance(objective, Objective)
    if not (own or reads_task_loss):
        return
    where, loss = "Train(objective=...)" if own else "Task(loss=...)", objective if own else task.loss
    inner: Any = loss.func if isinstance(loss, partial) else loss
    inner = inner.__self__ if isinstance(inner, MethodType) else inner
    if not isinstance(inner, nn.Module):
        return
    trained = set() if model is None else set(model.parameters())
    if free := [name for name, p in inner.named_parameters() if p.requires_grad and p not in trained]:
        raise SettingError(
            f"{where}: {type(inner).__name__} has parameters that require gradients ({free[0]}, {len(free)} in all), and a"
            " training moves those of the model alone; make them part of the model, in the bind of an Objective for the time of"
            " the training, or freeze them with requires_grad_(False)"
        )


def _is_cross_entropy(loss: Any) -> bool:
    return (loss.func if isinstance(loss, partial) else loss) is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)


def task_losses(model: nn.Module, task: Task) -> Callable[[Callable[..., Any], Any], Losses]:
    """Return `(model, batch) -> the task's loss`, for what reads it outside of a training.

    It raises DataError where the loss cannot be computed.
    """
    objective = bind_objective(None, model, task)

    def losses(model: Callable[..., Any], batch: Any) -> Losses:
        try:
            return objective(model, batch)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if isinstance(error, CompressError) or is_out_of_memory(error):
                raise
            raise DataError(
                f"Task(loss=...): the loss cannot be computed (tensors of shape {shapes_of(batch)}): {first_line(error)}"
            ) from error

    return losses


def bind_objective(objective: Objective | LossFunction | None, model: nn.Module, task: Task) -> Objective:
    """Return an objective that is ready for use on `model`; the task's loss where `objective` is None."""
    bound = (Supervised() if objective is None else as_objective(objective)).bind(model, task)
    reshard_(model)  # `bind` may have run the model
    return bound
