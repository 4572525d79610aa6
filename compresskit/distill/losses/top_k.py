"""Soft targets of a teacher of which only the k largest logits of each row are kept, as a cache on disk does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compresskit.base.errors import DataError, SettingError
from compresskit.distill.losses.common import kl_divergence, weighted_mean


@dataclass(frozen=True, kw_only=True)
class TopK:
    """The k largest logits of each row, and one number for the sum of all others.

    values: the logits (N, k, ...), less the largest of their row.
    index: their classes (N, k, ...).
    rest: logsumexp(other logits / temperature), (N, 1, ...).
    shape: the shape of all logits.
    temperature: the temperature at which `rest` was computed.
    dim: the dimension of the classes in the shape of all logits.
    """

    values: Tensor
    index: Tensor
    rest: Tensor
    shape: torch.Size
    temperature: float
    dim: int = 1


def top_k(logits: Tensor, k: int, *, temperature: float = 4.0) -> TopK:
    """Keep the k largest logits of each row of (N, C, ...).

    Raises `SettingError` unless 1 <= k < C.
    """
    if not 1 <= k < logits.shape[1]:
        raise SettingError(f"top_k(k=...): wanted 1..{logits.shape[1] - 1} of {logits.shape[1]} classes, got {k}")
    z = logits.detach().float()
    z = z - z.amax(1, keepdim=True)
    values, index = z.topk(k, dim=1)
    rest = (z / temperature).scatter(1, index, -torch.inf).logsumexp(1, keepdim=True)
    return TopK(values=values, index=index, rest=rest, shape=logits.shape, temperature=temperature)


def top_k_soft_targets(student: Tensor, teacher: TopK, *, weight: Tensor | None = None) -> Tensor:
    """Return T^2 KL(teacher || student) over the k kept classes and one bucket that holds all others.

    It is a lower bound of `soft_targets` at the temperature T of the `TopK`, and exact for the classes that are kept.

    Args:
        student: logits with the classes in `teacher.dim`, any floating dtype.
        teacher: the kept logits of the teacher, see `top_k`.
        weight: weights (N, ...) of the positions, or of their leading dimensions.

    Returns: an fp32 scalar.
    Raises: DataError where the student's logits do not have the shape of the teacher's.
    """
    if not isinstance(teacher, TopK):
        raise DataError(f"top_k_soft_targets: wanted a TopK of the teacher, got {type(teacher).__name__}; see losses.top_k.top_k")
    if student.shape != teacher.shape:
        raise DataError(f"top_k_soft_targets: student has shape {tuple(student.shape)}, the teacher {tuple(teacher.shape)}")
    t = teacher.temperature
    z = student.float().movedim(teacher.dim, 1) / t
    rest = z.scatter(1, teacher.index, -torch.inf)
    empty = rest.isneginf().all(1, keepdim=True)  # all others are masked: the logarithm of nothing has no gradient
    others = rest.masked_fill(empty, 0).logsumexp(1, keepdim=True).masked_fill(empty, -torch.inf)
    log_q = torch.cat([z.gather(1, teacher.index), others], 1).log_softmax(1)
    log_p = torch.cat([teacher.values.float() / t, teacher.rest.float()], 1).log_softmax(1)
    return weighted_mean("top_k_soft_targets", kl_divergence(log_p, log_q, dim=1), weight) * t**2
