"""The training of finalists: what it minimises where nothing is said, and how long it is."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from compresskit.base.errors import CompressError, SettingError
from compresskit.base.files import read_json, write_json
from compresskit.base.fingerprint import describe, short_hash
from compresskit.base.objective import Objective
from compresskit.base.progress import announce
from compresskit.base.task import Task, call
from compresskit.distill import imitate
from compresskit.distill.class_dim import class_dim
from compresskit.distill.losses import hint
from compresskit.distill.objectives.imitate import Imitate
from compresskit.graph.surgery import copy_model, frozen_copy, no_attention_fastpath
from compresskit.measure import evaluate
from compresskit.quant import QAT
from compresskit.recipe.preflight import missing_target
from compresskit.search.candidate import Candidate, Removable
from compresskit.search.ceilings import Ceiling
from compresskit.search.finals.rungs import RUNGS
from compresskit.search.finals.short_trainings import most_steps
from compresskit.search.proxy.workshop import NAME_DIGITS, SKETCH_SAMPLES, Workshop, with_reference
from compresskit.search.study import STEP_OF_RANK, first_candidates
from compresskit.train.callbacks import StepReport
from compresskit.train.train import Train

log = logging.getLogger(__name__)

STEPS = "steps-{}.json"  # how long a training is
TIMED_STEPS = 4  # of a training, after as many others, from which the length that fits into the minutes is taken
ROUNDED_STEP = 1.5  # what a step with rounding is taken to take, relative to one without, where it cannot be measured


def with_objective(train: Train, model: nn.Module, task: Task) -> Train:
    """The training with what it minimises: its own objective, or to imitate the uncompressed model.

    A classifier is imitated by soft targets, any other model by the mean squared difference of its predictions. The task's loss
    takes part where the training data have targets.
    """
    if train.objective is not None or task.train is None:
        return train
    labelled = missing_target(task, next(iter(task.batches("train")), None)) is None
    try:
        classes = _predicts_classes(model, task, labelled=labelled)
    except Exception:  # the model does not run on its data, which the check of the request says
        return train
    if not classes:
        return replace(train, objective=imitate(loss=hint, weight=1.0, task_weight=1.0 if labelled else 0.0))
    return replace(train, objective=imitate() if labelled else imitate(weight=1.0, task_weight=0.0))


def _predicts_classes(model: nn.Module, task: Task, *, labelled: bool) -> bool:
    """Whether the task says that predictions have scores of two or more classes in one of their dimensions."""
    probe = frozen_copy(model).to(task.device)
    with torch.no_grad(), no_attention_fastpath():
        predictions = task.predict(call(probe, task.example()))
        found = class_dim(task, probe, predictions, reads_loss=labelled)
    return found.known and found.dim is not None and predictions.shape[found.dim] >= 2


def check_objective(train: Train | None, model: nn.Module, task: Task) -> None:
    """Raise the error of an objective that does not fit the model, before candidates are made."""
    if train is not None and isinstance(train.objective, Objective):
        probe = copy_model(model).to(task.device).eval()
        train.objective.bind(probe, with_reference(task, model)).close()


def check_objective_of_candidates(train: Train | None, workshop: Workshop, order: Removable) -> None:
    """Raise the error of an objective that compares features which a candidate has no longer, before candidates are measured.

    Each kind of removal is tried once, that of blocks as deep as the search begins with, and in integers: there, a module that
    is removed has no value to compare. Kinds that this model does not have are left out.
    """
    if train is None or not (isinstance(train.objective, Imitate) and train.objective.terms):
        return
    for candidate in _one_of_each_kind(order):
        try:
            model = workshop.sketched(candidate, order)
        except CompressError:
            continue
        try:
            train.objective.bind(model, with_reference(workshop.task, workshop.model)).close()
        except CompressError as error:
            raise SettingError(
                f"compress(train=...): its objective cannot train the candidate {candidate.name}, and would end the search there:"
                f" {error}"
            ) from error


def _one_of_each_kind(order: Removable) -> Iterator[Candidate]:
    """Candidates that remove one kind of thing each: channels, ranks, blocks, activations."""
    yield Candidate(macs=0.5, bits="float")
    if order.factors:
        yield Candidate(rank=1 - STEP_OF_RANK, bits="float")
    if order.blocks:
        first = first_candidates(len(order.blocks), 0, trains=True)
        yield max((each for each in first if each.macs == each.rank == 1), key=lambda each: each.blocks)
    if order.runs:
        yield Candidate(merged=1, bits="float")


def training_within(
    workshop: Workshop,
    train: Train | None,
    minutes: Ceiling | None,
    *,
    finalists: int,
    fills: bool,
    in_full: bool = False,
    search: str = "",
) -> Train | None:
    """The training of each finalist: no longer than all of them may take together. None where nothing is trained.

    fills: whether it takes all of the minutes, or at most as many steps as it has.
    in_full: whether no finalist is given up early.
    search: names what is asked for. The length that its first call found stays where others ask for more finalists, so that those
        that were trained are still among them, and what these took of the minutes counts.
    """
    if train is not None and minutes is not None:
        length = train.length(workshop.task)
        if train.steps is None and train.validate_every:  # what it counts are steps from here on
            train = replace(train, validate_every=train.validate_every * (length.steps_per_epoch or 1))
        trainings = finalists if in_full else 1 + (finalists - 1) / RUNGS  # the others are given up, most of them early
        kept = workshop.out / STEPS.format(short_hash([search, minutes.value, in_full, describe(train)], NAME_DIGITS))
        if kept.exists():
            fits = int(read_json(kept, "the length of a training")["steps"])
        else:
            fits = _steps_within(workshop, replace(train, steps=1, epochs=None), minutes.value, finalists, trainings)
            write_json(kept, {"steps": fits})
        wanted = fits if fills else min(fits, length.steps)
        train = replace(train, steps=wanted, epochs=None)
        announce(log, "compress: %d steps for each finalist", wanted)
    if train is None or train.validate_every is not None:
        return train
    quarter = math.ceil((train.steps or train.epochs or 1) / RUNGS)
    return replace(train, validate_every=min(quarter, _of_an_epoch(train, workshop) or quarter))


def _of_an_epoch(train: Train, workshop: Workshop) -> int | None:
    """How long an epoch is, in what the training counts, where it measures the metric after each; None where it need not.

    It does by its own default, on which its patience and the weights that it keeps depend. Finalists are otherwise only compared.
    """
    if not train.keep_best and train.patience is None:
        return None
    return 1 if train.steps is None else train.length(workshop.task).steps_per_epoch


def _steps_within(workshop: Workshop, train: Train, minutes: float, finalists: int, trainings: float) -> int:
    """How many steps each finalist has. What was measured once is kept, so that budgets of one folder share their trainings.

    trainings: how many of this length all finalists have together.
    """
    path = workshop.out / STEPS.format(short_hash([minutes, finalists, trainings, describe(train)], NAME_DIGITS))
    if path.exists():
        return int(read_json(path, "the length of a training")["steps"])
    a_step, a_measurement = _seconds_of(workshop, train)
    left = minutes * 60
    if train.validate_every is None:
        left -= trainings * RUNGS * a_measurement
        if epoch := _of_an_epoch(train, workshop):
            a_step += a_measurement / epoch
    elif train.validate_every:
        a_step += a_measurement / train.validate_every
    fits = most_steps(max(0.0, left) / a_step, trainings)
    if fits < RUNGS:
        raise SettingError(
            f"at_most(minutes={minutes:g}): {finalists} finalists have {fits} steps, at {a_step:.2f} s each, and"
            f" {a_measurement:.2f} s for each measurement of the metric, wanted at least {RUNGS}; leave minutes= and train= out"
            " to train nothing"
        )
    write_json(path, {"steps": fits})
    return fits


def _seconds_of(workshop: Workshop, train: Train) -> tuple[float, float]:
    """Seconds of a step of a training, and of a measurement of the metric in it, with rounding where that is slower."""
    probe = replace(train, steps=2 * TIMED_STEPS, epochs=None, validate_every=0, keep_best=False, patience=None)
    in_float = with_rounding = _seconds_of_a_step(workshop, probe)
    (qat,) = workshop.stages(Candidate(), Removable(), samples=workshop.samples, train=probe)
    if isinstance(qat, QAT):
        try:
            with_rounding = _seconds_of_a_step(workshop, replace(qat, samples=SKETCH_SAMPLES, freeze=1.0))
        except CompressError:  # it cannot be rounded as a whole
            with_rounding = ROUNDED_STEP * in_float
    begin = time.perf_counter()
    evaluate(workshop.model, workshop.task)
    a_measurement = time.perf_counter() - begin
    slower = max(1.0, with_rounding / in_float)
    return slower * in_float, slower * a_measurement


def _seconds_of_a_step(workshop: Workshop, probe: Train) -> float:
    """Of the steps of a training those after the first ones, which are slower."""
    times: list[float] = []

    def clock(report: StepReport) -> None:
        if report.step in (TIMED_STEPS, 2 * TIMED_STEPS):
            for loss in report.losses.values():  # waits for a device that was only told what to do
                loss.item()
            times.append(time.perf_counter())

    replace(probe, on_step=clock)(copy_model(workshop.model), with_reference(workshop.task, workshop.model))
    return (times[1] - times[0]) / TIMED_STEPS
