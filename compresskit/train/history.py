"""What a training records of itself for the report: the mean loss of each epoch, the metric, learning rates and loss scales."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from compresskit.base import distributed
from compresskit.mixed.step.scaler import LossScaler

Batch = TypeVar("Batch")
AT_ONCE = 256  # losses that are held as tensors before they are added up


class History:
    """Entries of a record, one for every epoch and one for every measurement of the metric.

    `record["epochs"]` gets `{"epoch", "step", "loss", "rates", "waiting"}`, with loss scaling also `"scale"` and `"skipped"`: the
    epoch from 1, the optimizer steps done at its end, the mean of its losses, the learning rates of its last step, the share of
    the epoch's time in which the loader kept this process waiting, the loss scale after it and the steps skipped so far.
    `record["metrics"]` gets `[step, metric]`. What is not finite is None.

    Args:
        record: JSON-ready; it is changed.
    """

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.total, self.count = 0.0, 0  # of the losses of this epoch that are added up
        self.losses: list[Tensor] = []  # and those that are not, since reading one waits for the device
        self.began, self.waited = 0.0, 0.0  # when this epoch began, and seconds of it that went to waiting for data

    def add_loss(self, loss: Tensor) -> None:
        """Note the loss of this process's rows of a batch, weighted: a tensor of one element without a gradient."""
        self.losses.append(loss)
        if len(self.losses) == AT_ONCE:
            self._add_up()

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Give the batches of an epoch, and note how long each was waited for."""
        self.began = before = time.perf_counter()
        self.waited = 0.0
        for batch in batches:
            self.waited += time.perf_counter() - before
            yield batch
            before = time.perf_counter()

    def _add_up(self) -> None:
        if self.losses:
            self.total += torch.stack([loss.reshape(()) for loss in self.losses]).sum().item()
            self.count += len(self.losses)
            self.losses = []

    def add_metric(self, step: int, metric: float) -> None:
        """Note a measurement of the metric after a step."""
        self.record.setdefault("metrics", []).append([step, _finite(metric)])

    @property
    def last_metric(self) -> tuple[int, float] | None:
        """The step and the value of the last measurement of the metric; None before the first."""
        metrics = self.record.get("metrics")
        return (int(metrics[-1][0]), float(metrics[-1][1])) if metrics and metrics[-1][1] is not None else None

    def close_epoch(self, epoch: int, step: int, rates: Sequence[float], scalers: Iterable[LossScaler]) -> float | None:
        """Enter an epoch, and return the mean of its losses, in all processes; None where no batch was seen since the last one.

        Args:
            epoch: its number, from 1.
            step: optimizer steps done.
            rates: learning rates of the last step.
            scalers: of the training.
        """
        self._add_up()
        if not self.count:
            return None
        means = distributed.of_all_ranks(self.total / self.count)
        mean, self.total, self.count = sum(means) / len(means), 0.0, 0
        entry = {"epoch": epoch, "step": step, "loss": _finite(mean), "rates": list(map(_finite, rates))}
        if used := list(scalers):
            entry |= {"scale": _finite(used[0].scale.item()), "skipped": int(used[0].skipped.item())}
        if self.began:
            entry["waiting"] = round(self.waited / max(time.perf_counter() - self.began, self.waited, 1e-9), 4)
            self.began = 0.0
        self.record.setdefault("epochs", []).append(entry)
        return mean

    def resume_state(self) -> tuple[float, int]:
        """Return the sum and the number of the losses of the epoch that has begun."""
        self._add_up()
        return self.total, self.count

    def resume_from_(self, state: Sequence[Any]) -> None:
        """Continue from what `resume_state` returned."""
        self.total, self.count = float(state[0]), int(state[1])


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
