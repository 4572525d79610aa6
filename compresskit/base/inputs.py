"""What callers pass as inputs of a model, in the two forms that the rest works with: a tuple or a dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from compresskit.base.errors import DataError
from compresskit.base.task import Inputs

AnyInputs = Tensor | Sequence[Any] | Mapping[str, Any]


def as_inputs(value: AnyInputs, where: str = "the example") -> Inputs:
    """What a model is fed, as a tuple or a dict: one tensor stands for a tuple of it, a list or a mapping is copied.

    Raises DataError, which begins with `where`, for anything else.
    """
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return tuple(value)
    raise DataError(f"{where}: wanted inputs as a tensor, a tuple or a dict of them, got {type(value).__name__}")


def each_inputs(batches: Iterable[AnyInputs], where: str) -> Iterator[Inputs]:
    """`as_inputs` of every batch. Raises DataError for one tensor, whose rows would be taken for batches."""
    if isinstance(batches, Tensor | Mapping):
        raise DataError(f"{where}: wanted batches, such as [(x,), ...], got one {type(batches).__name__}; put it in a list")
    return (as_inputs(batch, where) for batch in batches)
