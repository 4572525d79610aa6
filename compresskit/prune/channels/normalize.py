"""Choices around a criterion: how the layers of one group count together, and how groups are made comparable."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compresskit.prune.criteria import Criterion, Slices

# -- aggregation over the layers of a group: (layers, channels) -> (channels,)


def total(scores: Tensor) -> Tensor:
    """Sum over layers: each counts by its size."""
    return scores.sum(0)


def mean(scores: Tensor) -> Tensor:
    """Mean over layers: each counts the same."""
    return scores.mean(0)


def largest(scores: Tensor) -> Tensor:
    """Largest over layers: a channel is kept if one layer needs it."""
    return scores.amax(0)


def over_layers(slices: Slices, *, criterion: Criterion, combine: Callable[[Tensor], Tensor] = mean) -> Tensor:
    """Score each layer of a group by itself, then combine: `partial(over_layers, criterion=l1, combine=largest)`.

    combine: `(layers, channels) -> (channels,)`, such as `total`, `mean`, `largest`.
    """
    if slices.layers is None:
        return combine(criterion(slices)[None])
    return combine(torch.stack([criterion(slices.part(slices.layers == n)) for n in slices.layers.unique().tolist()]))


# -- normalisation, so that the channels of different groups can be ranked together: (channels,) -> (channels,)

Normalizer = Callable[[Tensor], Tensor]


def unscaled(scores: Tensor) -> Tensor:
    """As they are: for scores that mean the same everywhere, such as changes of the loss or `lamp`."""
    return scores


def by_mean(scores: Tensor) -> Tensor:
    """The mean of a group becomes 1. Global ranking then cuts every group by about the same ratio."""
    return scores / scores.mean().clamp(min=1e-30)


def by_largest(scores: Tensor) -> Tensor:
    """The largest of a group becomes 1: groups with a few strong channels are cut more."""
    return scores / scores.amax().clamp(min=1e-30)


def by_deviation(scores: Tensor) -> Tensor:
    """Mean 0, standard deviation 1, as a plain ranking of outliers."""
    return (scores - scores.mean()) / scores.std(correction=0).clamp(min=1e-30)
