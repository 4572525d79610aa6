"""Short trainings: what a cut loses at once says little of what it has after training; some steps of training say more."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from compresskit.base.errors import CheckpointError, CompressError
from compresskit.base.files import read_json, write_json
from compresskit.base.fingerprint import describe, short_hash
from compresskit.base.progress import announce
from compresskit.measure import evaluate
from compresskit.recipe.folder import LOCK
from compresskit.recipe.locks import exclusive, is_locked
from compresskit.search.candidate import Candidate, at_lower_rates
from compresskit.search.figures import Figures
from compresskit.search.finals.finalists import Finals
from compresskit.search.finals.minutes import StepTimer
from compresskit.search.outcome import Tried
from compresskit.search.proxy.workshop import NAME_DIGITS, Workshop
from compresskit.train.callbacks import as_callbacks
from compresskit.train.train import Train

log = logging.getLogger(__name__)

SHORT_SHARE = 0.03  # of a finalist's training
SHORT_RATE = 0.2  # of a finalist's learning rates: at the full ones so few steps can undo more than they repair
LEAST_STEPS = 10  # of a short training; fewer say nothing
LEAST_TRAINING = 200  # steps of a finalist's training, below which there are no short ones
MOST_SHORT = 6  # candidates that get one


def short_training(train: Train, workshop: Workshop) -> Train | None:
    """A finalist's training with a fraction of its steps and of its rates; None where it has too few steps.

    Its schedule runs over these steps. One with rates of its own (`OneCycleLR(max_lr=...)`) keeps them.
    """
    if (steps := short_steps(train.length(workshop.task).steps)) == 0:
        return None
    optimizer = partial(at_lower_rates, train.optimizer, SHORT_RATE)
    return replace(train, optimizer=optimizer, steps=steps, epochs=None, validate_every=steps, keep_best=False, patience=None)


def short_steps(steps: int) -> int:
    """How many steps a short training has, by those of a finalist's training; 0 where there is none."""
    return 0 if steps < LEAST_TRAINING else max(LEAST_STEPS, math.floor(SHORT_SHARE * steps))


def most_steps(within: float, trainings: float) -> int:
    """How many steps each finalist has at most, so that all trainings together have so many.

    within: steps of all trainings, long and short. trainings: how many long ones there are.
    """
    fits = math.floor(within / (trainings + MOST_SHORT * SHORT_SHARE))
    if SHORT_SHARE * fits < LEAST_STEPS:  # they have as many, however short the long ones
        fits = math.floor((within - MOST_SHORT * LEAST_STEPS) / trainings)
    if short_steps(fits) == 0:
        fits = min(math.floor(within / trainings), LEAST_TRAINING - 1)
    return fits


@dataclass(frozen=True, kw_only=True)
class ShortTrainings:
    """Trains candidates for a short time, each once for a folder, and enters what they lose then.

    Attributes:
        finals: what comes after it. finalists: how many that trains at most.
        dense: figures of the uncompressed model.
    """

    finals: Finals
    finalists: int
    dense: Figures

    def enter_(self, tried: Sequence[Tried]) -> None:
        """Enter in candidates what they lose after a short training: in those that `chosen` returns, and in those like them.

        In none where nothing is trained.
        """
        train, shop = self.finals.train, self.finals.workshop
        if train is None or (short := short_training(train, shop)) is None:
            return
        if not (alike := self.chosen(tried)):
            return
        for candidate in alike:  # first those on which no other process is at work
            if not is_locked(shop.folder(candidate) / LOCK):
                self._outcome(candidate, short)
        for candidate, same in alike.items():
            outcome = self._outcome(candidate, short)
            self.finals.short_seconds += outcome.get("training", 0.0)
            for each in same:
                each.short, each.short_seconds = outcome.get("drop"), 0.0
            same[0].short_seconds = outcome["seconds"]

    def chosen(self, tried: Sequence[Tried]) -> dict[Candidate, list[Tried]]:
        """Candidates to train, each with those that differ from it by effort alone.

        Of those that keep the ceilings which training does not change. Where the drop is minimised, in turn: the one that loses
        least, the one that has most MACs left, and the one with the largest file; one that as many others as there are finalists
        are ahead of in all three needs no training to be told from them. Where the drop has a ceiling: those that have less of
        what is minimised than all that are expected to keep it, from small to large, in as many parts as there are short
        trainings; of each part the one that fewest are ahead of in the same three. None where all of them become finalists.
        """
        alike: dict[Candidate, list[Tried]] = {}
        for t in self.finals.within(tried, surely=self.finalists == 1):
            alike.setdefault(replace(t.candidate, effort="fast"), []).append(t)
        if len(alike) <= self.finalists:
            return {}

        if (minimised := self.finals.minimise) != "drop":
            kept = [t for same in alike.values() for t in same if self.finals.expects_to_keep(t)]
            bound = min((t.figures.get(minimised) for t in kept if t.figures is not None), default=math.inf)
            alike = {c: alike[c] for c, size in _least(alike, minimised).items() if size < bound}
        # What promises much after training: little is lost without it, or much is left that can be trained.
        promises = [_least(alike, "drop"), _least(alike, "macs", -1), _least(alike, "bytes", -1)]
        if minimised == "drop":
            chosen = [c for c in _in_turn(promises) if _ahead_of(c, promises) < self.finalists]
            chosen = chosen if len(chosen) > self.finalists else []
        else:
            chosen = _of_all_sizes(_least(alike, minimised), promises)
        return {candidate: alike[candidate] for candidate in chosen[:MOST_SHORT]}

    def _outcome(self, candidate: Candidate, short: Train) -> dict[str, Any]:
        """The drop on the held-out data after a short training, or why there is none, and the seconds; once for a folder."""
        shop, begin, timer = self.finals.workshop, time.perf_counter(), StepTimer()
        timed = replace(short, on_step=(*as_callbacks(short.on_step, "Train(on_step=...)"), timer.step))
        folder = shop.folder(candidate)
        path = folder / f"short-{short_hash(describe(short), NAME_DIGITS)}.json"
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / LOCK):  # another process may train it now
            if path.exists():
                return read_json(path, "what a candidate loses after a short training")
            try:
                model, _ = shop.compressed(candidate, self.finals.order, shop.samples, train=timed)
                lost = (self.dense.metric - evaluate(model, shop.held)) * (1 if shop.task.prefers_higher else -1)
            except CheckpointError:
                raise  # of the disk or the folder, not of the candidate
            except CompressError as error:
                log.warning("compress: %s cannot be trained for a short time: %s", candidate.name, error)
                outcome: dict[str, Any] = {"failure": str(error)}
            else:
                announce(log, "compress: %s loses %.4f after %d steps of training", candidate.name, lost, short.steps)
                outcome = {"drop": lost}
            outcome |= {"seconds": time.perf_counter() - begin, "training": timer.seconds}
            write_json(path, outcome)
            return outcome


def _least(alike: Mapping[Candidate, list[Tried]], quantity: str, sign: int = 1) -> dict[Candidate, float]:
    """The least of a quantity, times a sign, among candidates that are alike."""
    return {c: min(sign * t.figures.get(quantity) for t in same if t.figures is not None) for c, same in alike.items()}


def _order(values: Mapping[Candidate, float]) -> list[Candidate]:
    """Candidates, that with the least value first; of equal ones by name, so that other processes have the same order."""
    return sorted(values, key=lambda c: (values[c], c.name))


def _in_turn(promises: Sequence[Mapping[Candidate, float]]) -> list[Candidate]:
    """The first of each order, then the second of each, and so on."""
    places = zip(*map(_order, promises), strict=True)
    return list(dict.fromkeys(itertools.chain.from_iterable(places)))


def _ahead_of(candidate: Candidate, promises: Sequence[Mapping[Candidate, float]]) -> int:
    """How many others promise no less than a candidate in each way, and more in one."""
    mine = tuple(values[candidate] for values in promises)
    others = (tuple(values[other] for values in promises) for other in promises[0])
    return sum(theirs != mine and all(a <= b for a, b in zip(theirs, mine, strict=True)) for theirs in others)


def _of_all_sizes(sizes: Mapping[Candidate, float], promises: Sequence[Mapping[Candidate, float]]) -> list[Candidate]:
    """In each of `MOST_SHORT` parts of the candidates, from small to large, the one that fewest are ahead of in what promises."""
    ahead = {c: sum(other < values[c] for values in promises for other in values.values()) for c in sizes}
    ends = [k * len(sizes) // MOST_SHORT for k in range(MOST_SHORT + 1)]
    small_first = _order(sizes)
    return [min(small_first[begin:end], key=ahead.__getitem__) for begin, end in itertools.pairwise(ends) if begin < end]
