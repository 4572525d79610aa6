"""Choose the bits of each layer's weights under a budget: measured sensitivities, then an exact choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import nn

from compresskit.base.errors import SettingError
from compresskit.base.inputs import Batches, first_and_all
from compresskit.metrics import decibels
from compresskit.quant.accuracy_target.layer_sensitivity import LayerSensitivity, layer_sensitivities
from compresskit.quant.build import build_quantized
from compresskit.quant.effort.samples import OutputError, joined_samples
from compresskit.quant.model import CALIBRATION_BYTES
from compresskit.quant.numerics.bit_widths import Bits
from compresskit.quant.numerics.observers import MinMax
from compresskit.quant.numerics.targets import X86, Target, check_target

WIDTHS = (2, 3, 4, 5, 6, 8)
FRONTIER_POINTS = 12

Weighting = Literal["weights", "macs"]


@dataclass(frozen=True, kw_only=True)
class BitPlan:
    """The bits of each layer's weights; prints as a table, with the frontier of other budgets.

    bits: for `quantize_static(bits=)` and `prepare_qat(bits=)`. layers: what each layer costs at each width.
    average: bits of a weight, or of a weight in a MAC. weighting: which of the two. decibels: the predicted SQNR of the outputs
        with the rounding of weights alone. frontier: (average, decibels) of other budgets.
    """

    bits: dict[str, Bits]
    layers: tuple[LayerSensitivity, ...]
    average: float
    weighting: Weighting
    decibels: float
    frontier: tuple[tuple[float, float], ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights of these layers as the file stores them, without the operators that unpack them."""
        return sum(_stored_bytes(layer.weights, self.bits[layer.layer].weights or 8) for layer in self.layers)

    def __str__(self) -> str:
        widths = sorted(self.layers[0].noise)
        head = ["layer", "weights", "MACs", *(f"{width} bits" for width in widths), "chosen"]
        table = [head]
        for layer in self.layers:
            noise = [f"{decibels(1.0, layer.noise[width], most=120.0):.1f} dB" for width in widths]
            table.append([layer.layer, f"{layer.weights:,}", f"{layer.macs:,}", *noise, str(self.bits[layer.layer].weights)])
        columns = [max(len(row[i]) for row in table) for i in range(len(head))]
        lines = [_table_row(row, columns) for row in table]
        frontier = ", ".join(f"{average:.2f} bits {quality:.1f} dB" for average, quality in self.frontier)
        total = f"{self.average:.2f} bits a weight" + (" of a MAC" if self.weighting == "macs" else "")
        first = f"{total}, {self.weight_bytes:,} bytes of weights, {self.decibels:.1f} dB predicted"
        return "\n".join([first, *lines, f"frontier: {frontier}"])


def _table_row(row: Sequence[str], columns: Sequence[int]) -> str:
    return "  ".join(
        cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, columns, strict=True))
    )


def choose_bits(
    model: nn.Module,
    batches: Batches,
    *,
    average: float | None = None,
    weight_bytes: int | None = None,
    weighting: Weighting = "weights",
    widths: Sequence[int] = WIDTHS,
    target: Target = X86,
    skip: tuple[str, ...] = (),
    samples: int = 64,
) -> BitPlan:
    """Choose how many bits the weights of each layer take, such that the outputs lose least under a budget.

    Each layer is rounded alone to each width, and the error of the outputs is measured; errors of several layers are taken to add
    up. The choice is then exact: a mixed-integer linear program (scipy's `milp`), as in HAWQ-V3 (Yao et al., arXiv 2011.10680).
    No labels are needed.

    Args:
        model: any float module; it is not changed.
        batches: an iterable of inputs, or one batch.
        average: the largest mean bits of a weight. Give this or `weight_bytes`.
        weight_bytes: the most bytes that the weights may take in the file.
        weighting: "weights" counts each weight once in the average, "macs" as often as it is multiplied.
        widths: bits to choose from, 2 to 8.
        target, skip: as in `quantize_static`; layers that stay float are not counted.
        samples: how many samples the sensitivities are measured on.

    Raises SettingError for settings out of range, or a budget below the least that is possible, which it names; DataError and
    ModelError as `quantize_static`.
    """
    _check(average, weight_bytes, weighting, widths, samples)
    check_target(target, "choose_bits")
    example, data = first_and_all(batches, "choose_bits")
    inputs = joined_samples(list(data), samples)
    quantized = build_quantized(model, example, target, MinMax, skip=tuple(skip)).eval()
    quantized.calibrate_([inputs])
    error = OutputError(model, [inputs], max(1, CALIBRATION_BYTES // quantized.row_bytes))
    layers = layer_sensitivities(quantized, error, sorted(set(widths)))
    if weight_bytes is not None:
        costs = [{bits: float(_stored_bytes(layer.weights, bits)) for bits in layer.noise} for layer in layers]
        chosen = _solve(layers, costs, float(weight_bytes), "weight_bytes")
    else:
        assert average is not None
        chosen = _solve(layers, _average_costs(layers, weighting), average, "average")
    shares = _average_costs(layers, weighting)
    return BitPlan(
        bits={layer.layer: Bits(weights=bits) for layer, bits in zip(layers, chosen, strict=True)},
        layers=tuple(layers),
        average=sum(share[bits] for share, bits in zip(shares, chosen, strict=True)),
        weighting=weighting,
        decibels=_quality(layers, chosen),
        frontier=_frontier(layers, shares),
    )


def _check(average: float | None, weight_bytes: int | None, weighting: str, widths: Sequence[int], samples: int) -> None:
    if (average is None) == (weight_bytes is None):
        raise SettingError(f"choose_bits: wanted average= or weight_bytes=, one of them, got {average} and {weight_bytes}")
    if weighting not in ("weights", "macs"):
        raise SettingError(f'choose_bits(weighting=...): wanted "weights" or "macs", got {weighting!r}')
    if not widths or any(not isinstance(bits, int) or not 2 <= bits <= 8 for bits in widths):
        raise SettingError(f"choose_bits(widths=...): wanted whole numbers of 2..8, got {widths!r}")
    if samples < 1:
        raise SettingError(f"choose_bits(samples=...): wanted a whole number >= 1, got {samples}")


def _stored_bytes(weights: int, bits: int) -> int:
    """Bytes of weights in a file, without the operators that unpack them."""
    return math.ceil(weights * (8 if bits == 7 else bits) / 8)


def _average_costs(layers: Sequence[LayerSensitivity], weighting: Weighting) -> list[dict[int, float]]:
    """What each layer adds to the average at each width."""
    sizes = [layer.weights if weighting == "weights" else layer.macs for layer in layers]
    total = max(1, sum(sizes))
    return [{bits: bits * size / total for bits in layer.noise} for layer, size in zip(layers, sizes, strict=True)]


def _solve(layers: Sequence[LayerSensitivity], costs: Sequence[dict[int, float]], most: float, name: str) -> list[int]:
    """The width of each layer: least noise among all choices within the budget.

    Raises SettingError where even the fewest bits cost more than the budget.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # heavy, and only this needs it

    least = sum(min(cost.values()) for cost in costs)
    if least > most * (1 + 1e-9):
        raise SettingError(f"choose_bits({name}=...): the least that these widths allow is {least:,.6g}, got {most:,.6g}")
    choices = [(i, bits) for i, layer in enumerate(layers) for bits in layer.noise]
    noise = np.array([layers[i].noise[bits] for i, bits in choices])
    noise = np.where(np.isfinite(noise), noise, 1e12)
    one_each = np.array([[float(i == layer) for i, _ in choices] for layer in range(len(layers))])
    price = np.array([[costs[i][bits] for i, bits in choices]])
    found = milp(
        noise / max(noise.max(), 1e-300),
        integrality=np.ones(len(choices)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(price, -np.inf, most * (1 + 1e-9))],
        options={"mip_rel_gap": 1e-6},
    )
    return [bits for (_, bits), taken in zip(choices, found.x, strict=True) if taken > 0.5]


def _quality(layers: Sequence[LayerSensitivity], chosen: Sequence[int]) -> float:
    """Predicted SQNR in dB: errors of different layers add up."""
    return decibels(1.0, sum(layer.noise[bits] for layer, bits in zip(layers, chosen, strict=True)), most=120.0)


def _frontier(layers: Sequence[LayerSensitivity], shares: Sequence[dict[int, float]]) -> tuple[tuple[float, float], ...]:
    """(average bits, dB) of the best choices from the fewest bits to the most."""
    ends = [sum(pick(share.values()) for share in shares) for pick in (min, max)]
    points = set()
    for most in np.linspace(ends[0], ends[1], FRONTIER_POINTS):
        chosen = _solve(layers, shares, float(most), "average")
        points.add((sum(share[bits] for share, bits in zip(shares, chosen, strict=True)), _quality(layers, chosen)))
    return tuple(sorted(points))
