"""What is to be learned: data, loss and metric (`Task`).

A batch may be `(x, y)`, `(x1, x2, ..., y)` or a dict. `Task.split` turns each into *inputs* (a tuple of
positional arguments, or a dict of keyword arguments) and a *target*; `call(model, inputs)` feeds either to a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base import distributed
from compresskit.base.errors import CompressError, DataError, SettingError

Inputs = tuple[Any, ...] | dict[str, Any]
Metric = Callable[[Tensor, Any], Any]


def accuracy(predictions: Tensor, target: Tensor) -> float:
    """Share whose largest entry along dim 1 is the target: (N, C, ...) and (N, ...) -> [0, 1]; labels of -100 do not count."""
    classes = predictions.shape[1] if predictions.ndim > 1 else 0
    if classes < 2 or target.shape != predictions.shape[:1] + predictions.shape[2:]:
        raise DataError(
            f"accuracy: wanted predictions (N, classes, ...) and integer targets (N, ...), got {tuple(predictions.shape)} and"
            f" {tuple(target.shape)}; pass another metric to Task(metric=...)"
        )
    check_labels(target, classes, "validation data")
    counted = target != IGNORED
    return (predictions.argmax(1) == target)[counted].double().mean().item()


IGNORED = -100  # the label that PyTorch's losses leave out


def check_labels(target: Tensor, classes: int, where: str) -> None:
    """Raise `DataError` unless every class index lies in [0, classes); -100 is PyTorch's "ignore" and passes."""
    counted = target[target != IGNORED]
    if counted.numel() == 0:
        return
    low, high = int(counted.min()), int(counted.max())
    if low < 0 or high >= classes:
        bad = low if low < 0 else high
        raise DataError(
            f"{where}: the model has {classes} classes, so labels must be 0..{classes - 1}, got {bad};"
            " map the labels, or give the model as many outputs as there are classes"
        )


def first_tensor(output: Any) -> Tensor:
    """The predictions in what a model returned: the tensor itself, `logits` / `out` of a dict, or the first entry."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        for key in ("logits", "out"):
            if isinstance(output.get(key), Tensor):
                return output[key]  # type: ignore[no-any-return]
        output = tuple(output.values())
    if isinstance(output, Sequence) and output:
        return first_tensor(output[0])
    raise DataError(
        f"the model returned {type(output).__name__}, in which no tensor of predictions was found;"
        " pass Task(predict=lambda output: ...)"
    )


def call(model: Callable[..., Any], inputs: Inputs) -> Any:
    """Feed inputs, positional or by keyword, to a model."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def to_device(value: Any, device: torch.device | str) -> Any:
    """Move every tensor in nested tuples, lists and dicts; anything else is handed back as it is."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(entry, device) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        moved = [to_device(entry, device) for entry in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value


def batch_size(inputs: Inputs) -> int:
    """Rows of the first tensor among the inputs, or images in the first list of them."""
    for value in inputs.values() if isinstance(inputs, dict) else inputs:
        if isinstance(value, Tensor) and value.ndim:
            return value.shape[0]
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return len(value)
    raise DataError(f"no tensor among the inputs of a batch, got {[type(v).__name__ for v in inputs]}")


def first_rows(inputs: Inputs, count: int) -> Inputs:
    """The first `count` rows of every tensor."""

    def rows(value: Any) -> Any:
        return value[:count] if isinstance(value, Tensor) and value.ndim else value

    return {k: rows(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(rows(v) for v in inputs)


def shapes_of(inputs: Any) -> list[tuple[int, ...]]:
    """Shapes of the tensors among the inputs, for messages."""
    return [tuple(v.shape) for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor)]


def call_checked(model: Callable[..., Any], inputs: Inputs, where: str) -> Any:
    """`call`, with one clear `DataError` for inputs on which the model does not run."""
    try:
        return call(model, inputs)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        if isinstance(error, CompressError):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"{where}: the model does not run on inputs of shape {shapes_of(inputs)}: {first}") from error


@dataclass(frozen=True, kw_only=True)
class Task:
    """Data, loss and metric of one problem; every stage gets the same one.

    val, train: loaders that can be read again and again and whose length is fixed (a DataLoader, or a list of batches).
    loss: `(predictions, target) -> scalar`.
    metric: `(all predictions, all targets) -> number` over the whole validation set; or an object with
        `update(predictions, target)`, `compute()` and `reset()`, as torchmetrics has them, for sets too large to keep.
    predict: finds the predictions in what the model returns.
    target: the key of the target where a batch is a dict; the other entries are passed to the model by name.
    calibration: batches that show what inputs look like (quantization ranges, BatchNorm statistics, pruning scores);
        the training data where nothing is given.
    device: where models run and train.
    reference: the model whose behaviour is the goal. `imitate()` without a teacher imitates it; a Recipe sets it to
        the first trained float model of the chain.
    snapshots: weights to be kept on the way: share of the training -> an empty dict, which the next training fills with its
        state at that point, for rewinding. A Recipe sets it where a later stage rewinds.
    progress: where trainings are saved on the way, a `Progress`. A Recipe sets it.
    """

    val: Iterable[Any]
    train: Iterable[Any] | None = None
    loss: Callable[[Tensor, Any], Tensor] = F.cross_entropy
    metric: Any = accuracy
    predict: Callable[[Any], Tensor] = first_tensor
    target: str = "labels"
    calibration: Iterable[Any] | None = None
    device: torch.device | str = "cpu"
    reference: nn.Module | None = None
    snapshots: dict[float, dict[str, Tensor]] | None = None
    progress: Any = None  # Progress, which stands above this file

    def __post_init__(self) -> None:
        for name in ("train", "val", "calibration"):
            loader = getattr(self, name)
            if loader is None and name != "val":
                continue
            if not isinstance(loader, Iterable):
                raise SettingError(f"Task({name}=...): wanted a loader of batches, got {type(loader).__name__}")
            if isinstance(loader, Iterator):
                raise SettingError(
                    f"Task({name}=...): wanted a loader that can be read many times, got a one-pass"
                    f" {type(loader).__name__}; pass a DataLoader, or list(...) of it"
                )

    def split(self, batch: Any) -> tuple[Inputs, Any]:
        """`(x, y)`, `(x1, ..., y)` or `{"x": ..., target: ...}` to (inputs, target); both on `device`."""
        if isinstance(batch, Mapping):
            if self.target not in batch:
                raise DataError(
                    f"batch: no entry {self.target!r} for the target, got keys {sorted(map(str, batch))}; set Task(target=...)"
                )
            inputs: Inputs = {key: value for key, value in batch.items() if key != self.target}
            target = batch[self.target]
        elif isinstance(batch, tuple | list) and len(batch) >= 2:
            *first, target = batch
            inputs = tuple(first)
        else:
            raise DataError(f"batch: wanted (inputs..., target) or a dict, got {type(batch).__name__}")
        return to_device(inputs, self.device), to_device(target, self.device)

    def batches(self, which: str) -> Iterable[Any]:
        """The loader called `train`, `val` or `calibration`, after a check that there is one; of all samples, but in training."""
        loader = self.train if which == "calibration" and self.calibration is None else getattr(self, which)
        if loader is None:
            raise SettingError(f"this stage needs Task({which}=...), which was not given")
        return loader if which == "train" else distributed.whole(loader)  # type: ignore[no-any-return]

    def length(self, which: str) -> int:
        """Number of batches, at least 1; `DataError` where it is zero or not known beforehand."""
        loader = self.batches(which)
        try:
            count = len(loader) if isinstance(loader, Sized) else None
        except TypeError:
            count = None
        if count is None:
            raise DataError(
                f"Task({which}=...): its number of batches is not known beforehand ({type(loader).__name__}"
                " has no length); schedules and resuming need it: use a map-style dataset, or a list of batches"
            )
        if count == 0:
            raise DataError(f"Task({which}=...): the loader is empty; is batch_size larger than the data with drop_last=True?")
        return count

    def example(self) -> Inputs:
        """Inputs of the first validation batch, on `device`."""
        for batch in self.batches("val"):
            return self.split(batch)[0]
        raise DataError("Task(val=...): the loader is empty")
