"""What a model is to learn: the data, the loss and the metric of a `Task`; helpers to call models on batches.

A batch is `(x, y)`, `(x1, x2, ..., y)` or a dict. `Task.split` splits it into *inputs*, a tuple of positional arguments or a dict
of keyword arguments, and a *target*; `call(model, inputs)` calls a model with either.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from types import FunctionType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base import distributed
from compresskit.base.distributed import loader_length, why_no_length
from compresskit.base.errors import DataError, SettingError
from compresskit.base.progress import Progress
from compresskit.base.randomness import generators_kept
from compresskit.base.settings import check_device, check_flag, check_loader

Inputs = tuple[Any, ...] | dict[str, Any]
Metric = Callable[[Tensor, Any], Any]
RowDims = Sequence[int | None]  # of each leaf of inputs, the dimension that the rows of a batch are in

IGNORED = -100  # the label that PyTorch's losses leave out


@runtime_checkable
class DirectedMetric(Protocol):
    """A metric that says whether more of it is better, such as those of torchmetrics."""

    higher_is_better: bool | None


class MetricError(DataError):
    """The metric of a model is not finite; that of another may be."""


@runtime_checkable
class RunningMetric(Protocol):
    """A metric that is computed batch by batch, such as those of torchmetrics."""

    def update(self, predictions: Tensor, target: Any, /) -> Any:
        """Add one batch."""

    def compute(self) -> Any:
        """Return the metric of all batches since the last `reset`."""

    def reset(self) -> Any:
        """Forget all batches."""


def ignored_label(loss: Any) -> int:
    """Return the label that a loss leaves out: its attribute or its argument `ignore_index`, also in a partial; else -100."""
    label = vars(loss).get("ignore_index") if isinstance(loss, nn.Module) else None
    if label is None:
        with suppress(TypeError, ValueError):  # builtins without a signature
            parameter = inspect.signature(loss).parameters.get("ignore_index")
            label = None if parameter is None else parameter.default
    return label if isinstance(label, int) else IGNORED


def accuracy(predictions: Tensor, target: Tensor, *, ignore_index: int = IGNORED) -> float:
    """Return the fraction of predictions whose largest entry is the target, in [0, 1].

    Args:
        predictions: (N, C, ...), scores of C >= 2 classes. One with NaN among them is wrong, whatever its target is.
        target: (N, ...), class indices; those of -100 are not counted.
        ignore_index: another label that is not counted; a `Task` passes that of its loss.

    Raises:
        DataError: one is no tensor, the shapes do not match, a label is no whole number or lies outside the classes, or no label
            is counted.
    """
    if not (isinstance(predictions, Tensor) and isinstance(target, Tensor)):
        raise DataError(
            f"accuracy: wanted predictions and targets as tensors, got {type(predictions).__name__} and {type(target).__name__};"
            " torch.as_tensor makes one"
        )
    classes = predictions.shape[1] if predictions.ndim > 1 else 0
    if classes < 2 or target.shape != predictions.shape[:1] + predictions.shape[2:]:
        raise DataError(
            f"accuracy: wanted predictions (N, classes, ...) and integer targets (N, ...), got {tuple(predictions.shape)} and"
            f" {tuple(target.shape)}; pass another metric to Task(metric=...)"
        )
    if target.is_floating_point() and not bool((target == target.round()).all()):
        got = target[target != target.round()].flatten()[0]
        raise DataError(
            f"accuracy: wanted class indices as targets, whole numbers, got {got:g} ({target.dtype}); pass another metric to"
            " Task(metric=...), or make classes of the targets"
        )
    check_labels(target, classes, "validation data", ignore_index)
    counted = (target != IGNORED) & (target != ignore_index)
    if not bool(counted.any()):
        raise DataError(
            f"accuracy: all {target.numel()} labels are ignored ones, {ignore_index}, so that there is nothing to count; look at"
            " the labels of Task(val=...)"
        )
    return (predicted_classes(predictions) == target)[counted].double().mean().item()


def predicted_classes(predictions: Tensor) -> Tensor:
    """Return (N, ...) the class of the largest entry of predictions (N, C, ...); -1 where one is NaN, for argmax the largest."""
    return predictions.argmax(1).masked_fill(predictions.isnan().any(1), -1)


def check_labels(target: Tensor, classes: int, where: str, ignore_index: int = IGNORED) -> None:
    """Raise `DataError`, which begins with `where`, unless every label is a class in [0, classes), `ignore_index` or -100."""
    counted = target[(target != IGNORED) & (target != ignore_index)]
    if counted.numel() == 0:
        return
    low, high = int(counted.min()), int(counted.max())
    if low < 0 or high >= classes:
        bad = low if low < 0 else high
        raise DataError(
            f"{where}: the model has {classes} classes, so labels must be 0..{classes - 1}, got {bad};"
            " map the labels, or give the model as many outputs as there are classes; a label that does not count is named by the"
            f" loss, such as Task(loss=partial(F.cross_entropy, ignore_index={bad}))"
        )


def first_tensor(output: Any) -> Tensor:
    """Return the predictions in the output of a model.

    That is the tensor itself, the entry `logits` or `out` of a dict, or the first entry of a dict, tuple or list.

    Raises:
        DataError: there is no tensor in these places.
    """
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
    """Call a model with positional or keyword inputs."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def copied_tensors(value: Any) -> Any:
    """The same nested value with copies of its tensors, into which code may write."""
    return pytree.tree_map_only(Tensor, torch.clone, value)


def to_device(value: Any, device: torch.device | str) -> Any:
    """Move every tensor in nested tuples, lists and dicts to a device; other values are returned as they are."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(entry, device) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        moved = [to_device(entry, device) for entry in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value


def batch_size(inputs: Inputs, dims: RowDims | None = None) -> int:
    """Return the rows of the first tensor among the inputs, or the length of the first list of tensors, also inside dicts.

    dims: where the rows of each are, see `row_dims`; the first that has any counts.
    """
    given = zip(pytree.tree_leaves(inputs), dims or (), strict=dims is not None)
    if (rows := next((value.shape[dim] for value, dim in given if dim is not None), None)) is not None:
        return int(rows)
    pending = list(inputs.values() if isinstance(inputs, dict) else inputs)
    while pending:
        value = pending.pop(0)
        if isinstance(value, Tensor) and value.ndim:
            return value.shape[0]
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return len(value)
        if isinstance(value, Mapping):
            pending = [*value.values(), *pending]
    raise DataError(f"no tensor among the inputs of a batch, got {[type(v).__name__ for v in inputs]}")


def row_dims(names: Sequence[str], dynamic: Any) -> RowDims | None:
    """Where the rows of a batch are in each of several inputs, as the dimensions that may vary in a file say.

    They are in what is called by a name with "batch" in it, and else by the name of the first dimension of the first input.

    >>> row_dims(["x", "mask"], {"x": {0: "length", 1: "batch"}, "mask": {0: "length", 1: "length"}})
    (1, None)

    Args:
        names: of the inputs, in order.
        dynamic: dimensions that may vary, by number for all inputs or by name for each; see `graph.Dynamic`.

    Returns: a dimension for each input, None where it has no rows; None alone where nothing is said, see `first_rows`.
    """
    if not isinstance(dynamic, Mapping):
        return None if 0 in dynamic else (None,) * len(names)
    named = {name: dims for name, dims in dynamic.items() if isinstance(dims, Mapping)}
    called = {label for dims in named.values() for label in dims.values() if "batch" in str(label).lower()}
    if not called and names and 0 in named.get(names[0], {}):
        called = {named[names[0]][0]}
    return tuple(next((d for d, label in named.get(name, {}).items() if label in called), None) for name in names)


def first_rows(inputs: Inputs, count: int, dims: RowDims | None = None) -> Inputs:
    """Return the inputs with the first `count` rows of every tensor that has rows, also of those in lists, tuples and dicts.

    Tensors without as many rows as the first one, such as masks and tables, stay as they are. The rows of a state, (layers, rows,
    width), are in its second dimension: where that alone has as many as the first tensor.

    dims: where the rows of each are, where that is known; see `row_dims`.
    """
    leaves, structure = pytree.tree_flatten(inputs)
    if dims is None:
        rows = next((len(value) for value in leaves if isinstance(value, Tensor) and value.ndim), 0)
        dims = [_row_dim(value, rows) for value in leaves]
    cut = [v if d is None else v[(slice(None),) * d + (slice(count),)] for v, d in zip(leaves, dims, strict=True)]
    found: Inputs = pytree.tree_unflatten(cut, structure)
    return found


def repeated_rows(inputs: Inputs, count: int, dims: RowDims | None = None) -> Inputs:
    """Return inputs of exactly `count` rows: the first ones, repeated in their order where there are fewer.

    What has no rows stays as it is, as by `first_rows`.
    """
    held = batch_size(inputs, dims)
    leaves, structure = pytree.tree_flatten(inputs)
    dims = [_row_dim(value, held) for value in leaves] if dims is None else dims
    repeated = [
        value if dim is None else value.index_select(dim, torch.arange(count, device=value.device) % held)
        for value, dim in zip(leaves, dims, strict=True)
    ]
    found: Inputs = pytree.tree_unflatten(repeated, structure)
    return found


def _row_dim(value: Any, rows: int) -> int | None:
    """The dimension of an input that so many rows are in; None where they are in none."""
    if not isinstance(value, Tensor) or not value.ndim:
        return None
    if len(value) == rows:
        return 0
    return 1 if value.ndim == 3 and value.shape[1] == rows else None


def rows_that_run(run: Callable[[Inputs], object], rows: Inputs, inputs: Inputs) -> Inputs:
    """Return `rows` of inputs where a function runs on them, and the inputs as they are where it does not.

    The nodes of a graph go with its edges, and the frames of a video come in a fixed number: fewer of them are no inputs.
    """
    if shapes_of(rows) == shapes_of(inputs):
        return inputs
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):
        run(rows)
        return rows
    return inputs


def shapes_of(inputs: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors among nested inputs, for messages."""
    return [tuple(v.shape) for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor)]


@dataclass(frozen=True, kw_only=True, repr=False)
class Task:
    """Data, loss and metric of one problem; every stage of a recipe gets the same task.

    Args:
        val, train: loaders that can be iterated many times and have a fixed length: a DataLoader, or a list of batches. A
            training alone needs no `val`, a recipe does.
        loss: `(predictions, target) -> scalar`. The label that its `ignore_index` names is not counted by `accuracy` either.
        metric: `(predictions, targets) -> number` over the whole validation set;
            or a `RunningMetric`, for validation sets whose predictions are too large to keep.
        higher_is_better: whether a larger metric is a better one: False for an error such as RMSE. None where `accuracy` or the
            metric itself says it (torchmetrics do); what has to know asks for it where nothing says it.
        predict: returns the predictions in the output of the model, a tensor. In training it may keep what the loss reads
            besides, such as the results of auxiliary heads that the model gives only there.
        target: key of the target in batches that are dicts; the other entries are passed to the model by name.
        calibration: batches for quantization ranges, BatchNorm statistics and pruning scores; by default the training data.
        device: where models are trained and run.
        reference: the model to imitate where `imitate()` has no teacher. A Recipe sets it to its first trained float model.
        snapshots: for rewinding: fraction of the training -> an empty dict, which the next training fills with its weights at
            that point. A Recipe sets it where a later stage rewinds.
        progress: where trainings write checkpoints, from which they are resumed. A Recipe sets it.

    Raises:
        SettingError: data that are no loader, or one that can be read once; a setting of the wrong kind; a device that torch
            does not know.
    """

    val: Iterable[Any] | None = None
    train: Iterable[Any] | None = None
    loss: Callable[[Tensor, Any], Tensor] = F.cross_entropy
    metric: Metric | RunningMetric = accuracy
    higher_is_better: bool | None = None
    predict: Callable[[Any], Tensor] = first_tensor
    target: str = "labels"
    calibration: Iterable[Any] | None = None
    device: torch.device | str = "cpu"
    reference: nn.Module | None = None
    snapshots: dict[float, dict[str, Tensor]] | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        for name in ("train", "val", "calibration"):
            check_loader(getattr(self, name), f"Task({name}=...)")
        for name in ("loss", "metric"):
            given = getattr(self, name)
            if isinstance(given, type) and not (name == "metric" and isinstance(given, RunningMetric)):
                raise SettingError(f"Task({name}=...): wanted a function or an object, got a class; write {given.__name__}()")
        if not callable(self.metric) and not isinstance(self.metric, RunningMetric):
            raise SettingError(
                "Task(metric=...): wanted a function (predictions, targets) -> number, or an object with update, compute and"
                f" reset, got {type(self.metric).__name__}"
            )
        if self.loss is not None and not callable(self.loss):  # None where nothing reads it
            raise SettingError(
                "Task(loss=...): wanted a function (predictions, target) -> scalar, such as F.cross_entropy, got"
                f" {self.loss!r:.60}"
            )
        if not callable(self.predict):
            raise SettingError(
                f"Task(predict=...): wanted a function of the model's output, got {self.predict!r:.60}; write"
                " predict=lambda output: ..., or leave it out"
            )
        if self.higher_is_better is not None:
            check_flag(self.higher_is_better, "Task(higher_is_better=...)")
        if self.target is not None and not isinstance(self.target, str):
            raise SettingError(
                f"Task(target=...): wanted the key of the target in batches that are dicts, a text, got {self.target!r:.60};"
                " the target of other batches is their last entry"
            )
        check_device(self.device, "Task(device=...)")

    def __repr__(self) -> str:
        """The settings that were given, without the numbers of data and models."""
        given = [(f.name, vars(self)[f.name]) for f in fields(self) if vars(self)[f.name] is not f.default]
        return f"Task({', '.join(f'{name}={_in_a_word(value)}' for name, value in given)})"

    @property
    def prefers_higher(self) -> bool | None:
        """Whether a larger metric is a better one; None where neither the task nor the metric says so."""
        metric = self.metric.func if isinstance(self.metric, partial) else self.metric
        if self.higher_is_better is None and isinstance(metric, DirectedMetric):
            return metric.higher_is_better
        return True if self.higher_is_better is None and metric is accuracy else self.higher_is_better

    @property
    def metric_name(self) -> str:
        """The name of the metric, for people; "metric" where it has none."""
        metric = self.metric.func if isinstance(self.metric, partial) else self.metric
        name = metric.__name__ if isinstance(metric, FunctionType | type) else type(metric).__name__
        return "metric" if name == "<lambda>" else name

    def predicted(self, output: Any) -> Tensor:
        """Return the predictions in an output in eval mode. Raises DataError where `predict` gives no tensor."""
        predictions = self.predict(output)
        if not isinstance(predictions, Tensor):
            raise DataError(
                f"Task(predict=...): wanted a tensor of predictions in eval mode, got {type(predictions).__name__}; return the"
                " one that the metric reads, or join several, such as torch.cat(output, 1)"
            )
        return predictions

    @property
    def ignore_index(self) -> int:
        """The label that the loss leaves out, -100 by default; the default metric does not count it either."""
        return ignored_label(self.loss)

    def score(self, predictions: Tensor, target: Any) -> Any:
        """Return what the metric, a function, gives; `accuracy` leaves out the labels that the loss leaves out."""
        assert not isinstance(self.metric, RunningMetric)
        if self.metric is accuracy:
            return accuracy(predictions, target, ignore_index=self.ignore_index)
        return self.metric(predictions, target)

    def with_standard_ignored(self, target: Any) -> Any:
        """Return class indices with -100, which all losses of the library leave out, for the label that the task's loss does."""
        label = self.ignore_index
        if label == IGNORED or not isinstance(target, Tensor) or target.is_floating_point():
            return target
        return target.masked_fill(target == label, IGNORED)

    def split(self, batch: Any) -> tuple[Inputs, Any]:
        """Split a batch into inputs and target, and move both to `device`; see `split_in_place`."""
        return to_device(self.split_in_place(batch), self.device)  # type: ignore[no-any-return]

    def split_in_place(self, batch: Any) -> tuple[Inputs, Any]:
        """Split a batch into inputs and target, which stay where they are.

        Args:
            batch: `(x, y)`, `(x1, ..., y)` or `{"x": ..., target: ...}`.

        Raises:
            DataError: the batch has none of these forms, or no target.
        """
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
        return inputs, target

    def inputs(self, batch: Any) -> Inputs:
        """Return the inputs of a batch, on `device`; it needs no target: `{"x": ...}`, `(x,)` and a tensor will do."""
        if isinstance(batch, Mapping):
            return to_device({key: value for key, value in batch.items() if key != self.target}, self.device)  # type: ignore[no-any-return]
        if isinstance(batch, Tensor):
            return (to_device(batch, self.device),)
        if isinstance(batch, tuple | list) and len(batch) == 1:
            return tuple(to_device(list(batch), self.device))
        return self.split(batch)[0]

    def batches(self, which: str) -> Iterable[Any]:
        """Return the loader `train`, `val` or `calibration`.

        With several processes, those for validation and calibration hold all samples, also where the loader shards them.

        Raises:
            SettingError: the task has no such loader.
        """
        loader = self.train if which == "calibration" and self.calibration is None else getattr(self, which)
        if loader is None:
            more = "; only training alone (fit_) does without" if which == "val" else ""
            raise SettingError(f"this stage needs Task({which}=...), which was not given{more}")
        return loader if which == "train" else distributed.unsharded_loader(loader)  # type: ignore[no-any-return]

    def known_length(self, which: str, *, about: bool = False) -> int | None:
        """Return the number of batches of a loader, at least 1; None where it is not known beforehand.

        about: whether a guess will do, as that of a DataLoader whose workers share an IterableDataset.

        Raises:
            DataError: the loader is empty.
        """
        count = loader_length(self.batches(which), about=about)
        if count == 0:
            raise DataError(f"Task({which}=...): the loader is empty; is batch_size larger than the data with drop_last=True?")
        return count

    def length(self, which: str) -> int:
        """Return the number of batches of a loader, at least 1; of validation data, on which no step depends, about so many.

        Raises DataError where it is zero or not known beforehand.
        """
        if (count := self.known_length(which, about=which == "val")) is None:
            steps = "count the training in optimizer steps, Train(steps=...), or " if which == "train" else ""
            raise DataError(
                f"Task({which}=...): its number of batches is not known beforehand ({why_no_length(self.batches(which))});"
                f" {steps}use a map-style dataset or a list of batches, or read an IterableDataset that has a __len__, its number"
                " of samples, with num_workers=1 at most"
            )
        return count

    def example(self) -> Inputs:
        """Return the inputs of the first validation batch (without validation data, training batch), on `device`."""
        which = "train" if self.val is None and self.train is not None else "val"
        with generators_kept():  # of which a loader draws where it begins
            for batch in self.batches(which):
                return self.inputs(batch)
        raise DataError(f"Task({which}=...): the loader is empty")


def _in_a_word(value: Any) -> str:
    """A setting in a line: functions by name, loaders and models by their type."""
    if isinstance(value, FunctionType | type):
        return value.__name__
    if isinstance(value, bool | str | torch.device):
        return repr(value)
    length = loader_length(value, about=True)
    return type(value).__name__ if length is None else f"{type(value).__name__} of {length}"


def check_is_task(task: Any, where: str) -> None:
    """Raise SettingError, which begins with `where`, for a loader or a model in the place of a task."""
    if not isinstance(task, Task):
        raise SettingError(f"{where}: wanted a Task, got {type(task).__name__}; loaders go into Task(train=..., val=...)")
