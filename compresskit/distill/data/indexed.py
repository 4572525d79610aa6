"""Batches that carry the indices of their samples in the data set, for losses with a memory bank such as `CRDLoss`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from compresskit.base.errors import DataError


class IndexedTuple(tuple[Any, ...]):
    """A batch `(inputs..., target)` with `indices` (N,), the places of its samples in the data set."""

    indices: Tensor

    def __new__(cls, parts: Sequence[Any], indices: Tensor) -> IndexedTuple:
        self = super().__new__(cls, parts)
        self.indices = indices
        return self

    def __getnewargs__(self) -> tuple[tuple[Any, ...], Tensor]:
        return tuple(self), self.indices


class IndexedDict(dict[str, Any]):
    """A batch of named entries with `indices` (N,), the places of its samples in the data set."""

    indices: Tensor


@runtime_checkable
class MapStyleDataset(Protocol):
    """A data set with a length whose samples can be looked up by their place."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Any: ...


def with_indices(batch: Any, indices: Tensor) -> IndexedTuple | IndexedDict:
    """Return the same batch with the attribute `indices`.

    Args:
        batch: a tuple or list `(inputs..., target)`, or a dict.
        indices: places (N,) of its samples in the data set, integers.

    Raises: DataError for another kind of batch.
    """
    if isinstance(batch, Mapping):
        named = IndexedDict(batch)
        named.indices = indices
        return named
    if isinstance(batch, tuple | list):
        return IndexedTuple(batch, indices)
    raise DataError(f"with_indices: wanted a batch (inputs..., target) or a dict, got {type(batch).__name__}")


class IndexedDataset(Dataset[Any]):
    """The samples of another data set, each as `(its place, the sample)`."""

    def __init__(self, data: MapStyleDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int) -> tuple[int, Any]:
        return place, self.data[place]


def _collate(items: list[tuple[int, Any]], collate_fn: Callable[[list[Any]], Any]) -> Any:
    return with_indices(collate_fn([item for _, item in items]), torch.tensor([place for place, _ in items]))


def indexed_loader(dataset: Any, *, collate_fn: Callable[[list[Any]], Any] = default_collate, **settings: Any) -> DataLoader[Any]:
    """Return a DataLoader whose batches carry the `indices` of their samples.

    Args:
        dataset: a map-style data set: it has a length, and its samples can be looked up by their place.
        collate_fn: makes a batch, a tuple or a dict, of a list of samples.
        settings: the other settings of DataLoader, such as `batch_size` and `shuffle`.

    Raises: DataError for a data set of another kind.
    """
    if not isinstance(dataset, MapStyleDataset):
        raise DataError(
            f"indexed_loader: wanted a data set with a length whose samples can be indexed, got {type(dataset).__name__}"
        )
    return DataLoader(IndexedDataset(dataset), collate_fn=partial(_collate, collate_fn=collate_fn), **settings)


def sample_indices(batch: Any, term: str) -> Tensor:
    """Return the indices (N,) that a batch carries; `DataError`, which names the term that needs them, where it has none."""
    if not isinstance(batch, IndexedTuple | IndexedDict):
        raise DataError(
            f"term {term}: its loss must know which samples a batch holds, and this batch does not say;"
            " load the training data with distill.indexed_loader(dataset, batch_size=...), without pinned memory"
        )
    return batch.indices
