"""What QAT minimises where nothing else is asked for: that the quantized model says what its float model says.

It stands here because quantization and distillation never import one another; `distill.imitate` has everything beyond it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compresskit.base.objective import Losses, Objective
from compresskit.base.task import Task, call
from compresskit.graph.surgery import frozen_copy
from compresskit.train.objective import supervised_loss


def faithfulness(predictions: Tensor, wanted: Tensor, *, temperature: float = 1.0) -> Tensor:
    """How far predictions are from those of the float model, both (N, C, ...); a scalar in fp32.

    T^2 KL(softmax(wanted / T) || softmax(predictions / T)), as `soft_targets`, where dim 1 holds at least two classes;
    else the mean squared difference as a share of the mean square of what is wanted.
    """
    student, teacher = predictions.float(), wanted.detach().float()
    if student.ndim < 2 or student.shape[1] < 2:
        return F.mse_loss(student, teacher) / teacher.square().mean().clamp(min=1e-12)
    p, q = ((v / temperature).log_softmax(1).movedim(1, -1) for v in (teacher, student))
    return (p.exp() * (p - q)).sum(-1).mean() * temperature**2


@dataclass(frozen=True, kw_only=True)
class Faithful(Objective):
    """weight * `faithfulness` to the float model + task_weight * the task's loss.

    At temperature 1 that is the cross-entropy to labels half of which are the float model's answers. With less of the task's
    loss a network that is trained further would stay where the float model was (benchmarks/quantize_cifar.md).
    """

    teacher: nn.Module
    weight: float = 0.5
    task_weight: float = 0.5
    temperature: float = 1.0
    task: Task | None = None

    def bind(self, model: nn.Module, task: Task) -> Faithful:
        """The same objective for a task, with a frozen teacher in eval mode."""
        teacher = frozen_copy(self.teacher).to(task.device)
        return Faithful(
            teacher=teacher, weight=self.weight, task_weight=self.task_weight, temperature=self.temperature, task=task
        )

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        task = self.task
        assert task is not None, "bind first"
        inputs, target = task.split(batch)
        with torch.no_grad():
            wanted = task.predict(call(self.teacher, inputs))
        predictions = task.predict(call(model, inputs))
        losses = {"faithful": self.weight * faithfulness(predictions, wanted, temperature=self.temperature)}
        if self.task_weight:
            losses["task"] = self.task_weight * supervised_loss(task, predictions, target)
        return losses
