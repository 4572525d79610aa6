"""Rows of batches: how many there are, some of them, parts of a given size; and channels of outputs that are not alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs

UNLIKE = 100.0  # times the mean power of a channel that the next larger one has, where an output has channels of two kinds
LEAST_OF_A_KIND = 0.02  # of the channels: what a detector joins to its boxes is more, a channel that is hardly ever used less


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


def kinds_of_channels(values: Sequence[Tensor]) -> tuple[int, list[Tensor]] | None:
    """Channels of an output that differ so much in power that the small ones count for nothing beside the others.

    A detector that joins boxes in pixels and scores has two kinds: the power of the scores is a millionth of the whole. Channels
    are dimension 1, or the last one.

    values: the output for each batch. Returns the dimension and the numbers of the channels of each kind, the smallest first;
    None where all are alike.
    """
    first = values[0]
    for dim in channel_dims(first):
        if first.shape[dim] < 2 or any(v.ndim != first.ndim or v.shape[dim] != first.shape[dim] for v in values):
            continue
        powers = sum(channel_sums(v.detach().double().square(), dim) for v in values)
        assert isinstance(powers, Tensor)
        order = torch.argsort(powers)
        ranked = powers[order].clamp(min=float(powers.max()) * 1e-15)
        if not bool(torch.isfinite(ranked).all()) or not float(ranked[-1]):
            continue
        cuts = [0, *(int(i) + 1 for i in torch.nonzero(ranked[1:] > UNLIKE * ranked[:-1]).flatten()), len(order)]
        kinds = [order[a:b].sort().values for a, b in itertools.pairwise(cuts)]
        few = LEAST_OF_A_KIND * len(order)
        if len(kinds) > 1 and all(len(kind) >= few for kind in kinds[:-1]) and float(powers[kinds[0]].max()):
            return dim, kinds
    return None


def channel_dims(value: Tensor) -> tuple[int, ...]:
    """The dimensions that the channels of an output may be: the second, and the last one; none of a single dimension."""
    return tuple(dict.fromkeys((1, value.ndim - 1))) if value.ndim > 1 else ()


def channel_sums(values: Tensor, dim: int) -> Tensor:
    """Sums over all dimensions but one."""
    return values.movedim(dim, 0).flatten(1).sum(1)


def parts_by_kind(value: Tensor, kinds: tuple[int, list[Tensor]] | None) -> list[Tensor]:
    """An output as a part for each kind of its channels."""
    return [value] if kinds is None else [value.index_select(kinds[0], kind.to(value.device)) for kind in kinds[1]]
