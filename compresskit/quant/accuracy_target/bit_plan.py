"""The bits of each layer's weights under a budget: the exact choice, and the plan that holds it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from compresskit.base.errors import SettingError
from compresskit.base.files import atomic
from compresskit.measure.charts import Series, draw, svg
from compresskit.metrics import decibels
from compresskit.quant.accuracy_target.layer_sensitivity import LayerSensitivity
from compresskit.quant.numerics.bit_widths import Bits

FRONTIER_POINTS = 12
CLEAN_DECIBELS = 120.0  # of what loses nothing

Sensitivity = Literal["outputs", "fisher", "metric"]
Weighting = Literal["weights", "macs"]
_LOSSES: Mapping[str, str] = {
    "outputs": "predicted SQNR of the outputs, dB",
    "fisher": "predicted growth of the loss",
    "metric": "predicted loss of the metric, %",
}


@dataclass(frozen=True, kw_only=True)
class BitBudget:
    """What the bits of all layers may cost together.

    setting: the argument of `choose_bits` that gives it, for messages. unit: of what it counts, for people.
    costs: of each layer at each width, in the order of the layers. most: the budget.
    """

    setting: str
    unit: str
    costs: tuple[dict[int, float], ...]
    most: float

    def of(self, widths: Sequence[int]) -> float:
        """The cost of a width for each layer."""
        return sum(cost[bits] for cost, bits in zip(self.costs, widths, strict=True))

    def fits(self, widths: Sequence[int]) -> bool:
        """Whether a width for each layer can be had, and lies within the budget."""
        known = all(bits in cost for cost, bits in zip(self.costs, widths, strict=True))
        return known and self.of(widths) <= self.most * (1 + 1e-9)


@dataclass(frozen=True, kw_only=True)
class MeasuredBits:
    """A choice that was measured with all layers rounded at once. name: how it was made. lost: in percent, as in `repair`."""

    name: str
    widths: tuple[int, ...]
    cost: float
    lost: float


@dataclass(frozen=True, kw_only=True)
class BitPlan:
    """The bits of each layer's weights; prints as a table, with the frontier of other budgets.

    bits: for `quantize_static(bits=)` and `prepare_qat(bits=)`. layers: what each layer costs at each width.
    sensitivity: what their `noise` is, as in `choose_bits`. unit, cost: what was limited, and how much of it the plan takes.
    predicted: what the model loses if the losses of single layers add up. frontier: (cost, predicted) of other budgets.
    measured: choices that were measured, the best first; empty with `check=False`. judge: what on.
    """

    bits: dict[str, Bits]
    layers: tuple[LayerSensitivity, ...]
    sensitivity: Sensitivity
    unit: str
    cost: float
    predicted: float
    frontier: tuple[tuple[float, float], ...]
    measured: tuple[MeasuredBits, ...] = ()
    judge: str = ""

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of the weights of each layer, in the order of `layers`."""
        return tuple(self.bits[layer.layer].weights or 8 for layer in self.layers)

    @property
    def average(self) -> float:
        """Mean bits of a weight."""
        return _mean(self.widths, [layer.weights for layer in self.layers])

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights of these layers as the file stores them, without the operators that unpack them."""
        return sum(stored_bytes(layer.weights, bits) for layer, bits in zip(self.layers, self.widths, strict=True))

    def plot(self, path: str | Path) -> Path:
        """Write the frontier as an SVG picture, with the plan's own point; returns the path."""
        frontier = Series("the best choices for other budgets", [(cost, self._shown(loss)) for cost, loss in self.frontier])
        own = Series("this plan", [(self.cost, self._shown(self.predicted))])
        title = f"{self.average:.2f} bits a weight on average, {self.weight_bytes:,} bytes"
        with atomic(path) as written:
            written.write_text(svg(draw(title, self.unit, _LOSSES[self.sensitivity], [frontier, own], lines=True)))
        return Path(path)

    def _shown(self, loss: float) -> float:
        return decibels(1.0, loss, most=CLEAN_DECIBELS) if self.sensitivity == "outputs" else loss

    def _text(self, loss: float) -> str:
        ends = {"outputs": " dB", "fisher": "", "metric": " %"}
        return (f"{loss:.3g}" if self.sensitivity == "fisher" else f"{self._shown(loss):.1f}") + ends[self.sensitivity]

    def __str__(self) -> str:
        every = sorted({bits for layer in self.layers for bits in layer.noise})
        table = [["layer", "weights", "MACs", *(f"{width} bits" for width in every), "chosen"]]
        for layer, chosen in zip(self.layers, self.widths, strict=True):
            noise = [self._text(layer.noise[width]) if width in layer.noise else "" for width in every]
            table.append([layer.layer, f"{layer.weights:,}", f"{layer.macs:,}", *noise, str(chosen)])
        columns = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        head = f"{self.average:.2f} bits a weight, {self.weight_bytes:,} bytes of weights"
        if self.unit not in (BITS_OF_WEIGHTS, STORED_BYTES):
            head += f", {self.cost:.6g} {self.unit}"
        measured = [f"measured: {self.judge}"] if self.measured else []
        measured += [f"* {choice.name}: {choice.lost:.3f} % lost at {choice.cost:.6g} {self.unit}" for choice in self.measured]
        frontier = ", ".join(f"{cost:.2f} {self.unit} {self._text(loss)}" for cost, loss in self.frontier)
        lines = [f"{head}, {self._text(self.predicted)} predicted", *(_table_row(row, columns) for row in table)]
        return "\n".join([*lines, *measured, f"frontier: {frontier}"])


BITS_OF_WEIGHTS, BITS_OF_MACS, STORED_BYTES, TABLE_COST = "bits a weight", "bits a weight of a MAC", "bytes of weights", "cost"


def average_budget(layers: Sequence[LayerSensitivity], average: float, weighting: Weighting) -> BitBudget:
    """The mean bits of a weight; weighted by MACs, each counted as often as it is multiplied: the bit operations."""
    macs = weighting == "macs"
    sizes = [layer.macs if macs else layer.weights for layer in layers]
    total = max(1, sum(sizes))
    costs = tuple({bits: bits * size / total for bits in layer.noise} for layer, size in zip(layers, sizes, strict=True))
    return BitBudget(setting="average", unit=BITS_OF_MACS if macs else BITS_OF_WEIGHTS, costs=costs, most=average)


def bytes_budget(layers: Sequence[LayerSensitivity], most: float) -> BitBudget:
    """Bytes of the weights as the file stores them."""
    costs = tuple({bits: float(stored_bytes(layer.weights, bits)) for bits in layer.noise} for layer in layers)
    return BitBudget(setting="weight_bytes", unit=STORED_BYTES, costs=costs, most=most)


def table_budget(layers: Sequence[LayerSensitivity], table: Mapping[str, Mapping[int, float]], limit: float) -> BitBudget:
    """A cost of the caller's own for each layer and width."""
    costs = tuple({bits: float(table[layer.layer][bits]) for bits in layer.noise} for layer in layers)
    return BitBudget(setting="limit", unit=TABLE_COST, costs=costs, most=limit)


def stored_bytes(weights: int, bits: int) -> int:
    """Bytes of weights in a file, without the operators that unpack them."""
    return math.ceil(weights * (8 if bits == 7 else bits) / 8)


def predicted_loss(layers: Sequence[LayerSensitivity], widths: Sequence[int]) -> float:
    """What the model loses if the losses of single layers add up."""
    return sum(layer.noise[bits] for layer, bits in zip(layers, widths, strict=True))


def best_widths(
    layers: Sequence[LayerSensitivity], budget: BitBudget, *, least: int = 0, most: float | None = None
) -> tuple[int, ...]:
    """The width of each layer, `least` at least: the least loss of all choices within the budget, by a mixed-integer program.

    most: in the place of the budget's own. Raises SettingError where even the cheapest widths cost more.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # heavy, and only this needs it

    most = budget.most if most is None else most
    cheapest = sum(min(price for bits, price in cost.items() if bits >= least) for cost in budget.costs)
    if cheapest > most * (1 + 1e-9):
        raise SettingError(
            f"choose_bits({budget.setting}=...): the least that these widths allow is {cheapest:,.6g}, got {most:,.6g}"
        )
    choices = [(i, bits) for i, layer in enumerate(layers) for bits in layer.noise if bits >= least]
    noise = np.array([layers[i].noise[bits] for i, bits in choices])
    finite = noise[np.isfinite(noise)]
    top = float(finite.max()) if len(finite) else 1.0
    noise = np.where(np.isfinite(noise), noise, 1e3 * max(top, 1e-300))
    one_each = np.array([[float(i == layer) for i, _ in choices] for layer in range(len(layers))])
    price = np.array([[budget.costs[i][bits] for i, bits in choices]])
    scale = max(float(price.max()), 1e-300)
    found = milp(
        1e4 * noise / max(top, 1e-300),  # the solver stops at an absolute gap of 1e-6
        integrality=np.ones(len(choices)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(price / scale, -np.inf, most * (1 + 1e-9) / scale)],
        options={"mip_rel_gap": 1e-6},
    )
    return tuple(bits for (_, bits), taken in zip(choices, found.x, strict=True) if taken > 0.5)


def frontier_of(layers: Sequence[LayerSensitivity], budget: BitBudget) -> tuple[tuple[float, float], ...]:
    """(cost, predicted loss) of the best choices from the cheapest to the dearest."""
    least, most = (float(sum(pick(cost.values()) for cost in budget.costs)) for pick in (min, max))
    chosen = {best_widths(layers, budget, most=float(limit)) for limit in np.linspace(least, most, FRONTIER_POINTS)}
    return tuple(sorted((budget.of(widths), predicted_loss(layers, widths)) for widths in chosen))


def _mean(values: Sequence[int], sizes: Sequence[int]) -> float:
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / max(1, sum(sizes))


def _table_row(row: Sequence[str], columns: Sequence[int]) -> str:
    return "  ".join(
        cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, columns, strict=True))
    )
