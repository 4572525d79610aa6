"""Whether a file agrees with its model at sizes that the data at hand has not, where it names dimensions that vary.

An exporter may write a number that was computed of the example's sizes where its graph computes it anew. Data of one size does
not show that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError, ExportError, ModelError
from compresskit.base.inputs import call_checked
from compresskit.base.task import Inputs, call, copied_tensors, rows_that_run, shapes_of
from compresskit.export.check.agreement import fills_as_infinity
from compresskit.graph.differences import without_fills
from compresskit.graph.quantized import is_quantized, quantized_parts
from compresskit.measure import numpy_inputs, run_session
from compresskit.metrics import decibels

#: Distances are fractions of what the outputs vary by. Another size is judged by the data's own: so many times as far, plus that
#: of an exact file or of one that rounds, whose noise depends on the values. No more than so many roundings of outputs in their
#: own dtype are no distance: one value, or several that are nearly the same, vary by less.
FARTHER, EXACT, ROUNDED, ROUNDINGS = 4, 1e-3, 0.05, 8
ROWS = 2  # of the data, that other sizes are made of
#: Decibels that rounding leaves of an output at another size: fewer than these, so that it is poor, and so many fewer than at
#: the data's own. Some are lost of few samples in any case, since their values leave the ranges of others.
LEAST_AT_SIZE, MOST_FALL = 15.0, 10.0


def remark_on_other_sizes(
    path: str | Path, model: nn.Module, inputs: Inputs, sessions: Sequence[Any], dtype: torch.dtype | None
) -> str:
    """Say at which size the file gives something else than its model, or nothing; "" where none was found.

    Half the size, one more and twice the size are tried of all dimensions that vary together, where the model takes them.

    Args:
        path, model: the file and its model, in eval mode, whose state the caller keeps.
        inputs: a batch on which they agree.
        sessions: of the file.
        dtype: that rounds the outputs of the model; None where the file computes in integers.
    """
    leaves = [value for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor)]
    if any(value.is_cuda and not value.is_floating_point() for value in leaves):
        return ""  # an index outside of a table ends the process there
    names = {entry.name: entry.shape for entry in sessions[0].get_inputs()}
    held, batch = sizes_by_name(inputs, names)
    if not held or 0 in held.values():  # of nothing no other size can be made
        return ""
    few = resized_inputs(inputs, names, {batch: min(held.get(batch, ROWS), ROWS)})
    few = rows_that_run(partial(_arrays_given, model), few, inputs)
    eps = torch.finfo(dtype or torch.float32).eps
    try:
        usual = [_output_distances(path, run, few, _arrays_given(model, few), eps) for run in sessions]
    except ExportError as error:
        return _refused_by_file(few, error)
    own = rounding_decibels(model, few) if dtype is None else 0.0
    for sizes in _other_sizes(held, batch):
        resized = resized_inputs(few, names, sizes)
        try:
            wanted = _arrays_given(model, resized)
        except Exception:  # sizes that the model does not take
            continue
        try:
            found = [_output_distances(path, run, resized, wanted, eps, usual[i][1])[0] for i, run in enumerate(sessions)]
        except ExportError as error:
            return _refused_by_file(resized, error)
        if dtype is None and falls_short(left := rounding_decibels(model, resized), own):
            return (
                f"at inputs of shape {_shapes_in_words(resized)} rounding leaves {left:.1f} dB of the output, and {own:.1f} dB at"
                " the data's; calibrate with such sizes, too"
            )
        pairs = zip(itertools.chain(*found), itertools.chain(*(before for before, _ in usual)), strict=True)
        if any(distance > FARTHER * before + (EXACT if dtype else ROUNDED) for distance, before in pairs):
            return f"at inputs of shape {_shapes_in_words(resized)} the file gives something else than its model"
    return ""


def rounding_decibels(model: nn.Module, inputs: Inputs) -> float:
    """What the rounding of activations leaves of the poorest output, in dB; at most 120, as where nothing is rounded, and where
    nothing is finite without it.
    """

    def outputs() -> list[Tensor]:
        leaves = pytree.tree_leaves(call(model, copied_tensors(inputs)))
        return [value.detach().double() for value in leaves if isinstance(value, Tensor) and value.is_floating_point()]

    with ExitStack() as stack:
        for part in quantized_parts(model).values():
            stack.enter_context(part.float_activations())
        clean = outputs()
    pairs = [without_fills(*pair) for pair in zip(clean, outputs(), strict=True)]
    powers = [(float(a.square().sum()), float((a - b).square().sum())) for a, b in pairs if bool(a.isfinite().all())]
    return min((decibels(*each, most=120.0) for each in powers), default=120.0)


def falls_short(left: float, own: float) -> bool:
    """Whether much fewer decibels are left at another size than at the data's own, and few of them."""
    return left < min(LEAST_AT_SIZE, own - MOST_FALL)


def called_with_data(model: nn.Module, inputs: Inputs) -> Any:
    """Call a model on verification data.

    Raises DataError where it does not run on them; ModelError where it is a quantized model for several sizes: its graph may hold
    numbers that its float model computes of each.
    """
    try:
        return call_checked(model, inputs, "verification data")
    except DataError as error:
        if not is_quantized(model) or set(model.dynamic) <= {0}:
            raise
        raise ModelError(
            f"{error}; its graph is that of the first calibration batch, and may hold numbers of its sizes: where the float model"
            " runs on these inputs, quantize it with a first batch of larger ones"
        ) from error


def sizes_by_name(inputs: Inputs, names: Mapping[str, Sequence[Any]]) -> tuple[dict[str, int], str]:
    """The sizes of all dimensions that vary, by name, and which of them has the rows: the first dimension of the first input; ""
    where that is fixed.
    """
    held: dict[str, int] = {}
    for value, shape in zip(_tensors(inputs, names), names.values(), strict=True):
        held |= {name: size for name, size in zip(shape, value.shape, strict=False) if isinstance(name, str)}
    first = next((shape[0] for shape in names.values() if shape), "")
    return held, first if isinstance(first, str) else ""


def _other_sizes(held: Mapping[str, int], batch: str) -> Iterator[dict[str, int]]:
    """Half of the data's sizes, one more, and twice as many; rows stay few."""
    for times, plus, rows in ((0.5, 0, 1), (1, 1, 3), (2, 0, 2)):
        yield {name: rows if name == batch else int(times * size) + plus or 1 for name, size in held.items()}


def _tensors(inputs: Inputs, names: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a file takes, in its order; see `measure.numpy_inputs`."""
    if isinstance(inputs, Mapping) and set(names) <= set(inputs):
        return [inputs[name] for name in names]
    return [value for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor)]


def resized_inputs(inputs: Inputs, names: Mapping[str, Sequence[Any]], sizes: Mapping[str, int]) -> Inputs:
    """The inputs with other sizes: their values again, or fewer of them."""
    taken = {id(value): shape for value, shape in zip(_tensors(inputs, names), names.values(), strict=True)}

    def resized(value: Tensor) -> Tensor:
        for dim, name in enumerate(taken.get(id(value), ())):
            if name in sizes:
                value = value.index_select(dim, torch.arange(sizes[name], device=value.device) % value.shape[dim])
        return value

    return pytree.tree_map_only(Tensor, resized, inputs)  # type: ignore[no-any-return]


def _arrays_given(model: nn.Module, inputs: Inputs) -> list[np.ndarray]:
    found = pytree.tree_leaves(call(model, copied_tensors(inputs)))
    return [np.atleast_1d(value.detach().double().cpu().numpy()) for value in found if isinstance(value, Tensor)]


def _output_distances(
    path: str | Path, run: Any, inputs: Inputs, wanted: Sequence[np.ndarray], eps: float, scales: Sequence[float] = ()
) -> tuple[list[float], list[float]]:
    """How far each output of a file is from the model's, and what the latter varies by, both as root mean squares.

    scales: what outputs of other sizes vary by. A tenth of that counts at least: a map of one pixel does not vary.
    """
    distances, varied = [], []
    outputs = run_session(run, numpy_inputs(run, inputs, path), path, quiet=True)
    for i, (expected, got) in enumerate(zip(wanted, outputs, strict=False)):
        expected, got = fills_as_infinity(expected, np.atleast_1d(got).astype(np.float64))
        spread = _finite_rms(expected - expected[np.isfinite(expected)].mean() if np.isfinite(expected).any() else expected)
        varied.append(spread or _finite_rms(expected) or 1.0)
        scale = max(spread, scales[i] / 10) if scales else varied[-1]
        scale = max(scale, ROUNDINGS * eps * _finite_rms(expected) / EXACT)
        alike = got.shape == expected.shape and np.array_equal(np.isfinite(got), np.isfinite(expected))
        with np.errstate(invalid="ignore"):  # inf - inf
            distances.append(_finite_rms(got - expected) / scale if alike else np.inf)
    return distances, varied


def _finite_rms(values: np.ndarray) -> float:
    """Of the values that are finite; 0 where there are none."""
    finite = values[np.isfinite(values)]
    return float(np.sqrt(np.square(finite).mean())) if finite.size else 0.0


def _shapes_in_words(inputs: Inputs) -> str:
    return " and ".join(map(str, shapes_of(inputs)))


def _refused_by_file(inputs: Inputs, error: ExportError) -> str:
    reason = str(error).split("ONNX Runtime cannot run it: ")[-1]
    return f"at inputs of shape {_shapes_in_words(inputs)} the file does not run where its model does: {reason}"
