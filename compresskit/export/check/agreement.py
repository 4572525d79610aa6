"""How far outputs agree with reference outputs, in steps of 1/255 of a range, and whether that is near enough.

Each output is judged alone, and so are its parts: all that has one index in dimension 1, as the channels of a map, or in the last
one, as the features of a sequence. The whole would hide the scores of a detector, between 0 and 1, behind its boxes of some
hundred pixels. Numbers that code fills in, such as -1e9 for classes that are masked, count as infinite: they would hide all else.

The *unrounded model* is a quantized one whose activations pass in float; its weights are rounded, as in every right execution.
Of a model in half precision it is the copy that computes in fp32. What rounding the activations changes is the *quantization
error*. Within it two right executions may differ, where a step that flips early moves all later values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from compresskit.base.errors import DataError, ExportError
from compresskit.graph.differences import filled_in

#: Limits for a file to pass. FLOAT_STEPS: largest error of a float file, in steps. QUANTIZED_AGREEMENT and QUANTIZED_WITHIN:
#: fraction of samples whose largest class agrees, and of values within two steps. Or QUANTIZED_NOISE: error as a fraction of the
#: quantization error. Or QUANTIZED_EXCESS: distance from the unrounded model as a fraction of the simulation's distance.
FLOAT_STEPS, QUANTIZED_AGREEMENT, QUANTIZED_WITHIN, QUANTIZED_NOISE, QUANTIZED_EXCESS = 0.1, 0.98, 0.97, 0.7, 1.1
WEIGHT_ONLY_WITHIN = 0.9  # fraction within two steps where only weights are rounded: the quantization error is not known
WEIGHT_ONLY_NOISE = 0.05  # or the error as a fraction of what the outputs vary by
QUANTIZED_STEPS = 16  # largest error: a single wrong output among many is an error, not a rounding
FINER = 16  # steps of a part are at most so many times smaller than those of the whole, whose larger values round its own
BESIDE_LARGE = 16  # but by no more, in fp32, than so many times the error of the large parts, or one rounding of the whole range
FEWEST = 32  # values of a part whose distances mean something
FEWEST_JUDGED = 4  # values of a part; below FEWEST the limit grows as chance does, with the root of what is missing
TIMES_AS_FAR = 4  # as the model, from the unrounded model
#: Distances from the unrounded model that are none. Of integers: a step of the part's range, or less where nearly all of its
#: values are near one another. Of half precision: a fraction of a step, and one rounding of the largest value in fp16.
OF_SPREAD, HALF_STEP, HALF_ROUNDING = 0.02, 0.05, 2.0**-11


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far the outputs of a file agree with a reference, at one optimization level of ONNX Runtime.

    A step is 1/255 of the range of the reference output.

    Attributes:
        agreement: fraction of samples with the same largest class; None where the output has no classes. Classes lie in dimension
            1, of three-dimensional outputs (sequences) in the last.
        within_one, within_two: fraction of output values that are at most one or two steps off.
        largest: largest error, in steps.
        noise: root mean square error, as a fraction of the quantization error; None where it is unknown, as for a model in fp32.
            Both are of the first batches, of 1,000 samples at least where there are as many.
        excess: root mean square distance of the file from the unrounded model, as a fraction of the model's distance; None
            where `noise` is.
        flips: fraction of samples with another largest class that are no ties: in the reference, the two classes lie more than
            two steps apart.
        not_finite: fraction of output values that are NaN or the same infinity in both, which counts as agreement.
    """

    agreement: float | None
    within_one: float
    within_two: float
    largest: float
    noise: float | None = None
    excess: float | None = None
    flips: float = 0.0
    not_finite: float = 0.0


def not_finite_remark(levels: Iterable[Agreement]) -> str:
    """How many output values are not finite at any level, in words; empty where all are finite."""
    fraction = max((level.not_finite for level in levels), default=0.0)
    values = "all values" if fraction == 1 else f"{fraction:.2%} of the values"
    return f"not finite: {values} are NaN or infinite, at the same places in both" if fraction else ""


def usable_reference(reference: list[np.ndarray], exact: list[np.ndarray]) -> list[np.ndarray] | None:
    """The unrounded outputs; None where they say nothing of the file: where data decides their shape, rounding changes it, and a
    quantization error as large as the outputs vary is one to which any file is near.
    """
    if [v.shape for v in reference] != [v.shape for v in exact]:
        return None
    right = [fills_as_infinity(*pair)[1] for pair in zip(reference, exact, strict=True)]
    centered = [v - v[np.isfinite(v)].mean() if np.isfinite(v).any() else v for v in right]
    return exact if _error_norm(reference, exact) < _error_norm(centered, [np.zeros_like(v) for v in centered]) else None


def beside_unrounded(
    level: Agreement, reference: list[np.ndarray], outputs: list[np.ndarray], exact: list[np.ndarray]
) -> Agreement:
    """The agreement with its distances from the unrounded model. exact: outputs of the unrounded model."""
    error = max(_error_norm(reference, exact), 1e-30)
    return replace(level, noise=_error_norm(reference, outputs) / error, excess=_error_norm(outputs, exact) / error)


def compare(reference: list[np.ndarray], outputs: list[np.ndarray], *, heads: int = 1) -> Agreement:
    """Compare outputs with reference outputs, over all samples at once.

    heads: how many of the arrays, from the first, are predictions.

    Raises ExportError for outputs of other shapes, or that are no numbers; DataError where they hold no values.
    """
    steps, same_infinities, values = [], 0, 0
    shapes = [[v.shape for v in values] for values in (reference, outputs)]
    if len(reference) != len(outputs):
        raise ExportError(f"the file gives outputs of shapes {shapes[1]} where the model gives {shapes[0]}")
    reference, outputs = [_as_numbers(v) for v in reference], [_as_numbers(v) for v in outputs]
    for i, (wanted, got) in enumerate(zip(reference, outputs, strict=True)):
        if wanted.shape != got.shape:
            raise ExportError(f"the file gives an output of shape {got.shape} where the model gives {wanted.shape}")
        with np.errstate(invalid="ignore"):  # inf - inf
            error = np.abs(wanted.astype(np.float64) - got)
        equal = (wanted == got) | (np.isnan(wanted) & np.isnan(got))  # a masked logit of -inf agrees with itself
        error[equal] = 0
        same_infinities += int((equal & ~np.isfinite(wanted)).sum())
        values += error.size
        reference[i], outputs[i] = fills_as_infinity(wanted, got)
        counted = np.isfinite(reference[i]) | ~equal
        steps.append(error[counted] / _step(reference[i]))
    errors = np.nan_to_num(np.concatenate(steps or [np.zeros(0)]), nan=np.inf, posinf=np.inf)
    errors = errors if errors.size else np.zeros(1)  # the same infinities everywhere
    if not values:
        raise DataError(f"the outputs hold no values to compare, got shapes {shapes[0]}; give inputs with at least one row")
    classes = all(v.ndim > 1 and v.shape[_class_dim(v)] > 1 for v in reference[:heads])
    compared = [_compare_classes(*pair) for pair in zip(reference[:heads], outputs, strict=False)] if classes else []
    same, flips = (np.concatenate([pair[i] for pair in compared] or [np.zeros(1)]) for i in (0, 1))
    return Agreement(
        agreement=float(same.mean()) if classes else None,
        flips=float(flips.mean()),
        within_one=float((errors <= 1).mean()),
        within_two=float((errors <= 2).mean()),
        largest=float(errors.max()),
        not_finite=same_infinities / values,
    )


def fills_as_infinity(*outputs: np.ndarray) -> tuple[np.ndarray, ...]:
    """The outputs, of one shape, with infinity for what code fills in (`graph.differences.filled_in`)."""
    if outputs[0].dtype.kind != "f":
        return outputs
    filled = filled_in(*(torch.from_numpy(np.ascontiguousarray(v)) for v in outputs))
    return outputs if filled is None else tuple(np.where(filled.numpy(), np.copysign(np.inf, v), v) for v in outputs)


def _as_numbers(output: np.ndarray) -> np.ndarray:
    """An output that can be subtracted: truth values as 0 and 1."""
    if output.dtype.kind not in "biuf":
        raise ExportError(f"an output holds {output.dtype}; only numbers and truth values are compared, so drop it from the file")
    return output.astype(np.float32) if output.dtype.kind == "b" else output


def _class_dim(output: np.ndarray) -> int:
    """Dimension of the classes: (samples, classes, ...), or (samples, steps, classes) of a sequence."""
    return 2 if output.ndim == 3 else 1


def _compare_classes(wanted: np.ndarray, got: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each sample, whether the largest class is the same, and whether it is another that is no tie in `wanted`."""
    dim = _class_dim(wanted)
    best, other = (np.expand_dims(v.argmax(dim), dim) for v in (wanted, got))
    with np.errstate(invalid="ignore"):  # inf - inf
        lead = np.take_along_axis(wanted, best, dim) - np.take_along_axis(wanted, other, dim)
    return (best == other).ravel(), ((best != other) & ~(lead <= 2 * _step(wanted))).ravel()


def _step(reference: np.ndarray) -> float:
    """1/255 of the range of the finite values; of their size, where they are all the same."""
    finite = reference[np.isfinite(reference)].astype(np.float64)  # the range of half precision may be none of its numbers
    span = float(np.ptp(finite)) if finite.size else 0.0
    return (span or max(1.0, float(np.abs(finite).max(initial=0)))) / 255


def _error_norm(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """Root of the sum of all squared differences; entries that are not finite are left out."""
    total = 0.0
    for x, y in zip(a, b, strict=True):
        finite = np.isfinite(x) & np.isfinite(y)
        total += float(np.square(x[finite].astype(np.float64) - y[finite]).sum())
    return float(np.sqrt(total))


def steps_allowed(dtype: torch.dtype) -> float:
    """Largest error of a float file, in steps: 0.1 for fp32; for half precision eight roundings (2 in fp16, 16 in bf16).

    Those are of a value as large as the range is; see `sizes_in_ranges`.
    """
    return FLOAT_STEPS if dtype in (torch.float32, torch.float64) else 8 * 255 * torch.finfo(dtype).eps


def sizes_in_ranges(reference: Sequence[np.ndarray]) -> float:
    """How many times larger the largest value is than the range, at least 1: half precision rounds a value by its size."""
    parts = [v.reshape(1, -1).astype(np.float64) for v in (fills_as_infinity(v)[0] for v in reference) if v.size]
    return max((float(_sizes_of(v)[0] / _ranges_of(v)[0]) for v in parts if _ranges_of(v)[0]), default=1.0)


def float_part_that_differs(reference: Sequence[np.ndarray], outputs: Sequence[np.ndarray], allowed: float) -> str:
    """Say which part of an output of a float file differs from the reference by more than it may; "" where none does.

    Args:
        reference, outputs: arrays of the output, one for each of its shapes.
        allowed: the largest error, in steps of 1/255 of the part's own range; in half precision, of its largest value, if that is
            more: that precision rounds each value by its size.
    """
    for wanted, got in zip(reference, outputs, strict=True):
        wanted, got = fills_as_infinity(wanted, got)
        whole = _ranges_of(wanted.reshape(1, -1))[0]
        for dim, (a, b) in _parts_of(wanted, got):
            with np.errstate(invalid="ignore"):  # inf - inf
                errors = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))
            largest, own = np.nan_to_num(errors, nan=np.inf).max(1), _ranges_of(a)
            size = _sizes_of(a)
            least = whole / FINER or 1.0
            if allowed > FLOAT_STEPS:
                own = size
            elif whole:
                rounded = max(largest[size >= least].max(initial=0), whole * np.finfo(np.float32).eps)
                least = min(least, BESIDE_LARGE * rounded * 255 / allowed)
            steps = largest / np.maximum(own, least) * 255
            if steps.max() > allowed:
                at = int(steps.argmax())
                return f"entry {at} of dimension {dim}: the largest error is {steps[at]:.3g} steps of its own range"
    return ""


def part_beyond_rounding(
    reference: Sequence[np.ndarray], outputs: Sequence[np.ndarray], exact: Sequence[np.ndarray], *, integers: bool
) -> str:
    """Say which part of an output, or whether the whole, is far from the unrounded model where the model itself is near; "" where
    none is.

    Args:
        reference, outputs, exact: arrays of the output, one for each of its shapes: of the model, the file, the unrounded model.
        integers: whether the model rounds to integers, and not to half precision.
    """
    for arrays in zip(reference, outputs, exact, strict=True):
        filled = fills_as_infinity(*arrays)
        whole = (None, [v.reshape(1, -1).astype(np.float64) for v in filled])
        for dim, (wanted, got, right) in (whole, *_parts_of(*filled)):
            count = wanted.shape[1]
            if count < FEWEST_JUDGED:
                continue
            least = np.maximum(_distances(wanted, right), _least_distances(right, integers=integers))
            times = np.minimum(_distances(got, right), _distances(got, wanted)) / np.where(least, least, np.inf)
            if times.max() > TIMES_AS_FAR * max(1, np.sqrt(FEWEST / count)):
                at = int(times.argmax())
                part = "it" if dim is None else f"entry {at} of dimension {dim}"
                return f"{part} is {times[at]:.3g} times as far from the unrounded model as the model itself"
    return ""


def _least_distances(right: np.ndarray, *, integers: bool) -> np.ndarray:
    """The distance of each part from the unrounded model that is none; see HALF_ROUNDING."""
    step = _ranges_of(right) / 255
    if not integers:
        return np.maximum(step * HALF_STEP, _sizes_of(right) * HALF_ROUNDING)
    if right.shape[1] < FEWEST:  # few values have a smaller range than all
        return _sizes_of(right) / 255
    centered = right - np.where(np.isfinite(right), right, 0).mean(1, keepdims=True)
    return np.minimum(step, _distances(centered, np.zeros_like(centered)) * OF_SPREAD)


def _parts_of(*arrays: np.ndarray) -> Iterator[tuple[int, list[np.ndarray]]]:
    """(dimension, arrays of shape (parts, values)) for each dimension that parts lie in."""
    rank = arrays[0].ndim
    for dim in dict.fromkeys([1, rank - 1] if rank > 1 else []):
        if arrays[0].size and arrays[0].shape[dim] > 1:
            yield dim, [np.moveaxis(v, dim, 0).reshape(v.shape[dim], -1).astype(np.float64) for v in arrays]


def _ranges_of(parts: np.ndarray) -> np.ndarray:
    """Largest minus smallest finite value of each part; 0 where there is none."""
    parts = parts.astype(np.float64)
    finite = np.isfinite(parts)
    high, low = np.where(finite, parts, -np.inf).max(1), np.where(finite, parts, np.inf).min(1)
    return np.where(finite.any(1), high - low, 0.0)


def _sizes_of(parts: np.ndarray) -> np.ndarray:
    """Largest finite value of each part, or its range, where that is larger."""
    return np.maximum(_ranges_of(parts), np.where(np.isfinite(parts), np.abs(parts), 0).max(1))


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Root mean square difference of each part; entries that are not finite are left out."""
    finite = np.isfinite(a) & np.isfinite(b)
    squares = np.square(np.where(finite, a, 0) - np.where(finite, b, 0))
    return np.sqrt(squares.sum(1) / np.maximum(finite.sum(1), 1))
