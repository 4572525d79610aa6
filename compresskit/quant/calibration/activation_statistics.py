"""Statistics of values inside a captured graph, collected over calibration data without keeping the data.

collect_statistics(graph, batches, nodes)    range, mean and a sample of several values, for `smooth_`
input_moments(graph, batches, node)          second moment and mean magnitude of one value, for GPTQ and AWQ
patch_moments(graph, batches, conv)          second moment of the patches that a convolution reads, for GPTQ
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError
from compresskit.base.task import Inputs
from compresskit.graph.capture import module_path
from compresskit.graph.interpreter import run_graph
from compresskit.graph.normalize import Node


@dataclass(frozen=True, eq=False)
class InputMoments:
    """Moments of a value x whose channels are its last dimension.

    second: E[x x^T], (channels, channels) float64. mean: E|x|, (channels,).
    """

    second: Tensor
    mean: Tensor


@dataclass(frozen=True, eq=False)
class ActivationStatistics:
    """Statistics of a value whose channels are its last dimension.

    low, high, mean: of each channel, (channels,). sample: some positions, (positions, channels).
    """

    low: Tensor
    high: Tensor
    mean: Tensor
    sample: Tensor


def input_moments(body: fx.GraphModule, batches: Sequence[Inputs], node: Node) -> InputMoments:
    """Collect the moments of one value; keeps one batch and one (channels, channels) matrix in memory.

    Raises DataError where the value is nan or infinite.
    """
    second = mean = torch.zeros(())
    positions = 0
    for inputs in batches:
        with torch.no_grad():
            x = _rows(node, run_graph(body, pytree.tree_leaves(inputs), until=node)).float()
        second = second + second_moment(x)
        mean = mean + x.abs().sum(0).double()
        positions += len(x)
    return InputMoments(second / max(positions, 1), (mean / max(positions, 1)).float())


def patch_moments(body: fx.GraphModule, batches: Sequence[Inputs], conv: Node) -> Tensor:
    """E[p p^T] of the patches p that a convolution multiplies its weights with.

    Args:
        body, batches: the graph, and inputs to run it on; one batch is in memory at a time.
        conv: a node of `CONVS`.

    Returns (groups, inputs, inputs) float64; inputs are those of one output channel, in the order of its weights.
    Raises DataError where the inputs of the convolution are nan or infinite.
    """
    second, positions = torch.zeros(()), 0
    for inputs in batches:
        with torch.no_grad():
            x = run_graph(body, pytree.tree_leaves(inputs), until=conv.args[0]).float()
        if not torch.isfinite(x).all():
            raise DataError(f"{conv.name}: its inputs are nan or infinite on the calibration data; clean the data")
        x, groups = patches(x, conv, conv.args[1].meta["val"].shape[2:])
        # (batch, *positions, channels, *kernel) -> (groups, rows, inputs)
        rows = x.flatten(0, x.ndim // 2 - 1).unflatten(1, (groups, -1)).transpose(0, 1).flatten(2)
        second = second + second_moment(rows)
        positions += rows.shape[1]
    return second / max(positions, 1)


def second_moment(rows: Tensor) -> Tensor:
    """The sum of x x^T over rows x: (..., rows, inputs) -> (..., inputs, inputs), float64, summed in fp32 where that holds it."""
    found = (rows.transpose(-2, -1) @ rows).double()
    if bool(torch.isfinite(found).all()):
        return found
    rows = rows.double()
    return rows.transpose(-2, -1) @ rows


def patches(x: Tensor, conv: Node, kernel: Sequence[int]) -> tuple[Tensor, int]:
    """A view of the patches of a convolution's input, and the convolution's groups.

    x: (batch, channels, *sizes). kernel: sizes of it. Returns (batch, *positions, channels, *kernel), without copies of patches.
    """
    rank = len(kernel)
    stride, padding, dilation = (_each_dimension(conv, place, rank, default) for place, default in ((3, 1), (4, 0), (5, 1)))
    x = F.pad(x, [n for pad in reversed(padding) for n in (pad, pad)])
    for dim, size in enumerate(kernel):
        x = x.unfold(2 + dim, (size - 1) * dilation[dim] + 1, stride[dim])[..., :: dilation[dim]]
    return x.movedim(1, 1 + rank), int(conv.args[6]) if len(conv.args) > 6 else 1


def _each_dimension(conv: Node, place: int, rank: int, default: int) -> list[int]:
    """A setting of a convolution, one number for each dimension of its kernel."""
    given = conv.args[place] if len(conv.args) > place else [default]
    numbers = [int(n) for n in (given if isinstance(given, list | tuple) else [given])]
    return numbers if len(numbers) == rank else numbers * rank


def collect_statistics(
    body: fx.GraphModule, batches: Sequence[Inputs], nodes: Sequence[Node], *, sample: int
) -> dict[Node, ActivationStatistics]:
    """Run all batches once and collect statistics of several values, with a sample of about `sample` positions each.

    Raises DataError where a value is nan or infinite.
    """
    per_batch = max(1, sample // max(1, len(batches)))
    collectors = {node: _Collector() for node in nodes}

    def visit(node: Node, value: Any) -> None:
        if node in collectors:
            collectors[node].update(_rows(node, value), per_batch)

    with torch.no_grad():
        for inputs in batches:
            run_graph(body, pytree.tree_leaves(inputs), visit)
    return {node: collector.statistics() for node, collector in collectors.items()}


class _Collector:
    """Running extremes, sum and sample of one value."""

    def __init__(self) -> None:
        self.extremes: tuple[Tensor, Tensor] | None = None
        self.total: Tensor = torch.zeros(())
        self.positions = 0
        self.sample: list[Tensor] = []

    def update(self, x: Tensor, per_batch: int) -> None:
        """Add the positions of one batch, (positions, channels)."""
        low, high = x.amin(0), x.amax(0)
        if self.extremes is not None:
            low, high = torch.minimum(self.extremes[0], low), torch.maximum(self.extremes[1], high)
        self.extremes = (low, high)
        self.total = self.total + x.sum(0)
        self.positions += len(x)
        self.sample.append(x[:: max(1, len(x) // per_batch)][:per_batch].clone())

    def statistics(self) -> ActivationStatistics:
        assert self.extremes is not None
        return ActivationStatistics(*self.extremes, self.total / self.positions, torch.cat(self.sample))


def _rows(node: Node, value: Tensor) -> Tensor:
    """A value as (positions, channels). Raises DataError where it is nan or infinite."""
    x = value.reshape(-1, value.shape[-1])
    if not torch.isfinite(x).all():
        raise DataError(
            f"{module_path(node) or node.name}: what it hands on is nan or infinite on the calibration data; clean the data,"
            " or look at that layer"
        )
    return x
