"""How long finalists are trained: what the minutes of a budget are taken to be enough for, and what ends when they are over."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import compresskit as ck
from compresskit.search.candidate import Candidate, Removable
from compresskit.search.ceilings import Ceiling
from compresskit.search.figures import Figures
from compresskit.search.finals import minutes, training
from compresskit.search.finals.finalists import Finals
from compresskit.search.finals.minutes import StepTimer
from compresskit.search.outcome import Tried
from compresskit.search.proxy.workshop import Workshop
from compresskit.search.workers import Worker

TRAIN = ck.Train(steps=8, optimizer=partial(torch.optim.SGD, lr=0.01))
FIRST, SECOND, THIRD = Candidate(), Candidate(macs=0.5), Candidate(macs=0.25)


@pytest.fixture
def shop(model, task, tmp_path):
    return Workshop(
        model=model, task=task, held=task, out=tmp_path, samples=32, batch=1, threads=1, seconds=0.02, seed=0,
        target=ck.quant.X86, trains=True,
    )  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """What four steps in float, four with rounding and a measurement of the metric take, in seconds, from now on."""

    def takes(in_float: float, rounded: float, metric: float) -> None:
        times = itertools.cycle([0, in_float, 0, rounded, 0, metric])
        monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: next(times)))

    return takes


def steps(shop, train=TRAIN, **settings) -> int:
    """Steps of each finalist within a minute, where there is no time for short trainings."""
    settings = {"finalists": 1, "fills": True} | settings
    return training.training_within(shop, train, Ceiling(value=1), **settings).steps


def test_the_slower_step_says_how_many_there_are(shop, clock) -> None:
    clock(2, 2, 0)
    assert steps(shop) == 120
    clock(2, 6, 0)  # with rounding, of which nothing is known before
    assert steps(shop, replace(TRAIN, clip=1.0)) == 40
    clock(2, 1, 0)
    assert steps(shop, replace(TRAIN, clip=2.0)) == 120


def test_measurements_of_the_metric_take_their_part(shop, clock) -> None:
    clock(2, 2, 5)
    assert steps(shop) == 80  # four measurements take 20 s
    assert steps(shop, replace(TRAIN, validate_every=10)) == 60  # one to ten steps
    assert steps(shop, replace(TRAIN, validate_every=0)) == 120


def test_finalists_none_of_which_is_given_up_share_the_minutes(shop, clock) -> None:
    clock(2, 2, 0)
    assert steps(shop, finalists=3) == 80
    assert steps(shop, finalists=3, in_full=True) == 40


def test_epochs_between_measurements_are_counted_in_steps(shop, clock) -> None:
    clock(0.002, 0.002, 0)
    epochs = replace(TRAIN, steps=None, epochs=10, validate_every=2)
    of_epoch = epochs.length(shop.task).steps_per_epoch
    found = training.training_within(shop, epochs, Ceiling(value=1), finalists=1, fills=False)
    assert (found.steps, found.validate_every) == (10 * of_epoch, 2 * of_epoch)


def test_a_step_with_rounding_is_measured(shop) -> None:
    a_step, a_measurement = training._seconds_of(shop, TRAIN)
    assert 0 < a_step < 10
    assert 0 < a_measurement < 10


def test_a_timer_counts_steps_and_not_what_is_between_trainings(monkeypatch) -> None:
    times = iter([0, 1, 2, 100, 101, 103])
    monkeypatch.setattr(minutes, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    timer = StepTimer()
    for stage in ("1-prune", "2-qat"):
        for _ in range(3):
            timer.step(SimpleNamespace(stage=stage, training="train"))
    assert timer.seconds == 3 + 4  # the first step of each takes as long as the second


def test_all_of_a_training_calls_back() -> None:
    told = []
    train = replace(TRAIN, on_step=told.append)
    for candidate in (Candidate(), Candidate(macs=0.5), Candidate(bits="int4")):
        stages = candidate.stages(order=Removable(), samples=8, train=train)
        trainings = [each for stage in stages for each in (stage, vars(stage).get("finetune")) if isinstance(each, ck.Train)]
        assert [each.on_step for each in trainings] == [train.on_step] * len(trainings)
        assert trainings


@pytest.fixture
def finals(shop, tmp_path, monkeypatch):
    """Finalists whose trainings have four steps of 10 s each."""

    def run(self, candidate, recipe, *, trains=True):
        for step in range(1, 5) if trains else ():
            now[0] += 10
            watch[0](SimpleNamespace(stage="1-qat", training="QAT", step=step, steps=4, metric=0.5))
        return candidate

    def recipe(self, candidate, on_step=None, **settings):
        watch[:] = [on_step]

    def figures(self, candidate, seconds):
        return Figures(metric=0.5, drop=0.5, latency=1.0, bytes=round(1000 * candidate.macs), macs=1, seconds=1.0)

    now, watch = [0.0], []
    monkeypatch.setattr(minutes, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for name, patched in {"_run": run, "recipe": recipe, "_figures": figures}.items():
        monkeypatch.setattr(Finals, name, patched)
    monkeypatch.setattr(Candidate, "trains_in_two_parts", False)
    worker = Worker(tmp_path)
    with worker.at_work():
        yield Finals(
            workshop=shop, stopwatch=None, name="finals", order=Removable(), ceilings={"macs": 10.0}, minimise="drop",
            train=TRAIN, worker=worker,
        )  # fmt: skip


def candidates() -> list[Tried]:
    figures = Figures(metric=0.1, drop=0.9, latency=1.0, bytes=1000, macs=1)
    return [Tried(candidate=c, figures=replace(figures, drop=0.9 + 0.01 * k)) for k, c in enumerate((FIRST, SECOND, THIRD))]


@pytest.mark.parametrize(
    ("seconds", "short", "stopped"),
    [
        (None, 0, [None, None, None]),
        (20, 0, [None, "not begun", "not begun"]),  # the first is trained to its end
        (60, 0, [None, 0.25, "not begun"]),
        (70, 10, [None, 0.25, "not begun"]),  # which short trainings took
        (120, 0, [None, None, 0.75]),
    ],
)
def test_trainings_end_with_the_minutes(seconds, short, stopped, finals) -> None:
    finals.seconds, finals.short_seconds = seconds, short
    tried = candidates()
    assert finals.run(tried, 3) in tried
    assert ["not begun" if t.trained is None and t.stopped is None else t.stopped for t in tried] == stopped
    again = candidates()
    assert finals.run(again, 3) in again  # as a search that goes on sees it
    assert [t.stopped for t in again] == [t.stopped for t in tried]


def test_a_training_that_cannot_be_given_up_is_begun_only_where_it_fits(finals) -> None:
    finals.ceilings, finals.minimise, finals.seconds = {"drop": 0.4}, "bytes", 75
    tried = candidates()
    assert finals.run(tried, 3) is None
    assert [t.trained is not None for t in tried] == [True, False, False]
    finals.seconds = 85
    finals.run(tried, 3)
    assert [t.trained is not None for t in tried] == [True, True, False]


def told_of_the_end(caplog) -> int:
    return sum("no other finalist is trained" in message for message in caplog.messages)


def test_the_end_of_the_minutes_is_told_once(finals, monkeypatch, caplog) -> None:
    """Although the trainings are looked at again as long as other processes work."""
    caplog.set_level("INFO", logger="compresskit")
    finals.seconds, looked, real = 20, itertools.count(), finals._look_
    monkeypatch.setattr(finals, "_look_", lambda tried: real(tried) | ({"elsewhere"} if next(looked) < 4 else set()))
    monkeypatch.setattr("compresskit.search.finals.finalists.PAUSE", 0.0)
    finals.run(candidates(), 9)
    assert told_of_the_end(caplog) == 1
    assert next(looked) > 4


def test_the_end_of_the_minutes_is_not_told_where_no_candidate_is_left(finals, caplog) -> None:
    caplog.set_level("INFO", logger="compresskit")
    finals.seconds = 20
    finals.run(candidates()[:1], 9)
    assert told_of_the_end(caplog) == 0


def test_a_trial_is_told_of_its_minutes_between_measurements(monkeypatch) -> None:
    """What was trained counts where the process is killed before its metric is measured."""
    monkeypatch.setattr("time.perf_counter", itertools.count(0.0, 4.0).__next__)
    told: list[float] = []
    timer = StepTimer(SimpleNamespace(set_user_attr=lambda name, seconds: told.append(seconds)))
    for _ in range(7):
        timer.step(SimpleNamespace(stage="1", training="QAT"))
    assert told == [12.0, 24.0]
