"""Short trainings: what a cut loses at once says little of what it has after training; some steps of training say more."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from compresskit.base.errors import CheckpointError, CompressError
from compresskit.base.files import read_json, write_json
from compresskit.base.fingerprint import describe
from compresskit.base.progress import announce
from compresskit.measure import evaluate
from compresskit.recipe.folder import LOCK
from compresskit.recipe.locks import exclusive, is_locked
from compresskit.search.candidate import UNCOMPRESSED, Candidate
from compresskit.search.ceilings import MEASURED
from compresskit.search.figures import Figures
from compresskit.search.finals.finalists import Finals
from compresskit.search.outcome import Tried
from compresskit.search.proxy import Workshop
from compresskit.train.train import Train

log = logging.getLogger(__name__)

SHORT_SHARE = 0.05  # of a finalist's training
LEAST_STEPS = 10  # below which a training says nothing, and there is none
MOST_SHORT = 6  # candidates that get one


def short_training(train: Train, workshop: Workshop) -> Train | None:
    """A finalist's training with a fraction of its steps, over which its schedule runs; None where they are too few."""
    steps = math.floor(SHORT_SHARE * train.length(workshop.task).steps)
    if steps < LEAST_STEPS:
        return None
    return replace(train, steps=steps, epochs=None, validate_every=steps, keep_best=False, patience=None)


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

        In none where nothing is trained, or where what they lose does not decide.
        """
        train, shop = self.finals.train, self.finals.workshop
        if train is None or self.finals.minimise != "drop" or (short := short_training(train, shop)) is None:
            return
        if not (alike := self.chosen(tried)):
            return
        for candidate in alike:  # first those on which no other process is at work
            if not is_locked(shop.folder(candidate) / LOCK):
                self._outcome(candidate, short)
        for candidate, same in alike.items():
            outcome = self._outcome(candidate, short)
            for each in same:
                each.short, each.short_seconds = outcome.get("drop"), 0.0
            same[0].short_seconds = outcome["seconds"]

    def chosen(self, tried: Sequence[Tried]) -> dict[Candidate, list[Tried]]:
        """Candidates to train, each with those that differ from it by effort alone.

        Of those that keep the ceilings which training does not change, in turn: the one that loses least, the one that has most
        MACs left, and the one with the largest file. None where all of them become finalists.
        """
        measured = {name: ceiling for name, ceiling in self.finals.ceilings.items() if name in MEASURED}
        alike: dict[Candidate, list[Tried]] = {}
        for t in tried:
            if t.figures is not None and t.candidate != UNCOMPRESSED and not t.figures.excesses(measured):
                alike.setdefault(replace(t.candidate, effort="fast"), []).append(t)
        if sum(map(len, alike.values())) <= self.finalists:
            return {}

        def least(candidate: Candidate, quantity: str) -> float:
            return min(t.figures.get(quantity) for t in alike[candidate] if t.figures is not None)

        rankings = [
            sorted(alike, key=lambda c: (least(c, "drop"), c.name)),  # by name, too: other processes choose the same
            sorted(alike, key=lambda c: (-least(c, "macs"), c.name)),
            sorted(alike, key=lambda c: (-least(c, "bytes"), c.name)),
        ]
        in_turn = dict.fromkeys(candidate for places in zip(*rankings, strict=True) for candidate in places)
        return {candidate: alike[candidate] for candidate in list(in_turn)[:MOST_SHORT]}

    def _outcome(self, candidate: Candidate, short: Train) -> dict[str, Any]:
        """The drop on the held-out data after a short training, or why there is none, and the seconds; once for a folder."""
        asked = json.dumps(describe(short), sort_keys=True)
        shop, begin = self.finals.workshop, time.perf_counter()
        folder = shop.folder(candidate)
        path = folder / f"short-{hashlib.sha256(asked.encode()).hexdigest()[:8]}.json"
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / LOCK):  # another process may train it now
            if path.exists():
                return read_json(path, "what a candidate loses after a short training")
            try:
                model, _ = shop.compressed(candidate, self.finals.order, shop.samples, train=short)
                lost = (self.dense.metric - evaluate(model, shop.held)) * (1 if shop.task.prefers_higher else -1)
            except CheckpointError:
                raise  # of the disk or the folder, not of the candidate
            except CompressError as error:
                log.warning("compress: %s cannot be trained for a short time: %s", candidate.name, error)
                outcome: dict[str, Any] = {"failure": str(error)}
            else:
                announce(log, "compress: %s loses %.4f after %d steps of training", candidate.name, lost, short.steps)
                outcome = {"drop": lost}
            outcome["seconds"] = time.perf_counter() - begin
            write_json(path, outcome)
            return outcome
