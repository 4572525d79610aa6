"""The stage: train a student under a teacher."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from compresskit.base.errors import SettingError
from compresskit.base.task import Task
from compresskit.distill.models.teacher import AnyTeacher
from compresskit.distill.objectives.imitate import Imitate, imitate
from compresskit.distill.objectives.loss_weights import LossWeight
from compresskit.distill.objectives.terms import DistillLoss, Term, drop_adapters_
from compresskit.train.train import Train, fit_


@dataclass(frozen=True, kw_only=True)
class Distill(Train):
    """Train with a teacher (Hinton et al., 1503.02531): weight * soft targets + task_weight * the task's loss.

    student: a module, or a function that makes one; it takes the incoming model's place, which becomes its teacher. With
        None the incoming model is trained itself.
    teacher: None takes the incoming model where there is a student, else the task's reference.
    generations: how many students in a row, each taught by the one before it (born-again networks, 1805.04770). Assistants of
        different sizes (Mirzadeh et al., 1902.03393) are one Distill each.
    terms, loss, temperature, weight, task_weight, classes, mixup: see `imitate`.
    """

    student: nn.Module | Callable[[], nn.Module] | None = None
    teacher: AnyTeacher | None = None
    terms: Sequence[Term] = ()
    loss: DistillLoss | None = None
    temperature: float = 4.0
    weight: LossWeight = 0.9
    task_weight: float = 0.1
    classes: int | None = None
    mixup: float = 0.0
    generations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.goal(self.teacher)
        if self.generations < 1:
            raise SettingError(f"Distill(generations=...): wanted a whole number >= 1, got {self.generations}")
        if self.generations > 1 and self.student is None:
            raise SettingError("Distill(generations=...): each generation starts afresh; pass student=, a module or a function")
        if self.objective is not None:
            raise SettingError("Distill(objective=...): it is the teacher; use Train(objective=imitate(...)) for another")

    @property
    def makes_student(self) -> bool:
        """Whether there is a student to take the incoming model's place."""
        return self.student is not None

    @property
    def starts_from_trained(self) -> bool:
        """Whether the incoming model becomes the teacher; without a student it is trained itself."""
        return self.makes_student

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        teacher = self.teacher
        for _ in range(self.generations):
            if self.student is not None:
                teacher = model.eval() if teacher is None else teacher
                model = self.skeleton(model)
            model = model.to(task.device)
            try:
                fit_(model, task, self, objective=self.goal(teacher), label="distil")
            finally:
                drop_adapters_(model)
            teacher = None if self.student is not None else teacher
        return model

    def goal(self, teacher: AnyTeacher | None) -> Imitate:
        """What is minimised."""
        return imitate(
            teacher,
            terms=self.terms,
            loss=self.loss,
            temperature=self.temperature,
            weight=self.weight,
            task_weight=self.task_weight,
            classes=self.classes,
            mixup=self.mixup,
        )

    def skeleton(self, model: nn.Module) -> nn.Module:
        """The module that is trained, before it is."""
        if self.student is None:
            return model
        if isinstance(self.student, nn.Module):
            return copy.deepcopy(self.student)
        made = self.student()
        if not isinstance(made, nn.Module):
            raise SettingError(f"Distill(student=...): wanted a module or a function that makes one, got {type(made).__name__}")
        return made
