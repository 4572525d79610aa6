"""Candidates that would be far too slow are not made, and the search says so."""

from __future__ import annotations

import math

import networks
import pytest
import torch

import compresskit as ck
from compresskit.search.candidate import Candidate, Removable
from compresskit.search.figures import Figures
from compresskit.search.latency.latency_filter import LEAST_MARGIN, MEASURED_OPERATORS, LatencyFilter
from compresskit.search.proxy.held_out import held_out
from compresskit.search.proxy.workshop import Workshop


def half_is_slow(self, candidate, fast_enough):
    return 9.0 if candidate == Candidate(macs=0.5) else None


WIDTHS = (1.0, 0.7, 0.5, 0.35, 0.25)


@pytest.fixture(scope="module")
def task():
    torch.manual_seed(0)
    return networks.images_task(ck)


@pytest.fixture(scope="module")
def workshop(task, tmp_path_factory):
    out = tmp_path_factory.mktemp("search")
    model = networks.build(networks.WideChain).eval()
    shop = Workshop(
        model=model,
        task=task,
        held=held_out(task, 64, (0,)),
        out=out,
        samples=32,
        batch=1,
        threads=1,
        seconds=0.02,
        seed=0,
        target=ck.quant.X86,
    )
    for width in WIDTHS:
        folder = out / "candidates" / Candidate(macs=width).name
        folder.mkdir(parents=True)
        shop.sketch(Candidate(macs=width), Removable(), lambda file, folder=folder: file.rename(folder / "model.onnx"))
    return shop


def test_what_is_far_over_the_ceiling_is_told_before_it_is_made(workshop) -> None:
    times = {Candidate(macs=width): 1.0 + width for width in WIDTHS}
    found = LatencyFilter(workshop=workshop, order=Removable(), ceiling=0.1)
    assert found.error() is None
    assert found.too_slow(Candidate(macs=0.6), []) is None  # nothing is known yet
    found.learn(times, 1.0)
    assert found.error().files == 5
    assert all((workshop.out / "candidates" / c.name / MEASURED_OPERATORS).exists() for c in times)
    predicted = found.too_slow(Candidate(macs=0.6), [])
    assert predicted == pytest.approx(1.6, rel=0.3)
    assert found.too_slow(Candidate(macs=0.6), [Candidate(macs=0.7)]) is None  # one that has more is fast enough
    assert found.too_slow(Candidate(macs=0.6), [Candidate(macs=0.7, rank=0.6)]) == pytest.approx(predicted)
    margin = max(LEAST_MARGIN, found.error().largest)
    found.ceiling = math.nextafter(predicted / (1 + margin), math.inf)  # the division rounds
    assert found.too_slow(Candidate(macs=0.6), []) is None  # not by more than predictions err
    found.ceiling *= 0.999
    assert found.too_slow(Candidate(macs=0.6), []) == pytest.approx(predicted)
    assert found.too_slow(Candidate(macs=0.6, effort="balanced"), []) is None  # its placement is not known before it is made
    assert not (workshop.out / "candidates" / Candidate(macs=0.6).name).exists()


def test_what_was_learned_is_kept(workshop, monkeypatch) -> None:
    def measure(*args, **settings):
        raise AssertionError("measured again")

    times = {Candidate(macs=width): 1.0 + width for width in WIDTHS}
    LatencyFilter(workshop=workshop, order=Removable(), ceiling=1.0).learn(times, 1.0)
    monkeypatch.setattr("compresskit.search.latency.latency_filter.measure_operators", measure)
    again = LatencyFilter(workshop=workshop, order=Removable(), ceiling=0.1)
    again.learn(times, 1.0)
    assert again.error().files == 5


def test_the_search_makes_no_candidate_that_is_skipped(task, tmp_path, monkeypatch) -> None:
    made, latencies = [], {Candidate(): 2.0, Candidate(macs=0.25): 0.5}

    def measured(self, candidate, *rest):
        made.append(candidate)
        return Figures(metric=0.5, drop=0.0, latency=latencies[candidate], bytes=1000, macs=1000)

    monkeypatch.setattr(Workshop, "_measured", measured)
    monkeypatch.setattr(
        LatencyFilter, "too_slow", lambda self, candidate, fast: 9.0 if candidate == Candidate(macs=0.5) else None
    )
    budget, settings = ck.at_most(latency=1, bytes=10), {"trials": 2, "finalists": 1, "seconds": 0.02, "out": tmp_path / "s"}
    model = networks.build(networks.WideChain)
    for _ in range(2):
        with pytest.raises(ck.ModelError, match="none of 2 candidates meets"):
            ck.compress(model, task, budget, **settings)
        assert made == [Candidate(), Candidate(macs=0.25)]


def test_one_of_four_is_made_for_all_predictions_while_nothing_keeps_the_ceiling(task, tmp_path, monkeypatch) -> None:
    """What is predicted of too few files may be wrong, and no candidate would be made that shows it."""
    made, asked = [], []

    def measured(self, candidate, *rest):
        made.append(candidate)
        return Figures(metric=0.5, drop=0.0, latency=2.0, bytes=1000, macs=1000)

    def too_slow(self, candidate, fast):
        asked.append(candidate)
        return None if candidate == Candidate() else 9.0 + candidate.macs

    monkeypatch.setattr(Workshop, "_measured", measured)
    monkeypatch.setattr(LatencyFilter, "too_slow", too_slow)
    budget, settings = ck.at_most(latency=1), {"trials": 3, "finalists": 1, "seconds": 0.02, "out": tmp_path / "s"}
    with pytest.raises(ck.ModelError, match=r"none of \d candidates meets"):
        ck.compress(networks.build(networks.WideChain), task, budget, **settings)
    skipped = list(dict.fromkeys(asked))[1:]
    assert made[:2] == [Candidate(), min(skipped[:4], key=lambda c: (c.bits == "int8", c.macs))]  # of the precision that is new
    assert len(made) - 1 == len(skipped) // 4


def test_it_is_printed(task, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        LatencyFilter, "too_slow", lambda self, candidate, fast: 900.0 if candidate == Candidate(macs=0.5) else None
    )
    monkeypatch.setattr("compresskit.search.latency.latency_model.LEAST_FILES", 2)
    settings = {"trials": 3, "finalists": 1, "seconds": 0.02, "out": tmp_path / "s"}
    search = ck.compress(networks.build(networks.WideChain), task, ck.at_most(latency=100), **settings)
    skipped = search.tried[-1]
    assert (skipped.candidate, skipped.predicted, skipped.figures) == (Candidate(macs=0.5), 900.0, None)
    text = str(search)
    assert "macs0.5-int8" in text
    assert "~900.000 ms" in text
    assert "no: latency, predicted" in text
    assert f"latency model: {search.latency_error}; 1 candidates were not made" in text
