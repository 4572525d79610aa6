"""Halves of calibration data, and the error of a quantized model's outputs on one of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError
from compresskit.base.task import Inputs, batch_size, call, first_rows, rows_that_run, shapes_of
from compresskit.graph.capture import Dynamic
from compresskit.graph.differences import without_fills
from compresskit.graph.surgery import call_unmoved, mode
from compresskit.measure import input_row_dims, run_once
from compresskit.metrics import decibels
from compresskit.quant.calibration.rows import in_chunks, kinds_of_channels, parts_by_kind, row_count, take_rows

log = logging.getLogger(__name__)

LEAST_SAMPLES = 8  # of each half
COMPARED_ROWS = 8  # of an example, where the model takes so few, by whose outputs quantized models without calibration are judged
LEAST_OF_OUTPUTS = 15.0  # dB, below which an output is poor: there an error at right angles turns a vector by 10 degrees


def batch_varies(dynamic: Dynamic) -> bool:
    """Whether the first dimension of inputs may vary, so that batches may be cut and joined."""
    return any(0 in sizes for sizes in dynamic.values()) if isinstance(dynamic, Mapping) else 0 in dynamic


def halves(batches: Sequence[Inputs], where: str, *, cut: bool = True) -> tuple[list[Inputs], list[Inputs]]:
    """Split calibration data into a half to choose by and a half to judge by: the rows of each batch, or every other batch.

    cut: whether batches may be cut.

    Raises DataError, which begins with `where`, where a half has fewer than `LEAST_SAMPLES` samples.
    """
    parts: tuple[list[Inputs], list[Inputs]] = ([], [])
    turn = 0
    for inputs in batches:
        rows = row_count(inputs)
        if rows is None or rows < 2 or not cut:
            parts[turn % 2].append(inputs)
            turn += 1
        else:
            middle = (rows + turn % 2) // 2
            turn += rows % 2
            parts[0].append(take_rows(inputs, slice(0, middle)))
            parts[1].append(take_rows(inputs, slice(middle, rows)))
    counts = [sum(map(batch_size, part)) for part in parts]
    if min(counts) < LEAST_SAMPLES:
        raise DataError(
            f"{where}: wanted at least {2 * LEAST_SAMPLES} calibration samples, {LEAST_SAMPLES} to choose by and {LEAST_SAMPLES}"
            f' others to judge by, got {sum(counts)}, {counts[0]} and {counts[1]}; give more, or effort="fast"'
        )
    return parts


def joined_samples(batches: Sequence[Inputs], count: int) -> Inputs:
    """One batch of at most `count` samples, from the batches of the same shapes as the first; the first where it has no rows.

    They are spread evenly: samples beside each other are often of one kind (a class, a picture, a video).
    """
    first = batches[0]
    if row_count(first) is None:
        return first
    shapes = [shape[1:] for shape in shapes_of(first)]
    alike = [b for b in batches if row_count(b) is not None and [shape[1:] for shape in shapes_of(b)] == shapes]
    joined: Inputs = pytree.tree_map(lambda *v: torch.cat(v) if isinstance(v[0], Tensor) else v[0], *alike)
    total = row_count(joined) or 0
    return joined if total <= count else take_rows(joined, torch.arange(count) * total // count)


def rows_within(batches: Sequence[Inputs], most: int, step: int) -> list[Inputs]:
    """The first `most` rows of batches, one at least, in parts of at most `step` rows."""
    left, taken = max(1, most), list[Inputs]()
    for inputs in in_chunks(batches, max(1, min(step, left))):
        if taken and left < batch_size(inputs):
            break
        taken.append(inputs)
        left -= batch_size(inputs)
    return taken


def few_compared_rows(model: nn.Module, quantized: nn.Module, example: Inputs, dynamic: Dynamic) -> Inputs:
    """The first rows of an example where both models run on them, and the example where one does not."""

    def run(rows: Inputs) -> None:
        run_once(model, rows)
        run_once(quantized, rows)

    return rows_that_run(run, first_rows(example, COMPARED_ROWS, input_row_dims(model, example, dynamic)), example)


def float_leaves(output: Any) -> list[Tensor]:
    """The floating point tensors in the output of a model."""
    return [v for v in pytree.tree_leaves(output) if isinstance(v, Tensor) and v.is_floating_point()]


class OutputError:
    """The error of a model's outputs against those of the float model, on fixed data; the float outputs are kept.

    An output with channels of several kinds, as boxes beside scores, is as many outputs here: the power of the largest would hide
    what the others lose.

    batches: the data, in parts small enough for memory.
    outputs: of the float model for each part.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Inputs], rows: int | None) -> None:
        """rows: of a part, at most; None for the batches as they are."""
        self.model, self.batches = model, list(batches) if rows is None else list(in_chunks(batches, rows))
        whole = [self._leaves(inputs) for inputs in self.batches]
        self._kinds = [kinds_of_channels([without_fills(v, v)[0] for v in each]) for each in zip(*whole, strict=True)]
        self.outputs = [self._split(leaves) for leaves in whole]
        self._has_rows: bool | None = None

    def _leaves(self, inputs: Inputs) -> list[Tensor]:
        with torch.no_grad(), mode(self.model, training=False):
            return [v.clone() for v in float_leaves(call_unmoved(self.model, inputs)[0])]

    def _split(self, leaves: list[Tensor]) -> list[Tensor]:
        return [part for value, kinds in zip(leaves, self._kinds, strict=True) for part in parts_by_kind(value, kinds)]

    def _of_float_model(self, inputs: Inputs) -> list[Tensor]:
        return self._split(self._leaves(inputs))

    def outputs_of(self, output: Any) -> list[Tensor]:
        """The tensors in the output of a model that are compared with `outputs`."""
        return self._split(float_leaves(output))

    def rows_of(self, part: int, rows: Tensor) -> tuple[Inputs, list[Tensor]]:
        """Some rows of a part, and the float model's outputs for them."""
        inputs = take_rows(self.batches[part], rows)
        if self._has_rows is None:
            self._has_rows = self._outputs_have_rows(part)
        return inputs, [v[rows] for v in self.outputs[part]] if self._has_rows else self._of_float_model(inputs)

    def _outputs_have_rows(self, part: int) -> bool:
        """Whether the first dimension of every output is the batch: not where time or a mean comes first."""
        rows = row_count(self.batches[part]) or 0
        if any(not v.ndim or v.shape[0] != rows for v in self.outputs[part]):
            return False
        alone = self._of_float_model(take_rows(self.batches[part], slice(0, 1)))
        wanted = [v[:1] for v in self.outputs[part]]
        close = [
            a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, atol=1e-3 * float(b.abs().max()))
            for a, b in zip(alone, wanted, strict=True)
        ]
        return all(close)

    def of(self, model: nn.Module) -> list[float]:
        """Relative error of each output of a model: power of the difference / power of the float output."""
        power: list[list[float]] = [[0.0, 0.0] for _ in self.outputs[0]]
        with torch.no_grad(), mode(model, training=False):
            for inputs, wanted in zip(self.batches, self.outputs, strict=True):
                for total, a, b in zip(power, wanted, self.outputs_of(call(model, inputs)), strict=True):
                    a, b = without_fills(a.double(), b.double())
                    total[0] += float(a.square().sum())
                    total[1] += float((a - b).square().sum())
        return [noise / max(signal, 1e-300) for signal, noise in power]

    def decibels(self, model: nn.Module) -> float:
        """Signal-to-noise ratio of the outputs in dB, the mean of all outputs; larger is better."""
        return mean_decibels(self.of(model))


def mean_decibels(errors: Sequence[float]) -> float:
    """Mean signal-to-noise ratio in dB of relative errors, at most 120; one that is not finite counts as 1e12."""
    finite = [error if math.isfinite(error) else 1e12 for error in errors]
    return sum(decibels(1.0, error, most=120.0) for error in finite) / max(1, len(finite))


def tell_of_loss(error: OutputError, quantized: nn.Module, where: str, remedy: str) -> None:
    """Log, in a line that begins with `where`, what rounding leaves of the poorest output where that is little.

    remedy: what to do then. Nothing is told of a model that draws random numbers, which differ in every run.
    """
    drawn = torch.get_rng_state()
    worst = max((e if math.isfinite(e) else math.inf for e in error.of(quantized)), default=0.0)
    reached = mean_decibels([worst])
    if reached >= LEAST_OF_OUTPUTS or not torch.equal(drawn, torch.get_rng_state()):
        return
    if not all(bool(output.isfinite().all()) for output in error.outputs[0]):
        log.warning(
            "%s: the outputs of the float model on the example are nan or infinite, by which nothing that rounding loses can be"
            " judged; clean the data",
            where,
        )
        return
    log.warning(
        "%s: the %s on the example has %.1f dB against that of the float model; %s",
        where,
        "output" if len(error.outputs[0]) == 1 else "poorest output",
        reached,
        remedy,
    )
