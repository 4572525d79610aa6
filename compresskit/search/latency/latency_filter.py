"""Tell, before a candidate is made, that its file will be far over the ceiling on the latency.

Its stages run on a few samples, which gives a file of the same operators, and the latency of that one is predicted from the files
that were measured before. What is handed over is always measured.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compresskit.base.errors import CompressError
from compresskit.search.candidate import Candidate, Removable
from compresskit.search.latency.latency_model import LatencyModel, PredictionError
from compresskit.search.latency.operators import MeasuredFile, Operator, measure_operators, read_measured, read_operators
from compresskit.search.proxy.workshop import DENSE, Workshop
from compresskit.search.workers import timing_alone

log = logging.getLogger(__name__)

MEASURED_OPERATORS = "operators.json"  # in the folder of a file that was measured
LEAST_MARGIN = 0.1  # of a prediction, however small its errors were so far


@dataclass(kw_only=True)
class LatencyFilter:
    """Predicts latencies of candidates that are not made.

    Attributes:
        workshop: makes candidates; its folder has the files that were measured.
        order: of what can go.
        ceiling: milliseconds that a file may take.
        measured: folders of measured files -> their operators.
    """

    workshop: Workshop
    order: Removable
    ceiling: float
    measured: dict[Path, MeasuredFile] = field(default_factory=dict)
    _model: LatencyModel | None = None
    _error: PredictionError | None = None

    def learn(self, latencies: Mapping[Candidate, float], dense: float) -> None:
        """Measure the operators of the files of candidates that were not measured yet, and of the uncompressed one.

        latencies: milliseconds of candidates that were made, by their files. dense: of the uncompressed file.
        """
        out = self.workshop.out
        folders = {out / DENSE: dense} | {self.workshop.folder(candidate): ms for candidate, ms in latencies.items()}
        for folder, milliseconds in folders.items():
            if folder in self.measured or not (folder / "model.onnx").exists():
                continue
            self._measure(folder, milliseconds)
            self.measured[folder] = read_measured(folder / MEASURED_OPERATORS)
            self._model = None

    def _measure(self, folder: Path, milliseconds: float) -> None:
        """Write what the operators of a folder's file take, if no other process has."""
        with timing_alone():
            if not (folder / MEASURED_OPERATORS).exists():
                found = measure_operators(
                    folder / "model.onnx",
                    self.workshop.timed_inputs(),
                    threads=self.workshop.threads,
                    seconds=self.workshop.seconds,
                    milliseconds=milliseconds,
                )
                found.write(folder / MEASURED_OPERATORS)

    def error(self) -> PredictionError | None:
        """What predictions are worth: of each measured file, made from all others. None where too few were measured."""
        if self._model is None:
            self._model = LatencyModel(list(self.measured.values()))
            self._error = self._model.error()
        return self._error

    @property
    def margin(self) -> float:
        """How far predictions may err, as a fraction of the latency."""
        return LEAST_MARGIN if (error := self.error()) is None else max(LEAST_MARGIN, error.largest)

    def too_slow(self, candidate: Candidate, fast_enough: Sequence[Candidate]) -> float | None:
        """Predicted milliseconds of a candidate that is over the ceiling by more than predictions err; else None.

        fast_enough: candidates that keep the ceiling. One that has no more left than any of these is not looked at, and neither
            is one whose operators are placed by measurement, since a sketch does not have its placement.
        """
        if candidate.effort != "fast":
            return None
        if self.error() is None or any(_removes_no_less(candidate, other) for other in fast_enough):
            return None
        operators = self._sketched(candidate)
        predicted = None if operators is None or self._model is None else self._model.predict(operators)
        return predicted if predicted is not None and predicted > self.ceiling * (1 + self.margin) else None

    def _sketched(self, candidate: Candidate) -> list[Operator] | None:
        """The operators that the candidate's file would have; None where it cannot be made."""
        try:
            return self.workshop.sketch(candidate, self.order, lambda file: read_operators(file, self.workshop.timed_inputs()))
        except CompressError as error:
            log.info("compress: the latency of %s is not predicted: %s", candidate.name, error)
            return None


def _removes_no_less(candidate: Candidate, other: Candidate) -> bool:
    """Whether a candidate has at most what another has, in every way, and the same precision."""
    return (
        (candidate.bits, candidate.effort) == (other.bits, other.effort)
        and candidate.blocks >= other.blocks
        and candidate.merged >= other.merged
        and candidate.macs <= other.macs
        and candidate.rank == other.rank
    )
