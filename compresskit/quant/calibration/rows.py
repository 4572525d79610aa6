"""Rows of batches: how many there are, some of them, and parts of a given size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs


def row_count(inputs: Inputs) -> int | None:
    """The number of samples where every tensor has one row for each of them."""
    sizes = {v.shape[0] if v.ndim else 0 for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor)}
    size = sizes.pop() if len(sizes) == 1 else 0
    return size or None


def take_rows(inputs: Inputs, rows: slice | Tensor) -> Inputs:
    """Some rows of every tensor of the inputs."""
    taken: Inputs = pytree.tree_map(lambda v: v[rows] if isinstance(v, Tensor) else v, inputs)
    return taken


def in_chunks(batches: Sequence[Inputs], rows: int) -> Iterator[Inputs]:
    """The batches in parts of at most `rows` rows, where they have rows."""
    for inputs in batches:
        count = row_count(inputs)
        if count is None or count <= rows:
            yield inputs
        else:
            yield from (take_rows(inputs, slice(start, start + rows)) for start in range(0, count, rows))


def shuffled_parts(batches: Sequence[Inputs], rows: int, generator: torch.Generator) -> list[Inputs]:
    """The rows of all batches in a random order, in parts of `rows`; a batch without rows is a part as it is.

    Rows of batches of one shape are put together.
    """
    alike: dict[Any, list[Inputs]] = {}
    parts = []
    for inputs in batches:
        leaves, structure = pytree.tree_flatten(inputs)
        if row_count(inputs) is None:
            parts.append(inputs)
        else:
            key = tuple((v.shape[1:], v.dtype) if isinstance(v, Tensor) else repr(v) for v in leaves)
            alike.setdefault((str(structure), key), []).append(inputs)
    for group in alike.values():
        joined: Inputs = pytree.tree_map(lambda *v: torch.cat(v) if isinstance(v[0], Tensor) else v[0], *group)
        order = torch.randperm(row_count(joined) or 0, generator=generator)
        parts += [take_rows(joined, chosen) for chosen in order.split(rows)]
    return parts
