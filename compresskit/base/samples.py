"""A limited number of samples from the loaders of a task, with a progress bar: for calibration, scores and statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from compresskit.base.task import Inputs, Task, batch_size


def some_batches(task: Task, which: str, samples: int, label: str) -> Iterator[Any]:
    """Batches of `train`, `val` or `calibration` until `samples` samples were seen; the last batch is whole."""
    seen = 0
    with tqdm(total=samples, desc=label, disable=None, leave=False, unit="sample") as bar:
        for batch in task.batches(which):
            yield batch
            rows = batch_size(task.split(batch)[0])
            seen += rows
            bar.update(rows)
            if seen >= samples:
                return


def calibration_inputs(task: Task, samples: int, label: str = "calibrate") -> Iterator[Inputs]:
    """Inputs of calibration batches, without labels, until `samples` samples were seen."""
    return (task.split(batch)[0] for batch in some_batches(task, "calibration", samples, label))


@dataclass(frozen=True)
class ValidationInputs:
    """Inputs of all validation batches, without labels; as long as their loader."""

    task: Task

    def __len__(self) -> int:
        return self.task.length("val")

    def __iter__(self) -> Iterator[Inputs]:
        return (self.task.split(batch)[0] for batch in self.task.batches("val"))
