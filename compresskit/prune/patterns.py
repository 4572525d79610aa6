"""Sparsity patterns: which weights are removed together, and where zeros may be.

A pattern views a tensor as rows `(units, K)`, one for each unit that is kept or removed as a whole, so that every criterion
works with it, and expands a decision `(units,)` to the tensor's shape again. A pattern of one's own subclasses `Pattern`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compresskit.base.errors import SettingError


class Pattern(ABC):
    """Base of sparsity patterns; a subclass is a frozen dataclass."""

    @property
    def fixed(self) -> float | None:
        """The ratio that the pattern itself prescribes, such as 0.5 of 2:4; None where any ratio can be reached."""
        return None

    @abstractmethod
    def fits(self, shape: Sequence[int]) -> str:
        """Why a tensor of that shape cannot have this pattern; empty where it can."""

    @abstractmethod
    def rows(self, values: Tensor) -> Tensor:
        """View a tensor as (units, K)."""

    @abstractmethod
    def spread(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """Give each unit's entry, (units,), to all of its weights: a tensor of `shape`. The inverse of `rows`."""

    def choose(self, scores: Tensor, ratio: float) -> Tensor:
        """Units of one tensor that stay, (units,) bool; called only for patterns that prescribe a ratio.

        scores: (units,), larger = keep. ratio: the fraction to remove, on a schedule less than `fixed`.
        """
        return keep_largest(scores, len(scores) - round(ratio * len(scores)))


def keep_largest(scores: Tensor, count: int) -> Tensor:
    """(units,) bool: the `count` largest of (units,) scores; of equal ones the later."""
    kept = torch.ones_like(scores, dtype=torch.bool)
    removed = len(scores) - count
    if removed:
        edge = scores.kthvalue(removed).values
        kept = scores > edge
        equal = (scores == edge).nonzero().flatten()
        kept[equal[len(equal) - (count - int(kept.sum())) :]] = True
    return kept


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Every weight by itself."""

    def fits(self, shape: Sequence[int]) -> str:
        return ""

    def rows(self, values: Tensor) -> Tensor:
        return values.reshape(-1, 1)

    def spread(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        return units.view(*shape)


@dataclass(frozen=True, kw_only=True)
class Block(Pattern):
    """Blocks of `outputs` x `inputs` weights, dimensions 0 and 1 of a tensor, at one kernel position: 1x4, 4x1, 4x4."""

    outputs: int = 1
    inputs: int = 4

    def __post_init__(self) -> None:
        if self.outputs < 1 or self.inputs < 1:
            raise SettingError(f"Block(...): wanted whole numbers >= 1, got {self.outputs} x {self.inputs}")

    def fits(self, shape: Sequence[int]) -> str:
        if shape[0] % self.outputs or shape[1] % self.inputs:
            return f"{shape[0]} x {shape[1]} channels do not divide into blocks of {self.outputs} x {self.inputs}"
        return ""

    def rows(self, values: Tensor) -> Tensor:
        a, b = self.outputs, self.inputs
        blocks = values.reshape(values.shape[0] // a, a, values.shape[1] // b, b, -1)
        return blocks.permute(0, 2, 4, 1, 3).reshape(-1, a * b)

    def spread(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        a, b, rest = self.outputs, self.inputs, math.prod(shape[2:])
        grid = units.view(shape[0] // a, shape[1] // b, rest)
        return grid.repeat_interleave(a, 0).repeat_interleave(b, 1).reshape(*shape)


@dataclass(frozen=True, kw_only=True)
class NM(Pattern):
    """Exactly `n` of every `m` weights in a row along `axis` stay: 2:4 is what sparse tensor cores run (2104.08378), along the
    inputs (axis 1 of linear layers and convolutions).
    """

    n: int = 2
    m: int = 4
    axis: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.n < self.m:
            raise SettingError(f"NM(n=..., m=...): wanted 1 <= n < m, got n={self.n}, m={self.m}")

    def fits(self, shape: Sequence[int]) -> str:
        if not -len(shape) <= self.axis < len(shape):
            return f"it has {len(shape)} dimensions, no axis {self.axis}"
        size = shape[self.axis]
        return f"its {size} values along axis {self.axis} are no multiple of {self.m}" if size % self.m else ""

    def rows(self, values: Tensor) -> Tensor:
        return values.movedim(self.axis, -1).reshape(-1, 1)

    def spread(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        moved = list(shape)
        moved.append(moved.pop(self.axis))
        return units.view(*moved).movedim(-1, self.axis)

    @property
    def fixed(self) -> float | None:
        return 1 - self.n / self.m

    def choose(self, scores: Tensor, ratio: float) -> Tensor:
        """Keep the best of every group of m, (units,) bool: n of them, or more while a schedule's `ratio` is smaller."""
        groups = scores.view(-1, self.m)
        keep = max(self.n, round(self.m * (1 - ratio)))
        best = groups.argsort(dim=1, descending=True, stable=True)[:, :keep]
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(1, best, True).view(-1)


UNSTRUCTURED = Unstructured()
