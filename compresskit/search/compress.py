"""`compress`: from a trained model and a budget to a recipe and its verified file."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from compresskit.base.distributed import world_size
from compresskit.base.errors import ModelError, SettingError
from compresskit.base.files import atomic
from compresskit.base.fingerprint import describe, short_hash
from compresskit.base.randomness import generators_kept
from compresskit.base.settings import as_python
from compresskit.base.task import Task, accuracy, batch_size
from compresskit.graph.quantized import is_quantized
from compresskit.graph.surgery import copy_model
from compresskit.metrics import OutputAgreement
from compresskit.recipe.folder import folder_of_run
from compresskit.recipe.preflight import preflight_check
from compresskit.recipe.recipe import Recipe
from compresskit.search.candidate import UNCOMPRESSED, Removable
from compresskit.search.ceilings import MEASURED, Ceiling, Ceilings
from compresskit.search.explore import Explorer
from compresskit.search.figures import Figures
from compresskit.search.finals.finalists import OF_PROOF, OF_SETTINGS, Finals
from compresskit.search.finals.short_trainings import SHORT_RATE, ShortTrainings
from compresskit.search.finals.training import check_objective, check_objective_of_candidates, training_within, with_objective
from compresskit.search.latency.latency_filter import LatencyFilter
from compresskit.search.latency.stopwatch import NOISIEST, Stopwatch
from compresskit.search.latency.timed_batch import check_timed_batch
from compresskit.search.options import SearchOptions, SearchSettings
from compresskit.search.outcome import Search, Tried, nearest_budget
from compresskit.search.proxy.held_out import held_out
from compresskit.search.proxy.workshop import Workshop
from compresskit.search.script.source import as_script
from compresskit.search.study import import_optuna
from compresskit.search.workers import Worker
from compresskit.train.modes import remember_modes_
from compresskit.train.train import Train

log = logging.getLogger(__name__)

SCRIPT = "recipe.py"
SCRIPT_DIGEST = "recipe.digest"  # of the script as a search wrote it: one that somebody changed is kept
POINTS = 100  # of an accuracy of 1
FRACTIONS = ("classes", "boxes")  # what the metric `agreement` compares, where it is in [0, 1]
UNIT_OF = {"latency": " ms", "bytes": " bytes", "macs": " MACs", "drop": ""}
NOTABLY_SLOWER = 0.05  # fraction of the uncompressed file's latency
NOTABLY_WORSE = 0.1  # fraction of what was lost after a short training
NOTABLY_BETTER = 0.1  # fraction of the uncompressed model's metric


def compress(
    model: nn.Module,
    task: Task,
    budget: Ceilings,
    *,
    out: str | Path,
    **options: Unpack[SearchOptions],
) -> Search:
    """Search for the recipe that meets a budget, run it, and return its verified file with all that was tried.

    Candidates remove channels, residual blocks and precision, factor layers, and merge convolutions. Each is first made without
    training and judged by its exported file, on held-out data; Optuna proposes which. Those that promise most are then run as
    recipes on all data, one after another, and given up early where they fall behind. Called again, a search that was interrupted
    goes on where it was; another budget in the same folder takes over what was measured. Processes that make the same call share
    the search.

    Args:
        model: a trained float model; it is not changed.
        task: data, loss and metric. Its validation data choose, so keep other data to report a metric on.
        budget: made by `at_most`.
        out: folder of the search.
        train: how each finalist is trained, in all its stages; by default, with `minutes` in the budget, AdamW for as many
            steps as fit, and nothing without. Without an objective it imitates the uncompressed model, see `with_objective`.
        trials: how many candidates are measured without training.
        finalists: how many are run as recipes at most; without a training more, where none of these keeps the ceilings.
        held_out_samples: validation samples that candidates without training are judged by.
        calibration_samples: samples that stages read without training.
        seconds: for each measurement of a latency.
        target: runtime of quantized files.
        dynamic: dimensions of the inputs that may vary, `(0, 1)` for batch and length; see `export_onnx`.
        seed: of the search and of every stage.

    The global random generators have the state that they had before when it ends, in whatever way.

    Raises:
        SettingError: Optuna is missing, a setting is out of range, or a latency cannot be measured on this machine.
        ModelError: no candidate meets the budget; the message has the nearest that can. Or the model is in half precision, or
            quantized.
        CheckpointError: the folder belongs to another model or task, or to other settings than the budget's ceilings, or cannot
            be.
        Other errors that a first run of the model and its training raise.
    """
    with generators_kept():  # every stage seeds them
        return _compress(model, task, budget, folder_of_run(out), _settings(options))


def _compress(model: nn.Module, task: Task, budget: Ceilings, out: Path, settings: SearchSettings) -> Search:
    _check_request(model, task, budget, trains=settings.train is not None)
    import_optuna()
    train = with_objective(settings.train or Train(steps=1), model, task) if settings.train or budget.minutes else None
    preflight_check(model, task, [] if train is None else [train], dynamic=settings.dynamic)
    workshop = _workshop(model, task, budget, out, settings, trains=train is not None)
    about_batch = check_timed_batch(workshop, asked=budget.latency is not None or budget.batch != 1)
    if train is not None and not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            f"compress(train=...): {type(model).__name__} has no parameter with requires_grad, so no candidate can be trained;"
            " model.requires_grad_(True), or leave out train= and minutes="
        )
    check_objective(train, model, task)
    worker = Worker(out)
    with worker.at_work():
        found = _search_and_run(workshop, worker, budget, settings, train)
    return replace(found, reason=found.reason + about_batch)


def _workshop(model: nn.Module, task: Task, budget: Ceilings, out: Path, settings: SearchSettings, *, trains: bool) -> Workshop:
    mine = copy_model(model).to(task.device)
    remember_modes_(mine)  # what was given in eval mode, such as a frozen BatchNorm, stays there in trainings, as in a Recipe
    mine.eval()
    return Workshop(
        model=mine,
        task=task,
        held=held_out(task, settings.held_out_samples, settings.dynamic, mine),
        out=out,
        samples=settings.calibration_samples,
        batch=budget.batch,
        threads=budget.threads,
        seconds=settings.seconds,
        seed=settings.seed,
        target=settings.target,
        dynamic=settings.dynamic,
        saves="bytes" if budget.latency is None and budget.bytes is not None else "latency",
        trains=trains,
    )


def _search_and_run(
    workshop: Workshop, worker: Worker, budget: Ceilings, settings: SearchSettings, train: Train | None
) -> Search:
    """Explore, run the finalists, and write the recipe. train: of a finalist, with its objective; None trains nothing."""
    begin, out, name = time.perf_counter(), workshop.out, _study_name(budget, settings.train)
    with worker.alone("setup"):  # the first process measures what all of them need
        dense, stopwatch, order, train = _set_up(workshop, budget, settings, train, name)
    ceilings = budget.absolute(dense)
    minimise = free_quantity(ceilings)
    slow = LatencyFilter(workshop=workshop, order=order, ceiling=ceilings["latency"]) if "latency" in ceilings else None
    tried = Explorer(
        workshop=workshop,
        stopwatch=stopwatch,
        worker=worker,
        dense=dense,
        order=order,
        ceilings=ceilings,
        judged=tuple(quantity for quantity in ceilings if quantity != "drop" or train is None),
        trials=settings.trials,
        name=name,
        filter=slow,
    ).explore()
    part = _holds_out_a_part(workshop)
    _refuse_unreachable(tried, budget, ceilings, out, part=part, trains=train is not None)
    finals = Finals(
        workshop=workshop,
        stopwatch=stopwatch,
        name=f"{name}-finals",
        order=order,
        ceilings=ceilings,
        minimise=minimise,
        train=train,
        worker=worker,
        seconds=None if budget.minutes is None else 60 * budget.minutes.value,
    )
    ShortTrainings(finals=finals, dense=dense, finalists=settings.finalists).enter_(tried)
    if (chosen := finals.run(tried, settings.finalists)) is None:
        raise _none_within(tried, budget, ceilings, out, trains=train is not None)
    with worker.alone("result"):
        recipe, result = finals.finished_run(chosen)
        _write_script(recipe, out, f"{type(workshop.model).__name__} within {budget!r}: {chosen.candidate.name}.")
    return Search(
        budget=budget,
        dense=replace(dense, metric=result.rows[0].metric) if part else dense,
        dense_held_out=dense if part else None,
        tried=tuple(tried),
        chosen=chosen,
        noise=(noise := max(stopwatch.noise, *(t.unsteadiness for t in tried))),
        reason=_reason(chosen, tried, ceilings, minimise) + _caveats(chosen, dense, ceilings, noise, trains=train is not None),
        recipe=recipe,
        code=out / SCRIPT,
        result=result,
        ceilings=ceilings,
        seconds=time.perf_counter() - begin,
        latency_error=None if slow is None else slow.error(),
        trains=train is not None,
    )


def _set_up(
    workshop: Workshop, budget: Ceilings, settings: SearchSettings, train: Train | None, name: str
) -> tuple[Figures, Stopwatch, Removable, Train | None]:
    """What is measured before candidates are: the uncompressed model, the order of what can go, the training of finalists.

    train: of a finalist, with its objective. name: of the search.
    """
    dense, stopwatch = _uncompressed(workshop, budget)
    order = workshop.removable(stopwatch.milliseconds)
    check_objective_of_candidates(train, workshop, order)
    within = training_within(
        workshop,
        train,
        budget.minutes,
        finalists=settings.finalists,
        fills=settings.train is None,
        in_full=free_quantity(budget.absolute(dense)) != "drop",  # only of the drop, a training tells before its end
        search=name,
    )
    return dense, stopwatch, order, within


def _uncompressed(workshop: Workshop, budget: Ceilings) -> tuple[Figures, Stopwatch]:
    """The figures of the uncompressed model, and what times files beside its own."""
    workshop.prepare()
    dense = workshop.dense()  # writes the file that is timed
    stopwatch = workshop.stopwatch(strict=budget.latency is not None)
    dense = replace(dense, latency=stopwatch.milliseconds)
    _warn_of_statistics(workshop, dense)
    return dense, stopwatch


def _holds_out_a_part(workshop: Workshop) -> bool:
    """Whether there are more validation data than those that candidates are judged by."""
    held = sum(batch_size(workshop.task.inputs(batch)) for batch in workshop.held.batches("val"))
    seen = 0
    for batch in workshop.task.batches("val"):
        seen += batch_size(workshop.task.inputs(batch))
        if seen > held:  # the others need not be loaded
            return True
    return False


def _write_script(recipe: Recipe, out: Path, title: str) -> None:
    """Write the recipe as a script; one that somebody changed since a search wrote it is kept under another name."""
    text, path, written = as_script(recipe, title=title, name=SCRIPT, out="again"), out / SCRIPT, out / SCRIPT_DIGEST
    before = path.read_text(errors="replace") if path.exists() else text
    if before != text and not (written.exists() and written.read_text() == short_hash(before)):
        kept = next(name for i in count(1) if not (name := path.with_stem(f"{path.stem}-{i}")).exists())
        path.replace(kept)
        log.warning("compress: %s is not as a search wrote it; it is kept as %s", path, kept.name)
    with atomic(path) as file, atomic(written) as digest:
        file.write_text(text)
        digest.write_text(short_hash(text))


def _settings(options: SearchOptions) -> SearchSettings:
    """The settings of a search. Raises SettingError for a name that is none."""
    known = SearchOptions.__annotations__
    if unknown := sorted(set(options) - set(known)):
        raise SettingError(f"compress({unknown[0]}=...): there is no such setting; there are: {', '.join(known)}")
    return SearchSettings(**{name: as_python(value) for name, value in options.items()})  # type: ignore[arg-type]


def _check_request(model: nn.Module, task: Task, budget: Ceilings, *, trains: bool) -> None:
    """Raise SettingError or ModelError where it is plain that the search cannot work. trains: whether `train` was given."""
    if not isinstance(model, nn.Module):
        raise SettingError(f"compress(model): wanted a trained module, got {type(model).__name__}")
    if is_quantized(model):
        raise ModelError(f"compress(model): {model.float_class} is quantized already; give the float model that it was made from")
    for name, value in model.named_parameters():
        if value.dtype in (torch.float16, torch.bfloat16):
            raise ModelError(
                f"compress(model): wanted fp32 weights, but {name} of {type(model).__name__} is {value.dtype}; give"
                " model.float() and data in fp32 (or run.finish() of mixed precision)"
            )
    if world_size() > 1:
        raise SettingError(
            f"compress: wanted a process of its own, got one of {world_size()} that train together; start processes one by one"
            " with the same out=, and they share the search"
        )
    if not isinstance(budget, Ceilings):
        raise SettingError(f'compress(budget): wanted a budget such as ck.at_most(latency="5ms"), got {budget!r}')
    if task.train is None and task.calibration is None:
        raise SettingError(
            "compress: candidates are calibrated and repaired by data, got none; pass Task(calibration=...), without labels"
        )
    if task.train is None and (trains or budget.minutes is not None):
        setting = "compress(train=...)" if trains else "at_most(minutes=...)"
        raise SettingError(f"{setting} trains finalists, which needs Task(train=...); give it, or leave the setting out")
    if task.prefers_higher is None:
        raise SettingError("compress: whether a larger metric is better is not said; pass Task(higher_is_better=...)")
    if budget.drop is not None:
        _check_drop(budget.drop, task.metric)


def _check_drop(drop: Ceiling, metric: Any) -> None:
    """Raise SettingError for a drop that cannot be meant: it may be in points, or is all that there is of the metric."""
    given = drop.value
    if metric is accuracy and drop.implausible and given < POINTS:
        meant = f', and drop="{given:g}" if that is meant' if given < 1 else ""
        raise SettingError(
            f"at_most(drop={given:g}): a drop is in the unit of the metric, and accuracies are fractions; write"
            f' drop={given / POINTS:g} or drop="{given:g}pt" for {given:g} points{meant}'
        )
    metric = metric.func if isinstance(metric, partial) else metric
    if given >= 1 and (metric is accuracy or (isinstance(metric, OutputAgreement) and metric.outputs in FRACTIONS)):
        raise SettingError(
            f"at_most(drop=...): wanted less than 1, which is 100 points, since the metric is a fraction, got {given:g}, which is"
            f" {given * POINTS:g} points; half a point is 0.005 in the unit of the metric, or 0.5pt"
        )


def free_quantity(ceilings: dict[str, float]) -> str:
    """What is minimised: the first without a ceiling of the drop, the latency and the bytes; the drop where each has one."""
    return next((name for name in ("drop", "latency", "bytes") if name not in ceilings), "drop")


def _study_name(budget: Ceilings, train: Train | None) -> str:
    """One study for what is asked for, however long the training that fits today. train: as the user gave it."""
    return short_hash([repr(budget), None if train is None else describe(train)], 12)


def _refuse_unreachable(
    tried: Sequence[Tried], budget: Ceilings, ceilings: dict[str, float], out: Path, *, part: bool, trains: bool
) -> None:
    """Raise ModelError where no candidate keeps the ceilings on what nothing changes that follows.

    part: whether candidates were judged by a part of the data; the drop on that is not the one that the ceiling is for.
    trains: whether a training would follow, which changes the drop, too.
    """
    judges_drop = not part and not trains
    counted = {name: c for name, c in ceilings.items() if name in MEASURED or judges_drop}
    figures = [t.figures for t in tried if t.figures is not None and t.candidate != UNCOMPRESSED]
    if not figures:
        why = next((f"{t.candidate.name}: {t.failure}" for t in tried if t.failure), "none was tried")
        raise ModelError(f"compress: none of {len(tried)} candidates could be made: {why}; run its stages one by one")
    if any(not f.excesses(counted) for f in figures):
        return
    advice = ", or train (minutes= or train=)" if judges_drop and "drop" in ceilings else ""
    of_part = " (its drop is that of the held-out data)" if part and not trains and "drop" in ceilings else ""
    asked = counted if trains else ceilings  # a drop that is not known yet stays as it was asked for
    nearest = nearest_budget(figures, budget, ceilings, asked=asked, room=OF_SETTINGS if trains else OF_PROOF)
    raise ModelError(
        f"compress: none of {len(figures)} candidates meets {budget!r}; the nearest that can is {nearest}{of_part}; ask for that"
        f"{advice}, or raise trials=; all files are in {out}{_not_made(tried)}"
    )


def _not_made(tried: Sequence[Tried]) -> str:
    """How many candidates could not be made, and the reason that most of them have."""
    reasons = Counter(t.failure for t in tried if t.failure)
    if not reasons:
        return ""
    (reason, count), failed = reasons.most_common(1)[0], reasons.total()
    often = f" ({count} of them)" if len(reasons) > 1 else ""
    return f"; {failed} of {len(tried)} candidates could not be made: {reason}{often}"


def _none_within(tried: Sequence[Tried], budget: Ceilings, ceilings: dict[str, float], out: Path, *, trains: bool) -> ModelError:
    """The error for finalists none of which keeps all ceilings."""
    figures = [t.trained for t in tried if t.trained is not None]
    rejected = [f"{t.candidate.name}: {t.rejected}" for t in tried if t.rejected]
    if rejected and not figures:
        return ModelError(
            f"compress: the files of {len(rejected)} finalists were not proved, and no other keeps the ceilings: {rejected[0]}"
        )
    untrainable = [f"{t.candidate.name}: {t.untrainable}" for t in tried if t.untrainable]
    if untrainable and not figures:
        return ModelError(
            f"compress: the trainings of {len(untrainable)} finalists failed, and no other keeps the ceilings: {untrainable[0]}"
        )
    if not figures:
        return ModelError(
            f"compress: the uncompressed model alone meets {budget!r}; raise trials=, or ask for less; all files are in {out}"
        )
    train = "train longer" if trains else "train (minutes= or train=)"
    return ModelError(
        f"compress: none of {len(figures)} finalists meets {budget!r} on all validation data; the nearest of those that were run"
        f" is {nearest_budget(figures, budget, ceilings)}; ask for that, {train}, or raise finalists=; all files are in {out}"
        f"{_not_made(tried)}"
    )


def _caveats(chosen: Tried, dense: Figures, ceilings: dict[str, float], noise: float, *, trains: bool) -> str:
    """What a user should know of the chosen one besides why it was chosen."""
    without = _untrained(chosen, ceilings) if trains else ""
    return without + _slower(chosen, dense, ceilings, noise) + _rate_too_high(chosen) + _unsteady(chosen)


def _untrained(chosen: Tried, ceilings: dict[str, float]) -> str:
    """A remark on a file that was to be trained, and is handed over without."""
    if not chosen.untrained:
        return ""
    if (with_training := chosen.discarded) is None:
        why = chosen.rejected or chosen.untrainable
        return f". It is the file without training{f', which failed: {why}' if why else ''}"
    over = _over(with_training, ceilings)
    return f". It is the file without training; with it, {f'it has {over}' if over else f'the drop is {with_training.drop:.4f}'}"


def _over(figures: Figures, ceilings: dict[str, float]) -> str:
    """Which ceilings are exceeded, and by what."""
    return ", ".join(f"{name} {figures.get(name):.6g} > {ceilings[name]:.6g}" for name in figures.excesses(ceilings))


def _warn_of_statistics(workshop: Workshop, dense: Figures) -> None:
    """Warn of a model whose BatchNorm has statistics that do not fit the task's data: candidates are fitted to what it gives."""
    if (metric := workshop.metric_with_new_statistics()) is None:
        return
    task = workshop.held
    samples = sum(batch_size(task.inputs(batch)) for batch in task.batches("val"))
    notable = max(NOTABLY_BETTER, 3 / math.sqrt(samples)) * abs(dense.metric)  # more than few samples vary by
    if (metric - dense.metric) * (1 if task.prefers_higher else -1) > notable:
        log.warning(
            "compress: the statistics of BatchNorm in %s do not fit the data of the task: its metric is %.4f, and %.4f with those"
            " of the calibration data; compresskit.prune.reestimate_batchnorm_(model, inputs) sets them",
            type(workshop.model).__name__,
            dense.metric,
            metric,
        )


def _slower(chosen: Tried, dense: Figures, ceilings: dict[str, float], noise: float) -> str:
    """A remark on a file that nobody asked to be faster, and that is slower by more than latencies are known to."""
    assert chosen.trained is not None
    if "latency" in ceilings or chosen.trained.latency <= dense.latency * (1 + max(NOTABLY_SLOWER, noise)):
        return ""
    return f". It is slower than the uncompressed file, {_digits(chosen.trained.latency)} ms for {_digits(dense.latency)}"


def _digits(milliseconds: float) -> str:
    """A latency with three digits that count, and three behind the point where those are more."""
    return f"{milliseconds:.3f}" if milliseconds >= 0.1 else f"{milliseconds:#.3g}"


def _unsteady(chosen: Tried) -> str:
    """A remark on a latency that was another before."""
    assert chosen.figures is not None
    assert chosen.trained is not None
    if chosen.unsteadiness <= NOISIEST:
        return ""
    return (
        f". A file of the same operators took {_digits(chosen.figures.latency)} ms before, and this one"
        f" {_digits(chosen.trained.latency)}: measure it again when this machine is quiet"
    )


def _rate_too_high(chosen: Tried) -> str:
    """A remark on a training that lost more than a short one at lower learning rates."""
    assert chosen.trained is not None
    if chosen.short is None or chosen.trained.drop <= chosen.short + NOTABLY_WORSE * abs(chosen.short):
        return ""
    return (
        f". It lost {chosen.trained.drop:.4f}, and {chosen.short:.4f} of the held-out data after a short training at"
        f" {SHORT_RATE:g} of the learning rate: try a lower one"
    )


def _reason(chosen: Tried, tried: Sequence[Tried], ceilings: dict[str, float], minimise: str) -> str:
    assert chosen.trained is not None
    measured = {name: c for name, c in ceilings.items() if name in MEASURED}
    within = sum(t.figures is not None and not t.figures.excesses(measured) for t in tried)
    kept = ", ".join(f"{name} {chosen.trained.get(name):.6g} <= {c:.6g}{UNIT_OF[name]}" for name, c in ceilings.items())
    return (
        f"chosen: {chosen.candidate.name}: {kept}. {within} of {len(tried)} candidates keep the ceilings that training does not"
        f" change; {_among(tried, ceilings, minimise)} it has the least {minimise}"
    )


def _among(tried: Sequence[Tried], ceilings: dict[str, float], minimise: str) -> str:
    """Among which files the chosen one was taken, and which others were passed over for what."""
    run = [t for t in tried if t.trained is not None or t.stopped is not None]
    given_up = sum(t.trained is None for t in run)
    over = [
        f"{t.candidate.name} ({minimise} {t.trained.get(minimise):.6g}{UNIT_OF[minimise]}): {exceeded}"
        for t in run
        if t.trained is not None and (exceeded := _over(t.trained, ceilings))
    ]
    passed_over = [f"{given_up} {'was' if given_up == 1 else 'were'} given up"] if given_up else []
    passed_over += [f"{len(over)} {'exceeds' if len(over) == 1 else 'exceed'} a ceiling ({'; '.join(over)})"] if over else []
    others = f", {' and '.join(passed_over)}; of the others" if passed_over else ""
    return f"of {len(run)} that were run as recipes{others}"
