"""What the losses share: pairs of rows in fp32, weighted means, and square roots whose gradient is finite at zero."""

from __future__ import annotations

import torch
from torch import Tensor

from compresskit.base.errors import DataError, SettingError


def positive(where: str, name: str, value: float) -> None:
    """Raise `SettingError` unless a setting is a positive number."""
    if not value > 0:
        raise SettingError(f"{where}({name}=...): wanted a positive number, got {value}")


def same_shape(where: str, student: Tensor, teacher: Tensor) -> None:
    """Raise `DataError` unless both have one shape."""
    if student.shape != teacher.shape:
        raise DataError(
            f"{where}: student and teacher must have one shape, got {tuple(student.shape)} and {tuple(teacher.shape)};"
            " features of different width need an adapter, see Term(adapt=...)"
        )


def rows(where: str, student: Tensor, teacher: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(N, C, ...) logits of both, classes in `dim`, to two fp32 tensors (N, ..., C); the teacher's takes no gradient."""
    same_shape(where, student, teacher)
    if student.ndim < 2 or not -student.ndim <= dim < student.ndim:
        raise DataError(f"{where}: wanted logits of at least 2 dimensions with classes in dim {dim}, got {tuple(student.shape)}")
    return student.float().movedim(dim, -1), teacher.detach().float().movedim(dim, -1)


def check_weight(where: str, values: Tensor, weight: Tensor) -> None:
    """Raise `DataError` unless a weight has the shape of the values, or of their leading dimensions."""
    if weight.shape != values.shape[: weight.ndim]:
        raise DataError(f"{where}(weight=...): wanted shape {tuple(values.shape)}, or its start, got {tuple(weight.shape)}")


def weighted_mean(where: str, values: Tensor, weight: Tensor | None) -> Tensor:
    """Mean of values (N, ...), or sum(weight * values) / sum(weight) for weights of their leading dimensions; 0 if all are 0."""
    if weight is None:
        return values.mean()
    check_weight(where, values, weight)
    weight = weight.to(values.dtype)
    total = weight.sum() * (values.numel() / max(1, weight.numel()))
    weight = weight.reshape(*weight.shape, *[1] * (values.ndim - weight.ndim))
    return (values * weight).sum() / total.clamp(min=torch.finfo(values.dtype).tiny)


def unit(values: Tensor, *, dim: int = -1, least: float | Tensor = 1e-12) -> Tensor:
    """Scale to length 1 along `dim`; what has a squared length of at most `least` becomes 0 and gets no gradient."""
    square = (values * values).sum(dim, keepdim=True)
    alive = square > least
    return values * (torch.where(alive, square, 1.0).rsqrt() * alive)


def flat(where: str, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Features (N, ...) of both to fp32 (N, D) and (N, E); the widths may differ, the teacher's takes no gradient."""
    if student.ndim < 2 or teacher.ndim < 2 or len(student) != len(teacher):
        raise DataError(f"{where}: wanted features (N, ...) of one batch, got {tuple(student.shape)} and {tuple(teacher.shape)}")
    return student.float().flatten(1), teacher.detach().float().flatten(1)
