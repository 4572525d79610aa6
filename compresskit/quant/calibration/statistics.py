"""What calibration data says of one value of a graph, without keeping the data: second moment, mean and largest magnitude."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError
from compresskit.base.task import Inputs
from compresskit.graph.capture import module_path
from compresskit.graph.interpreter import run_graph
from compresskit.graph.normalize import Node


@dataclass(frozen=True, eq=False)
class Moments:
    """Of a value whose channels stand in its last dimension.

    second: E[x x^T], (channels, channels) float64. mean: E|x|, largest: max |x|, (channels,). rows: positions seen.
    """

    second: Tensor
    mean: Tensor
    largest: Tensor
    rows: int


def moments(body: fx.GraphModule, batches: Sequence[Inputs], node: Node) -> Moments:
    """Run all batches up to a node and sum; holds one batch and one (channels, channels) matrix.

    Raises DataError where a value is nan or infinite.
    """
    second = mean = largest = torch.zeros(())
    rows = 0
    for value in values(body, batches, node):
        x = value.reshape(-1, value.shape[-1]).float()
        if not torch.isfinite(x).all():
            raise DataError(
                f"{module_path(node) or node.name}: what it hands on is nan or infinite on the calibration data; clean the data,"
                " or look at that layer"
            )
        second = second + (x.T @ x).double()
        mean = mean + x.abs().sum(0).double()
        largest = torch.maximum(largest, x.abs().amax(0))
        rows += len(x)
    return Moments(second / max(rows, 1), (mean / max(rows, 1)).float(), largest, rows)


@dataclass(frozen=True, eq=False)
class Seen:
    """Of a value whose channels stand in its last dimension: extremes and mean of each, (channels,), and some positions of it,
    (positions, channels).
    """

    low: Tensor
    high: Tensor
    mean: Tensor
    some: Tensor


def watch(body: fx.GraphModule, batches: Sequence[Inputs], nodes: Sequence[Node], sample: int) -> dict[Node, Seen]:
    """Run all batches once and look at several values; at most about `sample` positions of each are kept.

    Raises DataError where a value is nan or infinite.
    """
    share = max(1, sample // max(1, len(batches)))
    collected = {node: _Collected() for node in nodes}

    def visit(node: Node, value: Any) -> None:
        if node in collected:
            collected[node].update(value, share, module_path(node) or node.name)

    with torch.no_grad():
        for inputs in batches:
            run_graph(body, pytree.tree_leaves(inputs), visit)
    return {node: collected[node].statistics() for node in nodes}


class _Collected:
    """Running extremes, sum and samples of one value."""

    low: Tensor | None = None
    high: Tensor | None = None
    total: Tensor | float = 0
    rows: int = 0

    def __init__(self) -> None:
        self.some: list[Tensor] = []

    def update(self, value: Tensor, share: int, where: str) -> None:
        x = value.reshape(-1, value.shape[-1])
        low, high, total = x.amin(0), x.amax(0), x.sum(0)
        if not torch.isfinite(total).all():
            raise DataError(
                f"{where}: what it hands on is nan or infinite on the calibration data; clean the data, or look at that layer"
            )
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        self.total = self.total + total
        self.rows += len(x)
        every = max(1, len(x) // share)
        self.some.append(x[::every][:share].clone())

    def statistics(self) -> Seen:
        assert self.low is not None
        assert self.high is not None
        assert isinstance(self.total, Tensor)
        return Seen(self.low, self.high, self.total / self.rows, torch.cat(self.some))


def values(body: fx.GraphModule, batches: Sequence[Inputs], node: Node) -> Iterator[Tensor]:
    """The value of a node for each batch; nothing that it does not depend on is run."""
    for inputs in batches:
        with torch.no_grad():
            value: Tensor = run_graph(body, pytree.tree_leaves(inputs), until=node)
        yield value
