"""How long finalists were trained, of the minutes that a budget allows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from compresskit.train.callbacks import StepReport

TRAINED_FOR = "trained for"  # attribute of a trial: seconds of its trainings
TELL_EVERY = 10.0  # seconds of a training, of which so many at most are forgotten where its process is killed


class StepTimer:
    """Adds up what the steps of trainings take, with the measurements of the metric between them.

    Of a training, the first step is taken to last as long as the second: what precedes it is no training.

    Attributes:
        seconds: of all steps so far.
        trial: that is told of them now and then; None for none.
    """

    def __init__(self, trial: Any = None) -> None:
        self.seconds, self.trial = 0.0, trial
        self._told = 0.0
        self._training, self._seen, self._at = ("", ""), 0, 0.0

    def step(self, report: StepReport) -> None:
        """Count a step that has ended."""
        now, training = time.perf_counter(), (report.stage, report.training)
        self._seen = self._seen + 1 if training == self._training else 1
        if self._seen > 1:
            self.seconds += (now - self._at) * (2 if self._seen == 2 else 1)
        self._training, self._at = training, now
        if self.trial is not None and self.seconds - self._told >= TELL_EVERY:
            self.tell()

    def tell(self) -> None:
        """Tell the trial."""
        self.trial.set_user_attr(TRAINED_FOR, self.seconds)
        self._told = self.seconds


@contextmanager
def timer_of(trial: Any) -> Iterator[StepTimer]:
    """A timer whose seconds the trial has at the end, however that comes; all but the last ones where the process is killed."""
    timer = StepTimer(trial)
    try:
        yield timer
    finally:
        timer.tell()


def trained_for(trial: Any) -> float:
    """Seconds that the trainings of a trial took so far."""
    return float(trial.user_attrs.get(TRAINED_FOR, 0.0))
