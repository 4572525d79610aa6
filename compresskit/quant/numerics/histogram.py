"""Histograms of values per channel, and the quantization ranges of least squared error or least divergence that follow from them.

A histogram widens its range as values arrive, by merging pairs of bins.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from compresskit.base.distributed import joins_rows
from compresskit.base.errors import SettingError

MAX_BINS = 2**22  # of |x|; 32 MiB
CHUNK = 2**18  # values that are counted at once: their bin numbers take eight bytes each


class Histogram:
    """A histogram of each channel with `bins` bins of equal width; exact zeros are counted separately.

    counts: values in each bin, (channels, bins), float64. zeros: exact zeros, (channels,).
    origin: start of the first bin; width: of one bin; both (channels,), float64.
    """

    counts: Tensor
    zeros: Tensor
    origin: Tensor
    width: Tensor

    def __init__(self, bins: int) -> None:
        if bins < 64 or bins % 2:
            raise SettingError(f"bins: wanted an even number >= 64, got {bins}")
        self.bins, self.started = bins, False

    def update(self, values: Tensor) -> None:
        """Count finite values (channels, n)."""
        for part in values.split(max(1, CHUNK // len(values)), dim=1):
            self._count(part.double())

    def _count(self, values: Tensor) -> None:
        low, high = values.amin(1), values.amax(1)
        if not self.started:
            self.started = True
            self.counts = values.new_zeros(len(values), self.bins)
            self.zeros = values.new_zeros(len(values))
            least = torch.maximum(low.abs(), high.abs()).clamp(min=1e-30) * 1e-9
            self.origin, self.width = low, torch.maximum(high - low, least) * (1 + 1e-9) / self.bins
        while True:
            under, over = low < self.origin, high >= self.origin + self.width * self.bins
            if not (under | over).any():
                break
            self._grow(under, over)
        nonzero = values != 0
        self.zeros += (~nonzero).sum(1)
        index = ((values - self.origin[:, None]) / self.width[:, None]).long().clamp_(0, self.bins - 1)
        index += torch.arange(len(values), device=values.device)[:, None] * self.bins
        self.counts += torch.bincount(index[nonzero], minlength=self.counts.numel()).view_as(self.counts)

    def _grow(self, under: Tensor, over: Tensor) -> None:
        """Double the bin width of some channels by merging pairs; `under`: the free half is below the old range, else above."""
        merged = self.counts.view(len(self.counts), -1, 2).sum(2)
        empty = torch.zeros_like(merged)
        new = torch.where(under[:, None], torch.cat([empty, merged], 1), torch.cat([merged, empty], 1))
        self.counts = torch.where((under | over)[:, None], new, self.counts)
        self.origin = torch.where(under, self.origin - self.width * self.bins, self.origin)
        self.width = torch.where(under | over, self.width * 2, self.width)

    def centres(self) -> Tensor:
        """Centres of the bins, (channels, bins)."""
        return self.origin[:, None] + (torch.arange(self.bins, device=self.width.device) + 0.5) * self.width[:, None]

    def joined(self) -> Histogram:
        """The histogram over all ranks of torch.distributed, with bins at their centres; itself for one rank."""
        if not joins_rows():
            return self
        parts = [self.origin, self.width, self.zeros]
        packed = torch.cat([torch.stack(parts, 1), self.counts], 1)
        gathered = [torch.empty_like(packed) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, packed)
        whole = Histogram(self.bins)
        whole.started = True
        whole.origin = torch.stack([g[:, 0] for g in gathered]).amin(0)
        whole.width = (torch.stack([g[:, 0] + g[:, 1] * self.bins for g in gathered]).amax(0) - whole.origin) / self.bins
        whole.zeros = sum((g[:, 2] for g in gathered), torch.zeros_like(self.zeros))
        whole.counts = torch.zeros_like(self.counts)
        for g in gathered:
            middles = g[:, :1] + (torch.arange(self.bins, device=g.device) + 0.5) * g[:, 1:2]
            index = ((middles - whole.origin[:, None]) / whole.width[:, None]).long().clamp_(0, self.bins - 1)
            whole.counts.scatter_add_(1, index, g[:, 3:])
        return whole

    def quantile(self, fraction: float) -> Tensor:
        """The value below which the given fraction of all values lies, (channels,); values are taken as uniform inside a bin."""
        counts = self.counts.clone()
        zero = ((0 - self.origin) / self.width).floor().long()
        inside = (zero >= 0) & (zero < self.bins)
        counts.scatter_add_(1, zero.clamp(0, self.bins - 1)[:, None], torch.where(inside, self.zeros, 0)[:, None])
        total = counts.cumsum(1)
        rank = total[:, -1:] * fraction
        index = torch.searchsorted(total, rank).clamp(max=self.bins - 1)
        before = total.gather(1, index) - counts.gather(1, index)
        within = ((rank - before) / counts.gather(1, index).clamp(min=1)).clamp(0, 1)
        return (self.origin[:, None] + (index + within) * self.width[:, None])[:, 0].float()


FEW_STEPS = 16  # integers of a grid whose values are not spread evenly between two of them


def least_error(
    histogram: Histogram, low: Tensor, high: Tensor, steps: int, *, symmetric: bool, candidates: int = 100
) -> tuple[Tensor, Tensor]:
    """The range inside (low, high), 0 included, whose grid has the least squared error.

    A value inside the range costs step^2 / 12 on average, one outside its squared distance from the end; of a grid of at most
    `FEW_STEPS` integers each value is rounded. The two ends are searched alternately, over `candidates` fractions of the observed
    range.

    Args:
        histogram: of the values.
        low, high: the observed range, each (channels,).
        steps: number of integers of the grid.
        symmetric: search ranges (-t, t).

    Returns (low, high), each (channels,) fp32.
    """
    low, high = low.double().clamp(max=0), high.double().clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    fractions = torch.linspace(1, 1 / candidates, candidates, device=low.device, dtype=torch.float64)
    ends = [torch.ones_like(low), torch.ones_like(high)]  # fractions of low and of high that are kept
    for side in (0, 1) if symmetric else (1, 0, 1, 0):
        tried = [end.repeat(candidates, 1) for end in ends]
        for changed in (0, 1) if symmetric else (side,):
            tried[changed] = fractions[:, None].expand(-1, len(low))
        errors = _squared_errors(histogram, low * tried[0], high * tried[1], steps)
        best = fractions[errors.argmin(0)]
        ends = [best, best] if symmetric else [best if i == side else end for i, end in enumerate(ends)]
    return (low * ends[0]).float(), (high * ends[1]).float()


def _squared_errors(histogram: Histogram, low: Tensor, high: Tensor, steps: int) -> Tensor:
    """The squared error in each channel of each candidate range; low, high and the result: (candidates, channels)."""
    centres, counts = histogram.centres(), histogram.counts
    errors = []
    for lower, upper in zip(*(ends.split(max(1, CHUNK // counts.numel())) for ends in (low, high)), strict=True):
        if steps <= FEW_STEPS:
            step = ((upper - lower) / (steps - 1)).clamp(min=torch.finfo(centres.dtype).tiny)[..., None]
            nearest = (centres / step).round_().mul_(step).clamp_(lower[..., None], upper[..., None])
            errors.append(torch.sub(centres, nearest, out=nearest).square_().mul_(counts).sum(-1))
            continue
        nearest = centres.clamp(lower[..., None], upper[..., None])
        inside = (nearest == centres) * counts
        outside = torch.sub(centres, nearest, out=nearest).square_().mul_(counts)
        errors.append(outside.sum(-1) + inside.sum(-1) * ((upper - lower) / (steps - 1)).square() / 12)
    return torch.cat(errors)


def least_divergence(histogram: Histogram, channel: int, largest: float, levels: int) -> float:
    """The bound t in one channel for which |x|, quantized to `levels` levels over [0, t], diverges least from the histogram."""
    # Bins of |x| as wide as those of x: narrower ones would be empty in between, which distorts the divergence.
    width = float(histogram.width[channel])
    bins = max(levels, int(largest / width) + 1)
    if bins > MAX_BINS:  # almost constant, far from 0: no bound below the largest value keeps any
        return largest
    index = (histogram.centres()[channel].abs() / width).long().clamp_(0, bins - 1)
    counts = torch.zeros(bins, dtype=torch.float64, device=index.device).scatter_add_(0, index, histogram.counts[channel])
    best, bound = float("inf"), largest
    for end in range(levels, bins + 1, max(1, bins // 256)):
        kept = counts[:end].clone()
        kept[-1] += counts[end:].sum()  # clipped values
        divergence = _divergence(counts[:end], kept, levels)
        if divergence < best:
            best, bound = divergence, end * width
    return bound


def _divergence(counts: Tensor, kept: Tensor, levels: int) -> float:
    """KL(kept || quantized counts), where the count of a level is spread evenly over its non-empty bins."""
    level = (torch.arange(len(counts), device=counts.device) * levels) // len(counts)
    filled = (kept > 0).double()
    total = torch.zeros(levels, dtype=torch.float64, device=counts.device)
    mean = total.scatter_add(0, level, counts) / total.scatter_add(0, level, filled).clamp(min=1)
    q = mean[level] * filled
    p, q = kept / kept.sum(), q / q.sum().clamp(min=1e-300)
    positive = p > 0
    return float((p[positive] * (p[positive] / q[positive].clamp(min=1e-12)).log()).sum())
