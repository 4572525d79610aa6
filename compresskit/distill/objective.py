"""`imitate`: an objective that mixes the task's loss with a teacher's opinion. It serves any training loop of the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.distill.logits import soft_targets
from compresskit.distill.taps import tapped
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
from compresskit.surgery import frozen_copy, mode
from compresskit.task import Losses, Task, call
from compresskit.train import supervised_loss


@dataclass(frozen=True, kw_only=True)
class Imitate:
    """See `imitate`. Bound to a task it holds the frozen teacher, in eval mode; the student never sees it as a submodule.

    What binding put on the student (adapters, if any term has one) `close()` takes off again.
    """

    teacher: nn.Module | None
    loss: DistillLoss
    weight: float
    task_weight: float
    terms: tuple[Term, ...] = ()
    task: Task | None = None
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
        frozen = frozen_copy(teacher).to(task.device)
        links = [replace(link, name="imitate") for link in linked([Term(self.loss, weight=self.weight)], model, frozen)]
        links += linked(self.terms, model, frozen)
        bound = replace(self, teacher=frozen, task=task, student=model, links=tuple(links))
        example = task.example()
        with torch.no_grad(), mode(model, training=False):
            try:
                wanted, theirs = bound.see_teacher(example)
            except (ModelError, SettingError):
                raise
            except Exception as error:
                raise ModelError(f"the teacher {type(teacher).__name__} does not run on the student's inputs: {error}") from error
            got, own = bound.see_student(model, example)
            if wanted.shape != got.shape:
                raise ModelError(
                    f"the teacher {type(teacher).__name__} gives predictions {tuple(wanted.shape)}, the student"
                    f" {type(model).__name__} {tuple(got.shape)}; both must have the same classes"
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

    def see_teacher(self, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The teacher's predictions and features."""
        assert self.task is not None, "bind first"
        assert self.teacher is not None, "bind first"
        # no_grad, not inference_mode: autograd refuses to save an inference tensor for the student's backward pass.
        with torch.no_grad(), tapped(self.teacher, [link.teacher for link in self.links if link.teacher is not None]) as features:
            return self.task.predict(call(self.teacher, inputs)), features

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        task = self.task
        assert task is not None, "bind first"
        inputs, target = task.split(batch)
        seen = self.see_student(model, inputs)
        losses: Losses = {}
        if self.links:
            losses |= term_losses(self.links, self.adapters, seen, self.see_teacher(inputs), target)
        if self.task_weight:
            losses["task"] = self.task_weight * supervised_loss(task, seen[0], target)
        return losses


def imitate(
    teacher: nn.Module | None = None,
    *,
    terms: Sequence[Term] = (),
    loss: DistillLoss | None = None,
    temperature: float = 4.0,
    weight: float = 0.9,
    task_weight: float = 0.1,
) -> Imitate:
    """An objective: weight * loss(student, teacher) + the terms + task_weight * (the task's loss).

    teacher: a trained model; None takes the task's reference, which in a chain is the trained dense float model. It is
        copied, frozen and kept in eval mode, so that neither its weights nor its running statistics change.
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
