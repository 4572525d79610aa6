"""Observers watch values go by and say in which range they lie.

    update(values)    values: (channels, n); called once for each batch and place
    range()           -> (low, high), each (channels,); where torch.distributed runs, over all ranks, which must all call it

Each looks at every value once and keeps a few numbers for a channel: extremes, or a histogram whose bins double in width, and
are merged in pairs, when a value falls outside. A value that is not finite makes the range not finite.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from compresskit.base.errors import SettingError
from compresskit.quant.numerics.histogram import Histogram, least_divergence, least_error


class Observer(Protocol):
    """Two methods, because it has memory."""

    def update(self, values: Tensor) -> None: ...

    def range(self) -> tuple[Tensor, Tensor]: ...


def extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each row of (channels, n); nan where a value is."""
    if len(values) == 1:  # without a dimension torch's kernel is forty times faster
        low, high = torch.aminmax(values)
        return low.reshape(1), high.reshape(1)
    low, high = torch.aminmax(values, dim=1)
    return low, high


def over_ranks(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """Reduced over the ranks of torch.distributed, where it runs."""
    if dist.is_available() and dist.is_initialized():
        values = values.clone()
        dist.all_reduce(values, operation)
    return values


class _Extremes:
    """What the observers share: extremes of all that was seen."""

    low: Tensor | None = None
    high: Tensor | None = None

    def update(self, values: Tensor) -> None:
        """Take in values, (channels, n)."""
        low, high = extremes(values.detach().float())
        if self.low is None or self.high is None:
            self.low, self.high = low, high
            return
        self.low, self.high = self._join(self.low.to(low.device), low, self.high.to(high.device), high)

    def _join(self, low: Tensor, new_low: Tensor, high: Tensor, new_high: Tensor) -> tuple[Tensor, Tensor]:
        return torch.minimum(low, new_low), torch.maximum(high, new_high)

    def _seen(self) -> tuple[Tensor, Tensor]:
        if self.low is None or self.high is None:
            raise SettingError("this observer has seen no values; calibrate first")
        return self.low, self.high

    def range(self) -> tuple[Tensor, Tensor]:
        """(low, high), each (channels,)."""
        low, high = self._seen()
        # nan is neither small nor large to every backend's reduction: infinities say the same and survive.
        low, high = low.nan_to_num(-torch.inf, torch.inf, -torch.inf), high.nan_to_num(torch.inf, torch.inf, -torch.inf)
        return over_ranks(low, dist.ReduceOp.MIN), over_ranks(high, dist.ReduceOp.MAX)


class MinMax(_Extremes):
    """Smallest and largest value ever seen."""


class MovingAverage(_Extremes):
    """Average of the batches' extremes that forgets: new = old + momentum * (batch - old); over ranks, their mean."""

    def __init__(self, momentum: float = 0.1) -> None:
        if not 0 < momentum <= 1:
            raise SettingError(f"MovingAverage(momentum=...): wanted (0, 1], got {momentum}")
        self.momentum = momentum

    def _join(self, low: Tensor, new_low: Tensor, high: Tensor, new_high: Tensor) -> tuple[Tensor, Tensor]:
        return torch.lerp(low, new_low, self.momentum), torch.lerp(high, new_high, self.momentum)

    def range(self) -> tuple[Tensor, Tensor]:
        """(low, high), each (channels,)."""
        low, high = self._seen()
        both = over_ranks(torch.stack([low, high]), dist.ReduceOp.SUM)
        if dist.is_available() and dist.is_initialized():
            both = both / dist.get_world_size()
        return both[0], both[1]


class _Counting(_Extremes):
    """An observer with a histogram beside the extremes."""

    def __init__(self, bins: int) -> None:
        self.histogram = Histogram(bins)

    def update(self, values: Tensor) -> None:
        """Take in values, (channels, n)."""
        super().update(values)
        low, high = self._seen()
        if torch.isfinite(low).all() and torch.isfinite(high).all():
            self.histogram.update(values.detach().float())

    def range(self) -> tuple[Tensor, Tensor]:
        """(low, high), each (channels,)."""
        low, high = super().range()
        if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
            return low, high
        chosen_low, chosen_high = self._choose(self.histogram.joined(), low, high)
        return torch.maximum(low, chosen_low), torch.minimum(high, chosen_high)

    def _choose(self, histogram: Histogram, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError  # every subclass chooses


class Percentile(_Counting):
    """The range of the middle `share` of all values; half of the rest is cut off at each end.

    >>> seen = Percentile(0.98)
    >>> seen.update(torch.arange(1001.0).reshape(1, -1))
    >>> [round(bound.item()) for bound in seen.range()]
    [10, 990]
    """

    def __init__(self, share: float = 0.9999, *, bins: int = 2048) -> None:
        if not 0.5 < share <= 1:
            raise SettingError(f"Percentile(share=...): wanted (0.5, 1], got {share}")
        super().__init__(bins)
        self.share = share

    def _choose(self, histogram: Histogram, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        rest = (1 - self.share) / 2
        return histogram.quantile(rest), histogram.quantile(1 - rest)


class HistogramMSE(_Counting):
    """The range of least mean squared error on a grid of 2**bits steps, rounding and clipping together.

    symmetric: the same number of steps each side of 0. Zeros, which every grid has, cost nothing and are not counted.
    """

    def __init__(self, bits: int = 8, *, symmetric: bool = False, bins: int = 2048) -> None:
        _check_bits("HistogramMSE", bits)
        super().__init__(bins)
        self.bits, self.symmetric = bits, symmetric

    def _choose(self, histogram: Histogram, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return least_error(histogram, low, high, 2**self.bits, symmetric=self.symmetric)


class Entropy(_Counting):
    """The range [-t, t], cut to what was seen, whose grid of 2**bits steps loses least information: KL(values || grid).

    The search of TensorRT's calibrator (Migacz, GTC 2017): what lies beyond t counts at t.
    """

    def __init__(self, bits: int = 8, *, bins: int = 8192) -> None:
        _check_bits("Entropy", bits)
        super().__init__(bins)
        self.bits = bits

    def _choose(self, histogram: Histogram, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        sides = torch.where((low < 0) & (high > 0), 2, 1)  # of one side, all steps lie there
        largest = torch.maximum(-low, high)
        bounds = [least_divergence(histogram, c, float(largest[c]), 2**self.bits // int(sides[c])) for c in range(len(low))]
        t = torch.tensor(bounds, device=low.device)
        return -t, t


def _check_bits(name: str, bits: int) -> None:
    if not 2 <= bits <= 8:
        raise SettingError(f"{name}(bits=...): wanted 2..8, got {bits}")


#: Every observer of the library; the contract tests run over this list.
OBSERVERS = (MinMax, MovingAverage, Percentile, HistogramMSE, Entropy)
