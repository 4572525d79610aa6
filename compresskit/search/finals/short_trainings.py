"""Short trainings: what a cut loses at once says little of what it has after training; some steps of training say more."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from compresskit.base.errors import CheckpointError, CompressError
from compresskit.base.files import read_json, write_json
from compresskit.base.fingerprint import describe
from compresskit.base.progress import announce
from compresskit.measure import evaluate
from compresskit.recipe.folder import LOCK
from compresskit.recipe.locks import exclusive
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
    """The first steps of a finalist's training, with its schedule; None where they are too few."""
    steps = math.floor(SHORT_SHARE * train.length(workshop.task).steps)
    if steps < LEAST_STEPS:
        return None
    return replace(train, steps=steps, epochs=None, validate_every=0, keep_best=False, patience=None)


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
        turn = self.finals.worker.others() % len(alike)  # another process begins with another one
        names = [*alike][turn:] + [*alike][:turn]
        for i, candidate in enumerate(names, 1):
            if (drop := self._drop(candidate, short)) is None:
                continue
            announce(log, "compress: %d of %d: %s loses %.4f after %d steps", i, len(names), candidate.name, drop, short.steps)
            for each in alike[candidate]:
                each.short = drop

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
            sorted(alike, key=lambda c: least(c, "drop")),
            sorted(alike, key=lambda c: -least(c, "macs")),
            sorted(alike, key=lambda c: -least(c, "bytes")),
        ]
        in_turn = dict.fromkeys(candidate for places in zip(*rankings, strict=True) for candidate in places)
        return {candidate: alike[candidate] for candidate in list(in_turn)[:MOST_SHORT]}

    def _drop(self, candidate: Candidate, short: Train) -> float | None:
        """What a candidate loses on the held-out data after a short training, once for a folder; None where that fails."""
        asked = json.dumps(describe(short), sort_keys=True)
        shop = self.finals.workshop
        folder = shop.folder(candidate)
        path = folder / f"short-{hashlib.sha256(asked.encode()).hexdigest()[:8]}.json"
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / LOCK):  # another process may train it now
            if path.exists():
                return float(read_json(path, "what a candidate loses after a short training")["drop"])
            try:
                model, _ = shop.compressed(candidate, self.finals.order, shop.samples, train=short)
                metric = evaluate(model, shop.held)
            except CheckpointError:
                raise  # of the disk or the folder, not of the candidate
            except CompressError as error:
                log.warning("compress: %s cannot be trained for a short time: %s", candidate.name, error)
                return None
            drop = (self.dense.metric - metric) * (1 if shop.task.prefers_higher else -1)
            write_json(path, {"drop": drop})
            return drop
