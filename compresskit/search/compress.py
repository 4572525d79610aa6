"""`compress`: from a trained model and a budget to a recipe and its verified file."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.files import atomic
from compresskit.base.fingerprint import describe
from compresskit.base.progress import announce
from compresskit.base.task import Task, accuracy
from compresskit.graph.surgery import copy_model
from compresskit.quant.numerics.targets import X86, Target
from compresskit.recipe.folder import locked
from compresskit.recipe.preflight import preflight_check
from compresskit.search.candidate import UNCOMPRESSED
from compresskit.search.ceilings import LARGEST_PLAUSIBLE_DROP, MEASURED, Ceilings
from compresskit.search.explore import Explorer
from compresskit.search.finalists import RUNGS, Finals
from compresskit.search.outcome import Search, Tried, nearest_budget
from compresskit.search.proxy import Workshop, held_out
from compresskit.search.source import SourceWriter, as_script
from compresskit.search.study import import_optuna
from compresskit.train.train import Train

log = logging.getLogger(__name__)

SCRIPT = "recipe.py"
TIMED_STEPS = 4  # of a training, from which the length that fits into the minutes is taken
ROUNDED_STEP = 1.5  # what a step with rounding takes, relative to one without


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What `compress` was given besides model, task and budget; it explains them."""

    train: Train | None
    trials: int
    finalists: int
    seed: int

    def __post_init__(self) -> None:
        for name, least in (("trials", 1), ("finalists", 1), ("seed", 0)):
            value = vars(self)[name]
            if type(value) is not int or value < least:
                raise SettingError(f"compress({name}=...): wanted a whole number >= {least}, got {value!r}")
        if self.train is not None and type(self.train) is not Train:
            raise SettingError(f"compress(train=...): wanted a Train, got {self.train!r}")
        if self.train is not None:
            SourceWriter().source(self.train, "compress(train=...)")  # raises where no recipe can be written with it


def compress(
    model: nn.Module,
    task: Task,
    budget: Ceilings,
    *,
    out: str | Path,
    train: Train | None = None,
    trials: int = 24,
    finalists: int = 3,
    held_out_samples: int = 1024,
    calibration_samples: int = 1024,
    seconds: float = 1.0,
    target: Target = X86,
    seed: int = 0,
) -> Search:
    """Search for the recipe that meets a budget, run it, and return its verified file with all that was tried.

    Candidates remove channels, residual blocks and precision, and factor layers. Each is first made without training and
    judged by its exported file, on held-out data; Optuna proposes which. Those that promise most are then run as recipes on all
    data, one after another, and given up early where they fall behind. Called again, a search that was interrupted goes on where
    it was; another budget in the same folder takes over what was measured.

    Args:
        model: a trained float model; it is not changed.
        task: data, loss and metric. Its validation data choose, so keep other data to report a metric on.
        budget: made by `at_most`.
        out: folder of the search.
        train: how each finalist is trained, in all its stages; by default, with `minutes` in the budget, AdamW for as many
            steps as fit, and nothing without. It imitates the uncompressed model unless it has an objective.
        trials: how many candidates are measured without training.
        finalists: how many are run as recipes at most.
        held_out_samples: validation samples that candidates without training are judged by.
        calibration_samples: samples that stages read without training.
        seconds: for each measurement of a latency.
        target: runtime of quantized files.
        seed: of the search and of every stage.

    Raises:
        SettingError: Optuna is missing, a setting is out of range, or a latency cannot be measured on this machine.
        ModelError: no candidate meets the budget; the message has the nearest that can.
        CheckpointError: the folder belongs to another model or task.
        Other errors that a first run of the model and its training raise.
    """
    begin = time.perf_counter()
    settings = _Settings(train=train, trials=trials, finalists=finalists, seed=seed)
    _check(model, task, budget, import_optuna())
    preflight_check(model, task, [train] if train is not None else [])
    out = Path(out)
    with locked(out / "lock"):
        model = copy_model(model).to(task.device).eval()
        workshop = Workshop(
            model=model,
            task=task,
            held=held_out(task, held_out_samples),
            out=out,
            samples=calibration_samples,
            batch=budget.batch,
            threads=budget.threads,
            seconds=seconds,
            seed=seed,
            target=target,
        )
        workshop.prepare()
        dense = workshop.dense()
        stopwatch = workshop.stopwatch(strict=budget.latency is not None)
        dense = replace(dense, latency=stopwatch.milliseconds)
        ceilings = budget.absolute(dense)
        minimise = free_quantity(ceilings)
        order = workshop.block_order()
        trained = training_within(model, task, settings, budget)
        name = _study_name(budget, ceilings, trained)
        explorer = Explorer(
            workshop=workshop,
            stopwatch=stopwatch,
            dense=dense,
            order=order,
            ceilings=ceilings,
            judged=tuple(q for q in ceilings if q != "drop" or trained is None),
            trials=trials,
            name=name,
        )
        tried = explorer.explore()
        _refuse_unreachable(tried, budget, ceilings, trained is not None, out)
        finals = Finals(
            workshop=workshop,
            stopwatch=stopwatch,
            name=f"{name}-finals",
            order=order,
            ceilings=ceilings,
            minimise=minimise,
            train=trained,
        )
        chosen = finals.run(tried, finalists)
        if chosen is None:
            _refuse_finalists(tried, budget, ceilings, out)
        assert chosen is not None
        result, recipe = finals.results[chosen.candidate.name], finals.recipes[chosen.candidate.name]
        code, title = out / SCRIPT, f"{type(model).__name__} within {budget!r}: {chosen.candidate.name}."
        with atomic(code) as file:
            file.write_text(as_script(recipe, title=title, name=SCRIPT, out=str(out / "again")))
        return Search(
            budget=budget,
            dense=dense,
            tried=tuple(tried),
            chosen=chosen,
            reason=_reason(chosen, tried, ceilings, minimise),
            recipe=recipe,
            code=code,
            result=result,
            noise=stopwatch.noise,
            ceilings=ceilings,
            seconds=time.perf_counter() - begin,
        )


def _check(model: nn.Module, task: Task, budget: Ceilings, optuna: object) -> None:
    """Raise SettingError where it is plain that the search cannot work."""
    assert optuna is not None
    if not isinstance(model, nn.Module):
        raise SettingError(f"compress(model): wanted a trained module, got {type(model).__name__}")
    if not isinstance(budget, Ceilings):
        raise SettingError(f'compress(budget): wanted a budget such as ck.at_most(latency="5ms"), got {budget!r}')
    if task.prefers_higher is None:
        raise SettingError("compress: whether a larger metric is better is not said; pass Task(higher_is_better=...)")
    if task.metric is accuracy and budget.drop is not None and budget.drop.value > LARGEST_PLAUSIBLE_DROP:
        raise SettingError(
            f"at_most(drop={budget.drop.value:g}): a drop is in the unit of the metric, and accuracies are fractions; write"
            f' drop={budget.drop.value / 100:g} or drop="{budget.drop.value:g}pt" for {budget.drop.value:g} points'
        )


def free_quantity(ceilings: dict[str, float]) -> str:
    """What is minimised: the first without a ceiling of the drop, the latency and the bytes; the drop where each has one."""
    return next((name for name in ("drop", "latency", "bytes") if name not in ceilings), "drop")


def training_within(model: nn.Module, task: Task, settings: _Settings, budget: Ceilings) -> Train | None:
    """The training of each finalist: no longer than all of them may take together. None where nothing is trained."""
    train = settings.train
    if budget.minutes is not None:
        probe = replace(train or Train(steps=1), steps=TIMED_STEPS, epochs=None, validate_every=0, keep_best=False, patience=None)
        probe(copy_model(model), task)  # the first steps are slower than the others
        begin = time.perf_counter()
        probe(copy_model(model), task)
        a_step = ROUNDED_STEP * (time.perf_counter() - begin) / TIMED_STEPS
        whole_trainings = 1 + (settings.finalists - 1) / RUNGS
        fits = math.floor(budget.minutes.value * 60 / a_step / whole_trainings)
        if fits < RUNGS:
            raise SettingError(
                f"at_most(minutes={budget.minutes.value:g}): {settings.finalists} finalists have {fits} steps in it, at"
                f" {a_step:.2f} s each, wanted at least {RUNGS}; leave minutes= and train= out to train nothing"
            )
        wanted = None if train is None else train.length(task).steps
        train = replace(train or Train(steps=1), steps=fits if wanted is None else min(fits, wanted), epochs=None)
        announce(log, "compress: %d steps for each finalist, %.2f s a step", train.steps, a_step)
    if train is None or train.validate_every is not None:
        return train
    return replace(train, validate_every=math.ceil((train.steps or train.epochs or 1) / RUNGS))


def _study_name(budget: Ceilings, ceilings: dict[str, float], train: Train | None) -> str:
    """One study for what is asked for, in words that do not depend on today's latency of the uncompressed file."""
    asked = [repr(replace(budget, minutes=None)), sorted(ceilings), None if train is None else describe(train)]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]


def _refuse_unreachable(tried: Sequence[Tried], budget: Ceilings, ceilings: dict[str, float], trains: bool, out: Path) -> None:
    """Raise ModelError where no candidate keeps the ceilings on what training does not change."""
    counted = {name: c for name, c in ceilings.items() if name in MEASURED or not trains}
    figures = [t.figures for t in tried if t.figures is not None and t.candidate != UNCOMPRESSED]
    if not figures:
        why = next((f"{t.candidate.name}: {t.failure}" for t in tried if t.failure), "none was tried")
        raise ModelError(f"compress: none of {len(tried)} candidates could be made: {why}; run its stages one by one")
    if any(not f.excesses(counted) for f in figures):
        return
    advice = "" if trains or "drop" not in ceilings else ", or train (minutes= or train=)"
    raise ModelError(
        f"compress: none of {len(figures)} candidates meets {budget!r}; the nearest that can is"
        f" {nearest_budget(figures, budget, ceilings)}; ask for that{advice}, or raise trials=; all files are in {out}"
    )


def _refuse_finalists(tried: Sequence[Tried], budget: Ceilings, ceilings: dict[str, float], out: Path) -> None:
    """Raise ModelError for finalists none of which keeps all ceilings."""
    figures = [t.trained for t in tried if t.trained is not None]
    raise ModelError(
        f"compress: none of {len(figures)} finalists meets {budget!r} on all validation data; the nearest that can is"
        f" {nearest_budget(figures, budget, ceilings)}; ask for that, train longer, or raise finalists=; all files are in {out}"
    )


def _reason(chosen: Tried, tried: Sequence[Tried], ceilings: dict[str, float], minimise: str) -> str:
    assert chosen.trained is not None
    measured = {name: c for name, c in ceilings.items() if name in MEASURED}
    within = sum(t.figures is not None and not t.figures.excesses(measured) for t in tried)
    run = sum(t.trained is not None or t.stopped is not None for t in tried)
    units = {"latency": " ms", "bytes": " bytes", "macs": " MACs", "drop": ""}
    kept = ", ".join(f"{name} {chosen.trained.get(name):.6g} <= {c:.6g}{units[name]}" for name, c in ceilings.items())
    return (
        f"chosen: {chosen.candidate.name}: {kept}. {within} of {len(tried)} candidates keep the ceilings that training does not"
        f" change; of {run} that were run as recipes it has the least {minimise}"
    )
