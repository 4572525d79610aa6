"""How sure a metric is: its confidence interval, and paired tests of two models on the same samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054  # of a normal distribution: 95 % lie within


def wilson_interval(right: int, samples: int) -> tuple[float, float]:
    """The 95 % interval of a fraction by Wilson's score (1927); samples > 0.

    >>> tuple(round(end, 3) for end in wilson_interval(90, 100))
    (0.826, 0.945)
    """
    p, z2 = right / samples, Z95**2
    middle = (p + z2 / (2 * samples)) / (1 + z2 / samples)
    half = Z95 * math.sqrt(p * (1 - p) / samples + z2 / (4 * samples**2)) / (1 + z2 / samples)
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar(lost: int, gained: int) -> float:
    """The exact two-sided p-value of McNemar's test.

    Of two equally good models, each sample that only one has right falls to either with probability 1/2.

    Args:
        lost: samples that only the first model has right. gained: those that only the second has right.
    """
    n = lost + gained
    return min(1.0, 2.0 * binomial_tail(min(lost, gained), n, 0.5)) if n else 1.0


def binomial_tail(most: int, n: int, p: float) -> float:
    """The probability of at most `most` successes in n draws of probability p, 0 < p < 1."""
    chosen = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(most + 1))
    return math.fsum(math.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p)) for k, ways in enumerate(chosen))


def exact_interval(successes: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a probability by Clopper and Pearson (1934); it holds 1/2 where `mcnemar` gives 0.05 or more."""

    def highest(most: int) -> float:
        """The largest p at which at most `most` successes still have a chance of 2.5 %, by bisection."""
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if binomial_tail(most, n, middle) > 0.025 else (low, middle)
        return (low + high) / 2

    return 1.0 - highest(n - successes) if successes else 0.0, highest(successes) if successes < n else 1.0


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """Two models on the same samples.

    samples: of both. lost, gained: how many only the first, and only the second, has right. p: of McNemar's test.
    low, high: 95 % interval of the difference in accuracy, second minus first, given how many samples changed.
    """

    samples: int
    lost: int
    gained: int
    p: float
    low: float
    high: float


def paired_test(before: str, after: str, samples: int) -> PairedTest:
    """Compare two models by which samples they have right, as `measure_outcomes` writes it."""
    first, second = int(before, 16), int(after, 16)
    lost, gained = (first & ~second).bit_count(), (second & ~first).bit_count()
    changed = lost + gained
    low, high = ((2 * end - 1) * changed / samples for end in exact_interval(gained, changed)) if changed else (0.0, 0.0)
    return PairedTest(samples=samples, lost=lost, gained=gained, p=mcnemar(lost, gained), low=low, high=high)


def bootstrap_interval(resampled: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a metric by the percentiles of its resamples (Efron 1979), of which there are some.

    >>> bootstrap_interval([x / 1000 for x in range(1001)])
    (0.025, 0.975)
    """
    ordered = sorted(resampled)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.025), at(0.975)


@dataclass(frozen=True, kw_only=True)
class PairedBootstrap:
    """The difference of two models' metric over the same draws of the same samples, second minus first.

    low, high: 95 % interval. p: two-sided: how often draws show no difference or the opposite one, at least 2 / (draws + 1).
    """

    low: float
    high: float
    p: float


def paired_bootstrap(before: Sequence[float], after: Sequence[float]) -> PairedBootstrap:
    """Compare two models by the metric of the same draws; both sequences are of one length, > 0."""
    differences = [second - first for first, second in zip(before, after, strict=True)]
    tails = [1 + sum(difference * sign <= 0 for difference in differences) for sign in (1, -1)]
    low, high = bootstrap_interval(differences)
    return PairedBootstrap(low=low, high=high, p=min(1.0, 2 * min(tails) / (len(differences) + 1)))
