"""Intervals and paired tests against scipy's, and against counting."""

from __future__ import annotations

import math
import random

import pytest
from scipy.stats import binomtest

from compresskit.recipe.page.statistics import mcnemar, paired_test, wilson_interval


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
    changes = [after - before for before, after in pairs]
    mean = sum(changes) / 1001
    error = math.sqrt(sum((change - mean) ** 2 for change in changes)) / 1001  # of the mean of paired differences
    assert (found.low, found.high) == pytest.approx((mean - 1.959964 * error, mean + 1.959964 * error), abs=1e-6)
