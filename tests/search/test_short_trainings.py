"""Which candidates are trained for a short time before finalists are chosen, and what that decides."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import networks
import pytest
import torch

import compresskit as ck
from compresskit.search.candidate import UNCOMPRESSED, Candidate, Removable
from compresskit.search.figures import Figures
from compresskit.search.finals.finalists import Finals
from compresskit.search.finals.short_trainings import MOST_SHORT, ShortTrainings, short_training
from compresskit.search.outcome import Tried
from compresskit.search.proxy import Workshop
from compresskit.search.workers import Worker

QUICK = {"trials": 4, "finalists": 1, "seconds": 0.02}
TRAIN = ck.Train(steps=200, optimizer=partial(torch.optim.SGD, lr=0.01), keep_best=False)


@pytest.fixture(scope="module")
def task():
    torch.manual_seed(0)
    return networks.images_task(ck)


@pytest.fixture(scope="module")
def model(task):
    return ck.Train(epochs=3)(networks.build(networks.WideChain), task)


@pytest.fixture
def trainings(model, task, tmp_path):
    shop = Workshop(
        model=model, task=task, held=task, out=tmp_path, samples=32, batch=1, threads=1, seconds=0.02, seed=0,
        target=ck.quant.X86, trains=True,
    )  # fmt: skip
    worker = Worker(tmp_path)
    finals = Finals(
        workshop=shop, stopwatch=None, name="finals", order=Removable(), ceilings={"bytes": 1000.0}, minimise="drop",
        train=TRAIN, worker=worker,
    )  # fmt: skip
    return ShortTrainings(finals=finals, dense=shop.dense(), finalists=1)


def tried(drop: float, work: int = 100, size: int = 900, **what: object) -> Tried:
    figures = Figures(metric=1 - drop, drop=drop, latency=1.0, bytes=size, macs=work)
    return Tried(candidate=Candidate(**what), figures=figures)


def test_a_short_training_is_the_beginning_of_the_long_one(trainings) -> None:
    short = short_training(TRAIN, trainings.finals.workshop)
    assert (short.steps, short.epochs, short.optimizer) == (10, None, TRAIN.optimizer)
    assert short_training(replace(TRAIN, steps=199), trainings.finals.workshop) is None  # so few steps say nothing
    epochs = replace(TRAIN, steps=None, epochs=300)
    assert short_training(epochs, trainings.finals.workshop).steps == epochs.length(trainings.finals.workshop.task).steps // 20


def test_those_that_lose_least_and_those_that_keep_most_are_trained(trainings) -> None:
    least = tried(0.1, work=10, size=10, blocks=1)
    balanced = replace(least, candidate=Candidate(blocks=1, effort="balanced"))
    slow, large = tried(0.9, work=99, size=9, blocks=2), tried(0.8, work=9, size=99, blocks=3)
    too_large, dense = tried(0.0, size=2000, blocks=4), Tried(candidate=UNCOMPRESSED, figures=least.figures)
    failed = Tried(candidate=Candidate(blocks=5), failure="it cannot be made")
    found = trainings.chosen([too_large, dense, failed, large, slow, least, balanced])
    assert list(found) == [least.candidate, slow.candidate, large.candidate]
    assert found[least.candidate] == [least, balanced]  # which differ by effort alone
    assert trainings.chosen([least, dense, too_large]) == {}  # the one that is left becomes a finalist anyway
    many = [tried(0.01 * k, blocks=k + 1) for k in range(2 * MOST_SHORT)]
    assert len(trainings.chosen(many)) == MOST_SHORT


def test_what_is_lost_is_measured_once_and_kept(trainings, monkeypatch, tmp_path) -> None:
    candidates = [tried(0.5, macs=0.5), tried(0.6, macs=0.3)]
    trained = []
    compressed = Workshop.compressed

    def logged(self, candidate, order, samples, train=None):
        trained.append((candidate, train.steps))
        return compressed(self, candidate, order, samples, train)

    monkeypatch.setattr(Workshop, "compressed", logged)
    trainings.enter_(candidates)
    assert trained == [(t.candidate, 10) for t in candidates]
    first = [t.short for t in candidates]
    again = [replace(t, short=None) for t in candidates]
    trainings.enter_(again)
    assert [t.short for t in again] == first
    assert len(trained) == 2
    (path,) = (tmp_path / "candidates" / "macs0.5-int8").glob("short-*.json")
    path.write_text(json.dumps({"drop": "much"}))
    with pytest.raises(ck.CheckpointError, match="what a candidate loses after a short training was expected"):
        trainings.enter_(again)


def test_a_candidate_that_cannot_be_trained_is_left_as_it_was(trainings, monkeypatch, caplog) -> None:
    def compressed(self, candidate, *_, **__):
        raise ck.ModelError("it has no layer")

    monkeypatch.setattr(Workshop, "compressed", compressed)
    candidates = [tried(0.5, blocks=1), tried(0.4, blocks=2)]
    trainings.enter_(candidates)
    assert [t.short for t in candidates] == [None, None]
    assert "1blocks-int8 cannot be trained for a short time: it has no layer" in caplog.text


def test_the_finalist_is_the_one_that_promises_most() -> None:
    finals = object.__new__(Finals)
    finals.ceilings, finals.minimise, finals.train, finals.remaining = {"bytes": 1000.0}, "drop", TRAIN, 0.5
    cut, whole, large = tried(0.5, blocks=1), tried(0.1), tried(0.0, size=2000, blocks=2)
    assert Finals.next_finalist(finals, [cut, whole, large], None) is whole  # as long as nothing else is known
    cut.short, whole.short = 0.05, 0.2  # which a high learning rate made worse than it was without training
    assert Finals.next_finalist(finals, [cut, whole, large], None) is cut
    cut.short = 0.15
    assert Finals.next_finalist(finals, [cut, whole, large], None) is whole


def test_the_search_follows_the_short_trainings(model, task, tmp_path, monkeypatch) -> None:
    best = Candidate(macs=0.5)
    monkeypatch.setattr(ShortTrainings, "_drop", lambda self, candidate, short: -0.5 if candidate == best else 0.9)
    train = replace(TRAIN, validate_every=0)
    found = ck.compress(model, task, ck.at_most(bytes="0.9x"), out=tmp_path, train=train, **QUICK)
    assert found.chosen.candidate == best
    assert "-0.5000" in str(found)
    assert sum(t.short is not None for t in found.tried) > 1
