"""Whether a file agrees with its model at sizes that the data at hand has not, where it names dimensions that vary.

An exporter may write a number that was computed of the example's sizes where its graph computes it anew. Data of one size does
not show that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ExportError
from compresskit.base.task import Inputs, call, copied_tensors, rows_that_run, shapes_of
from compresskit.export.check.agreement import fills_as_infinity
from compresskit.measure import numpy_inputs, run_session

#: Distances are fractions of what the outputs vary by. Another size is judged by the data's own: so many times as far, plus that
#: of an exact file or of one that rounds, whose noise depends on the values. No more than so many roundings of outputs in their
#: own dtype are no distance: one value, or several that are nearly the same, vary by less.
FARTHER, EXACT, ROUNDED, ROUNDINGS = 4, 1e-3, 0.05, 8
ROWS = 2  # of the data, that other sizes are made of


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
    held, batch = _sizes_by_name(inputs, names)
    if not held:
        return ""
    few = _resized(inputs, names, {batch: min(held.get(batch, ROWS), ROWS)})
    few = rows_that_run(partial(_arrays_given, model), few, inputs)
    eps = torch.finfo(dtype or torch.float32).eps
    try:
        usual = [_output_distances(path, run, few, _arrays_given(model, few), eps) for run in sessions]
    except ExportError as error:
        return _refused_by_file(few, error)
    for sizes in _other_sizes(held, batch):
        resized = _resized(few, names, sizes)
        try:
            wanted = _arrays_given(model, resized)
        except Exception:  # sizes that the model does not take
            continue
        try:
            found = [_output_distances(path, run, resized, wanted, eps, usual[i][1])[0] for i, run in enumerate(sessions)]
        except ExportError as error:
            return _refused_by_file(resized, error)
        pairs = zip(itertools.chain(*found), itertools.chain(*(before for before, _ in usual)), strict=True)
        if any(distance > FARTHER * before + (EXACT if dtype else ROUNDED) for distance, before in pairs):
            return f"at inputs of shape {_shapes_in_words(resized)} the file gives something else than its model"
    return ""


def _sizes_by_name(inputs: Inputs, names: Mapping[str, Sequence[Any]]) -> tuple[dict[str, int], str]:
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


def _resized(inputs: Inputs, names: Mapping[str, Sequence[Any]], sizes: Mapping[str, int]) -> Inputs:
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
