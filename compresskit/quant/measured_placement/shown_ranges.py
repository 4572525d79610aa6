"""The smallest and the largest value of each node of a graph on some rows of calibration data, by which operators are placed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs, batch_size, shapes_of
from compresskit.graph.capture import Captured
from compresskit.graph.interpreter import run_graph
from compresskit.graph.normalize import Node
from compresskit.quant.calibration.rows import in_chunks, row_count, take_rows
from compresskit.quant.model import CALIBRATION_BYTES
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.passes.placement import Placement

SHOWN_ROWS, SHOWN_MACS = (16, 256), 2e10  # that show ranges: at least, at most, and of their forward pass
SHOWN_BYTES = 2**26  # of inputs that are kept for it

Range = tuple[float, float]


class ShownRanges:
    """Measures the ranges once, at the first graph that needs them, whatever is done to its weights later."""

    def __init__(self, batches: Callable[[], Iterable[Inputs]]) -> None:
        """batches: gives those whose values show the ranges."""
        self._batches = batches
        self._measured: tuple[dict[str, Range], list[Inputs]] | None = None

    def of(self, captured: Captured, placement: Placement) -> dict[str, Range]:
        """The smallest and the largest value of each node, by its name."""
        return self._of(captured, placement)[0]

    def rows(self, captured: Captured, placement: Placement) -> list[Inputs]:
        """The rows on which they are measured, in parts small enough for memory."""
        return self._of(captured, placement)[1]

    def _of(self, captured: Captured, placement: Placement) -> tuple[dict[str, Range], list[Inputs]]:
        if self._measured is None:
            self._measured = _measured_ranges(captured, placement, self._batches())
        return self._measured


def _measured_ranges(
    captured: Captured, placement: Placement, batches: Iterable[Inputs]
) -> tuple[dict[str, Range], list[Inputs]]:
    """The smallest and the largest value of each node on some rows of batches, and these rows."""
    macs = sum(cost.macs for cost in placement.costs.values())
    rows = max(SHOWN_ROWS[0], min(SHOWN_ROWS[1], int(SHOWN_MACS / max(1, macs))))
    shown, ranges = _rows_alike(captured, batches, rows), dict[str, Range]()

    def visit(node: Node, value: Any) -> None:
        if node.op == "output" or not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return
        low, high = (float(end) for end in torch.aminmax(value.detach()))
        ranges[node.name] = union_of([ranges.get(node.name, (low, high)), (low, high)])

    with torch.no_grad():
        for inputs in shown:
            run_graph(captured.module, pytree.tree_leaves(inputs), visit)
    return ranges, shown


def shown_batches(data: Iterator[Inputs]) -> tuple[list[Inputs], Iterator[Inputs]]:
    """The first batches, as many as are kept to show ranges, and an iterator over all batches, these included."""
    taken, rows, size = list[Inputs](), 0, 0
    for inputs in data:
        taken.append(inputs)
        tensors = [v for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor)]
        rows += next((v.shape[0] for v in tensors if v.ndim), 1)
        size += sum(v.numel() * v.element_size() for v in tensors)
        if rows >= SHOWN_ROWS[1] or size >= SHOWN_BYTES:
            break
    return taken, _chained(taken, data)


def _chained(taken: Sequence[Inputs], rest: Iterator[Inputs]) -> Iterator[Inputs]:
    yield from taken
    yield from rest


def _rows_alike(captured: Captured, batches: Iterable[Inputs], rows: int) -> list[Inputs]:
    """At most so many rows of the batches of the example's shape, in parts small enough for memory; batches as they are, and at
    least one, where they cannot be cut.
    """
    example = captured.example
    alike = [inputs for inputs in batches if _form(inputs) == _form(example)] or [example]
    if not all(0 in dims for dims in captured.varying) or any(row_count(inputs) is None for inputs in alike):
        return alike[: max(1, rows // max(1, batch_size(example)))]
    total = sum(row_count(inputs) or 0 for inputs in alike)
    share = min(1.0, rows / total)
    some = [take_rows(inputs, _evenly(row_count(inputs) or 0, share)) for inputs in alike]
    largest = max(torch.Size(shape).numel() for shape in captured.shapes.values())
    row_bytes = max(1, 4 * largest // batch_size(example))
    return list(in_chunks(some, max(1, CALIBRATION_BYTES // row_bytes)))


def _form(inputs: Inputs) -> tuple[Any, ...]:
    names = list(inputs) if isinstance(inputs, dict) else len(inputs)
    return names, [shape[1:] for shape in shapes_of(inputs)]


def _evenly(count: int, share: float) -> Tensor:
    """The numbers of a share of the rows of a batch, one at least, evenly spread: rows beside each other are often alike."""
    chosen = max(1, round(share * count))
    return torch.arange(chosen) * count // chosen


def union_of(ranges: Sequence[Range]) -> Range:
    """The range that holds all of them; (0, 0) of none."""
    return min((low for low, _ in ranges), default=0.0), max((high for _, high in ranges), default=0.0)


def width_of(ends: Range, scheme: Scheme) -> float:
    """Width of the range of a scale that holds these values, and zero."""
    low, high = min(ends[0], 0.0), max(ends[1], 0.0)
    return 2 * max(-low, high) if scheme.symmetric else high - low
