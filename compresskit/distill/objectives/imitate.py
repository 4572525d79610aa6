"""`imitate`: an objective that mixes the task's loss with a teacher's opinion. It serves any training loop of the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.objective import Losses, Objective
from compresskit.base.packing import Resumable
from compresskit.base.task import Task, call
from compresskit.distill.data.cache import Cached
from compresskit.distill.data.indexed import sample_indices
from compresskit.distill.losses.logits import soft_targets
from compresskit.distill.losses.top_k import TopK, top_k_soft_targets
from compresskit.distill.models.taps import tapped
from compresskit.distill.models.teacher import AnyTeacher, Source, as_source
from compresskit.distill.objectives.loss_weights import LossWeight, check_loss_weight
from compresskit.distill.objectives.mixup import mixup
from compresskit.distill.objectives.terms import (
    DistillLoss,
    Link,
    Term,
    attach_,
    drop_adapters_,
    linked,
    started,
    takes,
    term_losses,
)
from compresskit.graph.surgery import mode
from compresskit.train.objective import supervised_loss


@dataclass
class Clock:
    """How much of the training is done, in [0, 1]; 1 where nobody says."""

    done: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Imitate(Objective):
    """See `imitate`. Bound to a task it holds the frozen teacher, in eval mode; the student never sees it as a submodule.

    What binding put on the student (adapters, if any term has one) `close()` takes off again.
    """

    teacher: AnyTeacher | None
    loss: DistillLoss
    weight: LossWeight
    task_weight: float
    terms: tuple[Term, ...] = ()
    classes: int | None = None
    mixup: float = 0.0
    task: Task | None = None
    source: Source | None = None
    student: nn.Module | None = None
    links: tuple[Link, ...] = ()
    adapters: dict[str, nn.Module] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)

    def bind(self, model: nn.Module, task: Task) -> Imitate:
        """Freeze the teacher, or take the task's reference; find the taps, and check that both models fit each other."""
        teacher = self.teacher if self.teacher is not None else task.reference
        if teacher is None:
            raise SettingError("imitate(): there is no teacher; pass imitate(teacher) or Task(reference=...)")
        drop_adapters_(model)
        source = as_source(teacher, model, "imitate()")
        if isinstance(source, nn.Module):
            source.to(task.device)
        if isinstance(source, Cached) and self.mixup:
            raise SettingError("imitate(mixup=...): a cache knows nothing of mixed inputs; imitate the teacher itself")
        links = [replace(link, name="imitate") for link in linked([Term(self._loss(source), weight=self.weight)], model, None)]
        links += linked(self.terms, model, source.inside)
        bound = replace(self, source=source, task=task, student=model, links=tuple(links), clock=Clock())
        example = task.example()
        with torch.no_grad(), mode(model, training=False):
            wanted, theirs = source.example(example, task, bound.taps())
            got, own = bound.see_student(model, example)
            bound.check_classes(wanted, got)
            ready, adapters = started(links, own, theirs)
        attach_(model, adapters)
        return replace(bound, links=tuple(ready), adapters=adapters)

    def check_classes(self, wanted: Tensor, got: Tensor) -> None:
        """Raise ModelError unless both predict the same classes, and a loss can say something of them."""
        assert self.source is not None, "bind first"
        student, teacher = type(self.student).__name__, self.source.label
        if self.classes is not None and (least := min(wanted.shape[1], got.shape[1])) < self.classes:
            raise ModelError(
                f"imitate(classes={self.classes}): {student} predicts {got.shape[1]} classes and the teacher {teacher}"
                f" {wanted.shape[1]}; wanted at most {least}"
            )
        if self.cut(wanted).shape != self.cut(got).shape:
            raise ModelError(
                f"the teacher {teacher} gives predictions {tuple(wanted.shape)}, the student {student} {tuple(got.shape)}; both"
                " must have the same classes (of vocabularies that are padded differently, imitate(classes=...) takes the first)"
            )
        soft = self.loss.func if isinstance(self.loss, partial) else self.loss
        if soft is soft_targets and self.weight and got.shape[1:2] == (1,):
            raise ModelError(
                f"imitate(): {student} gives one channel, of which a softmax says nothing; pass"
                " imitate(loss=...) such as F.mse_loss"
            )

    def cut(self, predictions: Any) -> Any:
        """The classes that are compared: the first `classes`, or all."""
        return predictions if self.classes is None or isinstance(predictions, TopK) else predictions[:, : self.classes]

    def advance(self, done: float) -> None:
        """Say how much of the training is done, in [0, 1], for weights that change with it; `fit_` does before every batch."""
        self.clock.done = done

    def close(self) -> None:
        """Take off the student what `bind` put there."""
        if self.student is not None:
            drop_adapters_(self.student)

    def resume_state(self) -> dict[str, Any]:
        """What the teacher and losses with a memory must remember; adapters are on the student."""
        holders = [self.source, *(link.loss for link in self.links)]
        return {"parts": [holder.resume_state() if isinstance(holder, Resumable) else None for holder in holders]}

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        holders: list[Any] = [self.source, *(link.loss for link in self.links)]
        for holder, saved in zip(holders, state["parts"], strict=True):
            if saved is not None:
                holder.resume_from_(saved)

    def see_student(self, model: Callable[..., Any], inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The student's predictions and features; `model` may be the student under a precision policy."""
        assert self.task is not None, "bind first"
        assert self.student is not None, "bind first"
        with tapped(self.student, [tap for link in self.links for tap in link.student]) as features:
            return self.task.predict(call(model, inputs)), features

    def taps(self) -> list[str]:
        """The teacher's taps."""
        return [tap for link in self.links for tap in link.teacher]

    def _loss(self, source: Source) -> DistillLoss:
        """The loss of the predictions; what a cache has of the top k it can only say to soft targets of one temperature."""
        if not isinstance(source, Cached) or not source.top:
            return self.loss
        given = self.loss.keywords if isinstance(self.loss, partial) and self.loss.func is soft_targets else {}
        if given != {"temperature": source.temperature} or any(term.student_tap is None for term in self.terms):
            raise SettingError(
                f"imitate(): a cache of the top {source.top} serves soft targets at temperature {source.temperature} alone;"
                f" pass temperature={source.temperature} and no other loss of the predictions, or cache whole rows (top=None)"
            )
        return top_k_soft_targets

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        task, source = self.task, self.source
        assert task is not None, "bind first"
        assert source is not None, "bind first"
        inputs, target = task.split(batch)
        if self.mixup:
            inputs = mixup(inputs, alpha=self.mixup)
        # The teacher first: its activations are gone before the student's, which stay for the backward pass, are made.
        opinion = source.opinion(model, batch, inputs, task, self.taps()) if self.links else None
        predictions, features = self.see_student(model, inputs)
        losses: Losses = {}
        if opinion is not None:
            student, teacher = (self.cut(predictions), features), (self.cut(opinion[0]), opinion[1])
            known = {"target": lambda term: target, "index": lambda term: sample_indices(batch, term)}
            losses |= term_losses(self.links, self.adapters, student, teacher, self.clock.done, **known)
        if self.task_weight:
            losses["task"] = self.task_weight * supervised_loss(task, predictions, target)
        return losses


def imitate(
    teacher: AnyTeacher | None = None,
    *,
    terms: Sequence[Term] = (),
    loss: DistillLoss | None = None,
    temperature: float = 4.0,
    weight: LossWeight = 0.9,
    task_weight: float = 0.1,
    classes: int | None = None,
    mixup: float = 0.0,
) -> Imitate:
    """An objective: weight * loss(student, teacher) + the terms + task_weight * (the task's loss).

    teacher: a trained model; None takes the task's reference, which in a chain is the trained dense float model. It is
        copied, frozen and kept in eval mode, so that neither its weights nor its running statistics change. `Teacher(a, b)`
        is an ensemble, or one cast to half; `EMA()` the student's own average; `cache(...)` what a teacher said before.
    terms: more losses, between any modules of the two: `[Term(hint, "layer3", weight=100, adapt=project)]`. weight=0 leaves
        the terms alone.
    loss: of the predictions, `(student, teacher) -> scalar` or `(student, teacher, target) -> scalar`; soft targets at
        `temperature` where nothing is given.
    weight: a number, or a function of the share of the training that is done, such as `linear_warmup`.
    classes: compare the first so many classes alone, for vocabularies that are padded to different sizes.
    mixup: alpha of the mixture that both networks see, 1 for a uniform one (patient and consistent teaching, Beyer et al.,
        2106.05237): with weight=1, task_weight=0 and no other augmentation than crops and flips it is their recipe.
    """
    check_loss_weight("imitate", weight)
    if task_weight < 0:
        raise SettingError(f"imitate(task_weight=...): wanted a number >= 0, got {task_weight}")
    if not isinstance(terms, Sequence) or isinstance(terms, str | bytes):
        raise SettingError(f"imitate(terms=...): wanted a list of Terms, got {type(terms).__name__}")
    if wrong := [type(term).__name__ for term in terms if not isinstance(term, Term)]:
        raise SettingError(f"imitate(terms=...): wanted Terms, got {wrong[0]}; write Term({wrong[0]}, ...)")
    if weight == task_weight == 0 and not any(term.weight for term in terms):
        raise SettingError("imitate(): both weights are 0, nothing would be learned")
    if temperature <= 0:
        raise SettingError(f"imitate(temperature=...): wanted a positive number, got {temperature}")
    if classes is not None and classes < 2:
        raise SettingError(f"imitate(classes=...): wanted a whole number >= 2, got {classes}")
    if mixup < 0:
        raise SettingError(f"imitate(mixup=...): wanted a number >= 0, got {mixup}")
    chosen = loss if loss is not None else partial(soft_targets, temperature=temperature)
    losses = [chosen, *(term.loss for term in terms)]
    if mixup and (task_weight or any(takes(each, name) for each in losses for name in ("target", "index"))):
        raise SettingError("imitate(mixup=...): mixed inputs have no label; set task_weight=0 and take losses without targets")
    return Imitate(
        teacher=teacher,
        loss=chosen,
        weight=weight,
        task_weight=task_weight,
        terms=tuple(terms),
        classes=classes,
        mixup=mixup,
    )
