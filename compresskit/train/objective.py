"""The default objective, the task's own loss, and `bind_objective`, which prepares any objective for training.

Also what a loss of several processes weighs, and what is wrong with a loss that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from compresskit.base import distributed
from compresskit.base.errors import CompressError, DataError, SettingError, first_line, is_out_of_memory
from compresskit.base.objective import Losses, LossFunction, Objective, as_objective, bound
from compresskit.base.task import Task, call, check_labels, ignored_label, shapes_of
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


def weigh_as_whole(objective: Objective, batch: Any, rows: Any, weight: float) -> tuple[Any, float]:
    """Return the rows of this process, and the weight with which the mean of all processes is the loss of the whole batch.

    A mean over rows weighs by rows. Of a task's loss that is torch's own, cross-entropy and `nll_loss` of class indices weigh by
    the labels that are not ignored and the weights of their classes, and `reduction="sum"` by the number of processes. Where a
    process has no such label, its loss would be 0 / 0: it gets other labels, whose loss weighs nothing.

    Args:
        objective: is minimised; others than the task's loss keep `weight`.
        batch: all rows.
        rows: those of this process, of `distributed.shard_batch`.
        weight: by rows; 0 where the row is one of another process.
    """
    if not isinstance(objective, Supervised) or not weight or rows is batch:
        return rows, weight
    task = bound(objective.task, objective)
    count = distributed.world_size()
    settings = _settings_in_torch(task.loss)
    if settings.get("reduction") == "sum":
        return rows, float(count)
    own, target = (task.split_in_place(part)[1] for part in (rows, batch))
    indices = isinstance(target, Tensor) and not target.is_floating_point()
    if settings.get("reduction") != "mean" or not settings["divides"] or not indices:
        return rows, weight
    classes = settings["weight"]
    part, whole = (_mass(labels, ignored_label(task.loss), classes) for labels in (own, target))
    if not whole or part:
        return rows, part * count / whole if whole else weight
    label = 0 if classes is None else int(classes.argmax())
    return pytree.tree_map(lambda value: torch.full_like(own, label) if value is own else value, rows), 0.0


def _mass(labels: Tensor, ignored: int, classes: Tensor | None) -> float:
    """The sum of the weights of the labels that are not ignored; without weights of classes, their number."""
    kept = labels[labels != ignored]
    if classes is None:
        return float(len(kept))
    inside = kept[(kept >= 0) & (kept < len(classes))]  # the loss itself says of others
    return float(classes.detach().to(inside.device).double()[inside.long()].sum())


def _settings_in_torch(loss: Any) -> dict[str, Any]:
    """The reduction and the weights of classes of a loss of torch itself, and whether it divides by these; {} of any other.

    loss: a function of torch.nn.functional, a partial of one by keywords, or a module of torch.nn.
    """
    if isinstance(loss, nn.Module) and type(loss).__module__ == nn.modules.loss.__name__:
        weight = dict(loss.named_buffers()).get("weight")
        divides = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
        return {"reduction": vars(loss).get("reduction"), "weight": weight, "divides": divides}
    inner = loss.func if isinstance(loss, partial) and not loss.args else loss
    if not isinstance(inner, FunctionType) or inner.__module__ != F.__name__:
        return {}
    given = loss.keywords if isinstance(loss, partial) else {}
    divides = inner in (F.cross_entropy, F.nll_loss)
    return {"reduction": given.get("reduction", "mean"), "weight": given.get("weight"), "divides": divides}


def check_batch_has_rows(batch: Any, where: str) -> None:
    """Raise DataError for a batch without rows, whose mean loss is NaN, whatever the model is.

    Only where the loss is not finite: a sum over no rows is 0. What is no tensor, such as pictures in NumPy arrays, may be rows.
    """
    shapes = [shape for shape in shapes_of(batch) if shape]
    only_tensors = all(isinstance(v, Tensor) for v in torch.utils._pytree.tree_leaves(batch))
    if only_tensors and shapes and all(0 in shape for shape in shapes):
        raise DataError(f"{where}: wanted one row at least, got tensors of shape {shapes}; leave empty batches out")


def no_scalar(losses: Any) -> str:
    """What an objective returned that is no scalar tensor; empty where all is well."""
    if not isinstance(losses, Mapping) or not losses:
        return type(losses).__name__ if losses or not isinstance(losses, Mapping) else "no loss"
    for name, loss in losses.items():
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return f"{name} = {f'a tensor {tuple(loss.shape)}' if isinstance(loss, Tensor) else type(loss).__name__}"
    return ""


def which_is_not_finite(model: nn.Module) -> str:
    """Says which parameter is not finite, and what to do; "" where all are."""
    bad = next((name for name, p in model.named_parameters() if not torch.isfinite(p).all()), None)
    return (
        "" if bad is None else f"the first parameter that is not finite is {bad}; lower the learning rate or set Train(clip=1.0)"
    )


def why_not_finite(model: nn.Module, losses: Losses, batch: Any, where: str) -> str:
    """Says which losses are not finite, why, and what to do; begins with `where`."""
    named = ", ".join(f"{name} = {loss.item():g}" for name, loss in losses.items())
    tensors = [v for v in torch.utils._pytree.tree_leaves(batch) if isinstance(v, Tensor) and v.is_floating_point()]
    if any(not torch.isfinite(v).all() for v in tensors):
        cause = "the batch itself holds nan or inf; clean the data"
    else:
        cause = "all parameters are finite, so the forward pass overflowed; lower the learning rate, or look at the loss"
    return f"{where}: the loss is not finite ({named}); {which_is_not_finite(model) or cause}"
