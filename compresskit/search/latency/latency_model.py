"""A model of latencies, made of the operators of files that were measured on this machine.

A file takes what its operators take, and something for each of them outside of it. What an operator takes that was not measured
is interpolated between those of its kind that were: a sum of its MACs and bytes with factors that fit best, times what operators
like it take relative to that sum (a Gaussian process on the logarithm of the quotient, over the logarithms of its sizes). The sum
of a file is corrected by what files like it took relative to theirs.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from compresskit.search.latency.operators import MeasuredFile, Operator

LIKENESS = 1.5  # distance of the logarithms of sizes at which two operators say little of one another
OTHER_FORM = 1.0  # distance of two operators that differ in more than channels
OTHER_ALIGNMENT = 0.7  # of two whose channels are not multiples of the same power of two
SPREAD = 0.5  # standard deviation of the logarithm of the quotient
NOISE = 0.1  # the same of a measurement
OUTSIDE = "outside of operators"
SHORTEST = 1e-4  # milliseconds; of kernels that the profiler does not see
#: The same for whole files, whose operators share caches: which part of the time is in each kind of operators tells them apart.
FILE_LIKENESS, FILE_SPREAD, FILE_NOISE = 0.5, 0.1, 0.05
LEAST_FILES = 5  # that are measured before a prediction is trusted


@dataclass(frozen=True, kw_only=True)
class PredictionError:
    """Relative errors of predictions of files from other files.

    files: how many were predicted. median: of their errors; ninth: the error that nine of ten do not exceed. largest: of all.
    """

    files: int
    median: float
    ninth: float
    largest: float

    def __str__(self) -> str:
        within = f"nine of ten within {self.ninth:.1%}, all within {self.largest:.1%}"
        return f"median error {self.median:.1%}, {within} ({self.files} files)"


class LatencyModel:
    """Predicts the latency of files from others that were measured with the same threads and inputs.

    Args:
        measured: the files.
    """

    def __init__(self, measured: Sequence[MeasuredFile]) -> None:
        self.measured = tuple(file for file in measured if file.operators)
        times: dict[str, dict[Operator, list[float]]] = defaultdict(lambda: defaultdict(list))
        for file in self.measured:
            for operator, milliseconds in file.operators:
                times[operator.kind][operator].append(max(milliseconds, SHORTEST))
        self.kinds = {kind: _Kind(found) for kind, found in times.items()}
        each = [file.outside / len(file.operators) for file in self.measured]
        self.outside = statistics.fmean(each) if each else 0.0
        parts = [found for file in self.measured if (found := self._parts([operator for operator, _ in file.operators]))]
        self.shares = [_shares_of_time(part) for part in parts]
        logs = np.array([np.log(file.milliseconds / sum(part.values())) for file, part in zip(self.measured, parts, strict=True)])
        covariance = self._similar(self.shares) + np.eye(len(parts)) * (FILE_NOISE / FILE_SPREAD) ** 2
        self.weights = np.linalg.solve(covariance, logs)

    def predict(self, operators: Sequence[Operator]) -> float | None:
        """Milliseconds of a file with these operators; None where one is of a kind that no measured file has."""
        if (parts := self._parts(operators)) is None:
            return None
        return float(sum(parts.values()) * np.exp(self._similar([_shares_of_time(parts)]) @ self.weights)[0])

    def _similar(self, shares: Sequence[dict[str, float]]) -> np.ndarray:
        """(files, measured) how much a measured file says of another, in [0, 1]."""
        apart = [[sum(abs(a.get(k, 0) - b.get(k, 0)) for k in a.keys() | b.keys()) for b in self.shares] for a in shares]
        found: np.ndarray = np.exp(-((np.array(apart).reshape(len(shares), len(self.shares)) / FILE_LIKENESS) ** 2) / 2)
        return found

    def _parts(self, operators: Sequence[Operator]) -> dict[str, float] | None:
        """Kind -> milliseconds of its operators, and of what is outside of them; None where a kind is unknown."""
        count = Counter(operators)
        by_kind: dict[str, list[Operator]] = defaultdict(list)
        for operator in count:
            by_kind[operator.kind].append(operator)
        if not by_kind.keys() <= self.kinds.keys():
            return None
        parts = {OUTSIDE: self.outside * len(operators)}
        for kind, some in by_kind.items():
            parts[kind] = float(self.kinds[kind].milliseconds(some) @ np.array([count[o] for o in some]))
        return parts

    def error(self) -> PredictionError | None:
        """What predictions are worth: of each measured file, made from all the others. None for fewer than `LEAST_FILES`."""
        if len(self.measured) < LEAST_FILES:
            return None
        errors = []
        for i, file in enumerate(self.measured):
            others = LatencyModel([*self.measured[:i], *self.measured[i + 1 :]])
            predicted = others.predict([operator for operator, _ in file.operators])
            if predicted is not None:
                errors.append(abs(predicted / file.milliseconds - 1))
        return prediction_error(errors)


def _shares_of_time(parts: dict[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {kind: part / total for kind, part in parts.items()}


def prediction_error(errors: Sequence[float]) -> PredictionError | None:
    """Median, ninth decile and largest of relative errors; None of none."""
    if not errors:
        return None
    ninth, largest = float(np.quantile(errors, 0.9)), max(errors)
    return PredictionError(files=len(errors), median=statistics.median(errors), ninth=ninth, largest=largest)


@dataclass
class _Kind:
    """Measured operators of one kind. times: of each, of every file that has it."""

    times: dict[Operator, list[float]]
    operators: list[Operator] = field(init=False)

    def __post_init__(self) -> None:
        self.operators = list(self.times)
        from scipy.optimize import nnls  # heavy, and only this needs it

        logs = np.array([np.mean(np.log(self.times[o])) for o in self.operators])
        work = _work_of(self.operators)
        # Relative errors count: of each row, the sum is to be 1 in units of the measured time.
        self.factors, _ = nnls(work / np.exp(logs)[:, None], np.ones(len(logs)))
        count = np.array([len(self.times[o]) for o in self.operators])
        covariance = self._likeness(self.operators) + np.diag((NOISE / SPREAD) ** 2 / count)
        self.weights = np.linalg.solve(covariance, logs - self._sums(work))

    def milliseconds(self, operators: Sequence[Operator]) -> np.ndarray:
        """(operators,) what each takes."""
        found: np.ndarray = np.exp(self._sums(_work_of(operators)) + self._likeness(operators) @ self.weights)
        return found

    def _sums(self, work: np.ndarray) -> np.ndarray:
        logs: np.ndarray = np.log(np.maximum(work @ self.factors, SHORTEST))
        return logs

    def _likeness(self, operators: Sequence[Operator]) -> np.ndarray:
        """(operators, measured) how much a measured operator says of another, in [0, 1]."""
        mine, measured = (np.log1p(_work_of(some)[:, 1:]) for some in (operators, self.operators))
        squares = ((mine[:, None] - measured[None]) ** 2).sum(-1) / LIKENESS**2
        forms = _differ([o.form for o in operators], [o.form for o in self.operators])
        alignments = _differ([o.alignment for o in operators], [o.alignment for o in self.operators])
        found: np.ndarray = np.exp(-(squares + OTHER_FORM**2 * forms + OTHER_ALIGNMENT**2 * alignments) / 2)
        return found


def _differ(some: Sequence[Hashable], others: Sequence[Hashable]) -> np.ndarray:
    """(some, others) whether each of some is another than each of others."""
    mine, theirs = (np.array([hash(value) for value in values]) for values in (some, others))
    different: np.ndarray = mine[:, None] != theirs
    return different


def _work_of(operators: Sequence[Operator]) -> np.ndarray:
    """(operators, 5) one, MACs, bytes read, stored and written."""
    return np.array([[1.0, o.macs, o.read, o.stored, o.written] for o in operators])
