"""`imitate`: an objective that compares the student with a teacher, for any training of the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.objective import Losses, Objective, bound
from compresskit.base.packing import Resumable
from compresskit.base.task import Task, call, first_tensor
from compresskit.distill.class_dim import (
    ClassDim,
    check_dim,
    check_soft_targets,
    class_dim,
    reads_class_dim,
    told_dim,
    with_class_dim,
)
from compresskit.distill.data.cache import Cached
from compresskit.distill.data.indexed import sample_indices
from compresskit.distill.losses.common import check_positive
from compresskit.distill.losses.logits import soft_targets
from compresskit.distill.losses.top_k import TopK, top_k_soft_targets
from compresskit.distill.models.teacher import Teacher, TeacherLike, TeacherSource, View, check_is_teacher, teacher_source
from compresskit.distill.objectives.averages import averaged_for
from compresskit.distill.objectives.loss_weights import LossWeight, check_loss_weight
from compresskit.distill.objectives.mixup import mixup
from compresskit.distill.objectives.terms import (
    BoundTerm,
    DistillLoss,
    Term,
    attach_adapters_,
    compute_terms,
    drop_adapters_,
    resolve_terms,
    start_terms,
    takes_argument,
)
from compresskit.graph.surgery import mode
from compresskit.graph.taps import tapped
from compresskit.train.objective import supervised_loss


@dataclass
class DoneFraction:
    """The fraction of the training that is done, in [0, 1]; 1 outside `fit_`, where `advance` is not called."""

    value: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Imitate(Objective):
    """The objective that `imitate` returns: its settings, and, once bound, the teacher and the terms of one training.

    The teacher is no submodule of the student. Adapters are, from `bind` to `close`.
    """

    teacher: TeacherLike | None
    loss: DistillLoss
    weight: LossWeight
    task_weight: float
    terms: tuple[Term, ...] = ()
    classes: int | None = None
    dim: int | None = None
    mixup: float = 0.0
    teacher_views: tuple[View, ...] = ()
    task: Task | None = None
    source: TeacherSource | None = None
    student: nn.Module | None = None
    bound_terms: tuple[BoundTerm, ...] = ()
    adapters: dict[str, nn.Module] = field(default_factory=dict)
    done: DoneFraction = field(default_factory=DoneFraction)

    def bind(self, model: nn.Module, task: Task) -> Imitate:
        """Freeze the teacher, find the taps, make the adapters, and check that both models predict the same classes."""
        teacher = self.teacher if self.teacher is not None else task.reference
        if teacher is None:
            raise SettingError("imitate(): there is no teacher; pass imitate(teacher) or Task(reference=...)")
        drop_adapters_(model)
        source = self._seeing(teacher_source(teacher, model, "imitate()"))
        if isinstance(source, nn.Module):
            source.to(task.device)
        if isinstance(source, Cached) and self.mixup:
            raise SettingError("imitate(mixup=...): a cache has no predictions of mixed inputs; imitate the teacher itself")
        predictions_term = Term(self._predictions_loss(source), weight=self.weight)
        terms = [replace(term, name="imitate") for term in resolve_terms([predictions_term], model, None)]
        terms += resolve_terms(self.terms, model, source.tappable)
        bound = replace(self, source=source, task=task, student=model, bound_terms=tuple(terms), done=DoneFraction())
        example = task.example()
        with torch.no_grad(), mode(model, training=False):
            wanted, teacher_features = source.example_outputs(example, task, bound._teacher_taps())
            got, student_features = bound._run_student(model, example)
            bound = bound._with_class_dim(model, got)
            bound._check_classes(wanted, got)
            if self.weight:
                loss = self.loss if bound._keeps_top_alone() else bound.bound_terms[0].loss
                source = averaged_for(source, loss, bound._first_classes(got), bound.dim)
            started, adapters = start_terms(bound.bound_terms, student_features, teacher_features)
        attach_adapters_(model, adapters)
        return replace(bound, source=source, bound_terms=tuple(started), adapters=adapters)

    def for_task(self, task: Task) -> Imitate:
        """Return the objective with its task, whose loss and labels say what the predictions are."""
        return replace(self, task=task)

    def rehearse(self, model: nn.Module, predictions: Any, where: str = "imitate") -> None:
        """Raise `ModelError` for soft targets of one channel, and of what the task, where it is known, says are no classes."""
        terms = [Term(self.loss, weight=self.weight), *(term for term in self.terms if term.student_tap is None)]
        alone = replace(self, bound_terms=tuple(resolve_terms(terms, model, None)))
        if self.task is not None:
            alone._with_class_dim(model, predictions, where)
        for term in alone.bound_terms if self.task is None else ():
            check_soft_targets(where, term.loss, model, predictions)

    def _with_class_dim(self, model: nn.Module, predictions: Any, where: str = "imitate") -> Imitate:
        """The objective whose losses know in which dimension the classes are; it is not asked for where none reads it.

        predictions: of the model for an example. where: begins messages.
        """
        task, losses = bound(self.task, self), [term.loss for term in self.bound_terms if not term.student]
        averaged = isinstance(self.source, Cached) or (isinstance(self.source, Teacher) and self.source.takes_mean)
        if self.classes is None and not averaged and not any(map(reads_class_dim, losses)):
            for loss in losses:
                check_soft_targets(where, loss, model, predictions)
            return self

        given = self.dim if self.dim is not None else next(filter(None, map(told_dim, losses)), None)
        found = class_dim(task, model, predictions, reads_loss=bool(self.task_weight), given=given, where=where)
        if found.dim is None and self.classes is not None:
            if predictions.ndim != 2:
                raise ModelError(
                    f"{where}(classes={self.classes}): {type(model).__name__} gives predictions {tuple(predictions.shape)}, and"
                    f" neither the task's loss nor its labels say which dimension holds the classes; pass {where}(dim=...)"
                )
            found = ClassDim(1)
        if self._keeps_top_alone():
            with_class_dim(where, self.loss, found, model, predictions)
        terms = [
            term if term.student else replace(term, loss=with_class_dim(where, term.loss, found, model, predictions))
            for term in self.bound_terms
        ]
        return replace(self, dim=found.dim, bound_terms=tuple(terms))

    def _keeps_top_alone(self) -> bool:
        """Whether the teacher is a cache of the largest logits, which has a loss of its own in place of soft targets."""
        return isinstance(self.source, Cached) and bool(self.source.top) and bool(self.weight)

    def _seeing(self, source: TeacherSource) -> TeacherSource:
        """The source, with the views of this objective."""
        if not self.teacher_views:
            return source
        if not isinstance(source, Teacher):
            raise SettingError(
                f"imitate(teacher_views=...): {source.label} is not a model in memory, and has no predictions of other inputs;"
                " imitate the model itself"
            )
        return source.seeing(self.teacher_views)

    def _check_classes(self, wanted: Tensor, got: Tensor) -> None:
        """Raise `ModelError` unless teacher and student predict the same classes.

        Neither may predict something for each place, where the teacher sees views.
        """
        student, teacher = type(self.student).__name__, bound(self.source, self).label
        if self.teacher_views and wanted.ndim > 2:
            raise ModelError(
                f"imitate(teacher_views=...): the teacher {teacher} gives predictions {tuple(wanted.shape)}, one for each place,"
                " and a view may move places; wanted (N, C)"
            )
        dim = self.dim or 1
        if self.classes is not None and (least := min(wanted.shape[dim], got.shape[dim])) < self.classes:
            raise ModelError(
                f"imitate(classes={self.classes}): {student} predicts {got.shape[dim]} classes and the teacher {teacher}"
                f" {wanted.shape[dim]}; wanted at most {least}"
            )
        if self._first_classes(wanted).shape != self._first_classes(got).shape:
            raise ModelError(
                f"the teacher {teacher} gives predictions {tuple(wanted.shape)}, the student {student} {tuple(got.shape)}; both"
                " must have the same classes (of vocabularies that are padded differently, imitate(classes=...) takes the first)"
            )

    def _first_classes(self, predictions: Any) -> Any:
        """The predictions of the classes that are compared."""
        if self.classes is None or isinstance(predictions, TopK):
            return predictions
        return predictions.narrow(self.dim or 1, 0, self.classes)

    def advance(self, done: float) -> None:
        """Set the fraction of the training that is done, in [0, 1], which the weights may follow."""
        self.done.value = done

    def close(self) -> None:
        """Remove the adapters from the student."""
        if self.student is not None:
            drop_adapters_(self.student)

    def resume_state(self) -> dict[str, Any]:
        """Return the state of the teacher and of losses with a memory; the adapters are submodules of the student."""
        return {"parts": [part.resume_state() if isinstance(part, Resumable) else None for part in self._parts()]}

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Restore what `resume_state` returned."""
        for part, saved in zip(self._parts(), state["parts"], strict=True):
            if saved is not None:
                part.resume_from_(saved)

    def _parts(self) -> list[Any]:
        return [self.source, *(term.loss for term in self.bound_terms)]

    def _run_student(self, model: Callable[..., Any], inputs: Any) -> tuple[Any, dict[str, Tensor]]:
        """What `Task.predict` gives of the student, and its features; `model` may be the student under a precision policy."""
        task, student = bound(self.task, self), bound(self.student, self)
        with tapped(student, [tap for term in self.bound_terms for tap in term.student]) as features:
            return task.predict(call(model, inputs)), features

    def _teacher_taps(self) -> list[str]:
        return [tap for term in self.bound_terms for tap in term.teacher]

    def _predictions_loss(self, source: TeacherSource) -> DistillLoss:
        """The loss of the predictions; a cache of the top k logits serves only soft targets of its temperature."""
        if not isinstance(source, Cached) or not source.top:
            return self.loss
        settings = dict(self.loss.keywords) if isinstance(self.loss, partial) and self.loss.func is soft_targets else {}
        settings.pop("dim", None)
        if settings != {"temperature": source.temperature} or any(term.student_tap is None for term in self.terms):
            raise SettingError(
                f"imitate(): a cache of the top {source.top} serves soft targets at temperature {source.temperature} alone;"
                f" pass temperature={source.temperature} and no other loss of the predictions, or cache whole rows (top=None)"
            )
        return top_k_soft_targets

    @property
    def reads_target(self) -> bool:
        """Whether the task's loss has a weight, or a term takes the targets."""
        terms = self.bound_terms or self.terms
        return bool(self.task_weight) or any(takes_argument(term.loss, "target") for term in terms)

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        task, source = bound(self.task, self), bound(self.source, self)
        inputs, target = task.split(batch) if self.reads_target else (task.inputs(batch), None)
        if self.mixup:
            inputs = mixup(inputs, alpha=self.mixup)
        # The teacher runs first: its activations are freed before the student's, which stay for the backward pass, are computed.
        outputs = source.outputs(model, batch, inputs, task, self._teacher_taps()) if self.bound_terms else None
        predictions, features = self._run_student(model, inputs)
        losses: Losses = {}
        if outputs is not None:
            student, teacher = (
                (self._first_classes(first_tensor(predictions)), features),
                (self._first_classes(outputs[0]), outputs[1]),
            )
            arguments = {
                "target": lambda term: task.with_standard_ignored(target),
                "index": lambda term: sample_indices(batch, term),
            }
            losses |= compute_terms(self.bound_terms, self.adapters, student, teacher, self.done.value, **arguments)
        if self.task_weight:
            losses["task"] = self.task_weight * supervised_loss(task, predictions, target)
        return losses


def _check_lists(teacher: Any, terms: Any, teacher_views: Any) -> None:
    if teacher is not None:
        check_is_teacher(teacher, "imitate()")
    if not isinstance(terms, Sequence) or isinstance(terms, str | bytes):
        raise SettingError(f"imitate(terms=...): wanted a list of Terms, got {type(terms).__name__}")
    if wrong := [type(term).__name__ for term in terms if not isinstance(term, Term)]:
        raise SettingError(f"imitate(terms=...): wanted Terms, got {wrong[0]}; write Term({wrong[0]}, ...)")
    if not isinstance(teacher_views, Sequence) or not all(map(callable, teacher_views)):
        raise SettingError(f"imitate(teacher_views=...): wanted a list of functions, such as [mirror], got {teacher_views!r}")


def _check_weights(weight: LossWeight, task_weight: float, terms: Sequence[Term]) -> None:
    check_loss_weight("imitate", weight)
    if task_weight < 0:
        raise SettingError(f"imitate(task_weight=...): wanted a number >= 0, got {task_weight}")
    if weight == task_weight == 0 and not any(term.weight for term in terms):
        raise SettingError("imitate(): both weights are 0, nothing would be learned")


def _check_ranges(temperature: float, classes: int | None, dim: int | None, mixup: float) -> None:
    check_dim(dim, "imitate")
    check_positive("imitate", "temperature", temperature)
    if classes is not None and classes < 2:
        raise SettingError(f"imitate(classes=...): wanted a whole number >= 2, got {classes}")
    if mixup < 0:
        raise SettingError(f"imitate(mixup=...): wanted a number >= 0, got {mixup}")


def imitate(
    teacher: TeacherLike | None = None,
    *,
    terms: Sequence[Term] = (),
    loss: DistillLoss | None = None,
    temperature: float = 4.0,
    weight: LossWeight = 0.9,
    task_weight: float = 0.1,
    classes: int | None = None,
    dim: int | None = None,
    mixup: float = 0.0,
    teacher_views: Sequence[View] = (),
) -> Imitate:
    """Return an objective: weight * loss(student, teacher) + the terms + task_weight * (the task's loss).

    Knowledge distillation (Hinton et al., 1503.02531). Use it in any training: `Train(objective=imitate(teacher))`.

    Args:
        teacher: a trained model in eval mode. It is copied, frozen and kept in eval mode. `Teacher(a, b)` is an ensemble, of
            probabilities or of outputs as `loss` asks for, `Teacher(a, dtype=torch.bfloat16)` one in half precision, `EMA()` a
            moving average of the student, `cache(...)` predictions on disk. None takes `Task.reference`, which a recipe sets to
            its first trained float model.
        terms: more losses, of features or predictions: `[Term(losses.hint, "layer3", weight=10, adapt=project)]`.
        loss: of the predictions, `(student, teacher) -> scalar` or `(student, teacher, target) -> scalar`; `soft_targets` at
            `temperature` if None.
        temperature: of the soft targets, a positive number.
        weight: of `loss`: a number >= 0, or a function of the fraction of the training that is done, such as `linear_warmup`;
            0 leaves the terms alone.
        task_weight: of the task's loss, >= 0.
        classes: compare only the first so many classes, for vocabularies that are padded to different sizes.
        dim: the dimension of the predictions that holds the classes: 1 for (N, C, ...), -1 for (N, T, C). None takes what the
            task's loss and labels say, and the losses of the library that compare classes are told it.
        mixup: alpha of the mixup of inputs that both networks see, 0 for none. With weight=1, task_weight=0, mixup=1 and no
            augmentation but crops and flips it is the recipe of patient and consistent teaching (Beyer et al., 2106.05237).
        teacher_views: functions `(inputs) -> inputs`, such as `mirror`. The teacher sees each view besides the inputs as they
            are, and the mean of its predictions is imitated (test-time augmentation), for predictions that no view should
            change: the class of a mirrored photograph, not where things are. Features are of the inputs as they are.

    Raises:
        SettingError: for settings of the wrong type or range, and for mixup with a loss that needs labels.
        ModelError: before the first step, for a softmax of what the task compares as numbers, or where nothing says `dim`.
    """
    _check_lists(teacher, terms, teacher_views)
    _check_weights(weight, task_weight, terms)
    _check_ranges(temperature, classes, dim, mixup)
    chosen = loss if loss is not None else partial(soft_targets, temperature=temperature)
    losses = [chosen, *(term.loss for term in terms)]
    if mixup and (task_weight or any(takes_argument(each, name) for each in losses for name in ("target", "index"))):
        raise SettingError("imitate(mixup=...): mixed inputs have no label; set task_weight=0 and take losses without targets")
    return Imitate(
        teacher=teacher,
        loss=chosen,
        weight=weight,
        task_weight=task_weight,
        terms=tuple(terms),
        classes=classes,
        dim=dim,
        mixup=mixup,
        teacher_views=tuple(teacher_views),
    )
