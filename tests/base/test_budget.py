"""Budgets: one fraction of one quantity, written as what stays or as what goes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import compresskit as ck
from compresskit.base.budget import QUANTITIES, percents
from compresskit.base.errors import SettingError
from compresskit.base.fingerprint import describe


@pytest.mark.parametrize("quantity", QUANTITIES)
@given(fraction=st.floats(0.001, 0.999))
def test_both_fractions_and_the_repr(quantity, fraction) -> None:
    kept, removed = ck.keep(**{quantity: fraction}), ck.remove(**{quantity: fraction})
    assert (kept.quantity, kept.kept, kept.removed) == (quantity, fraction, 1 - fraction)
    assert (removed.quantity, removed.kept, removed.removed) == (quantity, 1 - fraction, fraction)
    assert repr(kept) == f"keep({quantity}={fraction!r})"
    assert repr(removed) == f"remove({quantity}={fraction!r})"
    assert eval(repr(kept), {"keep": ck.keep}) == kept


def test_equal_fractions_are_equal_budgets() -> None:
    assert ck.keep(macs=0.5) == ck.remove(macs=0.5)
    assert ck.keep(macs=0.5) != ck.keep(parameters=0.5)
    assert len({ck.keep(macs=0.5), ck.remove(macs=0.5)}) == 1


@pytest.mark.parametrize("make", [np.float32, np.array, torch.tensor], ids=["scalar", "array", "tensor"])
def test_a_number_of_numpy_or_torch_is_a_number(make) -> None:
    assert type(ck.keep(macs=make(0.5)).kept) is float
    assert ck.keep(macs=make(0.5)) == ck.keep(macs=0.5)
    with pytest.raises(SettingError, match=r"wanted the fraction that goes, in \[0, 1\), got 1\.5"):
        ck.remove(weights=make(1.5))
    with pytest.raises(SettingError, match=r"wanted the fraction that stays, in \(0, 1\], got "):
        ck.keep(macs=torch.tensor([0.5, 0.2]))


def test_its_record_is_stable() -> None:
    record = {"kind": "Budget", "quantity": "weights", "kept": 0.25, "removed": 0.75, "written": "remove"}
    assert json.loads(json.dumps(describe(ck.remove(weights=0.75)))) == record


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, math.nan, math.inf, True, "0.5"])
def test_fractions_that_cannot_stay(fraction) -> None:
    with pytest.raises(SettingError, match=r"keep\(macs=...\): wanted the fraction that stays, in \(0, 1\], got"):
        ck.keep(macs=fraction)


@pytest.mark.parametrize("fraction", [1, -0.1, 1.1, math.nan, math.inf, False, "0.5"])
def test_fractions_that_cannot_go(fraction) -> None:
    with pytest.raises(SettingError, match=r"remove\(weights=...\): wanted the fraction that goes, in \[0, 1\), got"):
        ck.remove(weights=fraction)


@pytest.mark.parametrize("make", [ck.keep, ck.remove])
def test_exactly_one_quantity(make) -> None:
    with pytest.raises(
        SettingError, match=r"\(\): wanted exactly one of macs, parameters, bytes, latency, channels, weights; got none"
    ):
        make()
    with pytest.raises(SettingError, match=r"exactly one of .*; got \{'macs': 0.5, 'channels': 0.5\}"):
        make(macs=0.5, channels=0.5)


def test_the_whole_model() -> None:
    assert ck.keep(latency=1).kept == 1
    assert ck.remove(channels=0).removed == 0


STAGES = {
    ck.Prune: {},
    ck.Sparsify: {},
    ck.LotteryTicket: {"train": ck.Train(epochs=1)},
    ck.prune.low_rank.LowRank: {},
    ck.prune.depth.Depth: {},
    ck.prune.depth.Merge: {},
}


@pytest.mark.parametrize("name", ["ratio", *QUANTITIES])
@pytest.mark.parametrize("stage", STAGES)
def test_the_budget_that_a_message_says_to_write_is_taken(stage, name) -> None:
    with pytest.raises(SettingError, match=r"it is not a setting.*; write budget=ck\.\w+\(\w+=0\.\d\)$") as raised:
        stage(**{name: 0.5})
    advised = eval(str(raised.value).rpartition("budget=")[2], {"ck": ck})
    assert advised.quantity in stage.quantities
    assert advised.quantity == name or name not in stage.quantities
    assert stage(**STAGES[stage], budget=advised).budget == advised


@pytest.mark.parametrize(
    ("function", "allowed"),
    [
        (ck.prune.plan_channels, ck.Prune.quantities),
        (ck.prune.plan_mask, ("weights",)),
        (ck.prune.low_rank.plan_ranks, ("macs", "parameters")),
        (ck.prune.depth.plan_blocks, ("latency", "macs", "parameters", "bytes")),
        (ck.prune.depth.plan_merges, ("latency", "macs", "parameters")),
    ],
)
def test_functions_say_the_same(function, allowed) -> None:
    for name in ("ratio", *QUANTITIES):
        with pytest.raises(SettingError, match=rf"{function.__name__}\({name}=...\): it is not a setting") as raised:
            function(**{name: 0.5})
        assert eval(str(raised.value).rpartition("budget=")[2], {"ck": ck}).quantity in allowed


def test_percents_are_told_apart() -> None:
    assert percents(0.6, 0.5) == ("60.0%", "50.0%")
    assert percents(0.5, 0.50004) == ("50.000%", "50.004%")
    assert percents(0.4996, 0.4998) == ("49.96%", "49.98%")
    assert percents(0.5, 0.5) == percents(0.5, 0.5 + 1e-12) == ("50.0%", "50.0%")
