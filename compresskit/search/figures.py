"""`Figures`: what is measured of one exported file; which files are on the Pareto curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from compresskit.base.errors import CheckpointError
from compresskit.base.files import read_json

Entry = TypeVar("Entry")
ROUNDING = 1e-9
OF_METRIC = 2 * 2**-23  # of a metric, to which one in float32 is known: two of its steps


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Measurements of one exported file.

    Attributes:
        metric: the task's, computed by ONNX Runtime from the file.
        drop: how much worse that is than the metric of the uncompressed file on the same data; negative where it is better.
        latency: milliseconds of one call in ONNX Runtime, with the threads and the batch of the budget.
        bytes: of the file.
        macs: multiply-accumulates of one sample.
        seconds: that it took to make and measure the file.
    """

    metric: float
    drop: float
    latency: float
    bytes: int
    macs: int
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise CheckpointError(
                    f"figures of a candidate: {name} is {value!r}, no number; delete the folder of the candidate"
                )

    def get(self, quantity: str) -> float:
        """One of the measurements by its name."""
        return float(vars(self)[quantity])

    def excesses(self, ceilings: Mapping[str, float]) -> dict[str, float]:
        """By how much ceilings are exceeded: quantity -> fraction of the ceiling, or, for the drop, the difference."""
        over = {
            name: self.get(name) - ceiling if name == "drop" else fraction(self.get(name), ceiling) - 1
            for name, ceiling in ceilings.items()
        }
        return {name: value for name, value in over.items() if value > (self.uncertainty if name == "drop" else ROUNDING)}

    @property
    def uncertainty(self) -> float:
        """Up to which the drop is not told from another: a metric may be computed in float32, as by `.float().mean()`."""
        rounding = OF_METRIC * (abs(self.metric) + abs(self.drop))
        return max(ROUNDING, rounding) if math.isfinite(rounding) else ROUNDING


def read_figures(path: Path) -> Figures:
    """Figures from their file; CheckpointError where it holds none."""
    record = read_json(path, "the figures of a candidate")
    try:
        return Figures(**record)
    except TypeError as error:
        raise CheckpointError(f"{path}: no figures of a candidate in it ({error}); delete its folder") from None


def fraction(part: float, whole: float) -> float:
    """Return part / whole; 1 for nothing of nothing, such as the MACs of a model that has none, and infinity for more."""
    if whole == 0:
        return 1.0 if part == 0 else math.inf
    return part / whole


def pareto(entries: Sequence[Entry], points: Sequence[tuple[float, ...]]) -> list[Entry]:
    """The entries whose points no other point dominates, by the first coordinate; less is better in each. One of equal points."""
    kept: list[tuple[tuple[float, ...], Entry]] = []
    for point, entry in sorted(zip(points, entries, strict=True), key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other, point, strict=True)) for other, _ in kept):
            kept.append((point, entry))
    return [entry for _, entry in kept]
