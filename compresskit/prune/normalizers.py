"""Normalizers: make the scores of different groups of channels comparable. `(scores (channels,)) -> (channels,)`.

Only rankings that compare scores between groups (`rankings.pooled`) depend on them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

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
