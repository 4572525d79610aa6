"""Batches that know which samples of the data set they hold, for losses with a memory: `Contrast`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from compresskit.base.errors import DataError


class NumberedTuple(tuple[Any, ...]):
    """A batch `(inputs..., target)` with `numbers` (N,), the place of each of its samples in the data set."""

    numbers: Tensor

    def __new__(cls, parts: Sequence[Any], numbers: Tensor) -> NumberedTuple:
        self = super().__new__(cls, parts)
        self.numbers = numbers
        return self

    def __getnewargs__(self) -> tuple[tuple[Any, ...], Tensor]:
        return tuple(self), self.numbers


class NumberedDict(dict[str, Any]):
    """A batch of named entries with `numbers`."""

    numbers: Tensor


def number(batch: Any, numbers: Tensor) -> NumberedTuple | NumberedDict:
    """The same batch, a tuple, list or dict, with `numbers` (N,), the places of its samples, as an attribute."""
    if isinstance(batch, Mapping):
        named = NumberedDict(batch)
        named.numbers = numbers
        return named
    if isinstance(batch, tuple | list):
        return NumberedTuple(batch, numbers)
    raise DataError(f"number: wanted a batch (inputs..., target) or a dict, got {type(batch).__name__}")


class _Counted(Dataset[Any]):
    """Samples with their place in the data set."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int) -> tuple[int, Any]:
        return place, self.data[place]


def _collate(items: list[tuple[int, Any]], together: Callable[[list[Any]], Any]) -> Any:
    return number(together([item for _, item in items]), torch.tensor([place for place, _ in items]))


def numbered(dataset: Any, *, collate_fn: Callable[[list[Any]], Any] = default_collate, **settings: Any) -> DataLoader[Any]:
    """A DataLoader of a map-style data set whose batches carry `numbers`; settings: those of DataLoader, such as batch_size."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise DataError(f"numbered: wanted a data set with a length whose samples can be indexed, got {type(dataset).__name__}")
    return DataLoader(_Counted(dataset), collate_fn=partial(_collate, together=collate_fn), **settings)


def numbers_of(batch: Any, term: str) -> Tensor:
    """The numbers of a batch's samples; DataError where it has none."""
    numbers = getattr(batch, "numbers", None)
    if not isinstance(numbers, Tensor):
        raise DataError(
            f"term {term}: its loss must know which samples a batch holds, and this batch does not say;"
            " load the training data with distill.numbered(dataset, batch_size=...), without pinned memory"
        )
    return numbers
