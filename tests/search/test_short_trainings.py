"""Which candidates are trained for a short time before finalists are chosen, and what that decides."""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from formula import figures_by_formula

import compresskit as ck
from compresskit.recipe.folder import LOCK
from compresskit.recipe.locks import exclusive
from compresskit.search.candidate import UNCOMPRESSED, Candidate, Removable
from compresskit.search.ceilings import Ceiling
from compresskit.search.figures import Figures
from compresskit.search.finals import training
from compresskit.search.finals.finalists import Finals
from compresskit.search.finals.short_trainings import MOST_SHORT, ShortTrainings, short_training
from compresskit.search.latency.stopwatch import Stopwatch
from compresskit.search.outcome import Tried
from compresskit.search.proxy.workshop import Workshop
from compresskit.search.workers import Worker

QUICK = {"trials": 4, "finalists": 1, "seconds": 0.02}
TRAIN = ck.Train(steps=200, optimizer=partial(torch.optim.SGD, lr=0.01), keep_best=False)


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


def tried(drop: float, work: int | None = None, size: int = 900, **what: object) -> Tried:
    """A candidate that was tried; what loses more has more MACs left, so that none is ahead of another in all."""
    figures = Figures(metric=1 - drop, drop=drop, latency=1.0, bytes=size, macs=round(1000 * drop) if work is None else work)
    return Tried(candidate=Candidate(**what), figures=figures)


def timed(latency: float, drop: float, work: int = 100, **what: object) -> Tried:
    found = tried(drop, work, **what)
    return replace(found, figures=replace(found.figures, latency=latency))


def test_a_short_training_has_a_fraction_of_the_steps(trainings) -> None:
    short = short_training(TRAIN, trainings.finals.workshop)
    assert (short.steps, short.epochs, short.schedule) == (10, None, TRAIN.schedule)
    full, lower = (train.optimizer([{"params": [torch.nn.Parameter(torch.zeros(1))]}]) for train in (TRAIN, short))
    assert type(lower) is type(full)
    assert lower.param_groups[0]["lr"] == pytest.approx(full.param_groups[0]["lr"] / 5)
    rate = torch.tensor(0.01)
    tensor = short_training(replace(TRAIN, optimizer=partial(torch.optim.SGD, lr=rate, foreach=False)), trainings.finals.workshop)
    assert float(tensor.optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]) == pytest.approx(0.002)
    assert float(rate) == pytest.approx(0.01)  # the user's own
    assert short_training(replace(TRAIN, steps=199), trainings.finals.workshop) is None  # so few steps say nothing
    epochs = replace(TRAIN, steps=None, epochs=300)
    wanted = int(0.03 * epochs.length(trainings.finals.workshop.task).steps)
    assert short_training(epochs, trainings.finals.workshop).steps == wanted > 10


def test_minutes_are_set_aside_for_short_trainings_where_there_are_some(trainings, monkeypatch) -> None:
    clock = itertools.cycle([0, 1, 0, 1.5, 0, 0])  # four steps take a second, and 1.5 with rounding; the metric takes none
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    shop = trainings.finals.workshop

    def steps(minutes: float) -> int:
        return training.training_within(shop, TRAIN, Ceiling(value=minutes), finalists=1, fills=True).steps

    assert steps(10) == 1355  # six times 3 % of a finalist's for the short ones, or it were 1600
    assert steps(2) == 260  # six times 10 steps, the least
    assert steps(1.5) == 199  # with 40 more there would be short ones, for which there is no time
    assert steps(1) == 160  # too few for short ones


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
    many = [tried(0.01 * k, work=k, blocks=k + 1) for k in range(2 * MOST_SHORT)]
    assert len(trainings.chosen(many)) == MOST_SHORT


def test_a_cut_promises_what_the_better_of_its_efforts_loses(trainings) -> None:
    fast, balanced = tried(0.3, work=10, size=10, blocks=1), tried(0.1, work=10, size=10, blocks=1, effort="balanced")
    other = tried(0.2, work=5, size=20, blocks=2)
    assert list(trainings.chosen([fast, balanced, other])) == [fast.candidate, other.candidate]


def test_seconds_of_all_short_trainings_are_counted(trainings, monkeypatch) -> None:
    monkeypatch.setattr(ShortTrainings, "_outcome", lambda *_: {"drop": 0.1, "seconds": 4.0, "training": 1.5})
    trainings.enter_([tried(0.5, macs=0.5), tried(0.6, macs=0.3)])
    assert trainings.finals.short_seconds == 3.0


def test_one_that_others_are_ahead_of_in_all_ways_is_not_trained(trainings) -> None:
    best, behind = tried(0.1, work=90, size=90, blocks=1), tried(0.2, work=80, size=80, blocks=2)
    other, behind_both = tried(0.3, work=95, size=85, blocks=3), tried(0.3, work=80, size=80, blocks=4)
    assert trainings.chosen([best, behind]) == {}  # the best becomes the finalist
    assert list(trainings.chosen([best, behind, other, behind_both])) == [best.candidate, other.candidate]
    two = replace(trainings, finalists=2)
    assert list(two.chosen([best, behind, other, behind_both])) == [best.candidate, other.candidate, behind.candidate]
    assert two.chosen([best, behind, behind_both]) == {}
    same = tried(0.1, work=90, size=90, blocks=5)
    assert list(trainings.chosen([best, same])) == [best.candidate, same.candidate]  # neither is ahead
    balanced = replace(best, candidate=Candidate(blocks=1, effort="balanced"))
    assert trainings.chosen([best, balanced]) == {}  # one network, which becomes the finalist


@pytest.fixture
def with_ceiling(trainings):
    """Where the drop has a ceiling of 0.1, and the latency is minimised."""
    return replace(trainings, finals=replace(trainings.finals, ceilings={"drop": 0.1}, minimise="latency"))


def test_where_the_drop_has_a_ceiling_candidates_of_all_speeds_are_trained(with_ceiling) -> None:
    enough, slower = timed(4.0, 0.2, blocks=1), timed(5.0, 0.9, blocks=2)  # half of a drop is expected to stay
    first, worse = timed(1.0, 0.5, work=50, blocks=3), timed(0.9, 0.6, work=40, blocks=4)
    found = with_ceiling.chosen([enough, slower, worse, first])
    assert list(found) == [worse.candidate, first.candidate]  # a part of the range each
    assert with_ceiling.chosen([enough, slower]) == {}  # the fastest is expected to keep it
    many = [timed(1 + 0.1 * k, 0.9 - 0.01 * (k % 2), blocks=k + 2) for k in range(2 * MOST_SHORT)]
    chosen = with_ceiling.chosen([enough, *many])
    assert list(chosen) == [t.candidate for t in many[1::2]]  # of each two that which loses less
    assert list(with_ceiling.chosen([*many[::-1], enough])) == list(chosen)


def test_of_each_part_that_is_trained_which_promises_most_in_loss_work_and_size_together(with_ceiling) -> None:
    """Not the one that loses a little less now, and has a fifth of the MACs and of the bytes left."""
    sure = timed(4.0, 0.05, blocks=1)
    many = [tried(0.9 - 0.001 * (k % 2), (500, 100)[k % 2], (500, 100)[k % 2], blocks=k + 2) for k in range(2 * MOST_SHORT)]
    for k, t in enumerate(many):
        t.figures = replace(t.figures, latency=1 + 0.1 * k)
    assert list(with_ceiling.chosen([sure, *many])) == [t.candidate for t in many[::2]]


def test_the_fastest_that_is_expected_to_keep_the_drop_becomes_a_finalist(with_ceiling) -> None:
    finals = with_ceiling.finals
    sure, faster, fastest = timed(4.0, 0.05), timed(2.0, 0.9, blocks=1), timed(1.0, 0.95, blocks=2)
    assert finals.next_finalist([sure, faster, fastest], None) is sure
    faster.short, fastest.short = 0.3, 0.4  # three tenths of which are expected to stay
    assert finals.next_finalist([sure, faster, fastest], None) is faster
    cut = timed(1.5, 0.3, blocks=3)
    cut.short = 0.5  # it was better without, and half of what it lost then is expected to stay
    assert finals.next_finalist([sure, cut], None) is sure


@pytest.mark.parametrize(("lost", "left"), [(0.03, 0.15), (-0.01, 0.1)])  # a tenth at least
def test_what_the_last_training_left_is_expected_of_the_next(with_ceiling, lost, left) -> None:
    finals = with_ceiling.finals
    done, deeper, deepest = timed(4.0, 0.2), timed(2.0, 0.6, blocks=1), timed(1.0, 1.1, blocks=2)
    trial = finals.study.ask()
    trial.set_user_attr("folder", finals.folder(done.candidate).name)
    trial.set_user_attr("figures", asdict(replace(done.figures, drop=lost)))
    finals.study.tell(trial, 1 - lost)
    assert not finals.expects_to_keep(deeper)
    assert finals.run([done, deeper, deepest], most=1) is done
    assert finals.remaining == pytest.approx(left)
    assert finals.next_finalist([done, deeper, deepest], done) is deeper


@pytest.fixture
def trained(monkeypatch):
    """Names of the candidates that are trained, with their steps, from now on."""
    found = []
    compressed = Workshop.compressed

    def logged(self, candidate, order, samples, train=None):
        found.append((candidate.name, train.steps))
        return compressed(self, candidate, order, samples, train)

    monkeypatch.setattr(Workshop, "compressed", logged)
    return found


def test_what_is_lost_is_measured_once_and_kept(trainings, trained, tmp_path) -> None:
    candidates = [tried(0.5, macs=0.5), tried(0.6, macs=0.3)]
    trainings.enter_(candidates)
    assert trained == [("macs0.5-int8", 10), ("macs0.3-int8", 10)]
    again = [replace(t, short=None, short_seconds=0.0) for t in candidates]
    trainings.enter_(again)
    assert [(t.short, t.short_seconds) for t in again] == [(t.short, t.short_seconds) for t in candidates]
    assert all(t.short_seconds > 0 for t in again)
    assert len(trained) == 2
    (path,) = (tmp_path / "candidates" / "macs0.5-int8").glob("short-*.json")
    path.write_text(json.dumps({"drop": "much"}))
    with pytest.raises(ck.CheckpointError, match="what a candidate loses after a short training was expected"):
        trainings.enter_(again)


def test_a_candidate_that_another_process_trains_is_not_waited_for_as_long_as_others_are_left(trainings, trained) -> None:
    candidates = [tried(0.5, macs=0.5), tried(0.6, macs=0.3)]
    held, seen = threading.Event(), []
    folder = trainings.finals.workshop.folder(candidates[0].candidate)
    folder.mkdir(parents=True)

    def other() -> None:
        with exclusive(folder / LOCK):
            held.set()
            deadline = time.monotonic() + 60
            while not list(folder.parent.glob("macs0.3-int8/short-*.json")) and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.extend(trained)

    thread = threading.Thread(target=other)
    thread.start()
    held.wait(60)
    trainings.enter_(candidates)
    thread.join(60)
    assert seen == [("macs0.3-int8", 10)]
    assert None not in [t.short for t in candidates]


def test_processes_that_measured_in_another_order_choose_the_same(trainings) -> None:
    alike = [tried(0.5, blocks=k + 1) for k in range(2 * MOST_SHORT)]
    assert list(trainings.chosen(alike)) == list(trainings.chosen(alike[::-1]))


def test_a_candidate_that_cannot_be_trained_is_left_as_it_was(trainings, monkeypatch, caplog) -> None:
    def compressed(self, candidate, *_, **__):
        raise ck.ModelError("it has no layer")

    monkeypatch.setattr(Workshop, "compressed", compressed)
    candidates = [tried(0.5, blocks=1), tried(0.4, blocks=2)]
    for _ in range(2):
        trainings.enter_(candidates)
        assert [t.short for t in candidates] == [None, None]
    said = [record.message for record in caplog.records]
    assert sorted(said) == [f"compress: {k}blocks-int8 cannot be trained for a short time: it has no layer" for k in (1, 2)]


def test_a_schedule_that_reads_the_metric_has_one(trainings) -> None:
    plateau = ck.lr.EachEpoch(partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="max"))
    train = replace(TRAIN, steps=None, epochs=100, schedule=plateau)
    finals = replace(trainings.finals, train=train)
    candidates = [tried(0.5, macs=0.5), tried(0.6, macs=0.3)]
    replace(trainings, finals=finals).enter_(candidates)
    assert None not in [t.short for t in candidates]


def test_the_finalist_is_the_one_that_promises_most(trainings) -> None:
    finals = trainings.finals
    cut, whole, large = tried(0.5, blocks=1), tried(0.1), tried(0.0, size=2000, blocks=2)
    assert finals.next_finalist([cut, whole, large], None) is whole  # as long as nothing else is known
    cut.short, whole.short = 0.05, 0.2  # which a high learning rate made worse than it was without training
    assert finals.next_finalist([cut, whole, large], None) is cut
    cut.short = 0.15
    assert finals.next_finalist([cut, whole, large], None) is whole


@pytest.fixture
def with_fastest(trainings):
    """Where a latency of at most 1 ms is asked for, which is known to a twentieth."""
    watch = Stopwatch(dense=Path("d"), milliseconds=1.0, noise=0.05, inputs=(), threads=1, seconds=1.0)
    return replace(trainings, finals=replace(trainings.finals, ceilings={"latency": 1.0}, stopwatch=watch))


def test_the_first_finalist_keeps_the_latency_by_more_than_its_noise(with_fastest) -> None:
    finals = with_fastest.finals
    near, sure, over = timed(0.99, 0.1, blocks=1), timed(0.9, 0.3, blocks=2), timed(1.01, 0.0, blocks=3)
    assert finals.next_finalist([near, sure, over], None) is sure
    assert with_fastest.chosen([near, sure, over]) == {}  # it becomes the finalist, so that neither is trained before
    assert with_fastest.chosen([timed(0.99, 0.1, work=50, blocks=1), sure]) == {}  # neither is ahead of the other
    assert finals.next_finalist([near, over], None) is near  # better than none
    sure.trained = sure.figures
    assert finals.next_finalist([near, sure, over], sure) is near  # there is a file already
    finals.stopwatch = replace(finals.stopwatch, noise=0.0)  # so far: after a training it may be more
    assert finals.next_finalist([near, replace(sure, trained=None)], None).figures.latency == 0.9
    two = replace(with_fastest, finalists=2)
    other = timed(0.8, 0.4, work=200, blocks=4)
    assert near.candidate in two.chosen([near, sure, other])


def test_the_first_finalist_leaves_room_for_the_settings_of_its_training(trainings) -> None:
    finals = replace(trainings.finals, ceilings={"bytes": 10_000.0})
    near, sure = tried(0.1, size=9_500, blocks=1), tried(0.3, size=8_900, blocks=2)
    assert finals.next_finalist([near, sure], None) is sure
    sure.trained = sure.figures
    assert finals.next_finalist([near, sure], sure) is near
    assert replace(finals, train=None).next_finalist([near, tried(0.3, size=8_900, blocks=2)], None) is near


def test_a_latency_over_the_ceiling_is_measured_again(with_fastest, tmp_path, monkeypatch) -> None:
    finals, told = with_fastest.finals, iter([0.9, 1.2, 0.8, 0.95, 1.2, 0.9, 1.1])
    monkeypatch.setattr(Stopwatch, "measure", lambda self, file: next(told))
    assert [finals._latency(tmp_path / "model.onnx") for _ in range(3)] == [0.9, 0.95, 1.1]


def test_what_differs_by_effort_alone_does_not_take_the_place_of_another_network(trainings) -> None:
    finals = trainings.finals
    first, twin, other = tried(0.1, blocks=1), tried(0.1, blocks=1, effort="balanced"), tried(0.2, blocks=2)
    first.stopped = 0.5
    assert finals.next_finalist([first, twin, other], None) is other
    assert finals.next_finalist([first, twin], None) is twin
    first.stopped = None
    assert finals.next_finalist([first, twin, other], None, at_work={finals.folder(first.candidate).name}) is other


def test_the_search_follows_the_short_trainings(model, task, tmp_path, monkeypatch) -> None:
    def none_ahead(*made) -> Figures:  # what has more left loses more without a training
        figures = figures_by_formula(*made)
        return replace(figures, drop=0.1 - figures.drop)

    monkeypatch.setattr(Workshop, "_measured", none_ahead)
    best = Candidate(macs=0.5)
    told = {True: {"drop": -0.5, "seconds": 1.0}, False: {"drop": 0.9, "seconds": 2.0}}
    monkeypatch.setattr(ShortTrainings, "_outcome", lambda self, candidate, short: told[candidate == best])
    train = replace(TRAIN, validate_every=0)
    found = ck.compress(model, task, ck.at_most(bytes="0.9x"), out=tmp_path, train=train, **QUICK)
    assert found.chosen.candidate == best
    assert "-0.5000" in str(found)
    briefly = sum(t.short is not None for t in found.tried)
    assert briefly > 1
    assert f"{briefly} trained for a short time in {2 * briefly - 1} s" in str(found)
    assert "-0.5000 of the held-out data after a short training at 0.2 of the learning rate: try a lower one" in found.reason
    told[True]["drop"] = told[False]["drop"] = 2.0  # more than any training loses
    assert "learning rate" not in ck.compress(model, task, ck.at_most(bytes="0.9x"), out=tmp_path, train=train, **QUICK).reason


@pytest.mark.parametrize(("over", "best", "fractions"), [(900, "first", [None, 0.25]), (1001, "third", [None, None])])
def test_only_a_file_that_keeps_the_ceilings_lets_others_be_given_up(over, best, fractions, trainings, monkeypatch) -> None:
    """The first trains best; where it has grown over the ceiling it is no rival of the others."""
    finals = trainings.finals
    candidates = {"first": tried(0.1, blocks=1), "second": tried(0.2, blocks=2), "third": tried(0.3, blocks=3)}
    metrics = {1: 0.9, 2: 0.7, 3: 0.8}
    sizes = {1: over, 2: 900, 3: 900}

    def run(self, candidate, recipe, **settings):
        for step in (50, 100, 150, 200):
            watch(SimpleNamespace(stage="1-qat", training="QAT", step=step, steps=200, metric=metrics[candidate.blocks]))
        return candidate

    def recipe(self, candidate, on_step=None, **settings):
        nonlocal watch
        watch = on_step

    def figures(self, candidate, seconds):
        value = metrics[candidate.blocks]
        return Figures(metric=value, drop=1 - value, latency=1.0, bytes=sizes[candidate.blocks], macs=1, seconds=seconds)

    watch = None
    monkeypatch.setattr(Candidate, "trains_in_two_parts", False)
    for name, patched in {"_run": run, "recipe": recipe, "_figures": figures}.items():
        monkeypatch.setattr(Finals, name, patched)
    monkeypatch.setattr(finals, "train", replace(TRAIN, steps=200))
    for t in candidates.values():
        t.figures = replace(t.figures, drop=9.0)  # none is better without its training
    assert finals.run([*candidates.values()], 3) is candidates[best]
    assert [t.stopped for t in candidates.values()][:2] == fractions


def test_of_a_metric_that_should_be_small_its_growth_is_lost(trainings, monkeypatch) -> None:
    monkeypatch.setattr(Workshop, "compressed", lambda *_, **__: (None, None))
    monkeypatch.setitem(ShortTrainings._outcome.__globals__, "evaluate", lambda model, task: 0.7)
    shop = trainings.finals.workshop
    shop = replace(shop, task=replace(shop.task, higher_is_better=False))
    dense = replace(trainings.dense, metric=0.5)
    candidates = [tried(0.5, macs=0.5), tried(0.6, macs=0.3)]
    replace(trainings, finals=replace(trainings.finals, workshop=shop), dense=dense).enter_(candidates)
    assert [t.short for t in candidates] == pytest.approx([0.2, 0.2])
