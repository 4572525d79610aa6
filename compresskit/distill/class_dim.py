"""Which dimension of a model's predictions holds the scores of classes, as far as its task says it.

the metric          `agreement("classes", dim=...)` names it
the labels          whole numbers of the shape of the predictions without one dimension, (N, T) beside (N, T, C)
the loss            cross-entropy takes (N, C, ...); of any other it is the dimension along which all entries may grow by one
                    number without a change of the loss, as under a softmax; a loss that sees this compares numbers
the predictions     log-probabilities, which sum to 1 along it
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compresskit.base.errors import CompressError, ModelError, SettingError
from compresskit.base.randomness import generator_state, generators_in, generators_kept, set_generator_state_
from compresskit.base.settings import as_python
from compresskit.base.task import Inputs, Task, call
from compresskit.distill.losses import LOGIT_LOSSES, TARGET_LOSSES, match_predictions, soft_targets
from compresskit.graph.surgery import mode
from compresskit.metrics import OutputAgreement

log = logging.getLogger(__name__)

#: Losses of predictions with the classes in their `dim`.
OF_CLASSES = (*LOGIT_LOSSES, *TARGET_LOSSES, match_predictions)
#: A loss whose gradient sums to less than this along a dimension, relative to its size, does not see what all entries share.
BLIND = 0.02


@dataclass(frozen=True)
class ClassDim:
    """The dimension of predictions that holds classes; None of numbers, such as those of a regression.

    known: whether the task says so. Where it does not, predictions (N, C) and (N, C, H, W) are taken for classes, as PyTorch's
    losses take them, and of three dimensions, which may be (N, C, T) or (N, T, C), nothing is known.
    """

    dim: int | None
    known: bool = True


def check_dim(dim: Any, where: str) -> None:
    """Raise `SettingError`, which begins with `where`, unless it is None or a whole number that is not 0, the batch's."""
    number = as_python(dim)
    if dim is not None and (not isinstance(number, int) or isinstance(number, bool) or number == 0):
        raise SettingError(
            f"{where}(dim=...): wanted the dimension of the classes, 1 for (N, C, ...) or -1 for (N, T, C), got {dim!r}"
        )


def class_dim(
    task: Task, model: nn.Module, predictions: Any, *, reads_loss: bool = True, given: int | None = None, where: str = ""
) -> ClassDim:
    """Return the dimension of the classes in the predictions of a model.

    Args:
        task: has the loss, the metric and the data.
        model: runs, in eval mode, where labelled data have to be looked at.
        predictions: of the model for an example, what `Task.predict` gives.
        reads_loss: whether the training reads the task's loss; the default loss of a task that is not read says nothing.
        given: what the user says, which counts.
        where: begins the message about it.

    Raises: ModelError where the predictions do not have the dimension that is given.
    """
    is_tensor = isinstance(predictions, Tensor)
    if given is not None:
        if not is_tensor or not -predictions.ndim < given < predictions.ndim:
            got = tuple(predictions.shape) if is_tensor else type(predictions).__name__
            raise ModelError(f"{where}(dim={given}): the model gives predictions {got}, which have no such dimension of classes")
        return ClassDim(given)
    if not is_tensor or predictions.ndim < 2:
        return ClassDim(None)
    found = _said(task, predictions, None, reads_loss=reads_loss)
    for inputs, target in () if found is not None else _labelled(task):
        with suppress(Exception), torch.no_grad(), mode(model, training=False):  # what does not run says it where it is used
            found = _said(task, task.predict(call(model, inputs)), target, reads_loss=reads_loss)
        if found is not None:
            break
    return found or _unlabelled(task, predictions) or ClassDim(None if predictions.ndim == 3 else 1, known=False)


def _labelled(task: Task) -> Iterator[tuple[Inputs, Any]]:
    """Inputs and target of the first batches that have one."""
    for which in ("train", "val"):
        if (task.train if which == "train" else task.val) is not None:
            with suppress(CompressError):
                yield task.split(first_batch(task, which))


def first_batch(task: Task, which: str) -> Any:
    """The first batch of a loader, None of an empty one; its random numbers and the global ones stay as they are."""
    loader = task.batches(which)
    own = [(generator, generator_state(generator)) for generator in generators_in(loader)]
    with generators_kept():
        batch = next(iter(loader), None)
    for generator, state in own:
        set_generator_state_(generator, state)
    return batch


def _said(task: Task, predictions: Any, target: Any, *, reads_loss: bool) -> ClassDim | None:
    """What metric, labels and loss say of the predictions for a batch; None for nothing. target: None where there is none."""
    metric = task.metric
    if isinstance(metric, OutputAgreement) and metric.outputs == "classes" and (metric.dim or predictions.ndim != 3):
        return ClassDim(metric.dim or 1)
    named = _dims_of_labels(predictions, target)
    if len(named) == 1:
        return ClassDim(named[0])
    if _takes_classes(task.loss):
        return ClassDim(1) if predictions.ndim != 3 or reads_loss or named else None
    return None if target is None else _by_loss(task.loss, predictions, target)


def _unlabelled(task: Task, predictions: Tensor) -> ClassDim | None:
    """What a loss says that takes two tensors of the predictions' shape, as those of numbers do."""
    return None if _takes_classes(task.loss) else _by_loss(task.loss, predictions, _without_pattern(predictions, 0.3**0.5))


def _takes_classes(loss: Any) -> bool:
    """Whether a loss is one of PyTorch's that take predictions (N, C, ...)."""
    loss = loss.func if isinstance(loss, partial) else loss
    return loss is F.cross_entropy or loss is F.nll_loss or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


def _candidates(predictions: Tensor) -> tuple[int, ...]:
    return (1,) if predictions.ndim == 2 else (1, -1)


def _dims_of_labels(predictions: Tensor, target: Any) -> list[int]:
    """The dimensions without which predictions have the shape of whole numbers beside them."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        return []
    shape = list(predictions.shape)
    return [dim for dim in _candidates(predictions) if list(target.shape) == _without(shape, dim)]


def _without(shape: list[int], dim: int) -> list[int]:
    at = dim % len(shape)
    return [*shape[:at], *shape[at + 1 :]]


def _by_loss(loss: Any, predictions: Tensor, target: Any) -> ClassDim | None:
    """What a loss and the predictions say: the dimension that it is a softmax of, or numbers where it is one of none."""
    blind = _blind_dims(loss, predictions, target)
    for dims in (blind or [], _normalized_dims(predictions)):
        if len(dims) == 1:
            return ClassDim(dims[0])
    return ClassDim(None) if blind == [] else None


def _blind_dims(loss: Any, predictions: Tensor, target: Any) -> list[int] | None:
    """The dimensions along which all entries may grow by one number without a change of the loss.

    None where the loss does not say it: it cannot be computed here, or it is the same for all predictions.
    """
    leaf = _without_pattern(predictions, 0.5**0.5).requires_grad_()
    with suppress(Exception), generators_kept(), torch.enable_grad():
        own = copy.deepcopy(loss)  # of a module, whose buffers it may change
        (gradient,) = torch.autograd.grad(own(leaf, target), leaf)
        size = float(gradient.abs().sum())
        if 0 < size < float("inf"):
            return [dim for dim in _candidates(leaf) if float(gradient.sum(dim).abs().sum()) < BLIND * size]
    return None


def _without_pattern(predictions: Tensor, step: float) -> Tensor:
    """Numbers in [0.1, 0.6], which any loss takes, of the predictions' shape and without a pattern. step: an irrational one."""
    places = torch.arange(predictions.numel(), dtype=torch.float64).reshape(predictions.shape)
    return ((places * step) % 1 / 2 + 0.1).float().to(predictions.device)


def _normalized_dims(predictions: Tensor) -> list[int]:
    """The dimensions along which predictions are logarithms of probabilities that sum to 1."""
    sums = {dim: predictions.detach().float().exp().sum(dim) for dim in _candidates(predictions)}
    return [dim for dim, value in sums.items() if predictions.shape[dim] > 1 and bool(((value - 1).abs() < 1e-2).all())]


def _function_and_settings(loss: Any) -> tuple[Any, dict[str, Any]]:
    """The function and the settings of a loss."""
    return (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})


def told_dim(loss: Any) -> int | None:
    """The dimension of the classes that a loss of the library was given by `partial`; None for others."""
    function, settings = _function_and_settings(loss)
    return settings.get("dim") if any(function is each for each in OF_CLASSES) else None


def reads_class_dim(loss: Any) -> bool:
    """Whether a loss is one of the library that was not told in which dimension the classes are."""
    function, settings = _function_and_settings(loss)
    return any(function is each for each in OF_CLASSES) and "dim" not in settings


def check_soft_targets(where: str, loss: Any, model: nn.Module, predictions: Any) -> None:
    """Raise `ModelError`, which begins with `where`, for soft targets of a model whose predictions have one channel."""
    function, settings = _function_and_settings(loss)
    dim = settings.get("dim", 1)
    if function is soft_targets and -predictions.ndim <= dim < predictions.ndim and predictions.shape[dim] == 1:
        raise ModelError(
            f"{where}(): {type(model).__name__} gives one channel, of which a softmax says nothing; pass"
            f" {where}(loss=compresskit.distill.losses.match_predictions)"
        )


def with_class_dim(where: str, loss: Any, found: ClassDim, model: nn.Module, predictions: Any) -> Any:
    """Return a loss of the library that compares the classes of predictions, or numbers; any other loss as it is.

    Args:
        where: the function of the user, which begins messages.
        loss: `(student, teacher) -> scalar`.
        found: what `class_dim` says of the predictions.
        model, predictions: for messages.

    Raises: ModelError where a softmax is of numbers or of one channel, or nothing says in which dimension the classes are.
    """
    matched = _function_and_settings(loss)[0] is match_predictions
    if reads_class_dim(loss):
        if found.dim is None and not matched:
            check_soft_targets(where, loss, model, predictions)
            raise _no_classes(where, found, model, predictions)
        if not found.known:
            taken = "numbers" if found.dim is None else "scores of classes in dimension 1"
            log.warning(
                "%s: %s gives predictions %s; neither the task's loss nor its labels say of what, and they are taken for %s",
                where,
                type(model).__name__,
                tuple(predictions.shape),
                taken,
            )
        loss = partial(loss, dim=found.dim) if matched or found.dim != 1 else loss
    check_soft_targets(where, loss, model, predictions)
    return loss


def told_class_dim(
    where: str, loss: Any, task: Task, model: nn.Module, predictions: Any, *, reads_loss: bool, given: int | None
) -> Any:
    """Return the loss that `with_class_dim` gives for what `class_dim` says; it is not asked where the loss does not read it."""
    found = ClassDim(1)
    if reads_class_dim(loss):
        found = class_dim(task, model, predictions, reads_loss=reads_loss, given=given, where=where)
    return with_class_dim(where, loss, found, model, predictions)


def _no_classes(where: str, found: ClassDim, model: nn.Module, predictions: Any) -> ModelError:
    what = f"{type(model).__name__} gives predictions {tuple(predictions.shape)}"
    numbers = f"{where}(loss=compresskit.distill.losses.match_predictions)"
    if found.known:
        return ModelError(
            f"{where}(): {what}, which the task's loss compares as numbers, and a softmax does not see what all of them have in"
            f" common; pass {numbers}, or, of scores of classes, {where}(dim=1)"
        )
    return ModelError(
        f"{where}(): {what}, and neither the task's loss nor its labels say which dimension holds the classes; pass"
        f" {where}(dim=-1) for (N, T, C), {where}(dim=1) for (N, C, T), or, of numbers, {numbers}"
    )
