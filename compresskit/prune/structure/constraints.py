"""Constraints that rules record while channels are propagated, and `resolve.py` applies once the whole graph has been seen.

The first three restrict which channel sets can be removed. The others say what has to change beside the tensors when channels go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AxisSplit:
    """A dimension of channels that is viewed as several, such as (heads, width); the sizes of all but one of them must stay.

    path: the module whose code does it. labels: of the view.
    """

    path: str
    labels: Tensor
    reason: str


@dataclass(frozen=True, kw_only=True)
class DependsOnAll:
    """Values that can be removed only where all values that they were computed from can be.

    results: labels, with size 1 along the dimensions that were reduced. parts: labels that broadcast against them.
    """

    parts: Tensor
    results: Tensor
    reason: str


@dataclass(frozen=True, kw_only=True)
class HardCodedSize:
    """An operator that is given a size of a dimension with channels; the size may be a constant in the code or an attribute.

    path: the module whose code gives it. shape: of the result, with these labels.
    given: False where its numbers are dimensions, as those of a transposition are: the code beside it may know the size.
    cut, position: the number of the cut that made it, and which of its parts it is. sizes: of all its parts.
    """

    path: str
    labels: Tensor
    shape: tuple[int, ...]
    reason: str
    given: bool = True
    cut: int | None = None
    position: int = 0
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChannelCut:
    """Channels that are cut along `dim` at places which the code gives: the nth call of `target`.

    path: the module whose code does it. labels: of what is cut. places: (start, stop, step) of each part.
    Whether the places follow the width, as in `x[:, : x.shape[1] // 2]`, shows in a run of a pruned copy.
    """

    target: Any
    nth: int
    path: str
    labels: Tensor
    dim: int
    places: tuple[tuple[int, int, int], ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class WidthScaling:
    """Values (attention queries) multiplied by 1 / sqrt(size of `dim`), a size that shrinks when channels go.

    shared: the other factor of the product comes from the same channels, so that a correction of them counts twice.
    """

    labels: Tensor
    dim: int
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class ChannelStatistic:
    """An operator that takes a statistic over channels, such as LayerNorm: the nth call of `target`, over dimension `dim`."""

    target: Any
    nth: int
    labels: Tensor
    dim: int


@dataclass(frozen=True, kw_only=True)
class ComputedWeight:
    """Result `part` of the nth call of `target`, which is computed from parameters alone, such as a standardized weight.

    labels: for each dimension of channels of the parameters, labels that broadcast to the value's shape.
    """

    target: Any
    nth: int
    part: int
    labels: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class SizeAttribute:
    """An attribute of a module that repeats the size of `labels`; where it is a tuple, its entry at `position`."""

    path: str
    attribute: str
    labels: Tensor
    position: int | None = None
