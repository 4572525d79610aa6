"""Which candidates a search proposes: halfway to the ceilings, placed by measurement, or with more removed than ever."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from compresskit.quant.numerics.targets import X86
from compresskit.search.candidate import UNCOMPRESSED, Candidate, Removable
from compresskit.search.explore import Explorer, asks_for_more, between, further, in_float, nearly_enough, nearly_within
from compresskit.search.figures import Figures
from compresskit.search.latency.stopwatch import Stopwatch
from compresskit.search.outcome import Tried
from compresskit.search.study import CandidateStudy
from compresskit.search.workers import Worker

DENSE = Figures(metric=1.0, drop=0.0, latency=5.0, bytes=36, macs=100)


def test_what_asks_for_more_than_could_be_made_is_not_made() -> None:
    made = Figures(metric=1.0, drop=0.0, latency=1.0, bytes=9, macs=9)
    failed = Tried(candidate=Candidate(macs=0.5), failure="it has no channels")
    tried = {Candidate(): Tried(candidate=Candidate(), figures=made), failed.candidate: failed}
    assert asks_for_more(Candidate(macs=0.5, rank=0.6, bits="int4"), tried)
    assert asks_for_more(Candidate(macs=0.25, blocks=1), tried)
    assert not asks_for_more(Candidate(macs=0.7), tried)
    assert not asks_for_more(Candidate(rank=0.4), tried)
    assert not asks_for_more(Candidate(macs=0.25), {failed.candidate: failed})  # int8 may be the cause
    both = Tried(candidate=Candidate(macs=0.5, rank=0.6), failure="it has no channels")
    assert not asks_for_more(
        Candidate(macs=0.4, rank=0.4), tried | {both.candidate: both} | {failed.candidate: tried[Candidate()]}
    )
    blocks = Tried(candidate=Candidate(blocks=2), failure="no such blocks")
    assert asks_for_more(Candidate(blocks=3), {**tried, blocks.candidate: blocks})
    assert not asks_for_more(Candidate(blocks=1), {**tried, blocks.candidate: blocks})


class Waits(Exception):
    """A process waits for others."""


@pytest.fixture
def explorer(tmp_path, monkeypatch):
    """A function (what makes a candidate) -> the explorer of a new process, which ends with four, and where it would wait."""

    def wait(seconds: float) -> None:
        raise Waits

    def explorer(make) -> Explorer:
        shop = SimpleNamespace(
            trains=False, gains_by_dynamic=False, has_large_tables=False, out=tmp_path, storages=("float", "int8", "int4"),
            seed=0, target=X86, make=lambda candidate, *_: make(candidate), measured=dict,
        )  # fmt: skip
        return Explorer(
            workshop=shop, stopwatch=SimpleNamespace(surely=lambda ms: ms), worker=Worker(tmp_path), dense=DENSE,
            order=Removable(), ceilings={"bytes": 900.0}, judged=("bytes",), trials=4, name="s",
        )  # fmt: skip

    monkeypatch.setattr("compresskit.search.explore.time.sleep", wait)
    return explorer


def made(candidate: Candidate) -> Figures:
    return Figures(metric=1.0, drop=1 - candidate.macs, latency=1.0, bytes=round(1000 * candidate.macs), macs=100)


def explored(explorer: Explorer) -> set[str]:
    """The names of what one process measured."""
    with explorer.worker.at_work():
        return {entry.candidate.name for entry in explorer.explore() if entry.figures is not None}


def test_a_cut_that_fails_after_another_process_made_a_deeper_one_ends_no_search_in_waiting(explorer) -> None:
    """Since less of it cannot be removed, the deeper one would not be tried; but it was made, and counts."""

    def slow(candidate: Candidate) -> Figures | str:
        if candidate != Candidate(macs=0.5):
            return made(candidate)
        with suppress(Waits):  # another process does what else there is to do meanwhile, and waits
            explored(explorer(made))
        return "its file does not agree with the model"

    first = explored(explorer(slow))
    assert len(first) == 4
    assert "macs0.25-int8" in first
    assert explored(explorer(slow)) == first  # the same call again


def test_a_candidate_whose_folder_is_gone_and_that_cannot_be_made_again_ends_no_search_in_waiting(explorer) -> None:
    first, gone = explored(explorer(made)), Candidate(macs=0.25)
    again = explored(explorer(lambda candidate: "no longer" if candidate == gone else made(candidate)))
    assert len(first) == len(again) == 4
    assert first - again == {gone.name}


def test_what_was_measured_for_another_budget_takes_part_and_is_no_trial(explorer) -> None:
    found, (elsewhere, first) = explorer(made), (Candidate(macs=0.9, bits="float"), Candidate())
    found.workshop.measured = lambda: {candidate: made(candidate) for candidate in (elsewhere, first)}
    with found.worker.at_work():
        tried = [entry.candidate for entry in found.explore()]
    assert len(tried) == 4 + 1
    assert tried[-1] == elsewhere
    assert tried.count(first) == 1


def tried_of(**entries: tuple[float, float]) -> dict[Candidate, Tried]:
    """Of candidates by the hundredths of the MACs that stay: (drop, latency)."""
    found = {}
    for name, (drop, latency) in entries.items():
        candidate = Candidate(macs=int(name[1:]) / 100)
        figures = Figures(metric=1.0, drop=drop, latency=latency, bytes=9, macs=9)
        found[candidate] = Tried(candidate=candidate, figures=figures)
    return found


def over_latency(explorer: Explorer, latency, too_slow) -> list[Tried]:
    """What a search with a ceiling of 1 ms tries. latency: of a candidate. too_slow: what its filter predicts."""
    shop = SimpleNamespace(**vars(explorer.workshop) | {"make": lambda c, *_: replace(made(c), latency=latency(c))})
    told = SimpleNamespace(margin=0.1, learn=lambda *_: None, too_slow=too_slow)
    slow = replace(explorer, workshop=shop, ceilings={"latency": 1.0}, judged=("latency",), trials=6, filter=told)
    with slow.worker.at_work():
        return slow.explore()


def test_only_candidates_that_keep_the_latency_speak_for_those_with_less_left(explorer) -> None:
    """What removes no less than one of them is made without a prediction."""
    given = []
    entries = over_latency(explorer(made), lambda c: 2 * c.macs, lambda _, fast: given.append(fast))
    latencies = {entry.candidate: entry.figures.latency for entry in entries}
    assert all(latencies[candidate] <= 1 for fast in given for candidate in fast)
    assert Candidate(macs=0.5) in given[-1]


def test_a_candidate_made_in_spite_of_its_prediction_is_returned_once(explorer) -> None:
    """All are over the ceiling, so that some of those that are skipped are made to see whether predictions are right."""
    entries = over_latency(explorer(made), lambda _: 5.0, lambda c, _: 4.0 if c.macs < 1 else None)
    names = [entry.candidate.name for entry in entries]
    assert len(names) == len(set(names))
    assert any(entry.figures is None and entry.predicted == 4.0 for entry in entries)
    assert any(entry.figures is not None and entry.candidate.macs < 1 for entry in entries)


def test_the_sampler_is_told_by_how_much_a_candidate_is_over_the_ceiling(explorer, monkeypatch) -> None:
    told, tell = [], CandidateStudy.tell
    monkeypatch.setattr(CandidateStudy, "tell", lambda study, trial, *args: (told.append(args), tell(study, trial, *args)))
    explored(explorer(made))
    over = {round(1000 * (1 - drop)): over for (drop, _), (over,) in told}  # by the size, of which 900 are allowed
    assert over.pop(1000) == pytest.approx(1 / 9)
    assert over.pop(500) == over.pop(250) == 0


@pytest.mark.parametrize(("trains", "most"), [(False, 4), (True, 6)])
def test_of_the_blocks_half_may_go_and_three_quarters_where_candidates_are_trained(explorer, trains, most, monkeypatch) -> None:
    def study(*args, **settings):
        raise Waits(settings["most"]["blocks"])

    monkeypatch.setattr("compresskit.search.explore.CandidateStudy", study)
    found = explorer(made)
    found.workshop.trains = trains
    with pytest.raises(Waits, match=str(most)):
        replace(found, order=Removable(blocks=tuple("abcdefgh"))).explore()


def test_predictions_are_doubted_of_the_precision_of_which_fewest_were_measured(explorer) -> None:
    by_latency = replace(explorer(made), ceilings={"latency": 1.0}, judged=("latency",))
    tried = tried_of(m100=(0.0, 4.0), m50=(0.1, 2.0))
    predictions = {Candidate(macs=0.25): 1.2, Candidate(macs=0.35): 1.3}
    predictions |= {Candidate(bits="float", macs=0.25): 1.5, Candidate(bits="float", macs=0.5): 1.6}
    assert by_latency._doubted(tried, predictions) == Candidate(bits="float", macs=0.25)
    dense = {UNCOMPRESSED: Tried(candidate=UNCOMPRESSED, figures=replace(DENSE, latency=0.9))}
    assert by_latency._doubted(tried | dense, predictions) == Candidate(bits="float", macs=0.25)  # it was there before
    assert by_latency._doubted(tried | tried_of(m15=(0.2, 0.9)), predictions) is None  # one keeps the ceiling
    assert by_latency._doubted(tried | tried_of(m25=(0.2, 1.1)), predictions) is None  # one of four was made


def test_a_candidate_halfway_to_the_ceiling_is_proposed_until_none_is_left() -> None:
    tried = tried_of(m100=(0.0, 4.0), m50=(0.1, 2.0), m15=(0.4, 0.4))
    assert between(tried, {"latency": 1.0}) == Candidate(macs=0.3)
    assert between(tried, {"latency": 1.0}, [Candidate(macs=0.3)]) == Candidate(macs=0.2)
    assert between(tried, {"latency": 1.0}, [Candidate(macs=0.3), Candidate(macs=0.2)]) is None
    tried |= tried_of(m30=(0.3, 0.9))
    assert between(tried, {"latency": 1.0}) == Candidate(macs=0.4)
    tried |= tried_of(m40=(0.2, 1.1))
    assert between(tried, {"latency": 1.0}) == Candidate(macs=0.35)
    tried |= tried_of(m35=(0.25, 0.99))
    assert between(tried, {"latency": 1.0}) is None
    assert between(tried_of(m100=(0.0, 0.5), m50=(0.1, 0.2)), {"latency": 1.0}) is None  # the best is within
    assert between(tried_of(m100=(0.0, 4.0)), {"latency": 1.0}) is None
    float_one = replace(next(iter(tried)), bits="float")
    other = {float_one: Tried(candidate=float_one, figures=tried[Candidate()].figures)}
    assert between(other | tried_of(m15=(0.4, 0.4)), {"latency": 1.0}) is None  # of another precision


def test_the_candidate_above_loses_less_than_the_one_within() -> None:
    """One that is nearer to the ceiling and loses more is no direction to go in."""
    tried = tried_of(m30=(0.1, 0.8), m50=(0.2, 1.1), m90=(0.05, 1.5))
    assert between(tried, {"latency": 1.0}) == Candidate(macs=0.6)


def test_what_is_proposed_keeps_the_latency_when_it_is_measured_again() -> None:
    watch = Stopwatch(dense=Path("d"), milliseconds=4.0, noise=0.01, inputs=(), threads=1, seconds=1.0)
    assert watch.surely(1.03) == pytest.approx(1.0)
    assert replace(watch, noise=0.1).surely(1.1) == pytest.approx(1.0)
    workshop = SimpleNamespace(trains=False, target=SimpleNamespace(runs_here=True))
    settings = {"workshop": workshop, "stopwatch": watch, "worker": None, "dense": DENSE, "order": None, "trials": 9, "name": "s"}
    tried = tried_of(m100=(0.0, 1.5), m60=(0.1, 1.02), m40=(0.2, 0.9))
    by_latency = Explorer(ceilings={"latency": 1.03}, judged=("latency",), **settings)
    assert by_latency._proposed(tried, {}, 0) == Candidate(macs=0.5)  # 0.6 is below the ceiling by less than the noise
    too_slow = {Candidate(macs=0.5): Tried(candidate=Candidate(macs=0.5), predicted=1.4)}
    assert by_latency._proposed(tried, too_slow, 0) == Candidate(macs=0.45)
    by_bytes = Explorer(ceilings={"bytes": 10.0}, judged=("bytes",), **settings)
    assert by_bytes._proposed(tried, {}, 0) is None


def test_what_was_skipped_is_far_over_only_by_what_predictions_err_now() -> None:
    settings = {"workshop": None, "stopwatch": None, "worker": None, "dense": DENSE, "order": None, "trials": 9, "name": "s"}
    explorer = Explorer(ceilings={"latency": 1.0}, judged=("latency",), filter=SimpleNamespace(margin=0.1), **settings)
    assert explorer._far_over(1.2)
    explorer.filter.margin = 0.3
    assert not explorer._far_over(1.2)


def test_what_is_too_slow_in_integers_is_tried_in_float() -> None:
    slow = {
        candidate: Tried(candidate=candidate, figures=Figures(metric=1.0, drop=drop, latency=latency, bytes=size, macs=macs))
        for candidate, drop, latency, size, macs in (
            (Candidate(), 0.0, 3.5, 9, 100),
            (Candidate(macs=0.7), 0.01, 3.4, 7, 70),
            (Candidate(macs=0.5), 0.1, 3.3, 5, 50),
            (Candidate(macs=0.25), 0.2, 3.2, 3, 25),
        )
    }
    half, quarter = Candidate(macs=0.5, bits="float"), Candidate(macs=0.25, bits="float")
    ceiling = {"latency": 3.0}
    assert in_float(slow, ceiling, DENSE) == half  # 0.7 of the MACs take 3.5 in float, by what is known
    assert in_float(slow | {half: Tried(candidate=half, predicted=3.3)}, ceiling, DENSE) == quarter
    assert in_float(slow, {"latency": 3.0, "bytes": 15.0}, DENSE) == quarter  # half would have a file of 20 bytes
    assert in_float(slow, {"latency": 3.45}, DENSE) is None  # 0.7 of the MACs in integers keep it, and lose least
    assert in_float(slow, ceiling, replace(DENSE, latency=20.0)) is None  # integers are faster
    assert in_float(slow, {"bytes": 28.0}, DENSE) is None
    other = Tried(candidate=Candidate(blocks=1), figures=Figures(metric=1.0, drop=0.05, latency=2.0, bytes=8, macs=80))
    assert in_float(slow | {other.candidate: other}, ceiling, DENSE) is None  # it loses less


def test_a_little_more_is_removed_of_what_nearly_keeps_the_ceilings_and_loses_less() -> None:
    def of(drop: float, latency: float, **what: object) -> dict[Candidate, Tried]:
        figures = Figures(metric=1.0, drop=drop, latency=latency, bytes=9, macs=9)
        return {(c := Candidate(**what)): Tried(candidate=c, figures=figures)}

    within, near = of(0.2, 0.9, macs=0.25), of(0.05, 1.04, macs=0.5, bits="dynamic")
    ceilings = {"latency": 1.0}
    assert nearly_enough(within | near, ceilings, 0) == Candidate(macs=0.45, bits="dynamic")  # 0.5 / 1.04
    assert nearly_enough(within | near | of(0.06, 1.01, macs=0.45, bits="dynamic"), ceilings, 0) == Candidate(
        macs=0.4, bits="dynamic"
    )
    assert nearly_enough(near, ceilings, 0) is None  # none is within, of which `further` makes more
    assert nearly_enough(within | of(0.3, 1.04, macs=0.5, bits="dynamic"), ceilings, 0) is None  # it loses more
    assert nearly_enough(within | of(0.05, 1.3, macs=0.5, bits="dynamic"), ceilings, 0) is None  # far off
    assert nearly_enough(within | of(0.05, 1.04, macs=0.5), ceilings, 0) is None  # `between` halves that
    placed = of(0.2, 0.9, macs=0.25, effort="balanced")
    assert nearly_enough(placed | of(0.05, 1.04, macs=0.5), ceilings, 0) == Candidate(macs=0.45)  # of another effort
    cut = of(0.05, 1.04, macs=0.1, bits="dynamic")
    assert nearly_enough(within | cut, ceilings, 1) == Candidate(macs=0.1, bits="dynamic", blocks=1)
    assert nearly_enough(within | cut, ceilings, 0) is None  # nothing is left to remove


def test_more_is_removed_than_ever_where_nothing_keeps_the_ceilings() -> None:
    ceilings = {"latency": 0.5}
    assert further(tried_of(m100=(0.0, 4.0), m50=(0.1, 0.4)), ceilings, 2) is None  # one keeps them
    tried = tried_of(m100=(0.0, 4.0), m50=(0.1, 0.8), m70=(0.1, 1.4))
    assert further(tried, ceilings, 2) == Candidate(macs=0.3)  # 0.5 * 0.5 / 0.8, in steps
    tried |= {(slow := Candidate(macs=0.3)): Tried(candidate=slow, predicted=0.65)}
    assert further(tried, ceilings, 2) == Candidate(macs=0.2)
    tried |= tried_of(m20=(0.4, 0.55), m15=(0.5, 0.53), m10=(0.6, 0.51))
    assert further(tried, ceilings, 2) == Candidate(blocks=1, macs=0.1)
    tried |= {(deep := Candidate(blocks=n, macs=0.1)): Tried(candidate=deep, failure="it has no blocks") for n in (1, 2)}
    assert further({**tried, **tried_of(m25=(0.3, 0.6))}, ceilings, 2) is None
    assert further(tried_of(m50=(0.1, 0.8)), ceilings | {"drop": 0.05}, 2) is None  # it loses too much already
    balanced = replace(next(iter(tried_of(m30=(0.1, 0.6)))), effort="balanced")
    only = {balanced: Tried(candidate=balanced, figures=Figures(metric=1.0, drop=0.0, latency=0.6, bytes=9, macs=9))}
    assert further(only, ceilings, 0) == Candidate(macs=0.25)
    assert further(tried_of(m15=(0.1, 5.0)), ceilings, 1) == Candidate(macs=0.1)  # however far it is over
    assert further(tried_of(m10=(0.1, 5.0)), ceilings, 1) == Candidate(blocks=1, macs=0.1)


def test_operators_are_placed_by_measurement_where_that_may_keep_the_ceiling() -> None:
    tried = tried_of(m100=(0.0, 1.3), m70=(0.1, 1.19), m50=(0.2, 1.05), m15=(0.4, 0.4))
    assert nearly_within(tried, {"latency": 1.0}) == Candidate(macs=0.7, effort="balanced")  # loses least of those that are near
    tried |= {replace(c, effort="balanced"): t for c, t in tried_of(m70=(0.1, 1.1)).items()}
    assert nearly_within(tried, {"latency": 1.0}) == Candidate(macs=0.5, effort="balanced")
    assert nearly_within(tried, {"latency": 1.0, "bytes": 8}) is None  # over the size, too
    assert nearly_within(tried, {"latency": 1.06}) is None  # what loses less was placed already
    tried |= {replace(c, effort="balanced"): t for c, t in tried_of(m50=(0.2, 0.99)).items()}
    assert nearly_within(tried, {"latency": 1.0}) is None
    assert nearly_within(tried_of(m70=(0.3, 1.1), m50=(0.2, 0.9)), {"latency": 1.0}) is None  # it loses more than one within
    float_one = {replace(c, bits="float"): t for c, t in tried_of(m50=(0.2, 1.05)).items()}
    assert nearly_within(float_one, {"latency": 1.0}) is None  # it has no effort


def test_all_that_a_candidate_removes_is_halved() -> None:
    less, more = Candidate(blocks=1, macs=0.9, rank=0.8), Candidate(blocks=4, macs=0.4, rank=0.5)
    figures = [Figures(metric=1.0, drop=d, latency=ms, bytes=9, macs=9) for d, ms in ((0.0, 2.0), (0.5, 0.5))]
    tried = {c: Tried(candidate=c, figures=f) for c, f in zip((less, more), figures, strict=True)}
    assert between(tried, {"latency": 1.0}) == Candidate(blocks=2, macs=0.65, rank=0.6)
