"""Observers collect statistics of activations during calibration and return the range to quantize.

    update(values)    values: (channels, n); called once for each batch
    range()           -> (low, high), each (channels,); under torch.distributed over all ranks, which must all call it

The observers here see every value once and keep a few numbers per channel: extremes, or a histogram that widens its range by
merging bins. A value that is not finite makes the range not finite. To add an observer, write a class with these two methods and
pass the class, or a factory such as `partial(Percentile, 0.999)`, as `observer=`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from compresskit.base.distributed import joins_rows
from compresskit.base.errors import SettingError
from compresskit.base.settings import as_python
from compresskit.quant.numerics.histogram import Histogram, least_divergence, least_error


@runtime_checkable
class Observer(Protocol):
    """What an observer must have: any class with these two methods is one, and needs no arguments to be made."""

    def update(self, values: Tensor) -> None:
        """Take in values, (channels, n), of any floating dtype."""

    def range(self) -> tuple[Tensor, Tensor]:
        """The range to quantize: (low, high), each (channels,)."""
        ...


def check_observer(observer: object, where: str) -> None:
    """Raise SettingError unless `observer` is None or makes observers: a class, or a function without arguments."""
    if observer is None or (callable(observer) and (isinstance(observer, type) or not isinstance(observer, Observer))):
        return
    if isinstance(observer, Observer):
        kind = type(observer).__name__
        hint = f"each activation needs its own: write observer={kind}, or functools.partial({kind}, ...) with its settings"
        raise SettingError(f"{where}(observer=...): wanted a class or a function that makes observers, got an instance; {hint}")
    raise SettingError(f"{where}(observer=...): wanted a class such as quant.observers.MinMax, got {observer!r}")


def extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each row of (channels, n), each (channels,); nan where a row holds nan."""
    if len(values) == 1:  # without a dimension torch's kernel is forty times faster
        low, high = torch.aminmax(values)
        return low.reshape(1), high.reshape(1)
    return values.amin(1), values.amax(1)  # `torch.aminmax` along a dimension takes ten times as long on a CPU


def over_ranks(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """Reduce a tensor over the ranks of torch.distributed, where it runs and statistics are those of all rows."""
    if joins_rows():
        values = values.clone()
        dist.all_reduce(values, operation)
    return values


class _Extremes:
    """Common base of the observers: extremes of all values."""

    low: Tensor | None = None
    high: Tensor | None = None

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in vars(self).items() if isinstance(value, int | float))
        return f"{type(self).__name__}({settings})"

    def update(self, values: Tensor) -> None:
        """Take in values, (channels, n)."""
        low, high = extremes(values.detach().float())
        if self.low is None or self.high is None:
            self.low, self.high = low, high
            return
        self.low, self.high = self._join(self.low.to(low.device), low, self.high.to(high.device), high)

    def _join(self, low: Tensor, new_low: Tensor, high: Tensor, new_high: Tensor) -> tuple[Tensor, Tensor]:
        return torch.minimum(low, new_low), torch.maximum(high, new_high)

    def _observed(self) -> tuple[Tensor, Tensor]:
        if self.low is None or self.high is None:
            raise SettingError("this observer has seen no values; calibrate first")
        return self.low, self.high

    def range(self) -> tuple[Tensor, Tensor]:
        """(low, high), each (channels,)."""
        low, high = self._observed()
        # Backends disagree on reductions of nan; infinities mark the range as not finite just as well.
        low, high = low.nan_to_num(-torch.inf, torch.inf, -torch.inf), high.nan_to_num(torch.inf, torch.inf, -torch.inf)
        return over_ranks(low, dist.ReduceOp.MIN), over_ranks(high, dist.ReduceOp.MAX)


def has_seen_nothing(observer: Observer) -> bool:
    """Whether an observer got no values; of one of the user's own it is not known, and False."""
    return isinstance(observer, _Extremes) and (observer.low is None or observer.high is None)


def observed_ends(observer: Observer) -> tuple[float, float]:
    """The extremes that an observer of one channel follows; nan where it has none, as one of the user's own."""
    if not isinstance(observer, _Extremes) or observer.low is None or observer.high is None or observer.low.numel() != 1:
        return math.nan, math.nan
    return float(observer.low), float(observer.high)


def set_observed_ends_(observer: Observer, low: Tensor, high: Tensor) -> None:
    """Let an observer of one channel go on from extremes that `observed_ends` gave."""
    if isinstance(observer, _Extremes) and not bool(low.isnan()):
        observer.low, observer.high = low.reshape(1).clone(), high.reshape(1).clone()


class MinMax(_Extremes):
    """Smallest and largest value of the calibration data."""


class KnownRange(_Extremes):
    """A range that is known before any value is seen, such as that of a sigmoid: `partial(KnownRange, 0.0, 1.0)`.

    lowest, highest: finite, the first the smaller one. Values that are not finite make the range not finite here, too.
    fixed: integers must saturate at its ends, so that nothing may change it, not even training.
    """

    def __init__(self, lowest: float, highest: float, *, fixed: bool = False) -> None:
        if not -math.inf < lowest < highest < math.inf:
            raise SettingError(f"KnownRange: wanted two finite numbers, the first the smaller one, got {lowest} and {highest}")
        self.lowest, self.highest, self.fixed = float(lowest), float(highest), fixed

    def range(self) -> tuple[Tensor, Tensor]:
        """(low, high), each (channels,)."""
        low, high = super().range()
        whole = torch.isfinite(low) & torch.isfinite(high)
        return low.masked_fill(whole, self.lowest), high.masked_fill(whole, self.highest)


def has_fixed_range(observer: Observer) -> bool:
    """Whether integers must saturate at the ends of the range, so that no other rule may choose it."""
    return isinstance(observer, KnownRange) and observer.fixed


class MovingAverage(_Extremes):
    """Moving average of the extremes of batches: new = old + momentum * (batch - old); averaged over ranks.

    momentum: weight of the newest batch, in (0, 1].
    """

    def __init__(self, momentum: float = 0.1) -> None:
        if not 0 < momentum <= 1:
            raise SettingError(f"MovingAverage(momentum=...): wanted (0, 1], got {momentum}")
        self.momentum = momentum

    def _join(self, low: Tensor, new_low: Tensor, high: Tensor, new_high: Tensor) -> tuple[Tensor, Tensor]:
        return torch.lerp(low, new_low, self.momentum), torch.lerp(high, new_high, self.momentum)

    def range(self) -> tuple[Tensor, Tensor]:
        """(low, high), each (channels,)."""
        low, high = self._observed()
        both = over_ranks(torch.stack([low, high]), dist.ReduceOp.SUM)
        if joins_rows():
            both = both / dist.get_world_size()
        return both[0], both[1]


class _HistogramObserver(_Extremes):
    """Base of observers that choose a range from a histogram."""

    def __init__(self, bins: int) -> None:
        self.histogram = Histogram(bins)

    def update(self, values: Tensor) -> None:
        """Take in values, (channels, n)."""
        super().update(values)
        low, high = self._observed()
        if torch.isfinite(low).all() and torch.isfinite(high).all():
            self.histogram.update(values.detach().float())

    def range(self) -> tuple[Tensor, Tensor]:
        """(low, high), each (channels,)."""
        low, high = super().range()
        if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
            return low, high
        chosen_low, chosen_high = self._choose(self.histogram.joined(), low, high)
        return torch.maximum(low, chosen_low), torch.minimum(high, chosen_high)

    @abstractmethod
    def _choose(self, histogram: Histogram, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The range, from a histogram and the observed extremes."""


class Percentile(_HistogramObserver):
    """The range of the middle `fraction` of all values; half of the rest is clipped at each end.

    >>> observer = Percentile(0.98)
    >>> observer.update(torch.arange(1001.0).reshape(1, -1))
    >>> [round(bound.item()) for bound in observer.range()]
    [10, 990]
    """

    def __init__(self, fraction: float = 0.9999, *, bins: int = 2048) -> None:
        if not 0.5 < fraction <= 1:
            raise SettingError(f"Percentile(fraction=...): wanted (0.5, 1], got {fraction}")
        super().__init__(bins)
        self.fraction = fraction

    def _choose(self, histogram: Histogram, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        rest = (1 - self.fraction) / 2
        return histogram.quantile(rest), histogram.quantile(1 - rest)


class HistogramMSE(_HistogramObserver):
    """The range of least mean squared error, of rounding and clipping together, for a format of 2**bits integers.

    bits: 2 to 8. symmetric: search ranges (-t, t). Exact zeros are not counted, because every format represents them.
    """

    def __init__(self, bits: int = 8, *, symmetric: bool = False, bins: int = 2048) -> None:
        _check_bits("HistogramMSE", bits)
        super().__init__(bins)
        self.bits, self.symmetric = bits, symmetric

    def _choose(self, histogram: Histogram, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return least_error(histogram, low, high, 2**self.bits, symmetric=self.symmetric)


class Entropy(_HistogramObserver):
    """The range [-t, t], within the observed extremes, of least KL divergence between values and quantized values.

    The search of TensorRT's calibrator (Migacz, "8-bit inference with TensorRT", GTC 2017): values beyond t count at t.

    bits: 2 to 8.
    """

    def __init__(self, bits: int = 8, *, bins: int = 8192) -> None:
        _check_bits("Entropy", bits)
        super().__init__(bins)
        self.bits = bits

    def _choose(self, histogram: Histogram, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        sides = torch.where((low < 0) & (high > 0), 2, 1)  # values of one sign use all steps
        largest = torch.maximum(-low, high)
        bounds = [least_divergence(histogram, c, float(largest[c]), 2**self.bits // int(sides[c])) for c in range(len(low))]
        t = torch.tensor(bounds, dtype=low.dtype, device=low.device)
        return -t, t


def _check_bits(name: str, bits: int) -> None:
    if not isinstance(as_python(bits), int) or not 2 <= bits <= 8:
        raise SettingError(f"{name}(bits=...): wanted a whole number of 2..8, got {bits!r}")


#: All observers of the library; the contract tests run over this list.
OBSERVERS = (MinMax, MovingAverage, Percentile, HistogramMSE, Entropy)
