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
from compresskit.search.compress import _study_name
from compresskit.search.figures import Figures
from compresskit.search.finals import minutes, training
from compresskit.search.finals.finalists import Finals
from compresskit.search.finals.minutes import StepTimer
from compresskit.search.finals.rungs import _Rivals
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


def test_the_length_of_a_training_stays_where_more_finalists_are_asked_for(shop, clock) -> None:
    """Those that were trained are still finalists; another search of the folder has a length of its own."""
    clock(2, 2, 0)
    assert steps(shop, search="one") == 120
    assert steps(shop, search="one", finalists=3) == 120
    assert steps(shop, search="other", finalists=3) == 80
    assert steps(shop, search="one", finalists=3, train=replace(TRAIN, clip=1.0)) == 80


def test_epochs_between_measurements_are_counted_in_steps(shop, clock) -> None:
    clock(0.002, 0.002, 0)
    epochs = replace(TRAIN, steps=None, epochs=10, validate_every=2)
    of_epoch = epochs.length(shop.task).steps_per_epoch
    found = training.training_within(shop, epochs, Ceiling(value=1), finalists=1, fills=False)
    assert (found.steps, found.validate_every) == (10 * of_epoch, 2 * of_epoch)


def test_what_decides_by_the_metric_has_it_after_every_epoch(shop, clock) -> None:
    """Patience and the best weights, as in a training by itself; finalists are compared after quarters at least."""

    def every(train: ck.Train) -> int:
        return training.training_within(shop, train, None, finalists=1, fills=False).validate_every

    best = replace(TRAIN, steps=None, epochs=40, keep_best=True)
    of_epoch = best.length(shop.task).steps_per_epoch
    assert every(best) == 1
    assert every(replace(TRAIN, steps=40, patience=2)) == of_epoch == 3
    assert every(replace(TRAIN, patience=2)) == every(TRAIN) == 2
    clock(2, 2, 6)
    found = training.training_within(shop, best, Ceiling(value=1), finalists=1, fills=True)
    assert (found.validate_every, found.steps) == (of_epoch, 14)  # (60 s - 4 * 6 s) / (0.5 s + 6 s / 3)


@pytest.mark.parametrize("candidate", [Candidate(), SECOND, Candidate(macs=0.5, bits="int4"), Candidate(bits="int4")])
def test_all_of_a_training_has_the_settings_of_the_user(candidate) -> None:
    """Of QAT all but those that say how long it is, and by which rates it trains towards what."""
    given = {"keep_best": True, "patience": 3, "flat": True, "backend": "foreach", "clip": 2.0, "validate_every": 2}
    stages = candidate.stages(order=Removable(), samples=8, train=ck.Train(epochs=8, **given))
    parts = [part for stage in stages if isinstance(part := vars(stage).get("finetune") or stage, ck.Train)]
    assert parts
    assert all(given.items() <= vars(part).items() for part in parts)


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


def test_the_minutes_of_another_training_are_not_of_this_one(finals) -> None:
    """Nor are its candidates rivals of those of this one."""
    finals.seconds = 20
    tried = candidates()
    assert finals.run(tried, 1) is tried[0]
    other = replace(finals, train=replace(TRAIN, clip=1.0))
    again = candidates()
    assert other.run(again, 1) is again[0]
    assert (again[0].untrained, len(other.study.trials)) == (False, 2)
    first, second = other.study.trials
    rivals = _Rivals(other.study, second.user_attrs["folder"]).get_trials(deepcopy=False)
    assert [trial.number for trial in rivals] == [second.number] != [first.number]


def test_a_search_is_named_by_the_training_that_was_asked_for() -> None:
    """Also with minutes, which say how long it is: another one would find them spent."""
    for given in ({}, {"minutes": 1}):
        budget = ck.at_most(bytes=1000, **given)
        names = [_study_name(budget, train) for train in (None, TRAIN, replace(TRAIN, clip=1.0))]
        assert len(set(names)) == 3
        assert _study_name(budget, replace(TRAIN)) == names[1]


def test_a_training_that_cannot_be_given_up_is_begun_only_where_it_fits(finals) -> None:
    finals.ceilings, finals.minimise, finals.seconds = {"drop": 0.4}, "bytes", 75
    tried = candidates()
    assert finals.run(tried, 3) is None
    assert [t.trained is not None for t in tried] == [True, False, False]
    finals.seconds = 85
    finals.run(tried, 3)
    assert [t.trained is not None for t in tried] == [True, True, False]


def test_a_metric_that_is_measured_often_is_compared_after_each_quarter(finals, monkeypatch) -> None:
    """One of the first steps is no quarter, and says less than that of others."""

    def run(self, candidate, recipe, *, trains=True):
        for step in range(1, 11):
            watched(SimpleNamespace(stage="1-qat", training="QAT", step=step, steps=10, metric=step / 10))
        return candidate

    def recipe(self, candidate, on_step=None, **settings):
        nonlocal watched
        watched = on_step

    watched = None
    for name, patched in {"_run": run, "recipe": recipe}.items():
        monkeypatch.setattr(Finals, name, patched)
    assert finals.run(candidates()[:1], 1)
    assert finals.study.trials[0].intermediate_values == {1: 0.3, 2: 0.5, 3: 0.8, 4: 1.0}


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
