"""Time a quantized model beside the float one that it was made from, for the threads and batch that a user names."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from torch import nn

from compresskit.base.errors import CompressError, SettingError
from compresskit.base.task import Inputs, RowDims, repeated_rows, rows_that_run
from compresskit.export import export_onnx
from compresskit.export.check.profile.layers import profile_layers
from compresskit.measure import input_row_dims, latency, run_files, session
from compresskit.quant.calibrated import CalibratedSettings
from compresskit.quant.measured_placement.placement_model import OperatorTimes, operator_times
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.targets import Deployment

log = logging.getLogger(__name__)

MIN_GAIN = 0.98  # one file is faster than another only below this fraction of its latency, more than measurement noise

MOST_PROFILED = 300  # at most: reading the profile of more takes longer than the runs


@dataclass(frozen=True)
class BesideFloat:
    """Milliseconds of a quantized model's file, of the float model's and, where asked for, of another model's, timed in turn."""

    milliseconds: float
    float_milliseconds: float
    other_milliseconds: float | None = None

    @property
    def faster(self) -> bool:
        """Whether the quantized model is faster than the float one by more than noise, or no slower than the other."""
        other = self.other_milliseconds
        no_slower = other is not None and MIN_GAIN * self.milliseconds <= other
        return no_slower or self.milliseconds < MIN_GAIN * self.float_milliseconds


class Timed(Protocol):
    """Times quantized models beside the float one."""

    def __call__(self, quantized: Quantized, other: Quantized) -> BesideFloat | None:
        """Time a model and, where the float one is faster, another that it should replace; None where it cannot be timed."""

    def operators(self, quantized: Quantized) -> OperatorTimes | None:
        """What its operators would take in float; None where its file has other layers than that of the float model."""


class _Timed:
    """Files of a float model and of quantized ones in a folder."""

    def __init__(self, module: nn.Module, example: Inputs, settings: CalibratedSettings, folder: Path, seconds: float) -> None:
        self.module, self.example, self.settings, self.seconds = module, example, settings, seconds
        self.profiled: Quantized | None = None  # the last one, and its times
        self.times: OperatorTimes | None = None
        self.floating, self.rounded, self.before = (folder / f"{kind}.onnx" for kind in ("float", "rounded", "before"))

    def __call__(self, quantized: Quantized, other: Quantized) -> BesideFloat | None:
        return unless_guarding(self.settings, type(self.module).__name__, lambda: self._times(quantized, other))

    def _times(self, quantized: Quantized, other: Quantized) -> BesideFloat:
        rows = self._write(quantized)
        threads = self.settings.deployment.threads
        times = BesideFloat(*latency([self.rounded, self.floating], rows, threads=threads, seconds=self.seconds))
        if times.faster:
            return times
        files = [self.rounded, self.floating, export_onnx(other, self.before, self.example)]
        return BesideFloat(*latency(files, rows, threads=threads, seconds=self.seconds))

    def operators(self, quantized: Quantized) -> OperatorTimes | None:
        if self.profiled is not quantized:
            self.times = unless_guarding(self.settings, type(self.module).__name__, lambda: self._operators(quantized))
            self.profiled = quantized
        return self.times

    def _operators(self, quantized: Quantized) -> OperatorTimes | None:
        rows = self._write(quantized)
        profile = profile_layers(
            self.rounded,
            rows,
            against=self.floating,
            threads=self.settings.deployment.threads,
            seconds=self.seconds,
            runs=MOST_PROFILED,
        )
        return operator_times(quantized.body.graph, quantized.placement, profile)

    def _write(self, quantized: Quantized) -> Inputs:
        """Write the files; returns what they are run on."""
        if not self.floating.exists():
            export_onnx(self.module, self.floating, self.example, dynamic=self.settings.dynamic)
        export_onnx(quantized, self.rounded, self.example)
        dims = input_row_dims(self.module, self.example, self.settings.dynamic)
        return rows_of_batch(self.example, self.settings.deployment, self.floating, type(self.module).__name__, dims)


Found = TypeVar("Found")


def unless_guarding(settings: CalibratedSettings, name: str, measure: Callable[[], Found]) -> Found | None:
    """What a measurement gives; where it fails and was not asked for, None, after a warning.

    name: of the model, for the warning.
    """
    try:
        return measure()
    except CompressError as error:
        if settings.choice == "measure":
            raise
        log.warning('%s is not timed beside its float model, choose="rules" does not try to: %s', name, error)
        return None


def measures(settings: CalibratedSettings) -> bool:
    """Whether anything is timed for these settings, on this machine."""
    return settings.choice == "measure" or (settings.choice == "guard" and settings.target.runs_here)


@contextmanager
def beside_float(
    module: nn.Module, example: Inputs, settings: CalibratedSettings, *, seconds: float = 1.0
) -> Iterator[Timed | None]:
    """Give what times a quantized model of the module beside it; None where the settings measure nothing.

    Inside the block the files lie in a temporary folder; that of the float model is written at the first call.
    """
    if not measures(settings):
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        yield _Timed(module, example, settings, Path(folder), seconds)


def rows_of_batch(example: Inputs, deployment: Deployment, file: Path, name: str, dims: RowDims | None) -> Inputs:
    """Inputs of the batch that a deployment wants, repeated from the example where it has fewer.

    The example as it is where the file does not run on these: the nodes of a graph that goes with its edges.

    Args:
        example: a batch of inputs. file: the ONNX file that will be run. name: of the model, for the message.
        dims: where the rows of each input are, where that is known.

    Raises SettingError where the file takes another batch.
    """
    batch = deployment.batch
    shapes = [given.shape for given in session(file).get_inputs()]
    in_each = [(shape, dim) for shape, dim in zip(shapes, dims or (), strict=False) if dim is not None]
    fixed = next((shape[dim] for shape, dim in in_each or [(shape, 0) for shape in shapes if shape]), batch)
    if isinstance(fixed, int) and fixed != batch:
        raise SettingError(
            f"Deployment(batch={batch}): {name} takes {fixed} samples at a time, since dynamic= leaves the batch fixed;"
            f" write batch={fixed}, or let the batch vary"
        )
    return rows_that_run(partial(run_files, [file]), repeated_rows(example, batch, dims), example)
