"""Several processes at one search: each candidate is made once, the work of a killed one is taken up."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import checkout
import networks
import pytest
import torch
from formula import figures_by_formula
from quick import make_quick

import compresskit as ck
from compresskit.recipe.locks import is_locked
from compresskit.search import workers
from compresskit.search.candidate import Candidate
from compresskit.search.proxy.workshop import Workshop
from compresskit.search.study import LATER, CandidateStudy, _JournalLock
from compresskit.search.workers import Worker, timing_alone

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no locks")
SPAWN = multiprocessing.get_context("spawn")
QUICK = {"trials": 4, "finalists": 2, "seconds": 0.02}


def log_makers(out: Path, stuck: bool, formula: bool) -> None:
    """Write which process makes which candidate; one that is to be stuck says so and waits to be killed.

    formula: whether the figures come from one, and nothing is made.
    """
    measured = figures_by_formula if formula else Workshop._measured

    def logged(self, candidate, *rest):
        with (out.parent / "made.log").open("a") as file:
            file.write(json.dumps([os.getpid(), candidate.name]) + "\n")
        if stuck:
            (out.parent / "stuck").touch()
            time.sleep(600)
        return measured(self, candidate, *rest)

    Workshop._measured = logged
    Workshop._ranked_runs = lambda self, least: ()


def search(out: Path, answer: Path, stuck: bool = False, formula: bool = False) -> None:
    """One process of a search, see `log_makers`."""
    make_quick()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = networks.build(networks.WideChain)
    task = networks.images_task(ck)
    log_makers(out, stuck, formula)
    found = ck.compress(model, task, ck.at_most(bytes="0.5x"), out=out, train=ck.Train(steps=4), **QUICK)
    tried = {t.candidate.name: [t.figures and t.figures.bytes, t.trained and t.trained.bytes] for t in found.tried}
    answer.write_text(json.dumps([found.chosen.candidate.name, tried, str(found)]))


def start(out: Path, name: str, **settings) -> multiprocessing.process.BaseProcess:
    process = checkout.forkserver().Process(target=search, args=(out, out.parent / name), kwargs=settings)
    process.start()
    return process


def made(out: Path) -> list[list]:
    return [json.loads(line) for line in (out.parent / "made.log").read_text().splitlines()]


@pytest.fixture(autouse=True)
def quick_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def test_processes_share_a_search_and_hand_over_the_same(tmp_path) -> None:
    out = tmp_path / "s"
    both = [start(out, name) for name in ("a", "b")]
    for process in both:
        process.join(300)
        assert process.exitcode == 0
    (first, tried, text), (second, others, _) = (json.loads((tmp_path / name).read_text()) for name in ("a", "b"))
    assert first == second
    assert tried == others
    assert len(tried) == 4
    names = [name for _, name in made(out)]
    assert len(names) == len(set(names)) == 4  # each once
    assert sum(trained is not None for _, trained in tried.values()) <= 2  # runs of all processes together
    assert f"> {first}" in text


def test_the_work_of_a_killed_process_is_taken_up(tmp_path) -> None:
    out = tmp_path / "s"
    killed = start(out, "a", stuck=True, formula=True)
    deadline = time.monotonic() + 200
    while not (tmp_path / "stuck").exists():
        assert time.monotonic() < deadline
        assert killed.is_alive()
        time.sleep(0.05)
    other = start(out, "b", formula=True)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(60)
    other.join(300)
    assert other.exitcode == 0
    assert not (tmp_path / "a").exists()
    assert made(out)[0] == [killed.pid, "int8"]
    assert sorted(name for pid, name in made(out) if pid == other.pid) == [
        "int8",
        "macs0.25-int8",
        "macs0.5-int4",
        "macs0.5-int8",
    ]


def hold(out: Path, ready: Path) -> None:
    worker = Worker(out)
    with worker.at_work(), timing_alone():
        ready.write_text(worker.name)
        time.sleep(600)


def test_who_lives_is_seen_from_outside(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the machine's lock is
    monkeypatch.setattr(workers.tempfile, "tempdir", None)
    process = SPAWN.Process(target=hold, args=(tmp_path / "s", tmp_path / "ready"))
    process.start()
    deadline = time.monotonic() + 100
    while not (tmp_path / "ready").exists() or not (name := (tmp_path / "ready").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    me, timing = Worker(tmp_path / "s"), tmp_path / workers.TIMING
    assert me.lives(name)
    assert is_locked(timing)
    assert me.others() == 1
    assert not me.lives(None)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert not me.lives(name)
    assert not is_locked(timing)
    assert me.others() == 0
    with me.at_work():
        assert me.lives(me.name)
    assert not me.lives(me.name)


def test_trials_are_shared_out(tmp_path) -> None:
    first, second = Worker(tmp_path), Worker(tmp_path)
    settings = {"objectives": 1, "most": {}, "first": [Candidate(), Candidate(macs=0.5)], "seed": 0}
    with second.at_work():
        with first.at_work():
            mine = CandidateStudy(tmp_path, "s", first, **settings)
            theirs = CandidateStudy(tmp_path, "s", second, **settings)
            trial, candidate = mine.ask(2)
            assert candidate == Candidate()
            assert theirs.ask(2)[1] == Candidate(macs=0.5)
            assert mine.ask(2) is None  # two are worked on
            assert theirs.finished() == []
        taken, again = theirs.ask(2)  # the first has ended
        assert (again, taken.number) == (candidate, trial.number)
        theirs.tell(taken, [1.0])
        assert mine.finished() == [Candidate()]


def test_who_writes_into_the_journal_keeps_others_out_until_done(tmp_path) -> None:
    lock = _JournalLock(tmp_path / "journal")
    for _ in range(2):
        assert lock.acquire()
        assert is_locked(tmp_path / "journal")
        lock.release()
        assert not is_locked(tmp_path / "journal")


def test_a_lock_that_a_killed_process_left_in_a_folder_that_was_moved_holds_up_nothing(tmp_path, monkeypatch) -> None:
    (tmp_path / "study.log.lock").symlink_to(tmp_path / "elsewhere" / "study.log")  # which Optuna's own lock would wait for

    def symlink(*given: object, **settings: object) -> None:
        raise AssertionError("a link is left where its process is killed")

    monkeypatch.setattr(os, "symlink", symlink)
    worker = Worker(tmp_path)
    with worker.at_work():
        study = CandidateStudy(tmp_path, "s", worker, objectives=1, most={}, first=[Candidate()], seed=0)
        trial, candidate = study.ask(1)
        study.tell(trial, [1.0])
        assert study.finished() == [candidate]


@pytest.mark.parametrize("skips", [True, False])
def test_a_trial_whose_process_was_killed_while_it_told_it_is_told(skips, tmp_path) -> None:
    """The constraints that it had told are there, and Optuna warns of those that are told again."""
    worker = Worker(tmp_path)
    with worker.at_work():
        study = CandidateStudy(tmp_path, "s", worker, objectives=1, most={}, first=[Candidate()], seed=0)
        trial, _ = study.ask(1)
        trial.set_constraint("ceiling 0", 0.5)
        trial.set_constraint("predicted", 0.5)
        if skips:
            study.skip(trial, 9.0, 0.5)
        else:
            study.tell(trial, [1.0], [0.5, 0.25])
        (told,) = study.study.get_trials()
        assert told.constraints == {"ceiling 0": 0.5, "predicted": 0.5} | ({} if skips else {"ceiling 1": 0.25})


def test_a_proposal_comes_next_and_once(tmp_path) -> None:
    worker, wanted = Worker(tmp_path), Candidate(macs=0.3, effort="balanced")
    with worker.at_work():
        study = CandidateStudy(tmp_path, "s", worker, objectives=1, most={}, first=[Candidate()], seed=0)
        study.propose(wanted)  # another one waits
        trial, candidate = study.ask(9)
        assert candidate == Candidate()
        study.tell(trial, [1.0])
        study.propose(wanted)
        trial, candidate = study.ask(9)
        assert candidate == wanted
        study.tell(trial, None)
        study.propose(wanted)
        assert study.ask(9)[1] != wanted


def test_what_was_skipped_may_be_proposed_again_or_to_be_made(tmp_path) -> None:
    worker, wanted = Worker(tmp_path), Candidate(macs=0.3)
    with worker.at_work():
        study = CandidateStudy(tmp_path, "s", worker, objectives=1, most={}, first=[], seed=0)
        for checks in (False, False, True):
            study.propose(wanted, checks=checks)
            trial, candidate = study.ask(9)
            assert (candidate, study.checks(trial)) == (wanted, checks)
            study.skip(trial, 9.0, 1.0)
        assert study.skipped() == {wanted: 9.0}


def test_proposals_come_before_the_later_ones_of_the_first(tmp_path) -> None:
    worker, wanted, later = Worker(tmp_path), Candidate(macs=0.3), LATER[:2]
    first = [Candidate(), Candidate(macs=0.5), *later]
    with worker.at_work():
        study = CandidateStudy(tmp_path, "s", worker, objectives=1, most={}, first=first, seed=0)
        assert study.ask(9)[1] == first[0]
        study.propose(wanted)  # the other early one says more
        assert study.ask(9)[1] == first[1]
        study.propose(wanted)
        study.propose(Candidate(macs=0.4))  # one waits
        assert [study.ask(9)[1] for _ in range(3)] == [wanted, *later]
        study.propose(wanted)
        assert study.ask(9)[1] != wanted


def test_processes_that_train_together_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["compresskit.search.compress"], "world_size", lambda: 2)
    model, task = networks.build(networks.WideChain), networks.images_task(ck)
    with pytest.raises(ck.SettingError, match="got one of 2 that train together; start processes one by one with the same out="):
        ck.compress(model, task, ck.at_most(bytes=10), out=tmp_path / "s")


@pytest.mark.usefixtures("by_formula")
def test_a_machine_of_another_kind_is_refused(tmp_path, monkeypatch) -> None:
    model, task = networks.build(networks.WideChain), networks.images_task(ck)
    settings = {"out": tmp_path / "s", "trials": 1, "finalists": 1, "seconds": 0.02}
    ck.compress(model, task, ck.at_most(latency=1000), **settings)
    monkeypatch.setattr("compresskit.search.proxy.workshop.environment", lambda: {"processor": "an abacus"})
    with pytest.raises(ck.SettingError, match="are of the processor .*, this machine has an abacus; use machines of one kind"):
        ck.compress(model, task, ck.at_most(latency=1000), **settings)
    ck.compress(model, task, ck.at_most(bytes="0.9x"), **settings)
