"""Optuna's studies in the folder of a search: which candidate is tried next, and which training goes on.

The journal is a file, so that a search that was killed goes on where it was, and several processes, also of several machines,
work on one study. Samplers and pruners are Optuna's.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from compresskit.base.errors import CheckpointError, SettingError
from compresskit.quant.effort.improve import Effort
from compresskit.recipe.locks import HAS_LOCKS, exclusive
from compresskit.search.candidate import WITHOUT_EFFORT, Candidate, Storage
from compresskit.search.workers import LOCKS, Worker

JOURNAL, PREDICTED, PROPOSED, CHECKS, FIRST, WORKER = "study.log", "predicted", "proposed", "checks", "first", "worker"
WRITING = "journal"  # lock of who writes into it
TURN = "study"  # lock of who looks at the trials and takes one
EFFORTS: tuple[Effort, ...] = ("fast", "balanced")  # the one that takes no measurement first
#: What is tried before anything is known: from little to much.
EARLY = (Candidate(), Candidate(macs=0.5), Candidate(macs=0.25))
#: What is tried in turn with proposals, then: other ways, and what proposals may not meet.
LATER = (
    Candidate(effort="balanced"),
    Candidate(macs=0.5, bits="int4"),
    Candidate(macs=0.7),
    Candidate(macs=0.35),
    Candidate(macs=0.15),
    Candidate(rank=0.6),
    Candidate(bits="float", macs=0.5),
    Candidate(macs=0.5, effort="balanced"),
)
DYNAMIC = (Candidate(bits="dynamic"), Candidate(bits="dynamic", macs=0.5))  # tried first in networks that gain by it
TABLES = (Candidate(bits="weights4"), Candidate(bits="weights4", macs=0.5))  # tried first where embedding tables are large
#: Fractions of the blocks that may go, tried with nothing else removed and with half of the MACs.
DEPTHS = ((0.15, 1.0), (0.3, 1.0), (0.3, 0.5))
#: Fractions that are tried in the place of the first of these where candidates are trained, which can bring back deeper cuts.
DEPTHS_TRAINED: tuple[tuple[float, Storage], ...] = ((0.6, "int4"), (0.6, "int8"), (0.85, "int4"))
STEP_OF_MACS, STEP_OF_RANK = 0.05, 0.1  # of the fractions that stay
LEAST_MACS, LEAST_RANK = 0.1, 0.4  # the smallest of these fractions
MERGED_FRACTIONS = (0.5, 1.0)  # fractions of the runs of convolutions that become one each


def import_optuna() -> Any:
    """Optuna, silent. Raises SettingError where it is not installed, or too old."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise SettingError("compress(): it needs Optuna, which is not installed; pip install 'compresskit[search]'") from None
    if int(optuna.__version__.split(".")[0]) < 5:
        raise SettingError(
            f"compress(): wanted Optuna 5 or newer, got {optuna.__version__}; pip install --upgrade 'compresskit[search]'"
        )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def first_candidates(
    blocks: int, merged: int, *, dynamic: bool = False, tables: bool = False, trains: bool = False
) -> list[Candidate]:
    """What is tried first in a network with so many removable blocks and so many runs of convolutions that can become one.

    dynamic: whether it gains by ranges that are found in every call. tables: whether it has large embedding tables, whose bits
    can be fewer. trains: whether candidates are to be trained.
    """
    deep = [Candidate(blocks=max(1, round(f * blocks)), macs=macs) for f, macs in DEPTHS if blocks]
    if trains:
        deep = deep[1:]  # the shallowest gives its place
        deep += [Candidate(blocks=max(1, round(f * blocks)), bits=bits) for f, bits in DEPTHS_TRAINED if blocks]
    joined = dict.fromkeys(Candidate(merged=max(1, round(f * merged))) for f in MERGED_FRACTIONS if merged)
    return list(dict.fromkeys([*(DYNAMIC if dynamic else ()), *(TABLES if tables else ()), *EARLY, *deep, *joined, *LATER]))


class CandidateStudy:
    """The study that proposes candidates: few objectives to minimise, within constraints. Several processes may work on it.

    Args:
        out: folder of the search.
        name: of the study in the journal.
        worker: this process.
        objectives: how many values `tell` gets.
        most: the largest value of the parameters of a candidate that count: residual blocks, and merged convolutions.
        first: candidates that are tried before the sampler decides.
        seed: of the sampler.
        storages, efforts: what it chooses from. What is proposed may have others.
        factors: whether layers may be factored.
    """

    def __init__(
        self,
        out: Path,
        name: str,
        worker: Worker,
        *,
        objectives: int,
        most: Mapping[str, int],
        first: Sequence[Candidate],
        seed: int,
        storages: Sequence[Storage] = ("float", "int8", "int4"),
        efforts: Sequence[Effort] = EFFORTS,
        factors: bool = True,
    ) -> None:
        self.storages, self.efforts, self.factors, self.first = list(storages), list(efforts), factors, list(first)
        self.optuna, self.worker, self.most = import_optuna(), worker, {name: count for name, count in most.items() if count}
        self.states = self.optuna.trial.TrialState
        with worker.alone(TURN):
            self.study = open_study(
                self.optuna,
                out,
                name,
                worker,
                directions=["minimize"] * objectives,
                # Each process draws of its own, or all would try the same.
                sampler=self.optuna.samplers.TPESampler(seed=seed + worker.others(), n_startup_trials=len(first)),
            )

    def _parameters(self, candidate: Candidate) -> dict[str, Any]:
        names = (*self.most, "macs", *(("rank",) if self.factors else ()), "bits", "effort")
        return {name: vars(candidate)[name] for name in names}

    def _told(self) -> list[Any]:
        """Trials with a result; those that a process left behind have none."""
        states = (self.states.COMPLETE, self.states.PRUNED, self.states.FAIL)
        return self.study.get_trials(deepcopy=False, states=states)  # type: ignore[no-any-return]

    def finished(self) -> list[Candidate]:
        """The candidates that were made, each once, or could not be."""
        return list(dict.fromkeys(candidate_of(t.params) for t in self._told() if t.state != self.states.PRUNED))

    def measured(self) -> set[Candidate]:
        """Those of them that were made."""
        return {candidate_of(t.params) for t in self._told() if t.state == self.states.COMPLETE}

    def skipped(self) -> dict[Candidate, float]:
        """Candidates that were skipped -> what was predicted for them."""
        return {candidate_of(t.params): t.user_attrs[PREDICTED] for t in self._told() if t.state == self.states.PRUNED}

    @property
    def told(self) -> int:
        """How many trials were told."""
        return len(self._told())

    def ask(self, most: int, lost: Collection[Candidate] = ()) -> tuple[Any, Candidate] | None:
        """The next trial and its candidate: one that a process left when it ended, or a new one.

        None where `most` candidates were measured, or would be with those that living processes work on. lost: candidates that
        do not count, since what was measured of them is gone and they cannot be made again.
        """
        with self.worker.alone(TURN):
            running = self.study.get_trials(deepcopy=False, states=(self.states.RUNNING,))
            left = [t for t in running if not self.worker.lives(t.user_attrs.get(WORKER))]
            if len({*self.measured().difference(lost), *(candidate_of(t.params) for t in running if t not in left)}) >= most:
                return None
            trial = self.optuna.trial.Trial(self.study, left[0]._trial_id) if left else self._next_trial()
            trial.set_user_attr(WORKER, self.worker.name)
            for name, count in self.most.items():
                trial.suggest_int(name, 0, count)
            trial.suggest_float("macs", LEAST_MACS, 1.0, step=STEP_OF_MACS)
            if self.factors:
                trial.suggest_float("rank", LEAST_RANK, 1.0, step=STEP_OF_RANK)
            trial.suggest_categorical("bits", self.storages)
            if len(self.efforts) > 1 or PROPOSED in trial.user_attrs:
                trial.suggest_categorical("effort", list(EFFORTS))
            return trial, candidate_of(trial.params)

    def _next_trial(self) -> Any:
        """A trial of what was proposed; without that of the next of the first candidates, then of what the sampler draws."""
        begun = self._begun()
        if not self._waits() and begun < len(self.first):
            self.study.enqueue_trial(self._parameters(self.first[begun]), user_attrs={FIRST: begun})
        return self.study.ask()

    def _waits(self) -> bool:
        return bool(self.study.get_trials(deepcopy=False, states=(self.states.WAITING,)))

    def _begun(self) -> int:
        """How many of the first candidates had their turn."""
        return sum(FIRST in trial.user_attrs for trial in self.study.get_trials(deepcopy=False))

    def propose(self, candidate: Candidate, *, checks: bool = False) -> None:
        """Let a candidate be the next, unless another waits, it was proposed before and not skipped, or it is too early.

        It is while any of the first candidates but those of `LATER` had no turn: what they tell is what proposals are made of.
        checks: it is to be made whatever is predicted of it.
        """
        kind = CHECKS if checks else PROPOSED
        with self.worker.alone(TURN):
            if self._waits() or any(first not in LATER for first in self.first[self._begun() :]):
                return
            wanted = self._parameters(candidate)
            asked = [t for t in self.study.get_trials(deepcopy=False) if t.state != self.states.PRUNED]
            if all(trial.user_attrs.get(kind) != wanted for trial in asked):
                self.study.enqueue_trial(wanted, user_attrs={kind: wanted})

    @staticmethod
    def checks(trial: Any) -> bool:
        """Whether a candidate is to be made whatever is predicted of it."""
        return CHECKS in trial.user_attrs

    def tell(self, trial: Any, values: Sequence[float] | None, constraints: Sequence[float] = ()) -> None:
        """The result of a trial: what is minimised, and constraints that are met where <= 0; None where it could not be made."""
        if values is None:
            self.study.tell(trial, state=self.states.FAIL)
            return
        for i, constraint in enumerate(constraints):
            _constrain(trial, f"ceiling {i}", constraint)
        self.study.tell(trial, list(values))

    def skip(self, trial: Any, predicted: float, over: float) -> None:
        """The trial is not measured, since it is predicted to exceed a ceiling by a fraction `over`."""
        trial.set_user_attr(PREDICTED, predicted)
        _constrain(trial, "predicted", over)
        self.study.tell(trial, state=self.states.PRUNED)


def _constrain(trial: Any, key: str, value: float) -> None:
    """Give a trial a constraint, unless it has it from a process that was killed before it told the rest."""
    if key not in trial.constraints:
        trial.set_constraint(key, value)


def candidate_of(parameters: dict[str, Any]) -> Candidate:
    """The candidate of a trial's parameters; steps of floats are rounded to the decimals that they have."""
    return Candidate(
        blocks=int(parameters.get("blocks", 0)),
        merged=int(parameters.get("merged", 0)),
        macs=round(parameters["macs"], 2),
        rank=round(parameters.get("rank", 1.0), 2),
        bits=parameters["bits"],
        effort="fast" if parameters["bits"] in WITHOUT_EFFORT else parameters.get("effort", "fast"),
    )


def open_study(optuna: Any, out: Path, name: str, worker: Worker, **settings: Any) -> Any:
    """Optuna's study of this name in the journal of the folder, a new one where there is none.

    Half a line that a killed process left at the end of the journal is taken off, unless another process may be writing it.
    Raises CheckpointError where the journal cannot be read.
    """
    backend = importlib.import_module("optuna.storages.journal")
    if (out / JOURNAL).exists() and not worker.others():
        _drop_half_line(out / JOURNAL)
    try:
        lock = _JournalLock(out / LOCKS / WRITING) if HAS_LOCKS else None  # None: Optuna's own
        journal = backend.JournalFileBackend(str(out / JOURNAL), lock_obj=lock)
        storage = optuna.storages.JournalStorage(journal)
        return optuna.create_study(study_name=name, storage=storage, load_if_exists=True, **settings)
    except (AssertionError, KeyError, ValueError) as error:  # what Optuna raises for lines that are missing or damaged
        raise CheckpointError(
            f"{out / JOURNAL}: a damaged journal of Optuna ({type(error).__name__}: {error}); delete it: what was measured stays"
            " in the folder, and is not measured again"
        ) from error


class _JournalLock:
    """A lock of Optuna's journal that ends with the process that holds it, as Optuna's own, a link, does not.

    One that a killed process leaves holds up others for half a minute, and for ever where the folder was moved.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.held = path, ExitStack()

    def acquire(self) -> bool:
        self.held.enter_context(exclusive(self.path))
        return True

    def release(self) -> None:
        self.held.close()


def _drop_half_line(path: Path) -> None:
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
