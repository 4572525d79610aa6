"""After which parts of their trainings finalists are compared, and who is compared with whom (successive halving)."""

from __future__ import annotations

import math
from typing import Any

from compresskit.search.candidate import QAT_SHARE, Candidate
from compresskit.search.figures import ROUNDING
from compresskit.train.callbacks import StepReport
from compresskit.train.train import Train

RUNGS = 4  # parts of a training, after each of which but the last it may be given up
FOLDER, OVER = "folder", "over"  # attributes of a trial: the name of its folder; whether its trained file exceeds a ceiling


class GivenUp(BaseException):
    """A training is worse than others were at the same point. Not an Exception, which callbacks of a training may not raise."""


def rungs_done(candidate: Candidate, train: Train, report: StepReport) -> int:
    """How many of the `RUNGS` parts of all trainings of a candidate are done after a step. train: what they are parts of."""
    fraction = report.step / report.steps
    if candidate.trains_in_two_parts and (train.steps or train.epochs or 0) > 1:
        fraction = 1 - (1 - fraction) / QAT_SHARE if report.training == "QAT" else fraction * (1 - 1 / QAT_SHARE)
    return math.floor(fraction * RUNGS + ROUNDING)


def training_of(folder: str) -> str:
    """The hash of the training's settings, with which the name of a run's folder ends."""
    return folder.rpartition("-")[2]


def of_training(trials: list[Any], folder: str) -> list[Any]:
    """The trials of the training that a folder is named by: a study has others where its length was measured again."""
    return [trial for trial in trials if training_of(trial.user_attrs.get(FOLDER, "")) == training_of(folder)]


def halving(optuna: Any) -> Any:
    """Optuna's successive halving among trials of one training whose files keep the ceilings, as far as that is known."""

    class Halving(optuna.pruners.SuccessiveHalvingPruner):  # type: ignore[misc]
        def prune(self, study: Any, trial: Any) -> bool:
            return bool(super().prune(_Rivals(study, trial.user_attrs.get(FOLDER, "")), trial))

    return Halving(min_resource=1, reduction_factor=2)


class _Rivals:
    """A study without the trials that exceed a ceiling, and those of other trainings than a folder is named by."""

    def __init__(self, study: Any, folder: str) -> None:
        self._study, self._folder = study, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def get_trials(self, **settings: Any) -> list[Any]:
        trials = of_training(self._study.get_trials(**settings), self._folder)
        return [trial for trial in trials if OVER not in trial.user_attrs]
