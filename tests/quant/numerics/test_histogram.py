"""Histograms and the ranges that are chosen from them, against searches written out by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import oracles
import pytest
import torch

from compresskit.quant.numerics.histogram import Histogram, least_error
from compresskit.quant.numerics.observers import Entropy, HistogramMSE


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_no_range_has_clearly_less_error(bits, symmetric) -> None:
    """No range of a fine search over real roundings does clearly better."""
    values = torch.cat([torch.randn(4000), torch.randn(40) * 6]).double()
    if not symmetric:
        values = values.relu() + 0.0
    seen = HistogramMSE(bits, symmetric=symmetric)
    for part in values.float().split(500):
        seen.update(part[None])

    def error(low, high):
        if symmetric:
            high = max(-low, high)
            scale, zero, ends = high / (2 ** (bits - 1) - 1), 0, (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)
        else:
            scale, ends = (high - low) / (2**bits - 1), (0, 2**bits - 1)
            zero = round(-low / scale)
        back = (oracles.quantize(values, scale, zero, *ends) - zero) * scale
        return float(((values.numpy() - back) ** 2).mean())

    low, high = (float(b[0]) for b in seen.range())
    top = float(values.abs().max())
    best = min(error(-t if symmetric else 0.0, t) for t in np.linspace(0.02, 1, 400) * top)
    assert error(low, high) < 1.1 * best
    if bits < 8:
        assert error(low, high) < 0.8 * error(float(values.min()), top)


def entropy_by_hand(values: np.ndarray, levels: int, bins: int) -> float:
    """Migacz's search, one bin at a time."""
    top = np.abs(values).max()
    counts = np.histogram(np.abs(values[values != 0]), bins=bins, range=(0, top))[0].astype(float)
    best, bound = math.inf, top
    for end in range(levels, bins + 1, max(1, bins // 256)):
        p = counts[:end].copy()
        p[-1] += counts[end:].sum()
        q = np.zeros(end)
        edges = [math.ceil(i * end / levels) for i in range(levels + 1)]
        for a, b in itertools.pairwise(edges):
            filled = [i for i in range(a, b) if p[i] > 0]
            for i in filled:
                q[i] = counts[a:b].sum() / len(filled)
        p, q = p / p.sum(), q / q.sum()
        kl = sum(a * math.log(a / max(b, 1e-12)) for a, b in zip(p, q, strict=True) if a > 0)
        if kl < best:
            best, bound = kl, end / bins * top
    return bound


@pytest.mark.parametrize("side", [1, 2])
def test_least_divergence_is_migaczs(side) -> None:
    values = torch.cat([torch.randn(20000), torch.randn(20) * 8])
    values = values.abs() if side == 1 else values
    seen = Entropy(6)
    seen.update(values[None])
    wanted = entropy_by_hand(values.numpy(), 2**6 // side, 2048)
    assert seen.range()[1].item() == pytest.approx(wanted, rel=0.05)
    assert wanted < 0.7 * values.abs().max()


def test_a_histogram_grows_by_merging_bins() -> None:
    """Counting piece by piece gives what counting at once on the final bins gives; the memory never grows."""
    histogram, values = Histogram(128), torch.randn(2, 3000) * torch.linspace(0.1, 9, 3000)
    for part in values.split(100, dim=1):
        histogram.update(part)
        assert histogram.counts.shape == (2, 128)
    assert histogram.counts.sum(1).tolist() == [3000, 3000]
    for c in range(2):
        edges = histogram.origin[c] + histogram.width[c] * torch.arange(129, dtype=torch.float64)
        wanted = np.histogram(values[c].double().numpy(), bins=edges.numpy())[0]
        assert np.abs(histogram.counts[c].numpy() - wanted).sum() <= 2  # a value on an edge
    spread = values.amax(1) - values.amin(1)
    assert (histogram.width * 128 < 4.1 * spread).all()


class CountsCentres(Histogram):
    calls = 0

    def centres(self):
        self.calls += 1
        return super().centres()


@pytest.mark.parametrize("channels", [1, 300])
def test_the_range_of_least_error_is_the_first_of_the_best_candidates(channels) -> None:
    """Against one candidate at a time; bins are read once for each end, not for each candidate."""
    values = torch.randn(channels, 400) * torch.linspace(0.1, 3, channels)[:, None]
    histogram = CountsCentres(64)
    histogram.update(values)
    low, high = values.amin(1), values.amax(1)
    got = least_error(histogram, low, high, 32, symmetric=True, candidates=20)
    assert histogram.calls == 2
    reach = torch.maximum(-low, high).double()
    centres, best, least = Histogram.centres(histogram), reach.clone(), torch.full_like(reach, math.inf)
    for fraction in torch.linspace(1, 1 / 20, 20, dtype=torch.float64):
        end = (reach * fraction)[:, None]
        inside = ((centres.abs() <= end) * histogram.counts).sum(1) * (2 * end[:, 0] / 31).square() / 12
        error = ((centres - centres.clamp(-end, end)).square() * histogram.counts).sum(1) + inside
        best, least = torch.where(error < least, end[:, 0], best), torch.minimum(error, least)
    assert torch.equal(got[1], best.float())
    assert torch.equal(got[0], -best.float())


@pytest.mark.parametrize("steps", [2, 4, 16])
def test_the_error_of_few_steps_is_that_of_each_value(steps) -> None:
    """Between two steps values are not spread evenly: with one bit, of values behind a ReLU, most lie near zero."""
    values = torch.randn(1, 4000).clamp(min=0)
    histogram = Histogram(2048)
    histogram.update(values)
    got = least_error(histogram, values.amin(1), values.amax(1), steps, symmetric=False)[1]
    errors = {}
    for fraction in torch.linspace(1, 0.01, 100):
        step = values.max() * fraction / (steps - 1)
        errors[float(values.max() * fraction)] = float(
            (torch.round(values / step).clamp(0, steps - 1) * step - values).square().sum()
        )
    best = min(errors, key=lambda end: errors[end])
    assert float(got) == pytest.approx(best, rel=0.05)


def test_neither_end_of_the_range_of_least_error_can_be_moved_alone() -> None:
    """What is left of one end changes which other end is best, so both are searched again."""
    values = torch.cat([torch.randn(3000).abs() ** 3, -(torch.randn(3000).abs() ** 3) / 3])[None]
    histogram = Histogram(2048)
    histogram.update(values)
    ends = [values.amin(1), values.amax(1)]
    got = list(least_error(histogram, *ends, 32, symmetric=False))

    def error(low: torch.Tensor, high: torch.Tensor) -> float:
        step, centres = float(high - low) / 31, histogram.centres()
        lost = centres - centres.clamp(low, high)
        return float((torch.where(lost == 0, step**2 / 12, lost.square()) * histogram.counts).sum())

    least = error(*got)
    for side in (0, 1):
        for fraction in torch.linspace(1, 0.01, 100):
            moved = list(got)
            moved[side] = ends[side] * fraction
            assert error(*moved) >= least * (1 - 1e-9)
