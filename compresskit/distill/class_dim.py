"""Which dimension of a model's predictions holds the scores of classes, as far as its task says it.

These are asked in this order, until one says it:

the metric          `agreement("classes", dim=...)` names it
a loss of torch     cross-entropy takes (N, C, ...); labels that lack one dimension of the predictions count more
the labels          whole numbers of the shape of the predictions without one dimension, (N, T) beside (N, T, C), which are
                    indices along it. The shape alone says little: transcripts (N, S) and yes-or-no labels of a clip (N, K) may
                    have it by chance. A loss that can be computed has to agree: it is blind along that dimension alone, as a
                    softmax is, or else, where a class becomes another one, it pulls entries along it both up and down
the loss            the dimension along which all entries may grow by one number without a change of the loss
the values          labels or predictions that are probabilities, or logarithms of them: they sum to 1 along it

Predictions are numbers where the loss sees what all entries grow by, and the labels are values of their shape that are no shares
of classes, or values beside the rows; without labels, where the loss is 0 between equal predictions.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compresskit.base.errors import CompressError, ModelError, SettingError
from compresskit.base.fingerprint.data import undisturbed
from compresskit.base.randomness import generators_kept
from compresskit.base.settings import as_python
from compresskit.base.task import Inputs, Task, call
from compresskit.distill.losses import LOGIT_LOSSES, TARGET_LOSSES, match_predictions, soft_targets
from compresskit.graph.surgery import mode, state_kept
from compresskit.metrics import OutputAgreement

log = logging.getLogger(__name__)

#: Losses of predictions with the classes in their `dim`.
OF_CLASSES = (*LOGIT_LOSSES, *TARGET_LOSSES, match_predictions)
#: A loss whose gradient sums to less than this along a dimension, relative to its size, does not see what all entries share.
BLIND = 0.02
#: The same times the square root of the dimension's size: numbers of any sign sum to about 1 there, also in wide dimensions.
BLIND_OF_WIDE = 0.1
#: Where other labels change what a loss pulls at in both directions along a dimension, the lesser one is at least this part of
#: the other: one class more is another class less, also where classes have weights of 1 to 1000.
BOTH_WAYS = 1e-3
#: Values of predictions that are summed, at most.
SUMMED = 2**22


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
        # What does not run says it where it is used.
        with suppress(Exception), torch.no_grad(), mode(model, training=False), state_kept(model):
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
    """The first batch of a loader, None of an empty one; the loader, its random numbers and the global ones stay as they are."""
    loader = task.batches(which)
    with undisturbed(loader):
        return next(iter(loader), None)


def _said(task: Task, predictions: Any, target: Any, *, reads_loss: bool) -> ClassDim | None:
    """What metric, labels and loss say of the predictions for a batch; None for nothing. target: None where there is none."""
    metric = task.metric
    if isinstance(metric, OutputAgreement) and metric.outputs == "classes" and (metric.dim or predictions.ndim != 3):
        return ClassDim(metric.dim or 1)
    if _takes_classes(task.loss):
        named = _dims_of_labels(predictions, target)
        if len(named) == 1:
            return ClassDim(named[0])
        said = reads_loss or named or task.loss is not F.cross_entropy
        return ClassDim(1) if predictions.ndim != 3 or said else None
    return None if target is None else _by_loss(task.loss, predictions, target)


def _unlabelled(task: Task, predictions: Tensor) -> ClassDim | None:
    """What a loss says that takes two tensors of the predictions' shape; it compares numbers if it is 0 between equal ones."""
    if _takes_classes(task.loss):
        return None
    leaf = _without_pattern(predictions)
    found = _by_loss(task.loss, predictions, (leaf / 10).flip(-1))
    if found != ClassDim(None):
        return found
    with suppress(Exception), generators_kept(), _unmoved(task.loss), torch.no_grad():
        return found if abs(float(task.loss(leaf, leaf.clone()))) < 1e-3 else None
    return None


def _takes_classes(loss: Any) -> bool:
    """Whether a loss is one of PyTorch's that take predictions (N, C, ...)."""
    loss = loss.func if isinstance(loss, partial) else loss
    return loss is F.cross_entropy or loss is F.nll_loss or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


def _candidates(predictions: Tensor) -> tuple[int, ...]:
    return (1,) if predictions.ndim == 2 else (1, -1)


def _dims_of_labels(predictions: Tensor, target: Any) -> list[int]:
    """The dimensions without which predictions have the shape of whole numbers beside them; a yes or no is one of two classes."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        return []
    shape = list(predictions.shape)
    dims = [dim for dim in _candidates(predictions) if list(target.shape) == _without(shape, dim)]
    return [dim for dim in dims if target.dtype != torch.bool or shape[dim] <= 2]


def _without(shape: list[int], dim: int) -> list[int]:
    at = dim % len(shape)
    return [*shape[:at], *shape[at + 1 :]]


def _by_loss(loss: Any, predictions: Tensor, target: Any) -> ClassDim | None:
    """What labels, a loss and the values say: the dimension of classes, or numbers; None where neither is clear."""
    named = _dims_of_labels(predictions, target)
    few = _few_rows(predictions)
    blind = _blind_dims(loss, few, target[: len(few)]) if named and len(few) < len(predictions) else None
    if blind is None and (len(named) != 1 or predictions.numel() <= SUMMED):  # a loss may be of so many rows
        few, blind = predictions, _blind_dims(loss, predictions, target)
    if named and (dim := _dim_of_indices(loss, few, target, named, blind)) is not None:
        return ClassDim(dim)
    of_target = _dims_of_shares(target) if _is_like(target, predictions) else []
    logarithms = _dims_of_shares(_few_rows(predictions).detach().float().exp())
    for dims in (blind or [], of_target, logarithms, _dims_of_shares(predictions)):
        if len(dims) == 1:
            return ClassDim(dims[0])
    return ClassDim(None) if blind == [] and _are_values(target, predictions) else None


def _blind_dims(loss: Any, predictions: Tensor, target: Any) -> list[int] | None:
    """The dimensions along which all entries may grow by one number without a change of the loss.

    None where the loss does not say it: it cannot be computed here, or it is the same for all predictions.
    """
    gradients = _gradients(loss, predictions, target)
    return None if gradients is None else [dim for dim in _candidates(predictions) if _is_blind(gradients[0], dim)]


def _gradients(loss: Any, predictions: Tensor, *targets: Any) -> list[Tensor] | None:
    """What a loss pulls at, for each target, at the same predictions and random numbers; None where one cannot be computed."""
    for own in (False, True):  # a loss may refuse values that are not the model's
        leaf = (predictions.detach().float().clone() if own else _without_pattern(predictions)).requires_grad_()
        found: list[Tensor] = []
        with suppress(Exception):
            for target in targets:
                with generators_kept(), _unmoved(loss), torch.enable_grad():
                    found += torch.autograd.grad(loss(leaf, target), leaf)
            if all(0 < float(gradient.norm(1)) < math.inf for gradient in found):
                return found
    return None


def _is_blind(gradient: Tensor, dim: int) -> bool:
    return _one_sign(gradient, dim) < min(BLIND, BLIND_OF_WIDE / math.sqrt(gradient.shape[dim]))


def _one_sign(values: Tensor, dim: int) -> float:
    """How much of values is left where they are summed along a dimension: 1 of values of one sign, 0 of those that cancel."""
    return float(values.sum(dim).norm(1)) / float(values.norm(1))


def _pulls_both_ways(change: Tensor, dim: int) -> bool:
    """Whether most of what is changed has both signs along a dimension."""
    up, down = change.clamp(min=0).sum(dim), change.clamp(max=0).sum(dim).abs()
    both = torch.minimum(up, down) >= BOTH_WAYS * torch.maximum(up, down)
    return bool(both[(up + down) > 0].float().mean() > 0.5)


def _dim_of_indices(loss: Any, predictions: Tensor, labels: Tensor, named: list[int], blind: list[int] | None) -> int | None:
    """The dimension of classes that whole numbers beside predictions are indices along; None where they are none.

    Args:
        loss, predictions: the task's, and those of the first rows of a batch.
        labels: at least of these rows.
        named: the dimensions that their shape allows.
        blind: those that the loss does not see a constant along; None where it does not say it.
    """
    single = named[0] if len(named) == 1 else None
    if blind is None or predictions.shape[named[0]] == 1:
        return single
    if len(blind) == 1 and blind[0] in named:
        return blind[0]
    labels, size = labels[: len(predictions)], predictions.shape[named[0]]
    gradients = _gradients(loss, predictions, labels, labels, _relabelled(labels, size))
    if gradients is not None and not torch.allclose(gradients[0], gradients[1]):  # random numbers of its own
        return single
    change = torch.zeros(1) if gradients is None else gradients[2] - gradients[0]
    if not bool(change.any()):
        return single if len(blind) != 1 and _are_indices(labels, size) else None
    left = {dim: _one_sign(change, dim) for dim in _candidates(predictions)}
    least, *others = sorted(left, key=left.__getitem__)
    if any(_is_blind(change, dim) for dim in others):
        return single
    classes = least in named and _pulls_both_ways(change, least) and _are_indices(labels, size)
    return least if classes or _is_blind(change, least) else None


def _are_indices(labels: Tensor, size: int) -> bool:
    """Whether labels are classes of so many; one number that is none may be what a loss leaves out."""
    others = labels[~_inside(labels, size)]
    return bool((others == others[:1]).all())


def _inside(labels: Tensor, size: int) -> Tensor:
    return (labels >= 0) & (labels < size)


def _relabelled(labels: Tensor, size: int) -> Tensor:
    """Labels of which the largest of each row is less by one, and 1 in place of 0: no row has as many of each as before."""
    classes = labels.long().masked_fill(~_inside(labels, size), -1)
    largest = classes.flatten(1).amax(1).reshape(-1, *[1] * (labels.ndim - 1)) if labels.ndim > 1 else classes
    changed = torch.where(classes > 0, classes - 1, 1).to(labels.dtype)
    return torch.where((classes == largest) & (classes >= 0), changed, labels)


def _unmoved(loss: Any) -> AbstractContextManager[None]:
    """Put back what calls of a loss that is a module or an object, or a method of one, write to its buffers and attributes."""
    function, _ = _function_and_settings(loss)
    function = function.__self__ if inspect.ismethod(function) else function
    if isinstance(function, nn.Module):
        return state_kept(function)
    return nullcontext() if inspect.isroutine(function) else _attributes_kept(function)


@contextmanager
def _attributes_kept(loss: Any) -> Iterator[None]:
    """Put back the attributes of an object after the block, and the values of those that are tensors."""
    own: dict[str, Any] = {}
    with suppress(TypeError):  # an object with slots has none
        own = vars(loss)
    before = dict(own)
    values = {name: value.detach().clone() for name, value in own.items() if isinstance(value, Tensor)}
    try:
        yield
    finally:
        own.clear()
        own.update(before)
        with torch.no_grad():
            for name, value in values.items():
                before[name].copy_(value)


def _without_pattern(predictions: Tensor) -> Tensor:
    """Numbers in [0.1, 0.9], which any loss takes, of the predictions' shape, without a pattern; rows differ in their mean."""
    values = torch.zeros(predictions.shape, device=predictions.device)
    places = [torch.arange(size, dtype=torch.float64) for size in predictions.shape]
    for dim, place in enumerate(places):
        step = math.sqrt(3 * dim + 2)  # irrational
        values += (place * step % 1).float().reshape(-1, *[1] * (values.ndim - dim - 1)).to(values.device)
    rows = (places[0] * math.sqrt(3) % 1).float().reshape(-1, *[1] * (values.ndim - 1))
    return values.remainder_(1).mul_(0.3).add_((rows / 2 + 0.1).to(values.device))


def _is_like(target: Any, predictions: Tensor) -> bool:
    return isinstance(target, Tensor) and target.shape == predictions.shape


def _few_rows(values: Tensor) -> Tensor:
    return values[: max(1, SUMMED * len(values) // max(1, values.numel()))]


def _dims_of_shares(values: Tensor) -> list[int]:
    """The dimensions along which values are at least 0 and sum to 1, as one-hot labels and probabilities do."""
    rows = _few_rows(values).detach().float()
    if not bool((rows >= 0).all()):
        return []
    return [d for d in _candidates(rows) if rows.shape[d] > 1 and bool(((rows.sum(d) - 1).abs() < 1e-2).all())]


def _are_values(target: Any, predictions: Tensor) -> bool:
    """Whether labels can be nothing but numbers: one for each prediction or beside each row, and no class of one."""
    if _is_like(target, predictions):
        rows = _few_rows(target)
        whole = bool(((rows == 0) | (rows == 1)).all())
        return not (whole and any(rows.shape[d] > 1 and bool((rows.sum(d) <= 1).all()) for d in _candidates(rows)))
    if not isinstance(target, Tensor) or not target.is_floating_point() or bool((target == target.round()).all()):
        return False
    return any(list(target.shape) == _without(list(predictions.shape), dim) for dim in _candidates(predictions))


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
