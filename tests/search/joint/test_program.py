"""The exact choice of channels and bits: the best of all choices of small networks, by going through every one of them."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from compresskit.search.joint.file_size import Side, StoredWeight, modelled_bytes
from compresskit.search.joint.program import Options, best_choice

#: What each weight of a random network is made of, (outputs, inputs), each as {group: entries a channel} and what always stays.
CHAIN = [(({0: 1}, 0), ({}, 3)), (({1: 1}, 0), ({0: 1}, 0)), (({}, 5), ({1: 4}, 0))]
RESIDUAL = [(({0: 1}, 2), ({}, 3)), (({1: 1}, 0), ({0: 1}, 2)), (({0: 1}, 2), ({1: 1}, 0)), (({0: 1}, 2), ({0: 1}, 2))]
SEVERAL = [(({0: 2}, 0), ({}, 3)), (({1: 3}, 1), ({0: 2}, 0)), (({}, 5), ({1: 3}, 1))]  # entries of a channel, outputs, too


def drawn(network, seed: int) -> Options:
    random.seed(seed)
    groups = tuple({kept: random.uniform(0, 1) * (6 - kept) for kept in (2, 3, 4, 6)} for _ in range(2))
    layers = tuple({bits: random.uniform(0.5, 2) * 4.0**-bits * 8 for bits in (2, 3, 7, 8)} for _ in network[:3])
    weights = []
    for i, (outputs, inputs) in enumerate(network):
        sides = [Side(groups=groups_of, fixed=fixed) for groups_of, fixed in (outputs, inputs)]
        weights.append(StoredWeight(layer=i if i < 3 else None, outputs=sides[0], inputs=sides[1], rest=8))
    return Options(groups=groups, layers=layers, weights=tuple(weights))


def size_by_hand(network, kept, bits) -> float:
    total = 0.0
    for i, ((made, always_made), (read, always_read)) in enumerate(network):
        outputs = always_made + sum(each * kept[group] for group, each in made.items())
        inputs = always_read + sum(each * kept[group] for group, each in read.items())
        stored = {2: 2, 3: 3, 7: 8, 8: 8}[bits[i]] if i < 3 else 32
        total += 8 * outputs * inputs * stored / 8 + (12 * outputs if i < 3 else 0)
    return total


@pytest.mark.parametrize("network", [CHAIN, RESIDUAL, SEVERAL], ids=["chain", "residual", "several"])
@pytest.mark.parametrize("seed", range(3))
def test_the_choice_is_the_best_of_all_within_the_budget(network, seed) -> None:
    options = drawn(network, seed)
    every = [
        (sum(losses[option] for losses, option in zip((*options.groups, *options.layers), choice, strict=True)), choice)
        for choice in itertools.product(*options.groups, *options.layers)
    ]
    sizes = sorted(size_by_hand(network, choice[:2], choice[2:]) for _, choice in every)
    for most in (sizes[0], sizes[len(sizes) // 4], sizes[len(sizes) // 2], sizes[-1]):
        least = min(loss for loss, choice in every if size_by_hand(network, choice[:2], choice[2:]) <= most + 1e-6)
        found = best_choice(options, most + 1e-6)
        assert found is not None
        assert size_by_hand(network, *found) <= most + 1e-3
        assert options.loss(*found) == pytest.approx(least, rel=2e-4, abs=1e-6)
        assert modelled_bytes(options.weights, *found) == pytest.approx(size_by_hand(network, *found), abs=4)
    assert best_choice(options, sizes[0] - 1) is None


def test_seven_bits_take_eight_in_the_file() -> None:
    weight = StoredWeight(layer=0, outputs=Side(fixed=4, groups={}), inputs=Side(fixed=3, groups={}), rest=1)
    assert modelled_bytes([weight], [], [7]) == modelled_bytes([weight], [], [8]) == 12 + 4 * 12
    assert modelled_bytes([weight], [], [3]) == math.ceil(12 * 3 / 8) + 4 * 12
