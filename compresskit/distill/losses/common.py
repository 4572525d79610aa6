"""Checks and reductions that the losses share: shapes, fp32, weighted means, norms whose gradient is finite at zero."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from compresskit.base.errors import DataError, SettingError
from compresskit.base.settings import as_python


def check_positive(where: str, name: str, value: float) -> None:
    """Raise `SettingError` unless the setting `name` of the function `where` is a positive number, or a tensor of one."""
    if not is_within(value, 0, math.inf) or value == 0:
        raise SettingError(f"{where}({name}=...): wanted a positive number, got {value!r}")


def is_within(value: float, least: float, below: float) -> bool:
    """Whether a setting is a number, or a tensor of one, with least <= value < below; a text or several numbers are not."""
    try:
        return bool(least <= value) and bool(value < below)
    except (TypeError, ValueError, RuntimeError):
        return False


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

    dim: the dimension of the classes. Raises as `check_dim_of_classes`.
    """
    check_dim_of_classes(where, student, teacher, dim)
    return student.float().movedim(dim, -1), teacher.detach().float().movedim(dim, -1)


def check_dim_of_classes(where: str, student: Tensor, teacher: Tensor, dim: int) -> None:
    """Raise `DataError` for logits whose shapes differ or have no dimension `dim`, `SettingError` where that is no number."""
    check_same_shape(where, student, teacher)
    if not isinstance(dim, int) and not isinstance(as_python(dim), int):  # torch.compile does not trace `as_python`
        raise SettingError(f"{where}(dim=...): wanted the dimension of the classes, a whole number, got {dim!r}")
    if student.ndim < 2 or not -student.ndim <= dim < student.ndim:
        raise DataError(f"{where}: wanted logits of at least 2 dimensions with classes in dim {dim}, got {tuple(student.shape)}")


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
    check_weight(where, weight)
    if weight.shape != values.shape[: weight.ndim]:
        raise DataError(f"{where}(weight=...): wanted shape {tuple(values.shape)}, or its start, got {tuple(weight.shape)}")
    return weight.reshape(*weight.shape, *[1] * (values.ndim - weight.ndim))


def check_weight(where: str, weight: object) -> None:
    """Raise `DataError` unless a weight is a tensor. Its numbers are not read, which `torch.compile` and `vmap` cannot."""
    if not isinstance(weight, Tensor):
        raise DataError(f"{where}(weight=...): wanted a tensor, got {type(weight).__name__}; write torch.as_tensor(...)")


def weighted_mean(where: str, values: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean of values (N, ...), or sum(weight * values) / sum(weight); 0 where every weight is 0 or there is no value.

    weight: the shape of the values, or of their leading dimensions.
    """
    if weight is None:
        return values.mean() if values.numel() else values.sum()
    weight = broadcast_weight(where, values, weight).to(values.dtype)
    total = weight.sum() * (values.numel() / max(1, weight.numel()))
    # Not clamped: the gradient of a division by the smallest number is infinite, and times 0 no number.
    counts = total >= torch.finfo(values.dtype).tiny
    return (values * weight).sum() / torch.where(counts, total, 1.0)


def kl_divergence(log_p: Tensor, log_q: Tensor, *, dim: int = -1) -> Tensor:
    """Sum p (log p - log q) along `dim`; a class without mass in p counts 0, also where its logit is -inf in both."""
    return (log_p.exp() * (log_p - log_q).masked_fill(log_p.isneginf(), 0)).sum(dim)


def products(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32, also inside of `torch.autocast`, which would multiply fp32 matrices in half precision."""
    kind = a.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        return a.float() @ b.float()


def unit_norm(values: Tensor, *, dim: int = -1, least: float | Tensor = 1e-12) -> Tensor:
    """Scale vectors along `dim` to length 1; one whose squared length is at most `least` becomes 0 and gets no gradient."""
    square = (values * values).sum(dim, keepdim=True)
    nonzero = square > least
    return values * (torch.where(nonzero, square, 1.0).rsqrt() * nonzero)
