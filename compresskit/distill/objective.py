"""`imitate`: an objective that mixes the task's loss with a teacher's opinion. It serves any training loop of the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.distill.losses import soft_targets
from compresskit.errors import ModelError, SettingError
from compresskit.surgery import frozen_copy
from compresskit.task import Losses, Task, call
from compresskit.train import supervised_loss

DistillLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Imitate:
    """See `imitate`. Bound to a task it holds the frozen teacher, in eval mode; the student never sees it as a submodule."""

    teacher: nn.Module | None
    loss: DistillLoss
    weight: float
    task_weight: float
    task: Task | None = None

    def bind(self, model: nn.Module, task: Task) -> Imitate:
        """Freeze the teacher, or take the task's reference, and check that both give predictions of one shape."""
        teacher = self.teacher if self.teacher is not None else task.reference
        if teacher is None:
            raise SettingError("imitate(): there is no teacher; pass imitate(teacher) or Task(reference=...)")
        if teacher is model:
            raise SettingError("imitate(): teacher and student are one module; pass a copy of the teacher")
        frozen = frozen_copy(teacher).to(task.device)
        example = task.example()
        was = model.training
        with torch.no_grad():
            try:
                wanted = task.predict(call(frozen, example)).shape
            except Exception as error:
                raise ModelError(f"the teacher {type(teacher).__name__} does not run on the student's inputs: {error}") from error
            got = task.predict(call(model.eval(), example)).shape
        model.train(was)
        if wanted != got:
            raise ModelError(
                f"the teacher {type(teacher).__name__} gives predictions {tuple(wanted)}, the student"
                f" {type(model).__name__} {tuple(got)}; both must have the same classes"
            )
        return replace(self, teacher=frozen, task=task)

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        task, teacher = self.task, self.teacher
        assert task is not None, "bind first"
        assert teacher is not None, "bind first"
        inputs, target = task.split(batch)
        predictions = task.predict(call(model, inputs))
        losses: Losses = {}
        if self.weight:
            with torch.no_grad():
                opinion = task.predict(call(teacher, inputs))
            losses["imitate"] = self.weight * self.loss(predictions, opinion)
        if self.task_weight:
            losses["task"] = self.task_weight * supervised_loss(task, predictions, target)
        return losses


def imitate(
    teacher: nn.Module | None = None,
    *,
    loss: DistillLoss | None = None,
    temperature: float = 4.0,
    weight: float = 0.9,
    task_weight: float = 0.1,
) -> Imitate:
    """An objective: weight * loss(student, teacher) + task_weight * (the task's loss).

    teacher: a trained model; None takes the task's reference, which in a chain is the trained dense float model. It is
        copied, frozen and kept in eval mode, so that neither its weights nor its running statistics change.
    loss: `(student predictions, teacher predictions) -> scalar`; soft targets at `temperature` where nothing is given.
    """
    for name, value in (("weight", weight), ("task_weight", task_weight)):
        if value < 0:
            raise SettingError(f"imitate({name}=...): wanted a number >= 0, got {value}")
    if weight == task_weight == 0:
        raise SettingError("imitate(): both weights are 0, nothing would be learned")
    if temperature <= 0:
        raise SettingError(f"imitate(temperature=...): wanted a positive number, got {temperature}")
    chosen = loss if loss is not None else partial(soft_targets, temperature=temperature)
    return Imitate(teacher=teacher, loss=chosen, weight=weight, task_weight=task_weight)
