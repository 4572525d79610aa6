"""How sure an accuracy is: its confidence interval, and paired tests of two models on the same samples."""

from __future__ import annotations

import math
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
    if n == 0:
        return 1.0
    terms = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(min(lost, gained) + 1))
    return min(1.0, 2.0 * math.fsum(math.exp(term - n * math.log(2.0)) for term in terms))


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """Two models on the same samples.

    samples: of both. lost, gained: how many only the first, and only the second, has right. p: of McNemar's test.
    low, high: 95 % interval of the difference in accuracy, second minus first, for paired samples.
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
    difference = (gained - lost) / samples
    half = Z95 * math.sqrt(max(0.0, lost + gained - (gained - lost) ** 2 / samples)) / samples
    p = mcnemar(lost, gained)
    return PairedTest(samples=samples, lost=lost, gained=gained, p=p, low=difference - half, high=difference + half)
