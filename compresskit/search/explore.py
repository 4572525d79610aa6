"""Measure candidates without training, those that the study proposes."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace

from compresskit.base.errors import SettingError
from compresskit.base.progress import announce
from compresskit.search.candidate import UNCOMPRESSED, WITHOUT_EFFORT, Candidate, Removable
from compresskit.search.figures import Figures, fraction
from compresskit.search.latency.latency_filter import LatencyFilter
from compresskit.search.latency.stopwatch import Stopwatch
from compresskit.search.outcome import Tried
from compresskit.search.proxy.workshop import Workshop
from compresskit.search.study import EFFORTS, LEAST_MACS, STEP_OF_MACS, STEP_OF_RANK, CandidateStudy, first_candidates
from compresskit.search.workers import PAUSE, Worker

log = logging.getLogger(__name__)

MOST_BLOCKS, MOST_TRAINED = 0.5, 0.75  # fraction of the residual blocks that may go, and where candidates are trained
REMOVED = ("blocks", "merged", "macs", "rank")  # settings of a candidate that say how much is removed
NEARLY = 0.2  # fraction of a ceiling over it, for which operators placed by measurement, or a little more removed, may make up
PROPOSALS = 3  # one trial of so many is the sampler's, or of the ladder; the others are proposals, where there are any
DOUBTED = 4  # one of so many candidates that are skipped for the latency that is predicted is made, while none keeps the ceilings
ASKED = 3  # times as many trials as there may be candidates, since a sampler proposes some again


@dataclass(frozen=True, kw_only=True)
class Explorer:
    """Measures candidates without training.

    Attributes:
        workshop: makes them. stopwatch: measures their files. worker: this process.
        dense: figures of the uncompressed model.
        order: of what can go, first to go first.
        ceilings: of the budget. judged: those that the study keeps to.
        trials: how many candidates are measured; those that cannot be made do not count, but as many of them end it.
        name: of the study in the journal.
        filter: tells candidates that would be too slow before they are made; None makes all.

    Raises SettingError where the ceiling on the MACs is a share of none.
    """

    workshop: Workshop
    stopwatch: Stopwatch
    worker: Worker
    dense: Figures
    order: Removable
    ceilings: dict[str, float]
    judged: tuple[str, ...]
    trials: int
    name: str
    filter: LatencyFilter | None = None

    def __post_init__(self) -> None:
        if self.ceilings.get("macs") == 0:
            raise SettingError(
                f"at_most(macs=...): wanted a share of the MACs of {type(self.workshop.model).__name__}, which has none"
                " (lookups in tables and products of values are not counted); give a budget of bytes, such as"
                ' at_most(bytes="0.5x"), or run Prune(budget=ck.keep(parameters=...)) by itself'
            )

    def explore(self) -> list[Tried]:
        """All candidates that were tried, in their order, those that could not be made with the reason.

        Then those that were measured in the folder for other budgets, which are no trials of this one, and those skipped.
        """
        shop, trains = self.workshop, self.workshop.trains
        efforts = EFFORTS[:1] if self.places_at_the_ceiling else EFFORTS
        most = {
            "blocks": math.floor((MOST_TRAINED if trains else MOST_BLOCKS) * len(self.order.blocks)),
            "merged": len(self.order.runs),
        }
        objectives = ["drop", *(quantity for quantity in ("latency", "bytes") if quantity not in self.ceilings)]
        ladder = first_candidates(**most, dynamic=shop.gains_by_dynamic, tables=shop.has_large_tables, trains=trains)
        study = CandidateStudy(
            shop.out,
            self.name,
            self.worker,
            objectives=len(objectives),
            most=most,
            first=[c for c in ladder if c.effort in efforts and (c.rank == 1 or self.order.factors)],
            efforts=efforts,
            storages=shop.storages,
            seed=shop.seed,
            factors=self.order.factors,
        )
        tried: dict[Candidate, Tried] = {}
        while True:
            self._take_over_(tried, study)
            predictions = study.skipped()
            unmade = {c: Tried(candidate=c, predicted=ms) for c, ms in predictions.items() if c not in tried}
            skipped = {c: t for c, t in unmade.items() if self._far_over(t.predicted)}
            if max(self._measured(tried), len(tried) - self._measured(tried)) >= self.trials or study.told >= ASKED * self.trials:
                break
            if (doubted := self._doubted(tried, predictions)) is not None:
                study.propose(doubted, checks=True)
            elif study.told % PROPOSALS and (following := self._proposed(tried, skipped, most["blocks"])) is not None:
                study.propose(following)
            lost = [candidate for candidate, entry in tried.items() if entry.figures is None]  # they failed, here or elsewhere
            if (asked := study.ask(self.trials, lost)) is None:
                time.sleep(PAUSE)  # others work on the last of them
                continue
            trial, candidate = asked
            if candidate not in tried and asks_for_more(candidate, tried):
                study.tell(trial, None)
                continue
            if not study.checks(trial) and (slow := self._skipped(candidate, tried, skipped)) is not None:
                announce(log, "compress: %s", Tried(candidate=candidate, predicted=slow))
                study.skip(trial, slow, slow / self.ceilings["latency"] - 1)
                continue
            if candidate not in tried:
                tried[candidate] = self._tried(Tried(candidate=candidate))
                announce(log, "compress: %d of %d: %s", self._measured(tried), self.trials, tried[candidate])
            if (figures := tried[candidate].figures) is None:
                study.tell(trial, None)
                continue
            over = [figures.excesses({quantity: self.ceilings[quantity]}).get(quantity, 0.0) for quantity in self.judged]
            study.tell(trial, [figures.get(quantity) for quantity in objectives], over)
        others = {c: Tried(candidate=c, figures=figures) for c, figures in shop.measured().items() if c not in tried}
        return [*tried.values(), *others.values(), *(entry for c, entry in unmade.items() if c not in others)]

    def _take_over_(self, tried: dict[Candidate, Tried], study: CandidateStudy) -> None:
        """Enter what was made, or could not be, by other processes and in earlier calls."""
        measured = study.measured()
        for candidate in study.finished():
            if candidate in tried or self._measured(tried) >= self.trials:
                continue
            # One that was made counts, also where it was found since that less cannot be removed.
            if candidate in measured or not asks_for_more(candidate, tried):
                tried[candidate] = self._tried(Tried(candidate=candidate))

    @property
    def places_at_the_ceiling(self) -> bool:
        """Whether candidates are "balanced" only where that may bring them below the ceiling on the latency.

        Where a training follows, its effort is the placement of operators, which takes minutes to measure and changes only the
        latency; that matters no further where the drop is minimised.
        """
        return self.workshop.trains and "drop" not in self.ceilings

    def _proposed(
        self, tried: Mapping[Candidate, Tried], skipped: Mapping[Candidate, Tried], most_blocks: int
    ) -> Candidate | None:
        """A candidate near the ceilings, which a sampler seldom meets; None where none is known."""
        ceilings = {name: self.ceilings[name] for name in self.judged}
        placed = nearly_within(tried, ceilings) if self.places_at_the_ceiling and self.workshop.target.runs_here else None
        return (
            placed
            or between(tried, self._surely(ceilings), skipped)
            or nearly_enough({**skipped, **tried}, ceilings, most_blocks)
            or in_float({**skipped, **tried}, ceilings, self.dense)
            or further({**skipped, **tried}, ceilings, most_blocks)
        )

    def _far_over(self, predicted: float | None) -> bool:
        """Whether a prediction is over the ceiling by more than predictions err by what is known now."""
        assert self.filter is not None
        assert predicted is not None
        return predicted > self.ceilings["latency"] * (1 + self.filter.margin)

    def _doubted(self, tried: Mapping[Candidate, Tried], predictions: Mapping[Candidate, float]) -> Candidate | None:
        """A candidate to make in spite of its prediction, where it is time to see whether predictions are right.

        It is of the precision of which fewest were measured, and among those the one of the least latency. Predictions would
        else end a search in which nothing keeps the ceiling and nothing is made that could show them wrong.
        """
        measured = {c: entry.figures for c, entry in tried.items() if entry.figures is not None and c != UNCOMPRESSED}
        if not all(figures.excesses({name: self.ceilings[name] for name in self.judged}) for figures in measured.values()):
            return None
        known = Counter(candidate.bits for candidate in measured)
        left = {candidate: ms for candidate, ms in predictions.items() if candidate not in tried}
        if len(predictions) - len(left) >= len(predictions) // DOUBTED:
            return None
        return min(left, key=lambda candidate: (known[candidate.bits], left[candidate], candidate.name))

    def _surely(self, ceilings: Mapping[str, float]) -> dict[str, float]:
        """The ceilings, with a latency that is still below its own when it is measured again."""
        surely = {"latency": self.stopwatch.surely(ceilings["latency"])} if "latency" in ceilings else {}
        return {**ceilings, **surely}

    @staticmethod
    def _measured(tried: Mapping[Candidate, Tried]) -> int:
        return sum(entry.figures is not None for entry in tried.values())

    def _skipped(
        self, candidate: Candidate, tried: Mapping[Candidate, Tried], skipped: Mapping[Candidate, Tried]
    ) -> float | None:
        """Predicted milliseconds of a candidate that need not be made; None of one that must be."""
        if candidate in skipped:
            return skipped[candidate].predicted
        if self.filter is None or candidate in tried:
            return None
        latencies = {c: t.figures.latency for c, t in tried.items() if t.figures is not None}
        self.filter.learn(latencies, self.dense.latency)
        ceiling = self.ceilings["latency"]
        return self.filter.too_slow(candidate, [c for c, milliseconds in latencies.items() if milliseconds <= ceiling])

    def _tried(self, entry: Tried) -> Tried:
        """The entry with the figures of its candidate, or with the reason why there are none."""
        if entry.candidate == UNCOMPRESSED:
            entry.figures = self.dense
            return entry
        made = self.workshop.make(entry.candidate, self.order, self.dense, self.stopwatch)
        if isinstance(made, Figures):
            entry.figures = made
        else:
            entry.failure = made
        return entry


def between(
    tried: Mapping[Candidate, Tried], ceilings: Mapping[str, float], skipped: Container[Candidate] = ()
) -> Candidate | None:
    """A candidate halfway between the best within the ceilings and one above them that loses less.

    What a budget allows is lost by a file that stays far below it. Both have one precision and effort, and the one above exceeds
    the ceilings least of those that lose less.

    Args:
        tried: candidates with figures. ceilings: of what is measured of a file, by quantity.
        skipped: candidates that are above by what is predicted; halfway to such a one is tried next.

    Returns None where there are no such two, or nothing untried lies between them.
    """
    measured = [(c, t.figures) for c, t in tried.items() if t.figures is not None]
    within = [(figures.drop, c) for c, figures in measured if not figures.excesses(dict(ceilings))]
    for drop, below in sorted(within, key=lambda pair: pair[0]):
        above = [
            (max(over.values()), c)
            for c, figures in measured
            if (over := figures.excesses(dict(ceilings))) and figures.drop < drop
            if (c.bits, c.effort) == (below.bits, below.effort)
        ]
        if above:
            found = _halfway(below, min(above, key=lambda pair: pair[0])[1])
            while found in skipped and (nearer := _halfway(below, found)) != found:
                found = nearer
            return None if found in tried or found in skipped else found
    return None


def in_float(entries: Mapping[Candidate, Tried], ceilings: Mapping[str, float], dense: Figures) -> Candidate | None:
    """The float form of a candidate that is too slow in integers, and may be faster in float; None where there is none.

    So are narrow layers, and those that no integer kernel takes. By what is known a float form takes as much of the uncompressed
    model's latency as it has of its MACs, and of its bytes what the integers have of theirs. Of several that keep the ceilings
    so the one that loses least comes first, if that is less than all within.

    Args:
        entries: candidates that were tried, or skipped for the latency that was predicted.
        ceilings: of what is measured of a file, by quantity. dense: the uncompressed model.
    """
    measured = {c: t.figures for c, t in entries.items() if t.figures is not None}
    whole = measured.get(Candidate())
    if whole is None:
        return None
    least = min((figures.drop for figures in measured.values() if not figures.excesses(ceilings)), default=math.inf)
    found = []
    for candidate, figures in measured.items():
        expected = replace(
            figures,
            latency=dense.latency * fraction(figures.macs, dense.macs),
            bytes=dense.bytes * figures.bytes // whole.bytes,
        )
        other = replace(candidate, bits="float", effort="fast")
        too_slow = figures.latency > max(ceilings.get("latency", math.inf), expected.latency)
        wanted = candidate.bits == "int8" and candidate.changes_structure and figures.drop < least and other not in entries
        if wanted and too_slow and not expected.excesses(ceilings):
            found.append((figures.drop, candidate.name, other))
    return min(found, key=lambda each: each[:2])[2] if found else None


def nearly_within(tried: Mapping[Candidate, Tried], ceilings: Mapping[str, float]) -> Candidate | None:
    """The "balanced" form of a candidate a little over the ceiling on the latency alone that loses less than all within.

    Args:
        tried: candidates with figures. ceilings: of what is measured of a file, by quantity.

    Returns that of the one that loses least; None where there is none, or all such forms were tried.
    """
    measured = [(c, t.figures, t.figures.excesses(dict(ceilings))) for c, t in tried.items() if t.figures is not None]
    least = min((figures.drop for _, figures, over in measured if not over), default=math.inf)
    near = [
        (figures.drop, c.name, replace(c, effort="balanced"))
        for c, figures, over in measured
        if figures.drop < least and c.effort == "fast" and c.bits not in WITHOUT_EFFORT
        if set(over) == {"latency"} and over["latency"] <= NEARLY
    ]
    return next((placed for *_, placed in sorted(near, key=lambda entry: entry[:2]) if placed not in tried), None)


def nearly_enough(entries: Mapping[Candidate, Tried], ceilings: Mapping[str, float], most_blocks: int) -> Candidate | None:
    """A candidate that removes a little more than one that is nearly within the ceilings, and loses less than all within.

    It is of a precision and effort of which none is within: `between` has something to go to otherwise.

    Args:
        entries, ceilings, most_blocks: as in `further`.

    Returns that of the one that loses least; None where there is none.
    """
    tried = {c: t for c, t in entries.items() if t.predicted is None}
    measured = [(c, t.figures, t.figures.excesses(ceilings)) for c, t in tried.items() if t.figures is not None]
    within = [(c, figures.drop) for c, figures, over in measured if not over]
    kinds = {(c.bits, c.effort) for c, _ in within}
    least = min((drop for _, drop in within), default=-math.inf)
    found = []
    for candidate, figures, over in measured:
        if not over or max(over.values()) > NEARLY or figures.drop >= least or (candidate.bits, candidate.effort) in kinds:
            continue
        for more in _removing_more(candidate, max(over.values()), most_blocks):
            if more not in entries and not asks_for_more(more, tried):
                found.append((figures.drop, candidate.name, more))
                break
    return min(found, key=lambda each: each[:2])[2] if found else None


def further(entries: Mapping[Candidate, Tried], ceilings: Mapping[str, float], most_blocks: int) -> Candidate | None:
    """A candidate that removes more than the one nearest to the ceilings, where none is within them.

    Fewer MACs stay, in proportion to what the nearest is over; where that was tried, still fewer, and at last fewer blocks. A
    candidate that loses more than a ceiling allows is not gone on from.

    Args:
        entries: candidates that were tried, or skipped for the latency that was predicted.
        ceilings: of what is measured of a file, by quantity. most_blocks: how many blocks may go.

    Returns None where one is within, or nothing is left to remove.
    """
    tried = {c: t for c, t in entries.items() if t.predicted is None}
    near: list[tuple[float, str, Candidate]] = []
    for candidate, entry in entries.items():
        if entry.figures is not None:
            over = entry.figures.excesses(dict(ceilings))
            if not over:
                return None
            if "drop" not in over:
                near.append((max(over.values()), candidate.name, candidate))
        elif entry.predicted is not None:
            near.append((entry.predicted / ceilings["latency"] - 1, candidate.name, candidate))
    for over_by, _, candidate in sorted(near):
        for more in _removing_more(candidate, over_by, most_blocks):
            if more not in entries and not asks_for_more(more, tried):
                return more
    return None


def _removing_more(candidate: Candidate, over: float, most_blocks: int) -> Iterator[Candidate]:
    """Candidates that remove more than one that is over a ceiling by a fraction, those first that remove least."""
    least, now = round(LEAST_MACS / STEP_OF_MACS), round(candidate.macs / STEP_OF_MACS)
    first = min(max(least, math.floor(now / (1 + over))), now - 1)
    shares = [round(step * STEP_OF_MACS, 2) for step in range(first, least - 1, -1)]
    for macs in shares:
        yield replace(candidate, macs=macs, effort="fast")
    for blocks in range(candidate.blocks + 1, most_blocks + 1):
        yield replace(candidate, blocks=blocks, macs=min(shares, default=candidate.macs), effort="fast")


def _halfway(one: Candidate, other: Candidate) -> Candidate:
    """The candidate that removes the mean of what two remove, in the steps of the study."""
    counts = {name: round((vars(one)[name] + vars(other)[name]) / 2) for name in ("blocks", "merged")}
    fractions = {
        name: round(round((vars(one)[name] + vars(other)[name]) / 2 / step) * step, 2)
        for name, step in (("macs", STEP_OF_MACS), ("rank", STEP_OF_RANK))
    }
    return replace(one, **counts, **fractions)


def asks_for_more(candidate: Candidate, tried: Mapping[Candidate, Tried]) -> bool:
    """Whether a candidate cannot be made, since another that removes no more, in one way alone, could not.

    The precision of the other must not be the cause: the same without anything removed was made.
    """
    for other, entry in tried.items():
        plain = tried.get(Candidate(bits=other.bits, effort=other.effort))
        ways = [name for name in REMOVED if vars(other)[name] != vars(UNCOMPRESSED)[name]]
        if entry.figures is not None or len(ways) != 1 or plain is None or plain.figures is None:
            continue
        here, there, kept = (vars(each)[ways[0]] for each in (candidate, other, UNCOMPRESSED))
        if abs(here - kept) >= abs(there - kept):
            return True
    return False
