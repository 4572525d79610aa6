"""What may be handed over: of a finalist the better one of its files with and without training, and files that were measured."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from formula import figures_by_formula

import compresskit as ck
from compresskit.base.task import MetricError, accuracy
from compresskit.export.files import DiskError
from compresskit.search.candidate import Candidate, Removable
from compresskit.search.compress import _reason, _refuse_unreachable
from compresskit.search.figures import Figures
from compresskit.search.finals.finalists import Finals
from compresskit.search.latency.stopwatch import Stopwatch
from compresskit.search.outcome import SEARCH_COLUMNS, Search, Tried
from compresskit.search.proxy.workshop import Workshop
from compresskit.search.workers import Worker
from compresskit.train.callbacks import StepReport

QUICK = {"trials": 2, "finalists": 1, "seconds": 0.02}
CEILING = 1000
WHOLE, HALF, QUARTER = Candidate(), Candidate(macs=0.5), Candidate(macs=0.25)


def figures(drop: float, size: int = CEILING, latency: float = 1.0) -> Figures:
    return Figures(metric=1 - drop, drop=drop, latency=latency, bytes=size, macs=size)


def tried(candidate: Candidate, drop: float, size: int = CEILING) -> Tried:
    return Tried(candidate=candidate, figures=figures(drop, size))


@pytest.fixture
def finals(model, task, tmp_path):
    shop = Workshop(
        model=model, task=task, held=task, out=tmp_path, samples=32, batch=1, threads=1, seconds=0.02, seed=0,
        target=ck.quant.X86, trains=True,
    )  # fmt: skip
    worker = Worker(tmp_path)
    with worker.at_work():
        yield Finals(
            workshop=shop, stopwatch=None, name="finals", order=Removable(), ceilings={"bytes": float(CEILING)}, minimise="drop",
            train=ck.Train(steps=8, optimizer=partial(torch.optim.SGD, lr=0.01)), worker=worker,
        )  # fmt: skip


@pytest.fixture
def told(monkeypatch):
    """(candidate, whether it is trained) -> figures of its file, or the error of its run, and what was run, in turn."""
    files, runs = {}, []

    def run(self, candidate, recipe, *, trains=True):
        runs.append((candidate, trains))
        if isinstance(files[candidate, trains], Exception):
            raise files[candidate, trains]
        return candidate, trains

    monkeypatch.setattr(Finals, "_run", run)
    monkeypatch.setattr(Finals, "_figures", lambda self, result, seconds: replace(files[result], seconds=seconds + 1))
    return files, runs


def test_a_finalist_whose_trained_file_is_too_large_is_handed_over_without_training(finals, told) -> None:
    files, runs = told
    candidates = [tried(WHOLE, 0.0), tried(HALF, 0.3, 500)]
    files |= {(WHOLE, True): figures(-0.1, 2000), (WHOLE, False): figures(0.0)}
    files |= {(HALF, True): figures(0.2, 600), (HALF, False): figures(0.3, 500)}
    assert finals.run(candidates, 2) is candidates[0]
    assert (candidates[0].untrained, candidates[0].trained.bytes, candidates[0].discarded.bytes) == (True, CEILING, 2000)
    assert runs.count((WHOLE, False)) == 1
    assert (HALF, False) not in runs  # it is worse than what there is
    runs.clear()
    again = [replace(t, trained=None, untrained=False, discarded=None) for t in candidates]
    assert finals.run(again, 2) is again[0]  # as another process, or a search that goes on, sees it
    assert runs == []
    assert (again[0].untrained, again[0].discarded) == (True, candidates[0].discarded)


def test_where_no_finalist_keeps_the_ceilings_a_file_that_was_measured_is_taken(finals, told, caplog) -> None:
    files, runs = told
    candidates = [tried(WHOLE, 0.0), tried(HALF, 0.1, 990), tried(QUARTER, 0.3, 980)]
    files |= {(WHOLE, True): figures(0.0, 2000), (WHOLE, False): figures(0.0, 1001)}  # a little larger than it was
    files |= {(HALF, False): ck.ExportError("it DISAGREES with its model"), (QUARTER, False): figures(0.35, 985)}
    assert finals.run(candidates, 1) is candidates[2]
    assert candidates[2].trained == replace(files[QUARTER, False], seconds=candidates[2].trained.seconds)
    assert [each for each in runs if not each[1]] == [(WHOLE, False), (HALF, False), (QUARTER, False)]
    assert "macs0.5-int8 is not proved without training: it DISAGREES" in caplog.text
    assert finals.run([tried(WHOLE, 0.0), tried(HALF, 0.1, 990)], 1) is None  # what is known to be too large is not run again
    assert len([each for each in runs if not each[1]]) == 3


def test_where_trainings_fail_files_without_training_are_taken(finals, told) -> None:
    files, _ = told
    candidates = [tried(WHOLE, 0.1), tried(HALF, 0.2, 500)]
    lost = ck.TrainingError("batch 5: the loss is not finite")
    files |= {(WHOLE, True): lost, (HALF, True): lost, (WHOLE, False): figures(0.1), (HALF, False): figures(0.2, 500)}
    assert finals.run(candidates, 1) is candidates[0]
    assert candidates[0].untrained
    assert candidates[0].untrainable == str(lost)


@pytest.mark.parametrize("minimise", ["drop", "bytes"])
def test_what_was_measured_since_and_is_better_is_run_too(minimise, finals, told) -> None:
    """As where a finished search is called again with more trials."""
    files, runs = told
    ceilings = {"drop": {"bytes": float(CEILING)}, "bytes": {"drop": 0.5}}[minimise]
    finals = replace(finals, train=None, ceilings=ceilings, minimise=minimise)
    candidates = [tried(WHOLE, 0.2, 900), tried(HALF, 0.3, 950)]
    better, worse = tried(QUARTER, 0.1, 500), tried(Candidate(macs=0.7), 0.4, 960)
    files |= {(t.candidate, True): t.figures for t in (*candidates, better, worse)}
    assert finals.run(candidates, 1) is candidates[0]
    assert finals.run([*candidates, worse], 1) is candidates[0]
    assert finals.run([*candidates, worse, better], 1) is better
    assert runs == [(WHOLE, True), (QUARTER, True)]


def test_without_a_training_another_file_that_was_measured_within_the_ceilings_is_run(finals, told) -> None:
    """Beyond the number of finalists, until one keeps them: what was measured on a part of the data may be over on all."""
    files, runs = told
    finals = replace(finals, train=None, ceilings={"bytes": float(CEILING), "drop": 0.1}, minimise="latency")
    candidates = [tried(WHOLE, 0.0), tried(HALF, 0.05), tried(QUARTER, 0.1), tried(Candidate(macs=0.7), 0.4)]
    files |= {(t.candidate, True): t.figures for t in candidates}
    files |= {(WHOLE, True): figures(0.2), (HALF, True): ck.ExportError("it DISAGREES with its model")}
    assert finals.run(candidates, 1) is candidates[2]
    assert [candidate for candidate, _ in runs] == [WHOLE, HALF, QUARTER]
    runs.clear()
    files[QUARTER, True] = figures(0.2)
    none = replace(finals, name="others")
    assert none.run([tried(t.candidate, t.figures.drop) for t in candidates], 1) is None
    assert [candidate for candidate, _ in runs] == [WHOLE, HALF, QUARTER]  # the last was over when it was measured


@pytest.mark.parametrize(("fails", "runs_until"), [(True, 3), (False, 6)])
def test_without_a_training_the_runs_beyond_the_finalists_are_bounded(fails, runs_until, finals, told) -> None:
    """Two finalists: one failure more than them ends it, and so do twice as many that are over a ceiling beyond them."""
    files, runs = told
    finals = replace(finals, train=None, ceilings={"bytes": float(CEILING), "drop": 0.1}, minimise="latency")
    candidates = [tried(Candidate(macs=0.9 - i / 20), 0.05) for i in range(12)]
    files |= {(t.candidate, True): ck.ExportError("it DISAGREES") if fails else figures(0.2) for t in candidates}
    assert finals.run(candidates, 2) is None
    assert len(runs) == runs_until


@pytest.mark.parametrize("trains", [True, False])
def test_an_error_of_the_disk_rejects_no_finalist(trains, finals, told, tmp_path) -> None:
    files, _ = told
    finals, full = finals if trains else replace(finals, train=None), DiskError("the disk is full")
    whole = tried(WHOLE, 0.0)
    # The second is the file that a training is compared with which made it worse.
    for made in ({True: full, False: figures(0.0)}, {True: figures(0.2), False: full})[: 1 + trains]:
        files |= {(WHOLE, trained): outcome for trained, outcome in made.items()}
        call = replace(finals, worker=Worker(tmp_path))
        with call.worker.at_work(), pytest.raises(ck.ExportError, match="the disk is full"):
            call.run([whole], 1)
    files |= {(WHOLE, True): figures(0.2), (WHOLE, False): figures(0.0)}
    assert finals.run([whole], 1) is whole
    assert not whole.failed
    assert whole.untrained is trains


def test_of_two_files_of_a_finalist_that_which_keeps_the_ceilings_is_the_better_one(finals, told) -> None:
    files, _ = told
    whole = tried(WHOLE, 0.0, CEILING)
    files |= {(WHOLE, True): figures(0.1), (WHOLE, False): figures(0.0, CEILING + 1)}
    assert finals.run([whole], 1) is whole
    assert not whole.untrained


def test_a_training_whose_file_is_too_large_is_no_rival_of_others(finals, told) -> None:
    files, _ = told
    files |= {(WHOLE, True): figures(0.1, 2000), (WHOLE, False): figures(0.0)}  # without it, it keeps the ceilings
    finals.run([tried(WHOLE, 0.0)], 1)
    assert [trial.user_attrs.get("over") for trial in finals.study.trials] == [True]


@pytest.mark.parametrize(("epochs", "stage", "stopped"), [(1, "prune", None), (2, "prune", 0.75), (2, "QAT", None)])
def test_a_training_that_is_over_is_not_given_up(epochs, stage, stopped, finals, told, monkeypatch) -> None:
    """Of one epoch, none is left for rounding: its end is the end of the whole training."""
    files, _ = told
    files[HALF, True] = figures(0.1)
    end = StepReport(stage="1", training=stage, step=9, steps=9, epoch=1, losses={}, learning_rates=[], metric=0.5)

    def run(self, candidate, recipe, *, trains=True):
        for watch in recipe.on_step:
            watch(end)
        return candidate, trains

    monkeypatch.setattr(Finals, "_run", run)
    finals = replace(finals, train=ck.Train(epochs=epochs))
    trial = finals.study.ask()
    monkeypatch.setattr(trial, "should_prune", lambda: True)
    finals.run_one(tried(HALF, 0.3), trial)
    assert finals.study.trials[-1].user_attrs.get("stopped") == stopped


def test_times_of_files_without_training_have_to_be_less_by_more_than_the_noise(finals, tmp_path) -> None:
    watch = Stopwatch(dense=tmp_path, milliseconds=1.0, noise=0.05, inputs=(), threads=1, seconds=1.0)
    finals = replace(finals, ceilings={"drop": 0.1}, minimise="latency", stopwatch=watch)
    best, near = Tried(candidate=WHOLE, figures=figures(0.0), trained=figures(0.0)), tried(HALF, 0.0)
    near.figures = figures(0.0, latency=0.96)
    assert finals.next_untrained([best, near], best) is None
    near.figures = figures(0.0, latency=0.94)
    assert finals.next_untrained([best, near], best) is near
    near.figures = figures(0.2, latency=0.94)  # which loses too much
    assert finals.next_untrained([best, near], best) is None


@pytest.mark.parametrize("trains", [False, True])
def test_a_drop_at_its_ceiling_is_expected_to_keep_it(trains, finals) -> None:
    """0.91 - 0.905 is a little more than 0.005 in binary."""
    train, ceiling = (finals.train, 0.0025) if trains else (None, 0.005)  # a training is expected to leave half
    finals = replace(finals, train=train, ceilings={"drop": ceiling}, minimise="latency")
    found = Figures(metric=0.905, drop=0.91 - 0.905, latency=1.0, bytes=CEILING, macs=1)
    fast = Tried(candidate=HALF, figures=found)
    slow = Tried(candidate=WHOLE, figures=replace(found, metric=0.909, drop=0.91 - 0.909, latency=2.0))
    assert fast.figures.drop > 0.005
    assert finals.next_finalist([slow, fast], None) is fast
    over = replace(fast, figures=replace(found, metric=0.9049, drop=0.0051))
    assert finals.next_finalist([slow, over], None) is slow


def test_the_search_says_why_a_file_is_without_training(model, task, tmp_path, monkeypatch) -> None:
    """The metadata of a file tell of its training, and take bytes."""
    plain = ck.compress(model, task, ck.at_most(bytes="0.5x"), out=tmp_path / "plain", **{**QUICK, "trials": 1})
    monkeypatch.setattr("compresskit.search.explore.first_candidates", lambda **_: [Candidate()])
    train = ck.Train(steps=4, optimizer=partial(torch.optim.SGD, lr=0.0, momentum=0.9, weight_decay=1e-4, nesterov=True))
    budget = ck.at_most(bytes=plain.figures.bytes + 100)
    found = ck.compress(model, task, budget, out=tmp_path / "trained", train=train, **{**QUICK, "trials": 1})
    assert found.chosen.untrained
    assert found.onnx.stat().st_size == found.figures.bytes <= plain.figures.bytes + 100 < found.chosen.discarded.bytes
    assert f"It is the file without training; with it, it has bytes {found.chosen.discarded.bytes} > " in found.reason
    assert "QAT" not in found.code.read_text()


@pytest.mark.usefixtures("by_formula")
def test_a_drop_is_the_difference_of_two_metrics_on_the_same_data(model, task, tmp_path) -> None:
    found = ck.compress(model, task, ck.at_most(bytes="0.5x", drop=0.2), out=tmp_path / "s", held_out_samples=32, **QUICK)
    assert found.dense.metric == pytest.approx(ck.evaluate(model, task), abs=1e-6)
    assert found.dense.metric - found.figures.metric == pytest.approx(found.figures.drop, abs=1e-6)
    record = found.to_json()
    assert record["uncompressed"]["metric"] == found.dense.metric
    first = ck.Task(train=task.train, val=task.val[:1])
    assert record["uncompressed_held_out"]["metric"] == pytest.approx(ck.evaluate(model, first), abs=1e-6)
    assert {t["candidate"]: t["data"] for t in record["tried"]} == {
        t.candidate.name: "all" if t is found.chosen else "held out" for t in found.tried
    }
    rows = [line.split()[:2] for line in str(found).splitlines() if line.startswith("uncompressed")]
    assert rows == [["uncompressed", "all"], ["uncompressed", "held"]]
    assert "a drop is the difference to the uncompressed model on the same data; the ceiling on the drop is kept on all" in str(
        found
    )
    whole = ck.compress(model, task, ck.at_most(bytes="0.5x"), out=tmp_path / "t", **QUICK)
    assert str(whole).count("uncompressed  ") == 1
    assert "held out" not in str(whole)
    assert whole.to_json()["uncompressed_held_out"] == whole.to_json()["uncompressed"]


def test_a_drop_on_a_part_of_the_data_alone_refuses_no_budget(model, task, tmp_path, monkeypatch) -> None:
    def worse(*made) -> Figures:
        return replace(figures_by_formula(*made), drop=0.5)

    monkeypatch.setattr(Workshop, "_measured", worse)
    budget = ck.at_most(drop=0.2)
    found = ck.compress(model, task, budget, out=tmp_path / "s", held_out_samples=32, **QUICK)
    assert found.figures.drop <= 0.2
    with pytest.raises(ck.ModelError, match="none of 2 candidates meets"):  # of all data it is known
        ck.compress(model, task, budget, out=tmp_path / "t", **QUICK)
    measured = Finals._figures
    monkeypatch.setattr(Finals, "_figures", lambda *given: replace(measured(*given), drop=0.3))
    with pytest.raises(
        ck.ModelError, match=r"none of 1 finalists meets .*drop=0.3\); ask for that, train \(minutes= or train=\),"
    ):
        ck.compress(model, task, budget, out=tmp_path / "u", held_out_samples=32, **QUICK)


def test_a_budget_that_none_meets_has_the_reason_why_others_could_not_be_made(model, task, tmp_path, monkeypatch) -> None:
    def some(self, candidate, *rest):
        if candidate.macs < 1 and candidate.bits == "int8":
            raise ck.DataError("its values are nan" if candidate.macs == 0.5 else "it has no channels")
        return figures_by_formula(self, candidate, *rest)

    monkeypatch.setattr(Workshop, "_measured", some)
    ladder = [Candidate(), *(Candidate(macs=macs) for macs in (0.5, 0.25, 0.7))]
    monkeypatch.setattr("compresskit.search.explore.first_candidates", lambda **_: ladder)
    monkeypatch.setattr("compresskit.search.explore.asks_for_more", lambda candidate, tried: False)
    with pytest.raises(
        ck.ModelError,
        match=r"the nearest that can is .*; [34] of \d candidates could not be made: it has no channels \([23] of them",
    ):
        ck.compress(model, task, ck.at_most(bytes=10), out=tmp_path / "s", **{**QUICK, "trials": 3})


@pytest.mark.parametrize(("part", "trains"), [(True, True), (False, True), (True, False), (False, False)])
def test_the_nearest_budget_before_a_training_has_the_drop_that_was_asked_for(part, trains, tmp_path) -> None:
    """What is lost without a training says neither which candidate is nearest nor which drop can be asked for."""
    budget = ck.at_most(bytes=100, drop=0.1)
    candidates = [tried(QUARTER, 9.0, 200), tried(WHOLE, 0.15, 300)]
    with pytest.raises(ck.ModelError, match="none of 2 candidates meets") as raised:
        _refuse_unreachable(candidates, budget, {"bytes": 100.0, "drop": 0.1}, tmp_path, part=part, trains=trains)
    nearest = "at_most(bytes=1224, drop=0.1)" if trains else "at_most(bytes=556, drop=0.15)"
    held_out = " (its drop is that of the held-out data)" if part and not trains else ""
    assert f"the nearest that can is {nearest}{held_out}; ask for that" in str(raised.value)


@pytest.mark.usefixtures("by_formula")
@pytest.mark.parametrize("size", ["0.9x", 10], ids=["found", "refused"])
def test_global_generators_are_left_as_they_were(size, model, task, tmp_path) -> None:
    def drawn() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]  # noqa: NPY002

    def seed() -> None:
        torch.manual_seed(7)
        np.random.seed(7)  # noqa: NPY002
        random.seed(7)

    seed()
    wanted = drawn()
    seed()
    try:
        ck.compress(model, task, ck.at_most(bytes=size), out=tmp_path / "s", **QUICK)
    except ck.ModelError:
        assert size == 10
    assert drawn() == wanted


def started(finals, *candidates: Candidate) -> None:
    """As if the uncompressed model had been measured in the runs of candidates."""
    for candidate, trains in itertools.product(candidates, (True, False)):
        row = finals.folder(candidate, trains=trains) / "0-start" / "row.json"
        row.parent.mkdir(parents=True, exist_ok=True)
        row.write_text("{}")


NAN = MetricError("the metric is nan on the validation set")


def test_a_finalist_whose_metric_is_not_finite_gives_its_place_to_the_next(finals, told, caplog) -> None:
    files, _ = told
    candidates = [tried(WHOLE, 0.1), tried(HALF, 0.2, 500), tried(QUARTER, 0.3, 250)]
    started(finals, WHOLE, HALF)
    files |= {(WHOLE, True): NAN, (HALF, True): NAN, (QUARTER, True): figures(0.3, 250)}
    files |= {(WHOLE, False): NAN, (HALF, False): NAN, (QUARTER, False): figures(0.3, 250)}
    assert finals.run(candidates, 2) is candidates[2]
    assert [t.untrainable for t in candidates] == [str(NAN), str(NAN), ""]
    assert "macs0.5-int8 is no finalist: the metric is nan" in caplog.text
    assert "macs0.5-int8 is not proved without training: the metric is nan" in caplog.text


def test_without_a_training_a_metric_that_is_not_finite_is_of_the_file(finals, told) -> None:
    files, _ = told
    finals = replace(finals, train=None)
    started(finals, WHOLE)
    files |= {(WHOLE, True): NAN, (HALF, True): figures(0.2, 500)}
    candidates = [tried(WHOLE, 0.1), tried(HALF, 0.2, 500)]
    assert finals.run(candidates, 1) is candidates[1]
    assert (candidates[0].rejected, candidates[0].untrainable) == (str(NAN), "")


def test_an_error_of_the_data_of_one_finalist_gives_its_place_to_the_next(finals, told) -> None:
    files, _ = told
    started(finals, WHOLE)
    files |= {(WHOLE, True): ck.DataError("no box is left"), (HALF, True): figures(0.1, 500)}
    files |= {(WHOLE, False): figures(0.5), (HALF, False): figures(0.5, 500)}
    candidates = [tried(WHOLE, 0.1), tried(HALF, 0.2, 500)]
    assert finals.run(candidates, 1) is candidates[1]
    assert candidates[0].untrainable == "no box is left"


@pytest.mark.parametrize(("begun", "runs_until"), [((), 1), ((WHOLE, HALF), 2)], ids=["uncompressed", "the same twice"])
def test_an_error_of_the_data_that_all_finalists_have_ends_the_search(begun, runs_until, finals, told) -> None:
    files, runs = told
    started(finals, *begun)
    files |= dict.fromkeys([(c, True) for c in (WHOLE, HALF, QUARTER)], ck.DataError("batch 7: a worker died"))
    with pytest.raises(ck.DataError, match="batch 7: a worker died"):
        finals.run([tried(WHOLE, 0.1), tried(HALF, 0.2, 500), tried(QUARTER, 0.3, 250)], 3)
    assert len(runs) == runs_until


def test_a_file_without_training_that_the_data_do_not_fit_ends_no_search(finals, told, caplog) -> None:
    files, _ = told
    none_left = ck.DataError("no box is left")
    candidates = [tried(WHOLE, 0.1, 100), tried(HALF, 0.2, 500), tried(QUARTER, 0.3, 250)]
    started(finals, WHOLE, HALF)
    files |= {(WHOLE, True): figures(0.4, 100), (HALF, True): none_left, (QUARTER, True): figures(0.35, 250)}
    files |= {(WHOLE, False): none_left, (HALF, False): none_left, (QUARTER, False): figures(0.3, 250)}
    assert finals.run(candidates, 3) is candidates[2]
    assert (candidates[0].trained.drop, candidates[0].untrained) == (0.4, False)
    assert candidates[1].untrainable == str(none_left)
    assert "macs0.5-int8 is not proved without training: no box is left" in caplog.text
    states = [trial.state for trial in finals.study.get_trials(deepcopy=False)]
    assert finals.states.RUNNING not in states


def test_a_finalist_without_training_whose_training_had_the_same_error_is_no_second_one(finals, told) -> None:
    files, _ = told
    none_left = ck.DataError("no box is left")
    started(finals, WHOLE)
    files |= {(WHOLE, True): none_left, (WHOLE, False): none_left}
    whole = tried(WHOLE, 0.1)
    assert finals.run([whole], 1) is None
    assert whole.untrainable == str(none_left)


def test_without_a_training_what_the_data_do_not_fit_is_tried_again_by_another_call(finals, told, tmp_path) -> None:
    """The data, or the code of the metric, may have been mended since."""
    files, _ = told
    earlier, finals = replace(finals, train=None, worker=Worker(tmp_path)), replace(finals, train=None)
    started(finals, WHOLE, HALF)
    files |= {(WHOLE, True): ck.DataError("no box is left"), (HALF, True): NAN}
    with earlier.worker.at_work():
        first = [tried(WHOLE, 0.1), tried(HALF, 0.2, 500)]
        assert earlier.run(first, 2) is None
    assert [t.rejected for t in first] == ["no box is left", str(NAN)]
    files |= {(WHOLE, True): figures(0.1), (HALF, True): figures(0.0, 500)}
    again = [tried(WHOLE, 0.1), tried(HALF, 0.2, 500)]
    assert finals.run(again, 2) is again[0]
    assert [t.rejected for t in again] == ["", str(NAN)]  # the metric of a candidate stays what it is


def constant(parameters):
    """Makes each training end in a network that gives the same for all samples."""
    return torch.optim.SGD(parameters, lr=1e-30, weight_decay=1e30)


def spread(predictions, targets):
    return float(accuracy(predictions, targets) / (predictions.std(0).max() > 0))


@pytest.mark.usefixtures("by_formula")
def test_a_search_goes_on_without_a_training_that_makes_the_metric_nan(model, task, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("compresskit.search.explore.first_candidates", lambda **_: [Candidate(macs=0.5, bits="float")])
    task = replace(task, metric=spread, higher_is_better=True)
    train = ck.Train(steps=2, optimizer=constant)
    found = ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "s", train=train, **{**QUICK, "trials": 1})
    assert found.chosen.untrained
    assert "the file without training, which failed: the metric is" in found.reason


def ran(candidate: Candidate, drop: float, latency: float, **more) -> Tried:
    return Tried(candidate=candidate, figures=figures(0.0, latency=latency), trained=figures(drop, latency=latency), **more)


def test_the_reason_names_the_files_that_were_passed_over() -> None:
    whole, half = ran(WHOLE, 0.001, 2.0), ran(HALF, 0.03, 1.0)
    given_up = Tried(candidate=QUARTER, figures=figures(0.0), stopped=0.5)
    ceilings = {"drop": 0.01}
    assert _reason(whole, [whole], ceilings, "latency").endswith("; of 1 that were run as recipes it has the least latency")
    said = _reason(whole, [half, whole], ceilings, "latency")
    over = "1 exceeds a ceiling (macs0.5-int8 (latency 1 ms): drop 0.03 > 0.01)"
    assert said.endswith(f"; of 2 that were run as recipes, {over}; of the others it has the least latency")
    said = _reason(whole, [half, whole, given_up, given_up], ceilings, "latency")
    assert f"; of 4 that were run as recipes, 2 were given up and {over}; of the others it has" in said


def test_what_no_training_changes_is_not_said_to_be_trained() -> None:
    network, latency = [Candidate(bits="dynamic"), Candidate(bits="dynamic", macs=0.5), WHOLE], 1.0
    rows = [ran(candidate, 0.0, latency) for candidate in network]
    found = Search(
        budget=ck.at_most(bytes=CEILING), dense=figures(0.0), tried=tuple(rows), chosen=rows[0], reason="", recipe=None,
        code=None, result=None, noise=0.0,
    )  # fmt: skip
    assert [found._line(row, on_curve=False)[SEARCH_COLUMNS.index("trained")] for row in rows] == ["0", "1", "1"]
