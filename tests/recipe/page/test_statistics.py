"""Intervals and paired tests against scipy's, and against counting."""

from __future__ import annotations

import random

import pytest
from scipy.stats import binomtest, norm

from compresskit.recipe.page.statistics import (
    bootstrap_interval,
    exact_interval,
    mcnemar,
    paired_bootstrap,
    paired_test,
    wilson_interval,
)


@pytest.mark.parametrize(("right", "samples"), [(0, 1), (1, 1), (5, 10), (535, 540), (9_876, 10_000)])
def test_an_interval_is_that_of_wilson(right, samples) -> None:
    wanted = binomtest(right, samples).proportion_ci(method="wilson")
    assert wilson_interval(right, samples) == pytest.approx((wanted.low, wanted.high), abs=1e-9)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (0, 1), (3, 3), (10, 2), (2, 10), (400, 300), (5_000, 4_800)])
def test_a_paired_test_is_exact(lost, gained) -> None:
    wanted = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    assert mcnemar(lost, gained) == pytest.approx(wanted, rel=1e-6)


def test_a_paired_test_counts_samples() -> None:
    draw = random.Random(0)
    before, after = ([draw.random() < chance for _ in range(1001)] for chance in (0.9, 0.85))
    words = [f"{int(''.join('01'[value] for value in values), 2):0251x}" for values in (before, after)]
    found = paired_test(*words, 1001)
    pairs = list(zip(before, after, strict=True))
    assert (found.lost, found.gained) == (pairs.count((True, False)), pairs.count((False, True)))
    wanted = binomtest(found.gained, found.gained + found.lost).proportion_ci(method="exact")
    assert (found.low, found.high) == pytest.approx(
        tuple((2 * end - 1) * (found.gained + found.lost) / 1001 for end in (wanted.low, wanted.high)), abs=1e-9
    )
    same = paired_test("f0", "f0", 8)
    assert (same.p, same.low, same.high) == (1.0, 0.0, 0.0)


def test_the_interval_and_the_test_agree() -> None:
    for changed in range(1, 40):
        for gained in range(changed + 1):
            low, high = exact_interval(gained, changed)
            assert (low <= 0.5 <= high) == (mcnemar(changed - gained, gained) >= 0.05)


def test_a_bootstrap_of_a_normal_difference_is_that_of_the_normal_distribution() -> None:
    draw = random.Random(0)
    before = [draw.gauss(1.0, 0.3) for _ in range(20_000)]
    after = [value + draw.gauss(0.2, 0.1) for value in before]  # most of what varies is common to both
    found = paired_bootstrap(before, after)
    assert (found.low, found.high) == pytest.approx((0.2 - 0.196, 0.2 + 0.196), abs=0.006)
    assert found.p == pytest.approx(2 * norm.cdf(-2), rel=0.15)
    low, high = bootstrap_interval(before)
    assert (low, high) == pytest.approx((1 - 1.96 * 0.3, 1 + 1.96 * 0.3), abs=0.02)
    same = paired_bootstrap(before[:400], before[:400])
    assert (same.low, same.high, same.p) == (0.0, 0.0, 1.0)
    assert paired_bootstrap(before[:399], [value + 1 for value in before[:399]]).p == 2 / 400
