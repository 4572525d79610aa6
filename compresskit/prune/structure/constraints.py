"""What a walk notes for later: decisions that need the whole graph, and what a cut must change beside tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Split:
    """A dimension of channels seen as several, such as (heads, width): all but one of them are numbers that stay."""

    path: str
    labels: Tensor
    reason: str


@dataclass(frozen=True, kw_only=True)
class Total:
    """Something that vanishes where all the labels it was made of do: (rows with size 1 where totals stand for many)."""

    rows: Tensor
    totals: Tensor
    reason: str


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """Code that may break once a width has changed, since a size in it may be a constant or an attribute."""

    path: str
    labels: Tensor
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Values (queries) multiplied by 1 / sqrt(size of `dim`), a size that shrinks with a cut.

    shared: the other factor of the product comes from the same channels, so that a factor on them counts twice.
    """

    path: str
    labels: Tensor
    dim: int
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """An operator whose statistics run over channels: the nth call of `target`; labels of dimension `dim`."""

    target: Any
    nth: int
    labels: Tensor
    dim: int


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """A number of a module that is the size of labels; of a tuple, the entry at `position`."""

    path: str
    attribute: str
    labels: Tensor
    position: int | None = None
