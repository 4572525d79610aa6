"""What rules are made of: parameters as the graph reads them, the table of rules, small helpers.

A rule is `(walk, node, args, kwargs) -> labels of the output`. An operator without a rule locks every channel that reaches it:
never wrong, at worst less pruned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compresskit.graph.normalize import Node, aten
from compresskit.prune.structure.channel_sets import spread, varying

if TYPE_CHECKING:
    from compresskit.prune.structure.propagate import Walk

Rule = Callable[["Walk", Node, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Raw:
    """A parameter or buffer as the graph reads it.

    axes: for each dimension of the tensor where its values come from: indices of the shape in which they are read. They follow
    the values through views, permutations and look-ups. sources: the tensors that it is computed from with the same layout, as
    (name, dimensions); more than itself for parametrized weights only.
    """

    name: str
    axes: tuple[Tensor, ...]
    moved: bool = False
    also: tuple[tuple[str, tuple[int | None, ...]], ...] = ()

    @staticmethod
    def of(name: str, shape: tuple[int, ...], also: tuple[tuple[str, tuple[int | None, ...]], ...] = ()) -> Raw:
        """A whole tensor."""
        return Raw(name, tuple(spread(torch.arange(n), d, shape) for d, n in enumerate(shape)), also=also)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which it is read."""
        return tuple(self.axes[0].shape) if self.axes else ()

    @property
    def numel(self) -> int:
        """Number of values read."""
        return self.axes[0].numel() if self.axes else 1

    def map(self, function: Callable[[Tensor], Tensor]) -> Raw:
        """The same values after an operator that moves them."""
        return Raw(self.name, tuple(function(a) for a in self.axes), moved=True, also=self.also)

    def axis(self, dim: int) -> tuple[int, Tensor] | None:
        """The dimension of the tensor that runs along `dim` of what is read, and the indices met; None where it is not one."""
        found = []
        for own, indices in enumerate(self.axes):
            along = varying(indices)
            if dim in along:
                if along != [dim]:
                    return None
                found.append((own, indices.movedim(dim, 0).reshape(indices.shape[dim], -1)[:, 0]))
        return found[0] if len(found) == 1 else None


def rules_of(table: dict[Any, Rule]) -> Callable[..., Callable[[Rule], Rule]]:
    """A decorator that enters a function into a table as the rule of some operators."""

    def of(*targets: Any) -> Callable[[Rule], Rule]:
        def enter(function: Rule) -> Rule:
            table.update(dict.fromkeys(targets, function))
            return function

        return enter

    return of


def overloads(*names: str) -> list[Any]:
    """All overloads of ATen operators, and of their in-place forms, that this torch has."""
    found = []
    for name in (n for text in names for base in text.split() for n in (base, f"{base}_")):
        packet = getattr(aten, name, None)
        if packet is not None:
            found += [getattr(packet, o) for o in packet.overloads() if "out" not in o]
    return found


def argument(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, default: Any = None) -> Any:
    """An argument of an operator by name, wherever it was passed."""
    if name in kwargs:
        return kwargs[name]
    for position, entry in enumerate(node.target._schema.arguments):
        if entry.name == name:
            return args[position] if position < len(args) else entry.default_value
    return default
