"""How long a training is, in batches, optimizer steps and epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Length:
    """The length of a training.

    Attributes:
        steps: optimizer steps.
        epochs: passes over the data, the last of which may end early; None where the data have no known length.
        batches: of an epoch; None where it is not known.
        accumulate: batches of an optimizer step; the last step of an epoch may have fewer.
    """

    steps: int
    epochs: int | None
    batches: int | None
    accumulate: int

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch; None where it is not known."""
        return None if self.batches is None else math.ceil(self.batches / self.accumulate)

    def batches_until(self, step: int) -> int:
        """Batches of the first optimizer steps; where steps at the end of an epoch may have fewer, at most so many."""
        if self.batches is None or self.steps_per_epoch is None:
            return step * self.accumulate
        whole, rest = divmod(step, self.steps_per_epoch)
        return whole * self.batches + rest * self.accumulate
