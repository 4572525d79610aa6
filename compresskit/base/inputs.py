"""Convert what callers pass as inputs of a model into the two forms that the library works with, a tuple or a dict; check it."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import CompressError, DataError, ModelError, SettingError, first_line
from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs, RowDims, Task, batch_size, call, shapes_of

log = logging.getLogger(__name__)

Values = TypeVar("Values")
#: Inputs of one batch, as a caller may pass them.
AnyInputs = Tensor | Sequence[Any] | Mapping[str, Any]
#: Batches of inputs, without labels: one batch as a tensor, a tuple or a mapping, or a list, loader or other iterable of batches.
Batches = Iterable[AnyInputs] | AnyInputs


def as_inputs(value: AnyInputs, where: str = "the example") -> Inputs:
    """Return the inputs of a model as a tuple or a dict.

    Args:
        value: a tensor (the only input), a tuple or list of positional inputs, or a mapping of keyword inputs.
        where: what the value is, for the message.

    Raises:
        DataError: `value` is anything else.
    """
    if isinstance(value, Tensor):
        return (outside_inference(value),)
    if isinstance(value, Mapping):
        return outside_inference(dict(value))
    if isinstance(value, tuple | list):
        return outside_inference(tuple(value))
    raise DataError(f"{where}: wanted inputs as a tensor, a tuple or a dict of them, got {type(value).__name__}")


def names_of_args(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a model that positional arguments reach, in order; none where one of them has no name."""
    kept = vars(model).get("names_of_args")  # a quantized model has those of the float one; its own forward takes anything
    if isinstance(kept, tuple):
        return kept
    parameters = _parameters_of(model.forward)
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        return ()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


def call_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Inputs:
    """Return the arguments of a call of a model as inputs: a tuple, or a dict where any of them is given by name.

    Raises ModelError, which begins with `where`, where a positional argument beside named ones has no name itself.
    """
    if not args or not kwargs:
        return kwargs or args
    names = names_of_args(model)
    if len(args) > len(names) or not kwargs.keys().isdisjoint(names[: len(args)]):
        raise ModelError(
            f"{where}: it is called with {len(args)} positional arguments beside {sorted(kwargs)} by name, wanted each argument"
            f" once and under a name, got a forward that names {list(names)}; write parameters in the place of *args and of what"
            " is positional only, or call it with positional arguments alone"
        )
    return dict(zip(names, args, strict=False)) | kwargs


def check_constants(inputs: Inputs, example: Inputs, names: Sequence[str], where: str) -> None:
    """Raise ModelError, which begins with `where`, for other flags and numbers than a graph was captured with.

    Of whole numbers, which may be counters that the model does not compute with (the index of a layer), it is a warning.

    names: of the parameters that positional arguments reach, in order.
    """
    given, captured = (x if isinstance(x, dict) else dict(zip(names, x, strict=False)) for x in (inputs, example))
    if isinstance(inputs, dict) and captured and given.keys() != captured.keys():
        raise ModelError(
            f"{where}: wanted the inputs {list(captured)} that it was captured with, got {list(given)}; give all of them,"
            " also those that have a default, and no others"
        )
    for name in captured.keys() & given.keys():
        for got, wanted in zip(pytree.tree_leaves(given[name]), pytree.tree_leaves(captured[name]), strict=False):
            if isinstance(got, Tensor) or not (wanted is None or isinstance(wanted, bool | int | float | str)):
                continue
            if got is wanted or got == wanted or (got != got and wanted != wanted):  # the last are both nan
                continue
            message = (
                f"{where}: wanted the input {name}={wanted!r} that it was captured with, got {got!r}; its graph has that value"
                " for good: quantize with the other one"
            )
            if not all(isinstance(value, Integral) and not isinstance(value, bool) for value in (got, wanted)):
                raise ModelError(message)
            _warn_of_number(f"{message}, if the model computes with it")


@functools.lru_cache(1024)
def _warn_of_number(message: str) -> None:
    log.warning(message)


def outside_inference(values: Values) -> Values:
    """Nested values with copies of tensors that were made in torch.inference_mode, which autograd refuses; in it, as they are."""
    if torch.is_inference_mode_enabled() or not any(map(_is_inference, pytree.tree_leaves(values))):
        return values
    copied: Values = pytree.tree_map(lambda v: v.clone() if _is_inference(v) else v, values)
    return copied


def _is_inference(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_inference()


def each_inputs(batches: Batches, where: str) -> Iterator[Inputs]:
    """Yield the inputs of every batch; a tensor, a tuple or a mapping in the place of the batches is one batch.

    Raises DataError, which begins with `where`, for anything that is neither a batch nor an iterable of batches.
    """
    if isinstance(batches, Tensor | tuple | Mapping):
        batches = [batches]
    if isinstance(batches, str) or not isinstance(batches, Iterable):
        raise DataError(f"{where}: wanted batches of inputs, such as [(x,), ...], or one batch, got {type(batches).__name__}")
    return (as_inputs(batch, where) for batch in batches)


def first_and_all(batches: Batches, where: str) -> tuple[Inputs, Iterator[Inputs]]:
    """The inputs of the first batch, and an iterator over all batches, the first included.

    Batches that are dicts have their inputs in the order of the first, however they were given. Later batches without rows, as a
    filter of samples leaves them at the end, say nothing and are left out.

    Raises DataError, which begins with `where`, where there is no batch, or no row in the first.
    """
    stream = each_inputs(batches, where)
    for first in stream:
        check_has_rows(first, f"{where}: the first batch")
        return first, itertools.chain([first], (_in_order_of(first, batch) for batch in stream if _has_rows(batch)))
    raise DataError(f"{where}: no calibration batch was given; a few hundred samples will do")


def check_has_rows(inputs: Inputs, where: str) -> None:
    """Raise DataError, which begins with `where`, for inputs whose first tensor has no rows."""
    if not _has_rows(inputs):
        raise DataError(f"{where}: wanted one row at least, got inputs of shape {shapes_of(inputs)}; leave empty batches out")


def counted_rows(inputs: Inputs, dims: RowDims | None, where: str) -> int:
    """The rows of inputs, one at least; see `batch_size`.

    Raises SettingError, which begins with `where`, for dimensions that the inputs do not have, DataError where there is no row.
    """
    sizes = [value.ndim if isinstance(value, Tensor) else 0 for value in pytree.tree_leaves(inputs)]
    if dims is not None and not (
        isinstance(dims, Sequence)
        and len(dims) == len(sizes)
        and all(d is None or (isinstance(d, Integral) and -n <= d < n) for d, n in zip(dims, sizes, strict=True))
    ):
        raise SettingError(
            f"{where}(dims=...): wanted for each of {len(sizes)} inputs the dimension that its samples are in, or None, got"
            f" {dims!r} for inputs of shape {shapes_of(inputs)}"
        )
    if (rows := batch_size(inputs, dims)) < 1:
        raise DataError(f"{where}: wanted one row at least, got inputs of shape {shapes_of(inputs)}; leave empty batches out")
    return rows


def _has_rows(inputs: Inputs) -> bool:
    return next(iter(shapes_of(inputs)), ())[:1] != (0,)


def _in_order_of(first: Inputs, batch: Inputs) -> Inputs:
    if isinstance(first, dict) and isinstance(batch, dict) and first.keys() == batch.keys():
        return {name: batch[name] for name in first}
    return batch


def some_batches(task: Task, which: Literal["train", "val", "calibration"], samples: int, label: str) -> Iterator[Any]:
    """Yield batches of a loader of the task until `samples` samples were seen, with a progress bar; batches are not cut."""
    seen = 0
    with progress_bar(total=samples, desc=label, unit="sample") as bar:
        for batch in task.batches(which):
            yield batch
            rows = batch_size(task.inputs(batch))
            seen += rows
            bar.update(rows)
            if seen >= samples:
                return


def calibration_inputs(task: Task, samples: int, label: str = "calibrate") -> Iterator[Inputs]:
    """Yield the inputs of calibration batches, without targets, until `samples` samples were seen."""
    return (task.inputs(batch) for batch in some_batches(task, "calibration", samples, label))


def call_checked(model: Callable[..., Any], inputs: Inputs, where: str) -> Any:
    """Call a model; raise `DataError`, which begins with `where`, if it does not run on these inputs."""
    try:
        return call(model, inputs)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        if isinstance(error, CompressError):
            raise
        forward = model.forward if isinstance(model, nn.Module) else model
        first = misfit(forward, inputs) or first_line(error) + lacks_decoder_inputs(forward, inputs, error)
        raise DataError(f"{where}: the model does not run on inputs of shape {shapes_of(inputs)}: {first}") from error


def not_finite(values: Any) -> str:
    """`nan` or `infinite values`, where a tensor among nested values holds such; "" where all are finite."""
    found = [v for v in map(_checked_values, pytree.tree_leaves(values)) if v is not None and not bool(v.isfinite().all())]
    if not found:
        return ""
    return "nan" if any(bool(v.isnan().any()) for v in found) else "infinite values"


def _checked_values(value: Any) -> Tensor | None:
    """The tensor that `isfinite` can be asked of: of a sparse one, its values. None for others, and where none is."""
    if not isinstance(value, Tensor) or value.is_meta or value.is_quantized or value.is_nested:
        return None
    if value.layout is torch.sparse_coo:
        value = value.detach().coalesce().values()
    elif value.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        value = value.detach().values()
    narrow = value.is_floating_point() and value.element_size() == 1  # float8 has no such operator
    return None if narrow or value.layout is not torch.strided else value


def not_finite_error(where: str, what: str, batches: Iterable[Any], first: int = 1) -> DataError:
    """The error, which begins with `where`, for a result that is nan or infinite; it names the batch that holds such values.

    what: the result, such as `the input of conv1`. batches: what it was computed from. first: the number of the first of them.
    """
    number = first
    for number, batch in enumerate(batches, first):
        if held := not_finite(batch):
            return DataError(f"{where}: {what} is nan or infinite, since batch {number} holds {held}; clean the data")
    return DataError(
        f"{where}: {what} is nan or infinite (after batch {number}), though no value of the data is; look at that layer, or scale"
        " the data"
    )


def misfit(forward: Callable[..., Any], inputs: Inputs) -> str:
    """Say why inputs are not those that a function takes; "" where that is not seen.

    There are more, the labels of a loader most often, or they are inside of one another.
    """
    parameters = _parameters_of(forward)
    rest = inspect.Parameter.VAR_KEYWORD if isinstance(inputs, dict) else inspect.Parameter.VAR_POSITIONAL
    if (packed := packed_inputs(forward, inputs)) or not parameters:
        return packed
    taken = [p.name for p in _taken(parameters, by_name=isinstance(inputs, dict))]
    surplus = [name for name in inputs if name not in taken] if isinstance(inputs, dict) else list(inputs[len(taken) :])
    if not surplus or any(p.kind is rest for p in parameters):
        return ""
    wanted = f"wanted {len(taken)} input{'s' * (len(taken) != 1)} ({', '.join(taken)}), got {len(inputs)}"
    if isinstance(inputs, dict):
        names = ", ".join(map(repr, surplus))
        return f"{wanted} ({names} too many); batches must be inputs alone, beside the target of a Task: leave the others out"
    return f"{wanted}; batches must be inputs alone, without labels, such as [(x,) for x, y in loader]"


def lacks_decoder_inputs(forward: Callable[..., Any], inputs: Inputs, error: BaseException) -> str:
    """Say that a function makes the inputs of its decoder of labels, which it did not get; "" where that is not so.

    Encoder-decoders of Hugging Face do, and labels are what a `Task` takes out of a batch.
    """
    lacking = {p.name for p in _parameters_of(forward)} - set(inputs if isinstance(inputs, dict) else ())
    if not isinstance(inputs, dict) or not {"labels", "decoder_input_ids"} <= lacking:
        return ""
    if not any(word in str(error) for word in ("input_ids", "inputs_embeds", "NoneType")):
        return ""
    return (
        "; its forward makes decoder_input_ids of labels, which are the target of a batch and no input: put decoder_input_ids"
        " into the batches, too (model.prepare_decoder_input_ids_from_labels(labels=labels) of Hugging Face)"
    )


def packed_inputs(forward: Callable[..., Any], inputs: Inputs) -> str:
    """Say that a function takes several inputs, and got one tuple of them; "" where that is not so."""
    needed = [p.name for p in _taken(_parameters_of(forward), by_name=False) if p.default is p.empty]
    if isinstance(inputs, dict) or not len(inputs) == 1 < len(needed) or not isinstance(inputs[0], tuple | list):
        return ""
    return (
        f"wanted {len(needed)} inputs ({', '.join(needed)}), got one, a {type(inputs[0]).__name__} of {len(inputs[0])}; give"
        f" them side by side, in batches with a target ({', '.join(needed)}, target)"
    )


def _parameters_of(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function; none of a builtin, which has no signature."""
    try:
        return list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return []


def _taken(parameters: list[inspect.Parameter], *, by_name: bool) -> list[inspect.Parameter]:
    """Those that an input can be given to."""
    alone = inspect.Parameter.POSITIONAL_ONLY if by_name else inspect.Parameter.KEYWORD_ONLY
    return [p for p in parameters if p.kind not in (alone, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)]
