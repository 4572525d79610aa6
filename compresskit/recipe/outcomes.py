"""How sure a metric is: which samples are right, or the metric of samples drawn again and again (the bootstrap)."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compresskit.base.task import RunningMetric, Task, accuracy, predicted_classes
from compresskit.measure import Evaluation, each_output

log = logging.getLogger(__name__)

RESAMPLES = 400
MOST_SECONDS = 10.0  # for all of them
MOST_KEPT = 20_000_000  # of predictions that are kept for it


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """A metric, and what says how sure it is.

    metric: over all samples. correct: where it is `accuracy` of one class for each sample, which samples are right, as bits, the
    first one highest, in hexadecimal digits. samples: how many there are; 0 where neither is known. resampled: the metric of
    `RESAMPLES` draws of the samples with replacement (Efron 1979), the same draws for each model of one task. targets: a digest,
    by which two models are known to have met the same samples in the same order.
    """

    metric: float
    correct: str | None = None
    samples: int = 0
    resampled: tuple[float, ...] = ()
    targets: str = ""

    def to_json(self) -> dict[str, Any]:
        """All of it but the metric, JSON-ready."""
        certain = {"correct": self.correct, "samples": self.samples, "targets": self.targets}
        return certain | ({"resampled": list(self.resampled)} if self.resampled else {})


class _Recorder:
    """A metric that keeps what it is given, for as long as that is little."""

    def __init__(self, task: Task) -> None:
        self.task, self.outputs = task, list[tuple[Tensor, Any]]()
        self.values = 0

    def keep(self, predictions: Tensor, target: Any) -> None:
        self.values += predictions.numel()
        self.outputs.append((predictions, target))
        if self.values > MOST_KEPT or not _rows_of_both(predictions, target):
            self.outputs, self.values = [], MOST_KEPT + 1

    def recorded(self) -> tuple[Tensor, Tensor] | None:
        """Predictions and targets of all samples; None where they are too many, or are no tensors with a row a sample."""
        if not self.outputs or self.values > MOST_KEPT:
            return None
        predictions, targets = zip(*self.outputs, strict=True)
        if len({rows.shape[1:] for rows in predictions}) > 1 or len({rows.shape[1:] for rows in targets}) > 1:
            return None
        return torch.cat(predictions), torch.cat(targets)

    # What follows is a metric, of either kind.

    def __call__(self, predictions: Tensor, target: Any) -> float:
        self.keep(predictions, target)
        return self.task.score(predictions, target)

    def reset(self) -> None:
        self.task.metric.reset()  # type: ignore[union-attr]

    def update(self, predictions: Tensor, target: Any) -> None:
        self.keep(predictions.cpu(), target.cpu() if isinstance(target, Tensor) else target)
        self.task.metric.update(predictions, target)  # type: ignore[union-attr]

    def compute(self) -> Any:
        return self.task.metric.compute()  # type: ignore[union-attr]


def _rows_of_both(predictions: Tensor, target: Any) -> int:
    rows = predictions.ndim and isinstance(target, Tensor) and target.ndim and len(target)
    return rows if rows and len(predictions) == rows else 0


class OutcomesOf:
    """The outcomes of a model or a file, from what it returns for one validation batch of a task after another.

    A metric other than the accuracy of one class for each sample is computed for `RESAMPLES` draws of the samples where each
    takes little time, where targets are tensors with one row a sample, and where their order does not matter.
    """

    def __init__(self, task: Task) -> None:
        self.task, self._recorder = task, _Recorder(task)
        running = isinstance(task.metric, RunningMetric)
        self._evaluation = Evaluation(replace(task, metric=self._recorder if running else self._recorder.__call__))

    def add(self, output: Any, target: Any) -> None:
        """Count a batch: what was returned for it, and its target."""
        self._evaluation.add(output, target)

    def outcomes(self) -> Outcomes:
        """Of all batches."""
        task, metric, found = self.task, self._evaluation.value(), self._recorder.recorded()
        if found is None:
            return Outcomes(metric=metric)
        predictions, target = found
        samples, digest = len(target), hashlib.sha256(target.contiguous().numpy().tobytes()).hexdigest()[:16]
        if task.metric is accuracy and predictions.ndim == 2 and target.ndim == 1 and bool((target >= 0).all()):
            bits = "".join("1" if right else "0" for right in (predicted_classes(predictions) == target).tolist())
            return Outcomes(metric=metric, correct=f"{int(bits, 2):0{-(-len(bits) // 4)}x}", samples=samples, targets=digest)
        resampled = _resample(task, predictions, target, metric)
        return Outcomes(metric=metric, samples=samples if resampled else 0, resampled=resampled, targets=digest)


def measure_outcomes(run: Callable[..., Any], task: Task) -> Outcomes:
    """Run a model or a function of its inputs on the validation set; its outcomes, see `OutcomesOf`."""
    found = OutcomesOf(task)
    each_output(run, task, found.add)
    return found.outcomes()


def _resample(task: Task, predictions: Tensor, target: Tensor, value: float) -> tuple[float, ...]:
    """The metric of draws of the samples; none where that takes long, or where the metric cannot be computed of a draw.

    value: of all samples, in their order. A metric that compares them with something of its own, by place, has no draws.
    """
    metric = task.metric
    of_draws = copy.deepcopy(metric) if isinstance(metric, RunningMetric) else None

    def score(rows: Tensor) -> float:
        if of_draws is None:
            return float(task.score(predictions[rows], target[rows]))
        of_draws.reset()
        of_draws.update(predictions[rows], target[rows])
        return float(of_draws.compute())

    generator, samples, found = torch.Generator().manual_seed(0), len(target), list[float]()
    try:
        begin = time.perf_counter()
        turned = score(torch.arange(samples, device="cpu").flip(0))
        if (needed := (time.perf_counter() - begin) * RESAMPLES) > MOST_SECONDS:
            log.info("%s of one draw takes long (%.0f s for all); the report shows no interval", task.metric_name, needed)
            return ()
        if not math.isclose(turned, value, rel_tol=1e-4, abs_tol=1e-6):
            log.info("%s depends on the order of the samples; the report shows no interval", task.metric_name)
            return ()
        found = [score(torch.randint(samples, (samples,), generator=generator, device="cpu")) for _ in range(RESAMPLES)]
    except Exception as error:  # a user's metric, on samples in an order that it did not expect
        log.info("%s of drawn samples could not be computed, and the report shows no interval: %s", task.metric_name, error)
        return ()
    return tuple(found) if all(map(math.isfinite, found)) else ()
