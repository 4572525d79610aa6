"""Measure candidates without training, those that the study proposes."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from compresskit.base.progress import announce
from compresskit.search.candidate import UNCOMPRESSED
from compresskit.search.figures import Figures
from compresskit.search.outcome import Tried
from compresskit.search.proxy import Workshop
from compresskit.search.stopwatch import Stopwatch
from compresskit.search.study import CandidateStudy, first_candidates

log = logging.getLogger(__name__)

MOST_BLOCKS = 0.5  # fraction of the residual blocks that may go
ASKED = 3  # times as many trials as there may be candidates, since a sampler proposes some again


@dataclass(frozen=True, kw_only=True)
class Explorer:
    """Measures candidates without training.

    Attributes:
        workshop: makes them. stopwatch: measures their files.
        dense: figures of the uncompressed model.
        order: of residual blocks, first to go first.
        ceilings: of the budget. judged: those that the study keeps to.
        trials: how many candidates are measured.
        name: of the study in the journal.
    """

    workshop: Workshop
    stopwatch: Stopwatch
    dense: Figures
    order: tuple[str, ...]
    ceilings: dict[str, float]
    judged: tuple[str, ...]
    trials: int
    name: str

    def explore(self) -> list[Tried]:
        """All candidates that were tried, in their order; those that could not be made with the reason."""
        blocks = math.floor(MOST_BLOCKS * len(self.order))
        objectives = ["drop", *(quantity for quantity in ("latency", "bytes") if quantity not in self.ceilings)]
        study = CandidateStudy(
            self.workshop.out,
            self.name,
            objectives=len(objectives),
            blocks=blocks,
            first=first_candidates(blocks),
            seed=self.workshop.seed,
        )
        tried = {candidate: self._tried(Tried(candidate=candidate)) for candidate in study.finished()[: self.trials]}
        while len(tried) < self.trials and study.told < ASKED * self.trials:
            trial, candidate = study.ask()
            if candidate not in tried:
                tried[candidate] = self._tried(Tried(candidate=candidate))
                announce(log, "compress: %d of %d: %s", len(tried), self.trials, tried[candidate])
            if (figures := tried[candidate].figures) is None:
                study.tell(trial, None)
                continue
            over = [figures.excesses({quantity: self.ceilings[quantity]}).get(quantity, 0.0) for quantity in self.judged]
            study.tell(trial, [figures.get(quantity) for quantity in objectives], over)
        return list(tried.values())

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
