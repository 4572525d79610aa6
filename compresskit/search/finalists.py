"""Train the candidates that promise most, one after another, and give up early those that fall behind (successive halving)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compresskit.base.fingerprint import describe
from compresskit.export.files import file_bytes
from compresskit.recipe.recipe import Recipe, Result
from compresskit.search.candidate import QAT_SHARE, UNCOMPRESSED, Candidate
from compresskit.search.figures import Figures
from compresskit.search.outcome import Tried
from compresskit.search.proxy import Workshop
from compresskit.search.stopwatch import Stopwatch
from compresskit.search.study import import_optuna, journal
from compresskit.train.callbacks import OnStep, StepReport
from compresskit.train.train import Train

RUNGS = 4  # measurements of the metric in a training, after which it may be given up
RECOVERED = 0.5  # of the drop without training that a training is expected to leave, before one was seen
TRAINED = "trained"


class GivenUp(BaseException):
    """A training is worse than others were at the same point. Not an Exception, which callbacks of a training may not raise."""


@dataclass(kw_only=True)
class Finals:
    """Trainings of finalists.

    Attributes:
        workshop: makes models. stopwatch: measures files.
        name: of the study in the journal.
        order: of residual blocks.
        ceilings: that a file must keep. minimise: quantity that is minimised among those that keep them.
        train: of each candidate, in all its stages; None trains nothing.
        results, recipes: of finished runs, by the candidate's name.
        remaining: the part of the drop without training that the last training left.
    """

    workshop: Workshop
    stopwatch: Stopwatch
    name: str
    order: tuple[str, ...]
    ceilings: dict[str, float]
    minimise: str
    train: Train | None
    results: dict[str, Result] = field(default_factory=dict)
    recipes: dict[str, Recipe] = field(default_factory=dict)
    remaining: float = RECOVERED

    def __post_init__(self) -> None:
        self.optuna = import_optuna()
        self.states = self.optuna.trial.TrialState
        self.study = self.optuna.create_study(
            study_name=self.name,
            storage=journal(self.optuna, self.workshop.out),
            direction="maximize" if self.workshop.task.prefers_higher else "minimize",
            pruner=self.optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
            load_if_exists=True,
        )
        for trial in self.study.get_trials(deepcopy=False, states=(self.states.RUNNING,)):
            self.study.tell(trial.number, state=self.states.FAIL)  # of a process that was killed; its folder resumes

    def run(self, tried: Sequence[Tried], most: int) -> Tried | None:
        """Run up to `most` finalists; the best that keeps all ceilings, or None.

        Args:
            tried: candidates with figures; those that are run get `trained` or `stopped`.
            most: number of runs.
        """
        best: Tried | None = None
        for _ in range(most):
            following = self.next_finalist(tried, best)
            if following is None:
                break
            self.run_one(following)
            figures = following.trained
            if figures is None or figures.excesses(self.ceilings):
                continue
            if best is None or best.trained is None or figures.get(self.minimise) < best.trained.get(self.minimise):
                best = following
            if self.train is None and self.minimise == "drop":
                break  # the others were measured already, and are worse
        return best

    def next_finalist(self, tried: Sequence[Tried], best: Tried | None) -> Tried | None:
        """The candidate to run next; None where none of those left is expected to be better than `best`.

        Where the drop has a ceiling: the one with the least of what is minimised, among those whose drop is expected to stay
        below it; otherwise the one with the best metric.
        """
        measured = {name: ceiling for name, ceiling in self.ceilings.items() if name != "drop"}
        left = [
            (figures, t)
            for t in tried
            if (figures := t.figures) is not None
            and not figures.excesses(measured)
            and t.trained is None
            and t.stopped is None
            and t.candidate != UNCOMPRESSED
        ]
        if "drop" in self.ceilings and self.minimise != "drop":
            if best is not None and best.trained is not None:
                least = best.trained.get(self.minimise)
                left = [(figures, t) for figures, t in left if figures.get(self.minimise) < least]
            share = 1.0 if self.train is None else self.remaining
            kept = [(figures, t) for figures, t in left if figures.drop * share <= self.ceilings["drop"]]
            if kept:
                return min(kept, key=lambda pair: pair[0].get(self.minimise))[1]
            left = left if best is None else []
        return min(left, key=lambda pair: (pair[0].drop, pair[0].latency), default=(None, None))[1]

    def run_one(self, tried: Tried) -> None:
        """Run the recipe of a candidate on all data, or read what is finished of it."""
        candidate = tried.candidate
        out = self._folder(candidate)
        for before in self.study.get_trials(deepcopy=False, states=(self.states.PRUNED,)):
            if before.user_attrs["folder"] == out.name:
                tried.stopped, tried.training_seconds = before.user_attrs["stopped"], before.user_attrs["seconds"]
                return
        begin, trial = time.perf_counter(), self.study.ask()
        trial.set_user_attr("folder", out.name)

        def watch(report: StepReport) -> None:
            if report.metric is None:
                return
            rung = self._rung(candidate, report)
            trial.report(report.metric, rung)
            if rung < RUNGS and self.minimise == "drop" and trial.should_prune():
                tried.stopped = rung / RUNGS
                raise GivenUp

        recipe = self.recipe(candidate, watch)
        try:
            result = recipe.run(self.workshop.model, self.workshop.task, out)
        except GivenUp:
            tried.training_seconds = time.perf_counter() - begin
            trial.set_user_attr("stopped", tried.stopped)
            trial.set_user_attr("seconds", tried.training_seconds)
            self.study.tell(trial, state=self.states.PRUNED)
            return
        tried.training_seconds = time.perf_counter() - begin
        self.results[candidate.name], self.recipes[candidate.name] = result, recipe
        tried.trained = self._figures(result, tried.training_seconds)
        self.study.tell(trial, tried.trained.metric)
        if tried.figures is not None and tried.figures.drop > 0:
            self.remaining = max(tried.trained.drop, 0.0) / tried.figures.drop

    def recipe(self, candidate: Candidate, watch: OnStep | None = None) -> Recipe:
        """The recipe of a candidate; its trainings call `watch`."""
        shop = self.workshop
        stages = candidate.stages(order=self.order, samples=shop.samples, train=self.train, target=shop.target)
        return Recipe(*stages, seed=shop.seed, export="last", on_step=watch)

    def _folder(self, candidate: Candidate) -> Path:
        settings = json.dumps(describe(self.train), sort_keys=True)
        return self.workshop.out / TRAINED / f"{candidate.name}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"

    def _figures(self, result: Result, seconds: float) -> Figures:
        """Of the file of a run, on all validation data."""
        first, last, file = result.rows[0], result.rows[-1], result.out / "model.onnx"
        sign = 1 if self.workshop.task.prefers_higher else -1
        return Figures(
            metric=last.metric,
            drop=(first.metric - last.metric) * sign,
            latency=self.stopwatch.measure(file),
            bytes=file_bytes(file),
            macs=last.macs,
            seconds=seconds,
        )

    def _rung(self, candidate: Candidate, report: StepReport) -> int:
        """Which quarter of all trainings of the candidate a step ends, from 1."""
        fraction, two = report.step / report.steps, candidate.changes_structure and candidate.bits != "float"
        if two:
            fraction = 1 - (1 - fraction) / QAT_SHARE if report.training == "QAT" else fraction * (1 - 1 / QAT_SHARE)
        return max(1, round(fraction * RUNGS))
