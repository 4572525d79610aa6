"""Observers watch values go by and say in which range they lie.

update(values)    values: (channels, n); called once for each batch and place
range()           -> (low, high), each (channels,)
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from compresskit.errors import SettingError


class Observer(Protocol):
    """Two methods, because it has memory."""

    def update(self, values: Tensor) -> None: ...

    def range(self) -> tuple[Tensor, Tensor]: ...


class MinMax:
    """Smallest and largest value ever seen."""

    def __init__(self) -> None:
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def update(self, values: Tensor) -> None:
        """Take in values, (channels, n)."""
        low, high = torch.aminmax(values.detach(), dim=1)
        self.low = low if self.low is None else torch.minimum(self.low.to(low.device), low)
        self.high = high if self.high is None else torch.maximum(self.high.to(high.device), high)

    def range(self) -> tuple[Tensor, Tensor]:
        """(low, high), each (channels,)."""
        if self.low is None or self.high is None:
            raise SettingError("this observer has seen no values; calibrate first")
        return self.low, self.high


class MovingAverage:
    """Average of the batches' extremes that forgets: new = old + momentum * (batch - old)."""

    def __init__(self, momentum: float = 0.1) -> None:
        if not 0 < momentum <= 1:
            raise SettingError(f"MovingAverage(momentum=...): wanted (0, 1], got {momentum}")
        self.momentum = momentum
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def update(self, values: Tensor) -> None:
        """Take in values, (channels, n)."""
        low, high = torch.aminmax(values.detach(), dim=1)
        self.low = low if self.low is None else torch.lerp(self.low.to(low.device), low, self.momentum)
        self.high = high if self.high is None else torch.lerp(self.high.to(high.device), high, self.momentum)

    def range(self) -> tuple[Tensor, Tensor]:
        """(low, high), each (channels,)."""
        if self.low is None or self.high is None:
            raise SettingError("this observer has seen no values; calibrate first")
        return self.low, self.high


#: Every observer of the library; the contract tests run over this list.
OBSERVERS = (MinMax, MovingAverage)
