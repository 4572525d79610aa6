"""The exact choice of channels and bits: a mixed-integer linear program.

The bytes of a weight are the product of its bits, the channels it makes and the channels it reads: three choices. The product is
made linear without loss: for each weight and pair of groups there is a variable for each combination of their options, 1 for the
one that is taken and 0 for the others, whose sums along each choice are the variables of that choice. Where those are whole
numbers, so are these, so the program's optimum is that of the product.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compresskit.search.joint.file_size import CHANNEL_BYTES, FLOAT_BITS, Side, StoredWeight, stored_bits

SOLVER_SECONDS = 30.0  # after which the solver returns the best choice so far
GAP = 1e-4  # of the loss, at which a choice counts as the best


@dataclass(frozen=True, kw_only=True)
class Options:
    """What can be chosen, and what the model loses by it.

    groups: for each group, channels that stay -> loss. layers: for each layer, bits -> loss. weights: of the file.
    """

    groups: tuple[Mapping[int, float], ...]
    layers: tuple[Mapping[int, float], ...]
    weights: tuple[StoredWeight, ...]

    def loss(self, kept: Sequence[int], bits: Sequence[int]) -> float:
        """What the model loses if the losses of all choices add up."""
        chosen = zip((*self.groups, *self.layers), (*kept, *bits), strict=True)
        return sum(losses[option] for losses, option in chosen)


def best_choice(options: Options, most: float) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The channels that stay in each group and the bits of each layer, of least loss within `most` bytes; None where none is.

    Bytes are those of `modelled_bytes`, but for parts of a byte.
    """
    return _Program(options).solved(most)


class _Program:
    """Columns are variables, rows are constraints; `cost` is bytes, `loss` is what is minimised."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.losses: list[float] = []
        self.cost: list[float] = []
        self.entries: list[tuple[int, int, float]] = []  # row, column, coefficient
        self.right: list[float] = []
        self.constant = 0.0
        self.groups = [self._choice(losses) for losses in options.groups]
        self.layers = [self._choice(losses) for losses in options.layers]
        self.whole = len(self.losses)  # variables before this one are whole numbers
        for weight in options.weights:
            self._add(weight)

    def _column(self, loss: float = 0.0, cost: float = 0.0) -> int:
        self.losses.append(loss)
        self.cost.append(cost)
        return len(self.losses) - 1

    def _row(self, terms: Sequence[tuple[int, float]], right: float) -> None:
        self.entries += [(len(self.right), column, value) for column, value in terms]
        self.right.append(right)

    def _choice(self, losses: Mapping[int, float]) -> dict[int, int]:
        """A variable for each option, of which one is 1."""
        columns = {option: self._column(loss) for option, loss in losses.items()}
        self._row([(column, 1.0) for column in columns.values()], 1.0)
        return columns

    def _add(self, weight: StoredWeight) -> None:
        """The bytes of a weight: one product for each pair of what its two dimensions are sums of."""
        for a, b in itertools.product(self._parts(weight.outputs), self._parts(weight.inputs)):
            self._add_product(weight, a, b)
        for group, each in weight.outputs.groups.items() if weight.layer is not None else ():
            for kept, column in self.groups[group].items():
                self.cost[column] += CHANNEL_BYTES * each * kept
        self.constant += CHANNEL_BYTES * weight.outputs.fixed if weight.layer is not None else 0

    @staticmethod
    def _parts(side: Side) -> list[tuple[int | None, int]]:
        """(group, entries of each channel), and (None, entries that always stay)."""
        return [*side.groups.items(), *([(None, side.fixed)] if side.fixed else [])]

    def _add_product(self, weight: StoredWeight, a: tuple[int | None, int], b: tuple[int | None, int]) -> None:
        factor = weight.rest * a[1] * b[1] / 8
        groups = list(dict.fromkeys(group for group in (a[0], b[0]) if group is not None))
        powers = [(a[0], b[0]).count(group) for group in groups]
        choices = [self.groups[group] for group in groups]
        if weight.layer is None:
            factor *= FLOAT_BITS
        else:
            choices.append(self.layers[weight.layer])
        if not choices:
            self.constant += factor
            return
        columns: dict[tuple[int, ...], int] = {}
        for combination in itertools.product(*choices):
            bytes_ = factor * (1 if weight.layer is None else stored_bits(combination[-1]))
            for kept, power in zip(combination, powers, strict=False):
                bytes_ *= kept**power
            if len(choices) == 1:
                self.cost[choices[0][combination[0]]] += bytes_
            else:
                columns[combination] = self._column(cost=bytes_)
        for place, choice in enumerate(choices if columns else ()):
            for option, column in choice.items():
                along = [(c, 1.0) for combination, c in columns.items() if combination[place] == option]
                self._row([*along, (column, -1.0)], 0.0)

    def solved(self, most: float) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        from scipy.optimize import Bounds, LinearConstraint, milp  # heavy, and only this needs it
        from scipy.sparse import csr_array

        rows, columns, values = (np.array(part) for part in zip(*self.entries, strict=True))
        equal = csr_array((values, (rows, columns)), shape=(len(self.right), len(self.losses)))
        losses, cost = np.array(self.losses), np.array(self.cost)
        largest, scale = max(float(np.abs(losses).max()), 1e-300), max(float(cost.max()), 1e-300)
        found: Any = milp(
            1e3 * losses / largest,  # the solver stops at an absolute gap of 1e-6
            integrality=(np.arange(len(losses)) < self.whole).astype(int),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(equal, self.right, self.right),
                LinearConstraint(cost[None] / scale, -np.inf, (most - self.constant) / scale),
            ],
            options={"mip_rel_gap": GAP, "time_limit": SOLVER_SECONDS},
        )
        if found.x is None:
            return None
        kept, bits = (
            tuple(max(choice, key=lambda option: found.x[choice[option]]) for choice in choices)
            for choices in (self.groups, self.layers)
        )
        return kept, bits
