"""Convert what callers pass as inputs of a model into the two forms that the library works with: a tuple or a dict."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from compresskit.base.errors import DataError
from compresskit.base.task import Inputs

#: Inputs of one batch, as a caller may pass them.
AnyInputs = Tensor | Sequence[Any] | Mapping[str, Any]
#: Batches of inputs, without labels: one batch as a tensor, a tuple or a mapping, or a list, loader or other iterable of batches.
Batches = Iterable[AnyInputs] | AnyInputs


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


def each_inputs(batches: Batches, where: str) -> Iterator[Inputs]:
    """Yield the inputs of every batch; a tensor, a tuple or a mapping in the place of the batches is one batch.

    Raises DataError, which begins with `where`, for anything that is neither a batch nor an iterable of batches.
    """
    if isinstance(batches, Tensor | tuple | Mapping):
        batches = [batches]
    if isinstance(batches, str) or not isinstance(batches, Iterable):
        raise DataError(f"{where}: wanted batches of inputs, such as [(x,), ...], or one batch, got {type(batches).__name__}")
    return (as_inputs(batch, where) for batch in batches)


def first_and_all(batches: Batches, where: str) -> tuple[Inputs, Iterator[Inputs]]:
    """The inputs of the first batch, and an iterator over all batches, the first included.

    Raises DataError, which begins with `where`, where there is no batch.
    """
    stream = each_inputs(batches, where)
    for first in stream:
        return first, itertools.chain([first], stream)
    raise DataError(f"{where}: no calibration batch was given; a few hundred samples will do")
