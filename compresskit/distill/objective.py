"""`imitate`: an objective that mixes the task's loss with a teacher's opinion. It serves any training loop of the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.distill.cache import Cached, top_soft_targets
from compresskit.distill.logits import soft_targets
from compresskit.distill.taps import tapped
from compresskit.distill.teacher import EMA, Follower, Source, Teacher
from compresskit.distill.terms import (
    DistillLoss,
    Link,
    Term,
    attach_,
    drop_adapters_,
    linked,
    make_adapters,
    term_losses,
)
from compresskit.errors import ModelError, SettingError
from compresskit.surgery import mode
from compresskit.task import Losses, Task, call
from compresskit.train import supervised_loss

AnyTeacher = nn.Module | EMA | Cached


def as_source(teacher: AnyTeacher, student: nn.Module) -> Source:
    """A model is frozen and copied, unless it is a Teacher already; a cache gives its own opinion."""
    if isinstance(teacher, EMA):
        return Follower(student, teacher.decay)
    if isinstance(teacher, Teacher | Cached):
        return teacher
    if not isinstance(teacher, nn.Module):
        raise SettingError(f"imitate(): wanted a model, a Teacher, an EMA or a cache, got {type(teacher).__name__}")
    return Teacher(teacher)


@dataclass(frozen=True, kw_only=True)
class Imitate:
    """See `imitate`. Bound to a task it holds the frozen teacher, in eval mode; the student never sees it as a submodule.

    What binding put on the student (adapters, if any term has one) `close()` takes off again.
    """

    teacher: AnyTeacher | None
    loss: DistillLoss
    weight: float
    task_weight: float
    terms: tuple[Term, ...] = ()
    task: Task | None = None
    source: Source | None = None
    student: nn.Module | None = None
    links: tuple[Link, ...] = ()
    adapters: dict[str, nn.Module] = field(default_factory=dict)

    def bind(self, model: nn.Module, task: Task) -> Imitate:
        """Freeze the teacher, or take the task's reference; find the taps, and check that both models fit each other."""
        teacher = self.teacher if self.teacher is not None else task.reference
        if teacher is None:
            raise SettingError("imitate(): there is no teacher; pass imitate(teacher) or Task(reference=...)")
        if teacher is model:
            raise SettingError("imitate(): teacher and student are one module; pass a copy of the teacher")
        drop_adapters_(model)
        source = as_source(teacher, model)
        if isinstance(source, nn.Module):
            source.to(task.device)
        links = [replace(link, name="imitate") for link in linked([Term(self._loss(source), weight=self.weight)], model, None)]
        links += linked(self.terms, model, source.inside)
        bound = replace(self, source=source, task=task, student=model, links=tuple(links))
        example = task.example()
        with torch.no_grad(), mode(model, training=False):
            wanted, theirs = source.example(example, task, bound.taps())
            got, own = bound.see_student(model, example)
            if wanted.shape != got.shape:
                raise ModelError(
                    f"the teacher {source.label} gives predictions {tuple(wanted.shape)}, the student"
                    f" {type(model).__name__} {tuple(got.shape)}; both must have the same classes"
                )
            soft = self.loss.func if isinstance(self.loss, partial) else self.loss
            if soft is soft_targets and self.weight and got.shape[1:2] == (1,):
                raise ModelError(
                    f"imitate(): {type(model).__name__} gives one channel, of which a softmax says nothing; pass"
                    " imitate(loss=...) such as F.mse_loss"
                )
            adapters = make_adapters(links, own, theirs)
        attach_(model, adapters)
        return replace(bound, adapters=adapters)

    def close(self) -> None:
        """Take off the student what `bind` put there."""
        if self.student is not None:
            drop_adapters_(self.student)

    def parameters(self) -> list[nn.Parameter]:
        """The adapters', to be trained along with the student."""
        return [p for adapter in self.adapters.values() for p in adapter.parameters()]

    def see_student(self, model: Callable[..., Any], inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The student's predictions and features; `model` may be the student under a precision policy."""
        assert self.task is not None, "bind first"
        assert self.student is not None, "bind first"
        with tapped(self.student, [link.student for link in self.links if link.student is not None]) as features:
            return self.task.predict(call(model, inputs)), features

    def taps(self) -> list[str]:
        """The teacher's taps."""
        return [link.teacher for link in self.links if link.teacher is not None]

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
        return top_soft_targets

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        task, source = self.task, self.source
        assert task is not None, "bind first"
        assert source is not None, "bind first"
        inputs, target = task.split(batch)
        # The teacher first: its activations are gone before the student's, which stay for the backward pass, are made.
        opinion = source.opinion(model, batch, inputs, task, self.taps()) if self.links else None
        seen = self.see_student(model, inputs)
        losses: Losses = {}
        if opinion is not None:
            losses |= term_losses(self.links, self.adapters, seen, opinion, target)
        if self.task_weight:
            losses["task"] = self.task_weight * supervised_loss(task, seen[0], target)
        return losses


def imitate(
    teacher: AnyTeacher | None = None,
    *,
    terms: Sequence[Term] = (),
    loss: DistillLoss | None = None,
    temperature: float = 4.0,
    weight: float = 0.9,
    task_weight: float = 0.1,
) -> Imitate:
    """An objective: weight * loss(student, teacher) + the terms + task_weight * (the task's loss).

    teacher: a trained model; None takes the task's reference, which in a chain is the trained dense float model. It is
        copied, frozen and kept in eval mode, so that neither its weights nor its running statistics change. `Teacher(a, b)`
        is an ensemble, or one cast to half; `EMA()` the student's own average; `cache(...)` what a teacher said before.
    terms: more losses, between any modules of the two: `[Term(hint, "layer3", weight=100, adapt=project)]`. weight=0 leaves
        the terms alone.
    loss: of the predictions, `(student, teacher) -> scalar` or `(student, teacher, target) -> scalar`; soft targets at
        `temperature` where nothing is given.
    """
    for name, value in (("weight", weight), ("task_weight", task_weight)):
        if value < 0:
            raise SettingError(f"imitate({name}=...): wanted a number >= 0, got {value}")
    if wrong := [type(term).__name__ for term in terms if not isinstance(term, Term)]:
        raise SettingError(f"imitate(terms=...): wanted Terms, got {wrong[0]}; write Term({wrong[0]}, ...)")
    if weight == task_weight == 0 and not any(term.weight for term in terms):
        raise SettingError("imitate(): both weights are 0, nothing would be learned")
    if temperature <= 0:
        raise SettingError(f"imitate(temperature=...): wanted a positive number, got {temperature}")
    chosen = loss if loss is not None else partial(soft_targets, temperature=temperature)
    return Imitate(teacher=teacher, loss=chosen, weight=weight, task_weight=task_weight, terms=tuple(terms))
