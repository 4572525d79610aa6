"""The stage `Distill`: train a student with a teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from compresskit.base.errors import SettingError
from compresskit.base.task import Task, call
from compresskit.distill.class_dim import reads_class_dim
from compresskit.distill.models.teacher import TeacherLike, View
from compresskit.distill.objectives.imitate import Imitate, imitate
from compresskit.distill.objectives.loss_weights import LossWeight
from compresskit.distill.objectives.terms import DistillLoss, Term, drop_adapters_
from compresskit.graph.surgery import copy_model, mode
from compresskit.measure import few_rows
from compresskit.train.train import Train, fit_


@dataclass(frozen=True, kw_only=True)
class Distill(Train):
    """Train a model with the objective `imitate` (knowledge distillation, Hinton et al., 1503.02531).

    Args:
        student: a module, which is copied, or a function that returns one. It replaces the incoming model, which becomes its
            teacher. None trains the incoming model itself.
        teacher: see `imitate`; None takes the incoming model if there is a student, else `Task.reference`.
        generations: number of students in a row, each taught by the one before it (born-again networks, 1805.04770). For
            teacher assistants of decreasing size (Mirzadeh et al., 1902.03393), write one `Distill` for each.
        terms, loss, temperature, weight, task_weight, classes, dim, mixup, teacher_views: see `imitate`.

    The other settings are those of `Train`. Raises SettingError for settings of the wrong type or range.
    """

    student: nn.Module | Callable[[], nn.Module] | None = None
    teacher: TeacherLike | None = None
    terms: Sequence[Term] = ()
    loss: DistillLoss | None = None
    temperature: float = 4.0
    weight: LossWeight = 0.9
    task_weight: float = 0.1
    classes: int | None = None
    dim: int | None = None
    mixup: float = 0.0
    teacher_views: Sequence[View] = ()
    generations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.imitation(self.teacher)
        if self.generations < 1:
            raise SettingError(f"Distill(generations=...): wanted a whole number >= 1, got {self.generations}")
        if self.generations > 1 and self.student is None:
            raise SettingError("Distill(generations=...): each generation starts afresh; pass student=, a module or a function")
        if self.objective is not None:
            raise SettingError("Distill(objective=...): it is the teacher; use Train(objective=imitate(...)) for another")

    @property
    def reads_target(self) -> bool:
        """Whether the task's loss has a weight, or a term takes the targets."""
        return self.imitation(self.teacher).reads_target

    @property
    def makes_student(self) -> bool:
        """Whether there is a student to take the incoming model's place."""
        return self.student is not None

    @property
    def starts_from_trained(self) -> bool:
        """Whether the incoming model becomes the teacher; without a student it is trained itself."""
        return self.makes_student

    def rehearse(self, model: nn.Module, task: Task) -> None:
        """Raise `ModelError` for soft targets of a student with one channel, and of what the task says are no classes."""
        if not self.weight or not (self.loss is None or reads_class_dim(self.loss)):
            return
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            student = self.skeleton(model).to(task.device)
            with mode(student, training=False):
                predictions = task.predict(call(student, few_rows(student, task.example(), 2)))
        self.imitation(self.teacher).for_task(task).rehearse(student, predictions, "Distill")

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        teacher = self.teacher
        for _ in range(self.generations):
            if self.student is not None:
                teacher = model.eval() if teacher is None else teacher
                model = self.skeleton(model)
            model = model.to(task.device)
            try:
                fit_(model, task, self, objective=self.imitation(teacher), label="distil")
            finally:
                drop_adapters_(model)
            teacher = None if self.student is not None else teacher
        return model

    def imitation(self, teacher: TeacherLike | None) -> Imitate:
        """Return the objective with this stage's settings, for a teacher."""
        return imitate(
            teacher,
            terms=self.terms,
            loss=self.loss,
            temperature=self.temperature,
            weight=self.weight,
            task_weight=self.task_weight,
            classes=self.classes,
            dim=self.dim,
            mixup=self.mixup,
            teacher_views=self.teacher_views,
        )

    def skeleton(self, model: nn.Module) -> nn.Module:
        """Return the untrained student: a copy, a new module, or the incoming model where there is none."""
        if self.student is None:
            return model
        if isinstance(self.student, nn.Module):
            return copy_model(self.student)
        student = self.student()
        if not isinstance(student, nn.Module):
            raise SettingError(
                f"Distill(student=...): wanted a module or a function that makes one, got {type(student).__name__}"
            )
        return student
