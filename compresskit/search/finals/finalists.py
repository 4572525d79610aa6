"""Train the candidates that promise most, and give up early those that fall behind (successive halving).

One process trains them one after another; several share them out.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compresskit.base.errors import CheckpointError, CompressError, DataError, ExportError, TrainingError
from compresskit.base.fingerprint import describe, short_hash
from compresskit.base.progress import announce
from compresskit.base.task import MetricError
from compresskit.export.files import file_bytes
from compresskit.recipe.folder import ROW, START
from compresskit.recipe.recipe import Recipe, Result
from compresskit.search.candidate import UNCOMPRESSED, Candidate, Removable
from compresskit.search.ceilings import MEASURED
from compresskit.search.figures import Figures
from compresskit.search.finals.minutes import StepTimer, timer_of, trained_for
from compresskit.search.finals.rungs import FOLDER, OVER, RUNGS, GivenUp, halving, of_training, rungs_done
from compresskit.search.latency.stopwatch import Stopwatch
from compresskit.search.outcome import Tried
from compresskit.search.proxy.workshop import NAME_DIGITS, Workshop
from compresskit.search.study import TURN, WORKER, import_optuna, open_study
from compresskit.search.workers import PAUSE, Worker
from compresskit.train.callbacks import OnStep, StepReport
from compresskit.train.train import Train

log = logging.getLogger(__name__)

#: Of the drop before it, the part that a training is expected to leave before one was seen: after a short training, and without
#: one. ResNet-56 lost 7.5, 3.9 and 0.8 points after short ones, and 1.7, 0.9 and 0.04 in the end (`benchmarks/budgets_avx2.md`).
LEFT_AFTER_SHORT, LEFT = 0.3, 0.5
BEYOND = 2  # times as many as the finalists are run beyond them, where nothing is trained and none keeps the ceilings
LEAST_LEFT = 0.1  # the same of what was seen, at least: one that lost nothing in the end says little of deeper cuts
OF_SETTINGS = 1024  # bytes that are left for what a file tells of its training
OF_PROOF = 256  # bytes by which what it tells of its stage, metric and proof may be longer than when its candidate was made
TRAINED = "trained"
#: Attributes of a trial that have the error of its run: of its file, for good and for one call, and of its training, for one
#: call. What failed for one call may have been mended since.
REJECTED, REJECTED_ONCE, UNTRAINABLE = "rejected", "rejected_once", "untrainable"


@dataclass(kw_only=True)
class Finals:
    """Trainings of finalists.

    Attributes:
        workshop: makes models. stopwatch: measures files.
        name: of the study in the journal.
        order: of what can go.
        ceilings: that a file must keep. minimise: quantity that is minimised among those that keep them.
        train: of each candidate, in all its stages; None trains nothing.
        worker: this process.
        seconds: that all trainings may take together, those of other processes included; None for no end.
        short_seconds: that the steps of short trainings took of them.
        remaining: the part of the drop before it that the last training left, `LEAST_LEFT` at least; None before the first.
    """

    workshop: Workshop
    stopwatch: Stopwatch
    name: str
    order: Removable
    ceilings: dict[str, float]
    minimise: str
    train: Train | None
    worker: Worker
    seconds: float | None = None
    short_seconds: float = 0.0
    remaining: float | None = None

    def __post_init__(self) -> None:
        self.told_end = False
        self.optuna = import_optuna()
        self.states = self.optuna.trial.TrialState
        with self.worker.alone(TURN):
            self.study = open_study(
                self.optuna,
                self.workshop.out,
                self.name,
                self.worker,
                direction="maximize" if self.workshop.task.prefers_higher else "minimize",
                pruner=halving(self.optuna),
            )

    def run(self, tried: Sequence[Tried], most: int) -> Tried | None:
        """Run up to `most` finalists, together with other processes; the best that keeps all ceilings, or None.

        Where they are trained, files without training that keep all ceilings, too, and promise more than the best of them are
        run after that. Where they are not, and none keeps the ceilings, twice as many more are run at most that were measured
        within all of them.

        Args:
            tried: candidates with figures; those that are run, here or elsewhere, get `trained`, `stopped`, `rejected` or
                `untrainable`.
            most: number of runs, of all processes; those that failed do not count, but one more of them ends it. It is that of
                runs without training, too, once there is a file to hand over.
        """
        best = self._run_finalists(tried, most)
        return best if self.train is None else self._run_untrained(tried, most)

    def _run_finalists(self, tried: Sequence[Tried], most: int) -> Tried | None:
        while True:
            with self.worker.alone(TURN):
                at_work = self._look_(tried)
                best = self._best(tried)
                done = sum(t.trained is not None or t.stopped is not None for t in tried)
                failed = sum(t.failed for t in tried)
                following = trial = None
                ended = best is not None and self.train is None and self.minimise == "drop"
                if best is not None and self.train is None:
                    # What was run was the best; only what was measured since may be better.
                    following = self.next_finalist(self._measured_better(tried, best), best, at_work)
                if following is None and not ended and done + len(at_work) < most and failed <= most:
                    following = self.next_finalist(tried, best, at_work)
                    if following is not None and not self._has_time():
                        following = None
                elif best is None and self.train is None and not at_work and done < (1 + BEYOND) * most and failed <= most:
                    # Without a training, it is soon seen whether another file keeps the ceilings when it is run.
                    following = self.next_finalist(self._measured_within(tried), None)
                if following is not None:
                    trial = self._trial(self.folder(following.candidate))
            if following is not None:
                self.run_one(following, trial)
            elif ended or not at_work:
                return best
            else:
                time.sleep(PAUSE)

    def _measured_better(self, tried: Sequence[Tried], best: Tried) -> list[Tried]:
        """The candidates that keep the ceilings surely, and had less of what is minimised than the best when it was measured.

        None whose run failed, in an earlier call either: where one is finished, no run is tried again.
        """
        assert best.figures is not None
        least, sure = best.figures.get(self.minimise), self._sure_ceilings()
        trials = self.study.get_trials(deepcopy=False, states=(self.states.FAIL,))
        gone = {t.user_attrs.get(FOLDER) for t in trials if {UNTRAINABLE, REJECTED_ONCE} & t.user_attrs.keys()}
        measured = [(t.figures, t) for t in tried if t.figures is not None and self.folder(t.candidate).name not in gone]
        return [t for found, t in measured if found.get(self.minimise) < least and not found.excesses(sure)]

    def _measured_within(self, tried: Sequence[Tried]) -> list[Tried]:
        """The candidates whose files were measured within all ceilings when they were made."""
        return [t for t in tried if t.figures is not None and not t.figures.excesses(self.ceilings)]

    def _trainings(self, folder: str) -> list[Any]:
        """The trials with the training that a folder is named by: seconds that others took are not of its minutes."""
        return of_training(self.study.get_trials(deepcopy=False), folder)

    def _has_time(self) -> bool:
        """Whether another training may begin: where none is given up early, one as long as those so far has to fit."""
        if self.seconds is None:
            return True
        trainings = self._trainings(self.folder(UNCOMPRESSED).name)
        spent = sum(map(trained_for, trainings))
        longest = max((trained_for(t) for t in trainings if t.state == self.states.COMPLETE), default=0.0)
        ended = spent and self.short_seconds + spent + (0.0 if self.minimise == "drop" else longest) >= self.seconds
        if ended and not self.told_end:  # once, and not whenever other processes are looked at
            self.told_end = True
            announce(log, "compress: no other finalist is trained, since the minutes are over")
        return not ended

    def _must_end(self, trial: Any, timer: StepTimer) -> bool:
        """Whether the training of a trial has to end, since the minutes are over, and it is not the first."""
        if self.seconds is None:
            return False
        others = [t for t in self._trainings(trial.user_attrs[FOLDER]) if t.number != trial.number and trained_for(t)]
        first = all(t.state == self.states.FAIL or (t.state == self.states.RUNNING and t.number > trial.number) for t in others)
        return not first and self.short_seconds + sum(map(trained_for, others)) + timer.seconds >= self.seconds

    def _run_untrained(self, tried: Sequence[Tried], most: int) -> Tried | None:
        """Run candidates without training that were measured within all ceilings so, as long as they promise more than the best.

        A training can make a file too large, or fail, and a finalist can lose more with it than others without.
        """
        while True:
            with self.worker.alone(TURN):
                at_work = self._look_(tried)
                ended = self._look_at_untrained_(tried)
                best, following = self._best(tried), None
                if best is None or len(ended) < most:
                    following = self.next_untrained(tried, best, {*ended, *at_work})
                if following is not None:
                    trial = self._trial(self.folder(following.candidate, trains=False))
            if following is not None:
                self._run_one_untrained(following, trial)
            elif not at_work:
                return best
            else:
                time.sleep(PAUSE)

    def _trial(self, folder: Path) -> Any:
        """A trial of this process for the run in a folder."""
        trial = self.study.ask()
        trial.set_user_attr(FOLDER, folder.name)
        trial.set_user_attr(WORKER, self.worker.name)
        return trial

    def _look_(self, tried: Sequence[Tried]) -> set[str]:
        """Enter what is known of runs, and return the folders of those that living processes work on."""
        of_folder = {self.folder(t.candidate).name: t for t in tried}
        at_work = set()
        for trial in self.study.get_trials(deepcopy=False):
            about = trial.user_attrs
            found = of_folder.get(about.get(FOLDER))
            if trial.state == self.states.RUNNING:
                if self.worker.lives(about.get(WORKER)):
                    at_work.add(about[FOLDER])
                else:  # its process was killed; the folder resumes
                    self.study.tell(trial.number, state=self.states.FAIL)
            elif found is None:
                continue
            elif trial.state == self.states.FAIL:
                found.rejected = self._rejection(about) or found.rejected
                if self.worker.lives(about.get(WORKER)):  # what made it fail may have been mended since another call
                    found.untrainable = about.get(UNTRAINABLE, found.untrainable)
            elif trial.state == self.states.PRUNED:
                found.stopped, found.training_seconds = about["stopped"], about["seconds"]
            elif trial.state == self.states.COMPLETE:
                found.trained, found.untrained = Figures(**about["figures"]), about.get("untrained", False)
                found.discarded = Figures(**about["discarded"]) if "discarded" in about else None
                found.training_seconds = found.trained.seconds
                if found.figures is not None and found.promise > 0:
                    lost = min(each.drop for each in (found.trained, found.discarded) if each is not None)
                    self.remaining = max(lost / found.promise, LEAST_LEFT)
        return at_work

    def _rejection(self, about: dict[str, Any]) -> str:
        """Why a file is not proved, by the attributes of its trial; "" also where that was in another call, and may be mended."""
        once = about.get(REJECTED_ONCE, "") if self.worker.lives(about.get(WORKER)) else ""
        return about.get(REJECTED, once)

    def _look_at_untrained_(self, tried: Sequence[Tried]) -> set[str]:
        """Enter what is known of runs without training, where it is better, and return the folders of those that have ended."""
        of_folder = {self.folder(t.candidate, trains=False).name: t for t in tried}
        ended = set()
        for trial in self.study.get_trials(deepcopy=False, states=(self.states.COMPLETE, self.states.FAIL)):
            about = trial.user_attrs
            found = of_folder.get(about.get(FOLDER))
            if found is None or (trial.state == self.states.FAIL and not self._rejection(about)):
                continue
            ended.add(about[FOLDER])
            if trial.state == self.states.FAIL:
                continue
            figures = Figures(**about["figures"])
            if found.trained is None or self._rank(figures) < self._rank(found.trained):
                found.trained, found.discarded, found.untrained = figures, found.trained, True
                found.training_seconds = found.training_seconds or figures.seconds
        return ended

    def _rank(self, figures: Figures) -> tuple[bool, float]:
        """Of two files of one candidate, with and without training, that with the lesser value is the better one."""
        return bool(figures.excesses(self.ceilings)), figures.drop

    def _best(self, tried: Sequence[Tried]) -> Tried | None:
        """The candidate with the least of what is minimised among those whose trained files keep all ceilings.

        Of equal ones, that with the least of the other quantities.
        """
        within = [(t.trained, t) for t in tried if t.trained is not None and not t.trained.excesses(self.ceilings)]
        order = (self.minimise, "drop", "latency", "bytes", "macs")
        return min(within, key=lambda pair: [pair[0].get(quantity) for quantity in order], default=(None, None))[1]

    def within(self, tried: Sequence[Tried], *, surely: bool) -> list[Tried]:
        """The candidates that keep the ceilings which training does not change.

        surely: only those that keep that on the latency by more than latencies are known to, and that on the bytes by what the
            settings of a training take in a file, where there are some: once it is trained, a file is measured again.
        """
        measured = self._measured_ceilings()
        kept = [(t.figures, t) for t in tried if t.figures is not None and t.candidate != UNCOMPRESSED]
        kept = [(figures, t) for figures, t in kept if not figures.excesses(measured)]
        if surely:
            sure = self._sure_ceilings()
            kept = [(figures, t) for figures, t in kept if not figures.excesses(sure)] or kept
        return [t for _, t in kept]

    def _measured_ceilings(self) -> dict[str, float]:
        """The ceilings on what training does not change."""
        return {name: ceiling for name, ceiling in self.ceilings.items() if name in MEASURED}

    def _sure_ceilings(self) -> dict[str, float]:
        """The same, as far as a file without training may be to keep them surely."""
        return {name: self._surely(name, ceiling) for name, ceiling in self._measured_ceilings().items()}

    def _surely(self, name: str, ceiling: float) -> float:
        """What a file without training may have at most, to be sure that it keeps a ceiling when it is measured again."""
        if name == "bytes" and self.train is not None:
            return ceiling - OF_SETTINGS
        return self.stopwatch.surely(ceiling) if name == "latency" else ceiling

    def next_finalist(self, tried: Sequence[Tried], best: Tried | None, at_work: Container[str] = ()) -> Tried | None:
        """The candidate to run next; None where none of those left is expected to be better than `best`.

        Where the drop has a ceiling: the one with the least of what is minimised, among those whose drop is expected to stay
        below it; otherwise the one with the best metric, and of those that differ by effort alone, which matters little in a
        training, one before all others. The first keeps a ceiling on the latency surely, see `within`.
        at_work: folders of those that other processes run.
        """
        ended = [t for t in tried if t.trained or t.stopped is not None or t.failed]
        taken = [*ended, *(t for t in tried if t not in ended and self.folder(t.candidate).name in at_work)]
        untaken = [t for t in tried if t not in taken]
        left = [(t.figures, t) for t in self.within(untaken, surely=best is None) if t.figures is not None]
        if "drop" in self.ceilings and self.minimise != "drop":
            if best is not None and best.trained is not None:
                least = best.trained.get(self.minimise)
                left = [(figures, t) for figures, t in left if figures.get(self.minimise) < least]
            kept = [pair for pair in left if self.expects_to_keep(pair[1])]
            if kept:
                return min(kept, key=lambda pair: pair[0].get(self.minimise))[1]
            left = left if best is None else []
        if self.train is not None:
            networks = {replace(t.candidate, effort="fast") for t in taken}
            left = [pair for pair in left if replace(pair[1].candidate, effort="fast") not in networks] or left
        return min(left, key=lambda pair: (pair[1].promise, pair[0].drop, pair[0].latency), default=(None, None))[1]

    def next_untrained(self, tried: Sequence[Tried], best: Tried | None, taken: Container[str] = ()) -> Tried | None:
        """The candidate to run next without training; None where none promises more than `best` by its file without training.

        Such a file was measured within all ceilings, and there is none of the candidate with training that keeps them.
        taken: folders of those whose runs have ended, or that other processes run.
        """
        left = []
        for t in self.within(tried, surely=False):
            kept = t.trained is not None and not t.trained.excesses(self.ceilings)
            if t.figures is None or t.figures.excesses(self.ceilings) or kept or t.untrained:
                continue
            if self.folder(t.candidate, trains=False).name not in taken:
                left.append((t.figures, t))
        if left and best is not None and best.trained is not None:
            least = best.trained.get(self.minimise)
            # Times of two files are told apart by no less than the noise.
            least = self.stopwatch.surely(least) if self.minimise == "latency" else least
            left = [(figures, t) for figures, t in left if figures.get(self.minimise) < least]
        left.sort(key=lambda pair: (pair[0].get(self.minimise), pair[0].drop, pair[1].candidate.name))
        return left[0][1] if left else None

    def expects_to_keep(self, tried: Tried) -> bool:
        """Whether the drop of a candidate is expected to stay below its ceiling, by what is known before its training."""
        share = 1.0 if self.train is None else self.remaining
        if share is None:
            share = LEFT_AFTER_SHORT if tried.promise == tried.short else LEFT
        assert tried.figures is not None
        expected = replace(tried.figures, drop=tried.promise * share)
        return not expected.excesses({"drop": self.ceilings["drop"]})  # which know a drop at the ceiling from one over it

    def run_one(self, tried: Tried, trial: Any) -> None:
        """Run the recipe of a candidate on all data, or read what is finished of it, and tell its trial."""
        begin, candidate = time.perf_counter(), tried.candidate
        rung_reached = 0

        def watch(report: StepReport) -> None:
            nonlocal rung_reached
            timer.step(report)
            if self._must_end(trial, timer):
                raise GivenUp
            if report.metric is None:
                return
            timer.tell()
            assert self.train is not None
            if (rung := rungs_done(candidate, self.train, report)) <= rung_reached:
                return  # the metric may be measured more often
            rung_reached = rung
            trial.report(report.metric, rung_reached)
            if rung_reached < RUNGS and self.minimise == "drop" and trial.should_prune():
                raise GivenUp

        try:
            with timer_of(trial) as timer:
                result = self._run(candidate, self.recipe(candidate, watch))
        except GivenUp:
            trial.set_user_attr("stopped", rung_reached / RUNGS)
            trial.set_user_attr("seconds", time.perf_counter() - begin)
            self.study.tell(trial, state=self.states.PRUNED)
            return
        except (ExportError, TrainingError, DataError) as error:
            if not self._is_of_candidate(error, candidate):
                raise
            log.warning("compress: %s is no finalist: %s", candidate.name, error)
            self._tell_failed(trial, error, trains=self.train is not None)
            return
        figures = with_training = self._figures(result, time.perf_counter() - begin)
        if self.train is not None and tried.figures is not None and tried.figures.drop < figures.drop:
            figures = min(figures, self._without_training(candidate, begin) or figures, key=self._rank)
        trial.set_user_attr("untrained", figures is not with_training)
        if figures is not with_training:
            trial.set_user_attr("discarded", asdict(with_training))
        if with_training.excesses(self.ceilings):
            trial.set_user_attr(OVER, True)
        trial.set_user_attr("figures", asdict(figures))
        self.study.tell(trial, figures.metric)

    def _without_training(self, candidate: Candidate, begin: float) -> Figures | None:
        """Figures of a candidate's file without training; None where its run fails, since that with it is whole all the same."""
        try:
            plain = self._run(candidate, self.recipe(candidate, trains=False), trains=False)
            return self._figures(plain, time.perf_counter() - begin)
        except CheckpointError:
            raise  # of the disk or the folder
        except (ExportError, DataError):
            return None

    def _tell_failed(self, trial: Any, error: CompressError, *, trains: bool) -> None:
        """Tell a trial why its run failed: for good only where the candidate, which stays as it is, cannot do otherwise."""
        lasting = isinstance(error, ExportError) or (isinstance(error, MetricError) and not trains)
        of_training = trains or isinstance(error, TrainingError)
        trial.set_user_attr(REJECTED if lasting else UNTRAINABLE if of_training else REJECTED_ONCE, str(error))
        self.study.tell(trial, state=self.states.FAIL)

    def _is_of_candidate(self, error: CompressError, candidate: Candidate, *, trains: bool = True) -> bool:
        """Whether the error of a candidate's run is of the candidate alone, so that others may do.

        One of the disk or the folder is not. One of the data or of the user's code is not: the uncompressed model, which is
        measured first, has it, too, or another finalist had it in the same words and none was finished. A metric that is not
        finite is: the uncompressed model has one that is.
        """
        if not isinstance(error, DataError):
            return not isinstance(error, CheckpointError)
        if not (self.folder(candidate, trains=trains) / START / ROW).exists():
            return False
        trials = self.study.get_trials(deepcopy=False, states=(self.states.COMPLETE, self.states.FAIL))
        of_this_call = [t.user_attrs for t in trials if self.worker.lives(t.user_attrs.get(WORKER))]
        its_own = {self.folder(candidate, trains=each).name for each in (True, False)}
        others = [about for about in of_this_call if about.get(FOLDER) not in its_own]
        said = {about.get(kind) for about in others for kind in (REJECTED, REJECTED_ONCE, UNTRAINABLE)}
        finished = any(t.state == self.states.COMPLETE for t in trials)
        return finished or isinstance(error, MetricError) or str(error) not in said

    def _run_one_untrained(self, tried: Tried, trial: Any) -> None:
        """Run the recipe of a candidate without training, on all data, and tell its trial."""
        begin, candidate = time.perf_counter(), tried.candidate
        try:
            result = self._run(candidate, self.recipe(candidate, trains=False), trains=False)
        except (ExportError, DataError) as error:
            if not self._is_of_candidate(error, candidate, trains=False):
                raise
            log.warning("compress: %s is not proved without training: %s", candidate.name, error)
            self._tell_failed(trial, error, trains=False)
            return
        figures = self._figures(result, time.perf_counter() - begin)
        trial.set_user_attr("figures", asdict(figures))
        self.study.tell(trial, figures.metric)

    def finished_run(self, tried: Tried) -> tuple[Recipe, Result]:
        """The recipe and the result of a candidate that was run, here or elsewhere, read from its folder."""
        recipe = self.recipe(tried.candidate, trains=not tried.untrained)
        return recipe, self._run(tried.candidate, recipe, trains=not tried.untrained)

    def _run(self, candidate: Candidate, recipe: Recipe, *, trains: bool = True) -> Result:
        out = self.folder(candidate, trains=trains)
        with self.worker.alone(out.name):  # a search with another budget may run it now
            return recipe.run(self.workshop.model, self.workshop.task, out)

    def recipe(self, candidate: Candidate, watch: OnStep | None = None, *, trains: bool = True) -> Recipe:
        """The recipe of a candidate; its trainings call `watch`."""
        shop = self.workshop
        stages = shop.stages(candidate, self.order, train=self.train if trains else None)
        return Recipe(*stages, seed=shop.seed, export="last", dynamic=shop.dynamic, on_step=watch)

    def folder(self, candidate: Candidate, *, trains: bool = True) -> Path:
        """Where a candidate is run."""
        settings = short_hash(describe(self.train if trains else None), NAME_DIGITS)
        name = f"{self.workshop.unique_name(candidate)}-{settings}"
        return self.workshop.out / TRAINED / name

    def _figures(self, result: Result, seconds: float) -> Figures:
        """Of the file of a run, on all validation data."""
        first, last, file = result.rows[0], result.rows[-1], result.out / "model.onnx"
        sign = 1 if self.workshop.task.prefers_higher else -1
        return Figures(
            metric=last.metric,
            drop=(first.metric - last.metric) * sign,
            latency=self._latency(file),
            bytes=file_bytes(file),
            macs=self.workshop.macs(result.model),
            seconds=seconds,
        )

    def _latency(self, file: Path) -> float:
        """The latency of a file; where it is over the ceiling, the median of three measurements."""
        first = self.stopwatch.measure(file)
        if first <= self.ceilings.get("latency", math.inf):
            return first
        return statistics.median([first, self.stopwatch.measure(file), self.stopwatch.measure(file)])
