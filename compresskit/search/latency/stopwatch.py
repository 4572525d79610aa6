"""Latencies of files beside that of the uncompressed one, and how far they can be trusted on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compresskit.base.errors import SettingError
from compresskit.base.task import Inputs
from compresskit.measure import latency
from compresskit.search.workers import timing_alone

NOISIEST = 0.15  # difference of two measurements of one file up to which a latency says something
LEAST_NOISE = 0.03  # by which the latency of a file may be another after a training, on a machine that was quiet before
ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class Stopwatch:
    """Measures files in turn with the uncompressed one, whose own latency is measured once.

    Attributes:
        dense: the uncompressed file.
        milliseconds: its latency.
        noise: relative difference of two measurements of it that ran in turn.
        inputs: what files run on.
        threads: of the runtime.
        seconds: for each file.
    """

    dense: Path
    milliseconds: float
    noise: float
    inputs: Inputs
    threads: int
    seconds: float

    def measure(self, file: Path) -> float:
        """Milliseconds of a file: its ratio to the uncompressed one, run in turn, times the latency of that one."""
        with timing_alone():
            before, after = latency([self.dense, file], self.inputs, threads=self.threads, seconds=self.seconds)
        return self.milliseconds * after / before

    def surely(self, ceiling: float) -> float:
        """The latency up to which a file is below a ceiling when it is measured again, too: by more than the noise."""
        return ceiling / (1 + max(self.noise, LEAST_NOISE))


Timer = Callable[[Sequence[Path], float], Sequence[float]]


def start_stopwatch(
    dense: Path, inputs: Inputs, *, threads: int, seconds: float, strict: bool, timer: Timer | None = None
) -> Stopwatch:
    """Measure the uncompressed file against itself.

    Args:
        strict: whether noise is an error, since a latency is in the budget.
        timer: measures files for so many seconds each; by default `measure.latency`.

    Raises SettingError where two measurements of one file differ too much, three times in a row.
    """
    time = timer or (lambda files, spent: latency(files, inputs, threads=threads, seconds=spent))
    noise, milliseconds = float("inf"), 0.0
    for attempt in range(ATTEMPTS):
        first, second = time([dense, dense], seconds * 2**attempt)
        if (found := abs(first - second) / min(first, second)) < noise:
            noise, milliseconds = found, (first + second) / 2
        if noise <= NOISIEST:
            break
    if strict and noise > NOISIEST:
        raise SettingError(
            f"at_most(latency=...): this machine is too noisy to measure a latency: the same file differed from itself by"
            f" {noise:.0%} in {ATTEMPTS} attempts, wanted at most {NOISIEST:.0%}; end what else runs, pin the process to a core"
            " (taskset -c 1), or give bytes= or macs= in the place of latency="
        )
    return Stopwatch(dense=dense, milliseconds=milliseconds, noise=noise, inputs=inputs, threads=threads, seconds=seconds)
