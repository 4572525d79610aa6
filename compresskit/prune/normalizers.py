"""Normalizers: make the scores of different groups of channels comparable. `(scores (channels,)) -> (channels,)`.

Only rankings that compare scores between groups (`rankings.pooled`) depend on them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Normalizer = Callable[[Tensor], Tensor]


def unscaled(scores: Tensor) -> Tensor:
    """Leave scores as they are: for scores that are comparable between groups, such as changes of the loss or `lamp`."""
    return scores


def by_mean(scores: Tensor) -> Tensor:
    """Divide by the mean of the group. Global ranking then removes about the same ratio of every group."""
    return scores / scores.mean().clamp(min=1e-30)


def by_largest(scores: Tensor) -> Tensor:
    """Divide by the largest score of the group: more channels go from groups in which few have large scores."""
    return scores / scores.amax().clamp(min=1e-30)


def by_deviation(scores: Tensor) -> Tensor:
    """Subtract the mean of the group and divide by its standard deviation (z-scores)."""
    return (scores - scores.mean()) / scores.std(correction=0).clamp(min=1e-30)
