"""Budgets of a search: units, what is minimised, messages."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import compresskit as ck
from compresskit.search.ceilings import parse_ceiling
from compresskit.search.compress import _settings, free_quantity
from compresskit.search.figures import Figures, pareto
from compresskit.search.latency.stopwatch import start_stopwatch
from compresskit.search.outcome import nearest_budget

DENSE = Figures(metric=0.9, drop=0.0, latency=10.0, bytes=1000, macs=500)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("latency", 5, 5.0),
        ("latency", "5ms", 5.0),
        ("latency", "200 us", 0.2),
        ("latency", "1s", 1000.0),
        ("bytes", "1MB", 1e6),
        ("bytes", "2KiB", 2048.0),
        ("macs", "10M", 1e7),
        ("drop", "0.5pt", 0.005),
        ("drop", 0, 0.0),
        ("minutes", "2h", 120.0),
    ],
)
def test_units(name, given, value) -> None:
    assert parse_ceiling(name, given).value == pytest.approx(value)


def test_numbers_may_be_of_numpy_or_torch() -> None:
    of_torch = {"drop": torch.tensor(0.25), "batch": torch.tensor(7)}
    found = ck.at_most(bytes=np.array(9), latency=np.float32(2), threads=np.int64(2), **of_torch)
    assert found == ck.at_most(drop=0.25, bytes=9, latency=2, threads=2, batch=7)
    assert repr(found) == "at_most(latency=2.0, bytes=9.0, drop=0.25, threads=2, batch=7)"  # which a run records
    assert _settings({"trials": np.int64(3), "seconds": torch.tensor(0.5)}) == _settings({"trials": 3, "seconds": 0.5})
    with pytest.raises(ck.SettingError, match=r"at_most\(drop=...\): wanted 0.005"):
        ck.at_most(drop=torch.zeros(2))


def test_models_of_which_no_candidate_can_be_made_are_refused_first(tmp_path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    batches = [(torch.randn(4, 4), torch.zeros(4, dtype=torch.long))]
    mixed = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2).bfloat16())
    for model, why in (
        (copy.deepcopy(net).half(), r"wanted fp32 weights, but 0.weight of Sequential is torch.float16; give model.float\(\)"),
        (mixed, "wanted fp32 weights, but 1.weight of Sequential is torch.bfloat16"),
        (ck.quant.quantize_static(net, [batches[0][0]]), "Sequential is quantized already; give the float model"),
    ):
        with pytest.raises(ck.ModelError, match=rf"compress\(model\): {why}"):
            ck.compress(model, ck.Task(train=batches, val=batches), ck.at_most(bytes=10), out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_fractions_are_of_the_uncompressed_file() -> None:
    budget = ck.at_most(latency="0.4x", bytes="0.1x", macs="0.5x", drop=0.01)
    assert budget.absolute(DENSE) == pytest.approx({"latency": 4.0, "bytes": 100.0, "macs": 250.0, "drop": 0.01})
    assert repr(budget) == 'at_most(latency="0.4x", bytes="0.1x", macs="0.5x", drop=0.01)'
    assert eval(repr(budget), vars(ck)) == budget


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "wanted at least one of latency=, bytes=, macs= and drop=, got none"),
        ({"minutes": "2h"}, "wanted at least one of .*, got minutes= alone, which is how long may be trained; such as"),
        ({"latency": "5MB"}, r'at_most\(latency=...\): wanted "5ms", 5 \(milliseconds\)'),
        ({"latency": -1}, "got -1"),
        ({"bytes": 0}, "got 0"),
        ({"drop": "0.1x"}, "got '0.1x'"),
        ({"drop": float("nan")}, "got nan"),
        ({"bytes": 10**5000}, "got inf"),
        ({"macs": True}, "got True"),
        ({"macs": 0.5}, 'got 0.5; for a share of the uncompressed one write "0.5x"'),
        ({"bytes": "0.1"}, 'got .0.1.; for a share of the uncompressed one write "0.1x"'),
        ({"latency": 1, "threads": 0}, r"at_most\(threads=...\): wanted a whole number >= 1, got 0"),
    ],
)
def test_messages(given, message) -> None:
    with pytest.raises(ck.SettingError, match=message):
        ck.at_most(**given)


def test_what_has_no_ceiling_is_minimised() -> None:
    assert free_quantity({"latency": 1.0}) == "drop"
    assert free_quantity({"drop": 0.1}) == "latency"
    assert free_quantity({"drop": 0.1, "latency": 1.0}) == "bytes"
    assert free_quantity({"drop": 0.1, "latency": 1.0, "bytes": 1.0}) == "drop"


def test_excesses_and_the_nearest_budget() -> None:
    slow = Figures(metric=0.9, drop=0.0, latency=6.0, bytes=90, macs=1)
    large = Figures(metric=0.8, drop=0.1, latency=3.0, bytes=900, macs=1)
    ceilings = {"latency": 4.0, "bytes": 100.0, "drop": 0.05}
    assert slow.excesses(ceilings) == pytest.approx({"latency": 0.5})
    assert large.excesses(ceilings) == pytest.approx({"bytes": 8.0, "drop": 0.05})
    budget = ck.at_most(latency=4, bytes=100, drop=0.05, threads=2)
    nearest = nearest_budget([slow, large], budget, ceilings)
    assert nearest == 'at_most(latency="6.3ms", bytes=100, drop=0.05, threads=2)'
    assert not slow.excesses(eval(nearest, vars(ck)).absolute(DENSE))


def test_the_nearest_budget_trains_as_long_and_is_met_by_large_numbers_too() -> None:
    figures = Figures(metric=9e6, drop=1234.56781, latency=1.0, bytes=12_345_432, macs=1)
    budget = ck.at_most(bytes=12_345_432.1, drop=1000, minutes="90s")
    nearest = nearest_budget([figures], budget, budget.absolute(DENSE))
    assert nearest == 'at_most(bytes=12345432.1, drop="1234.5679", minutes=1.5)'
    assert not figures.excesses(eval(nearest, vars(ck)).absolute(DENSE))


def test_a_drop_at_its_ceiling_is_not_over_it_for_the_digits_of_float32() -> None:
    """As of `.float().mean()`: 97 and 96 of 100 differ by 5e-8 more than a point."""
    metric, of_dense = float(np.float32(0.96)), float(np.float32(0.97))
    at = Figures(metric=metric, drop=of_dense - metric, latency=1.0, bytes=1, macs=1)
    assert at.drop > 0.01 + 1e-8
    assert not at.excesses({"drop": 0.01})
    assert at.excesses({"drop": 0.00999})
    assert nearest_budget([at], ck.at_most(drop=0.001), {"drop": 0.001}) == "at_most(drop=0.01)"
    small = Figures(metric=1e-9, drop=3e-9, latency=1.0, bytes=1, macs=1)  # a metric of other units has other digits
    assert small.excesses({"drop": 1e-9})
    large = Figures(metric=2.0**24, drop=1.0, latency=1.0, bytes=1, macs=1)
    assert not large.excesses({"drop": 0.0})  # one step of float32
    assert replace(large, drop=8.0).excesses({"drop": 0.0})  # eight of them
    assert Figures(metric=2.5e6, drop=3.0, latency=1.0, bytes=1, macs=1).excesses({"drop": 0.5})
    assert replace(large, metric=float("inf"), drop=float("inf")).excesses({"drop": 0.5})


def test_what_a_file_may_become_larger_by_is_in_the_nearest_budget() -> None:
    figures = Figures(metric=0.9, drop=0.0, latency=5.0, bytes=990, macs=1)
    asked, ceilings = ck.at_most(latency=1, bytes=1000), {"latency": 1.0, "bytes": 1000.0}
    assert nearest_budget([figures], asked, ceilings) == 'at_most(latency="5.25ms", bytes=1000)'
    assert nearest_budget([figures], asked, ceilings, room=64) == 'at_most(latency="5.25ms", bytes=1054)'


def test_pareto_keeps_what_nothing_dominates() -> None:
    points = [(1.0, 5.0), (2.0, 5.0), (2.0, 3.0), (3.0, 4.0), (4.0, 1.0), (4.0, 1.0)]
    assert pareto(list(range(6)), points) == [0, 2, 4]


def test_a_noisy_machine_is_named(tmp_path) -> None:
    def timer(files, seconds):
        return [5.0, 7.0]

    settings = {"threads": 1, "seconds": 0.1, "timer": timer}
    with pytest.raises(ck.SettingError, match="the same file differed from itself by 40% in 3 attempts, wanted at most 15%"):
        start_stopwatch(tmp_path, (), strict=True, **settings)
    assert start_stopwatch(tmp_path, (), strict=False, **settings).noise == pytest.approx(0.4)
