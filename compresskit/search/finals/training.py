"""The training of finalists: what it minimises where nothing is said, and how long it is."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from compresskit.base.errors import CompressError, SettingError
from compresskit.base.files import read_json, write_json
from compresskit.base.fingerprint import describe, short_hash
from compresskit.base.objective import Objective
from compresskit.base.progress import announce
from compresskit.base.task import Task, accuracy, call
from compresskit.distill import imitate
from compresskit.distill.losses import hint
from compresskit.distill.objectives.imitate import Imitate
from compresskit.graph.surgery import copy_model, frozen_copy, no_attention_fastpath
from compresskit.recipe.preflight import missing_target
from compresskit.search.candidate import Candidate, Removable
from compresskit.search.ceilings import Ceiling
from compresskit.search.finals.finalists import RUNGS
from compresskit.search.finals.short_trainings import most_steps
from compresskit.search.proxy import NAME_DIGITS, Workshop, with_reference
from compresskit.search.study import STEP_OF_RANK, first_candidates
from compresskit.train.train import Train

log = logging.getLogger(__name__)

TIMED_STEPS = 4  # of a training, from which the length that fits into the minutes is taken
ROUNDED_STEP = 1.5  # what a step with rounding takes, relative to one without


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
    """Whether predictions have scores of classes in their second dimension, by the loss, or, without targets, by the metric."""
    with torch.no_grad(), no_attention_fastpath():
        predictions = task.predict(call(frozen_copy(model).to(task.device), task.example()))
    loss = task.loss.func if isinstance(task.loss, partial) else task.loss
    of_classes = loss is F.cross_entropy or loss is F.nll_loss or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    known = (of_classes and labelled) or task.metric is accuracy
    return known and predictions.ndim >= 2 and predictions.shape[1] >= 2


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
    workshop: Workshop, train: Train | None, minutes: Ceiling | None, *, finalists: int, fills: bool
) -> Train | None:
    """The training of each finalist: no longer than all of them may take together. None where nothing is trained.

    fills: whether it takes all of the minutes, or at most as many steps as it has.
    """
    if train is not None and minutes is not None:
        fits = _steps_within(workshop, train, minutes.value, finalists)
        wanted = fits if fills else min(fits, train.length(workshop.task).steps)
        train = replace(train, steps=wanted, epochs=None)
        announce(log, "compress: %d steps for each finalist", wanted)
    if train is None or train.validate_every is not None:
        return train
    return replace(train, validate_every=math.ceil((train.steps or train.epochs or 1) / RUNGS))


def _steps_within(workshop: Workshop, train: Train, minutes: float, finalists: int) -> int:
    """How many steps each finalist has. What was measured once is kept, so that an interrupted training goes on."""
    path = workshop.out / f"steps-{short_hash([minutes, finalists, describe(train)], NAME_DIGITS)}.json"
    if path.exists():
        return int(read_json(path, "the length of a training")["steps"])
    task = with_reference(workshop.task, workshop.model)
    probe = replace(train, steps=TIMED_STEPS, epochs=None, validate_every=0, keep_best=False, patience=None)
    probe(copy_model(workshop.model), task)  # the first steps are slower than the others
    begin = time.perf_counter()
    probe(copy_model(workshop.model), task)
    a_step = ROUNDED_STEP * (time.perf_counter() - begin) / TIMED_STEPS
    trainings = 1 + (finalists - 1) / RUNGS  # the others are given up, most of them early
    fits = most_steps(minutes * 60 / a_step, trainings)
    if fits < RUNGS:
        raise SettingError(
            f"at_most(minutes={minutes:g}): {finalists} finalists have {fits} steps, at {a_step:.2f} s each, wanted at least"
            f" {RUNGS}; leave minutes= and train= out to train nothing"
        )
    write_json(path, {"steps": fits})
    return fits
