"""Checks and reductions that the losses share: shapes, fp32, weighted means, norms whose gradient is finite at zero."""

from __future__ import annotations

import torch
from torch import Tensor

from compresskit.base.errors import DataError, SettingError


def check_positive(where: str, name: str, value: float) -> None:
    """Raise `SettingError` unless the setting `name` of the function `where` is a positive number, or a tensor of one."""
    try:
        positive = bool(value > 0)
    except (TypeError, ValueError, RuntimeError):  # a text, several numbers
        positive = False
    if not positive:
        raise SettingError(f"{where}({name}=...): wanted a positive number, got {value!r}")


def check_tensors(where: str, student: object, teacher: object) -> None:
    """Raise `DataError` unless both are tensors."""
    for name, value in (("student", student), ("teacher", teacher)):
        if not isinstance(value, Tensor):
            raise DataError(f"{where}: wanted tensors, got {type(value).__name__} of the {name}; write torch.as_tensor(...)")


def check_same_shape(where: str, student: Tensor, teacher: Tensor) -> None:
    """Raise `DataError` unless both are tensors of one shape."""
    check_tensors(where, student, teacher)
    if student.shape != teacher.shape:
        raise DataError(
            f"{where}: student and teacher must have one shape, got {tuple(student.shape)} and {tuple(teacher.shape)};"
            " features of different width need an adapter, see Term(adapt=...)"
        )


def check_logits(where: str, student: Tensor, teacher: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Check the logits (N, C, ...) of both networks and return them as fp32 (N, ..., C), the teacher's detached.

    dim: the dimension of the classes. Raises `DataError` for shapes that differ or have no such dimension.
    """
    check_same_shape(where, student, teacher)
    if student.ndim < 2 or not -student.ndim <= dim < student.ndim:
        raise DataError(f"{where}: wanted logits of at least 2 dimensions with classes in dim {dim}, got {tuple(student.shape)}")
    return student.float().movedim(dim, -1), teacher.detach().float().movedim(dim, -1)


def check_features(where: str, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Check the features (N, ...) of both networks and return them as fp32 (N, D) and (N, E), the teacher's detached.

    Raises `DataError` unless both are tensors that hold the same number of samples; their widths may differ.
    """
    check_tensors(where, student, teacher)
    if student.ndim < 2 or teacher.ndim < 2 or len(student) != len(teacher):
        raise DataError(f"{where}: wanted features (N, ...) of one batch, got {tuple(student.shape)} and {tuple(teacher.shape)}")
    return student.float().flatten(1), teacher.detach().float().flatten(1)


def broadcast_weight(where: str, values: Tensor, weight: Tensor) -> Tensor:
    """Append dimensions of size 1 to a weight of the leading dimensions of `values`; `DataError` where it does not fit them."""
    if weight.shape != values.shape[: weight.ndim]:
        raise DataError(f"{where}(weight=...): wanted shape {tuple(values.shape)}, or its start, got {tuple(weight.shape)}")
    return weight.reshape(*weight.shape, *[1] * (values.ndim - weight.ndim))


def weighted_mean(where: str, values: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean of values (N, ...), or sum(weight * values) / sum(weight); 0 where every weight is 0.

    weight: the shape of the values, or of their leading dimensions.
    """
    if weight is None:
        return values.mean()
    weight = broadcast_weight(where, values, weight).to(values.dtype)
    total = weight.sum() * (values.numel() / max(1, weight.numel()))
    # Not clamped: the gradient of a division by the smallest number is infinite, and times 0 no number.
    counts = total >= torch.finfo(values.dtype).tiny
    return (values * weight).sum() / torch.where(counts, total, 1.0)


def unit_norm(values: Tensor, *, dim: int = -1, least: float | Tensor = 1e-12) -> Tensor:
    """Scale vectors along `dim` to length 1; one whose squared length is at most `least` becomes 0 and gets no gradient."""
    square = (values * values).sum(dim, keepdim=True)
    nonzero = square > least
    return values * (torch.where(nonzero, square, 1.0).rsqrt() * nonzero)
