"""Parameters as the graph reads them, so that a rule knows which stored dimension runs along which dimension of what is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compresskit.prune.structure.channel_sets import expand_along, tighten, varying_dims

#: A dimension of a parameter, and the indices along it that are read.
ParameterAxis = tuple[int, Tensor]


@dataclass(frozen=True)
class ParameterView:
    """A parameter or buffer as the graph reads it, after views, permutations and look-ups, or a value computed from parameters.

    axes: for each dimension of the stored tensor, the index along it that each value read comes from, in the shape that is read.
    moved: whether that differs from the stored layout.
    same_layout: other tensors that it is computed from with the same layout, as (name, its dimension for each of ours or None);
        only parametrized weights (weight norm) have some.
    computed: whether it is computed from the parameter and others of its layout (weight standardization).
    reduced: stored dimensions that were reduced: every value read comes from all indices along them.
    """

    name: str
    axes: tuple[Tensor, ...]
    moved: bool = False
    same_layout: tuple[tuple[str, tuple[int | None, ...]], ...] = ()
    computed: bool = False
    reduced: frozenset[int] = frozenset()

    @staticmethod
    def of(name: str, shape: tuple[int, ...], same_layout: tuple[tuple[str, tuple[int | None, ...]], ...] = ()) -> ParameterView:
        """A whole tensor in its stored layout."""
        axes = tuple(expand_along(torch.arange(n), d, shape) for d, n in enumerate(shape))
        return ParameterView(name, axes, same_layout=same_layout)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which it is read."""
        return tuple(self.axes[0].shape) if self.axes else ()

    @property
    def numel(self) -> int:
        """Number of values read."""
        return self.axes[0].numel() if self.axes else 1

    def map(self, function: Callable[[Tensor], Tensor]) -> ParameterView:
        """The view after an operator that only moves values."""
        return replace(self, axes=tuple(tighten(function(a)) for a in self.axes), moved=True)

    def map_parts(self, function: Callable[[Tensor], Any]) -> list[ParameterView]:
        """The views after an operator that cuts a tensor into parts."""
        columns = zip(*(function(a) for a in self.axes), strict=True)
        return [replace(self, axes=tuple(axes), moved=True) for axes in columns]

    def axis(self, dim: int) -> ParameterAxis | None:
        """The stored dimension that runs along `dim` of what is read, and its indices; None where there is not exactly one."""
        axes = []
        for stored, indices in enumerate(self.axes):
            along = varying_dims(indices)
            if dim in along:
                if along != [dim]:
                    return None
                axes.append((stored, indices.movedim(dim, 0).reshape(indices.shape[dim], -1)[:, 0]))
        return axes[0] if len(axes) == 1 else None
