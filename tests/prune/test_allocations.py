"""Allocations: how a ratio is distributed over layers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.prune.allocations import counts, erk_ratios, lamp_ratios, measured_ratios, uniform_ratios

pytestmark = pytest.mark.filterwarnings("ignore:.* loses all of its weights")  # which has a test of its own


QUICK = settings(max_examples=25, deadline=None)


@given(st.lists(st.tuples(st.floats(0, 0.999), st.integers(1, 500)), min_size=1, max_size=8))
@QUICK
def test_counts_add_up(layers) -> None:
    ratios = {str(i): r for i, (r, _) in enumerate(layers)}
    sizes = {str(i): n for i, (_, n) in enumerate(layers)}
    found = counts(ratios, sizes)
    assert sum(found.values()) == pytest.approx(sum(r * n for r, n in layers), abs=0.5 + 1e-6)
    assert all(math.floor(ratios[k] * sizes[k] + 1e-9) <= c <= ratios[k] * sizes[k] + 1 for k, c in found.items())


@pytest.mark.parametrize(
    ("wrong", "known"),
    [("erk", "erk"), ("uniform", "uniform"), ("lamp_ratios", "lamp"), (0.5, "erk"), ([("0.weight", 0.1)], "erk"), (dict, "erk")],
)
def test_what_is_no_allocation_is_refused(wrong, known) -> None:
    """It was left out without a word, and the weights of all layers were ranked together."""
    message = rf"\(allocation=\.\.\.\): wanted a function such as prune\.allocations\.{known}_ratios, or {{name: ratio}}, got "
    budget = ck.remove(weights=0.6)
    with pytest.raises(SettingError, match="plan_mask" + message):
        ck.prune.plan_mask(torch.nn.Linear(8, 8), budget, allocation=wrong)
    with pytest.raises(SettingError, match="Sparsify" + message):
        ck.Sparsify(budget=budget, allocation=wrong)
    with pytest.raises(SettingError, match="LotteryTicket" + message):
        ck.LotteryTicket(budget=budget, allocation=wrong, train=ck.Train(epochs=1))


def test_erk_is_its_formula() -> None:
    weights = {"a": torch.zeros(64, 64, 3, 3), "b": torch.zeros(64, 128, 3, 3), "c": torch.zeros(10, 64)}
    ratios = erk_ratios(weights, 0.8)
    density = {n: 1 - r for n, r in ratios.items()}
    assert density["c"] == 1  # its share would be above 1
    assert density["a"] / density["b"] == pytest.approx(((64 + 64 + 6) / (64 * 64 * 9)) / ((64 + 128 + 6) / (64 * 128 * 9)))
    total = sum(w.numel() for w in weights.values())
    assert sum(d * weights[n].numel() for n, d in density.items()) == pytest.approx(0.2 * total)


def test_lamp_is_its_formula() -> None:
    torch.manual_seed(0)
    weights = {"a": torch.randn(5, 4), "b": torch.randn(3, 4) * 5, "c": torch.randn(2, 2) * 0.1}
    scores = []
    for name, w in weights.items():
        flat = w.flatten().tolist()
        scores += [(u * u / sum(v * v for v in flat if v * v >= u * u), name) for u in flat]
    gone = [name for _, name in sorted(scores)[:18]]
    assert lamp_ratios(weights, 0.5) == {n: pytest.approx(gone.count(n) / w.numel()) for n, w in weights.items()}


def test_measured_allocation_takes_the_cheapest() -> None:
    weights = {"robust": torch.zeros(100), "touchy": torch.zeros(100)}
    curves = {"robust": {0.0: 1.0, 0.5: 1.0, 0.9: 1.1}, "touchy": {0.0: 1.0, 0.5: 3.0, 0.9: 9.0}}
    allocate = measured_ratios(curves)
    assert allocate(weights, 0.25) == {"robust": pytest.approx(0.5), "touchy": 0.0}
    assert allocate(weights, 0.45) == {"robust": pytest.approx(0.9), "touchy": 0.0}
    assert allocate(weights, 0.6) == {"robust": pytest.approx(0.9), "touchy": pytest.approx(0.3)}
    with pytest.raises(SettingError, match=r"the curves end at 90\.0% of all weights, wanted 95\.0%"):
        allocate(weights, 0.95)
    with pytest.raises(SettingError, match="no curve for other"):
        allocate({"other": torch.zeros(3)}, 0.5)
    with pytest.raises(SettingError, match="the curve of a wants the loss at ratio 0"):
        measured_ratios({"a": {0.5: 1.0}})


def test_uniform_gives_every_layer_the_same_ratio() -> None:
    weights = {"a": torch.zeros(5, 4), "b": torch.zeros(3, 4)}
    assert uniform_ratios(weights, 0.3) == {"a": 0.3, "b": 0.3}


@pytest.mark.parametrize(
    ("curve", "slope", "ratio", "wanted"),
    [
        # Half of it costs 2 a weight and three quarters 1.47: the lower hull goes past the dear half.
        ({0.0: 0.0, 0.5: 1.0, 0.75: 1.1, 0.9: 5.0}, 1.5, 0.375, (0.75, 0.0)),
        # A loss below the dense one is noise: what follows costs 2.5 a weight, counted from the dense loss, and not 3.
        ({0.0: 1.0, 0.5: 0.8, 0.9: 2.0}, 2.7, 0.4, (0.8, 0.0)),
    ],
)
def test_measured_losses_count_on_the_lower_hull_of_a_curve_that_does_not_fall(curve, slope, ratio, wanted) -> None:
    weights = {"a": torch.zeros(100), "b": torch.zeros(100)}
    ratios = measured_ratios({"a": curve, "b": {0.0: 1.0, 0.9: 1.0 + 0.9 * slope}})(weights, ratio)
    assert (ratios["a"], ratios["b"]) == pytest.approx(wanted)


def test_a_rise_of_the_loss_counts_for_each_weight_that_it_removes() -> None:
    """The large layer loses twice as much, and ten times as many weights go for it."""
    weights = {"large": torch.zeros(1000), "small": torch.zeros(100)}
    allocate = measured_ratios({"large": {0.0: 0.0, 0.9: 2.0}, "small": {0.0: 0.0, 0.9: 1.0}})
    assert allocate(weights, 0.5) == {"large": pytest.approx(0.55), "small": 0.0}


def test_what_is_missing_goes_where_most_was_rounded_off() -> None:
    assert counts({"a": 0.21, "b": 0.28, "c": 0.51}, dict.fromkeys("abc", 10)) == {"a": 2, "b": 3, "c": 5}
