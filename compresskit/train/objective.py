"""The default objective, the task's own loss, and `bind_objective`, which prepares any objective for training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compresskit.base.errors import CompressError, DataError, first_line, is_out_of_memory
from compresskit.base.objective import Losses, LossFunction, Objective, as_objective, bound
from compresskit.base.task import Task, call, check_labels, shapes_of
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
        with _checked_shapes(predictions, target):
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


def _checked_shapes(predictions: Tensor, target: Any) -> AbstractContextManager[Any]:
    """Inside the block, watch predictions (N, 1) beside targets (N,), which most losses would broadcast to (N, N)."""
    columns = isinstance(target, Tensor) and target.shape[:1] > (1,) and predictions.shape == (*target.shape, 1)
    return BroadcastCheck(predictions.shape, target.shape) if columns else nullcontext()


class BroadcastCheck(TorchDispatchMode):
    """Raise `DataError` where predictions (N, 1) and targets (N,) are broadcast to (N, N)."""

    def __init__(self, predictions: torch.Size, target: torch.Size) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.predictions, self.target = predictions, target

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shapes = {leaf.shape for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)}
        column = func is torch.ops.aten.expand.default and shapes == {self.predictions}
        square = torch.broadcast_shapes(self.predictions, self.target)
        if (column or shapes == {self.predictions, self.target}) and isinstance(result, Tensor) and result.shape == square:
            raise DataError(
                f"predictions {tuple(self.predictions)} and targets {tuple(self.target)} are broadcast to {tuple(square)}, each"
                f" prediction beside every target; let the loader give targets {tuple(self.predictions)}, or pass a predict="
                " that squeezes the last dimension"
            )
        return result


def bind_objective(objective: Objective | LossFunction | None, model: nn.Module, task: Task) -> Objective:
    """Return an objective that is ready for use on `model`; the task's loss where `objective` is None."""
    bound = (Supervised() if objective is None else as_objective(objective)).bind(model, task)
    reshard_(model)  # `bind` may have run the model
    return bound
