"""Minimum cuts against every cut there is."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from compresskit.quant.numerics.minimum_cut import minimum_cut


@pytest.mark.parametrize("seed", range(10))
def test_no_cut_is_cheaper(seed: int) -> None:
    draw = random.Random(seed)
    edges = {(a, b): draw.random() for a in range(8) for b in range(8) if a != b and draw.random() < 0.5}

    def capacity(side: frozenset[int]) -> float:
        return sum(value for (a, b), value in edges.items() if a in side and b not in side)

    found = minimum_cut(edges, 0, 7)
    assert 0 in found
    assert 7 not in found
    every = (frozenset({0, *some}) for k in range(7) for some in itertools.combinations(range(1, 7), k))
    assert capacity(found) == pytest.approx(min(map(capacity, every)))


def test_edges_without_bound_are_not_cut() -> None:
    edges = {("s", "project"): 3.0, ("project", "tool"): math.inf, ("tool", "t"): 2.0}
    assert minimum_cut(edges, "s", "t") == {"s", "project", "tool"}
    assert minimum_cut(edges | {("tool", "t"): 4.0}, "s", "t") == {"s"}
