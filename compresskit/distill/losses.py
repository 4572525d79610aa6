"""Distillation losses: pure functions of plain tensors, logits in, computed in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from compresskit.errors import SettingError


def soft_targets(student: Tensor, teacher: Tensor, *, temperature: float = 4.0) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), averaged over the batch (Hinton et al., 1503.02531).

    student, teacher: logits (N, C, ...), classes in dim 1; other dimensions are averaged over too. T^2 keeps the size of the
    gradient the same for every temperature.
    """
    if temperature <= 0:
        raise SettingError(f"soft_targets(temperature=...): wanted a positive number, got {temperature}")
    log_p = torch.log_softmax(teacher.float() / temperature, dim=1)
    log_q = torch.log_softmax(student.float() / temperature, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(1).mean() * temperature**2


#: Every loss of the library; the contract tests run over this list.
LOSSES = (soft_targets,)
