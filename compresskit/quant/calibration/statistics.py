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
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor


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
    looker = _Looker(body, set(nodes), max(1, sample // max(1, len(batches))))
    with torch.no_grad():
        for inputs in batches:
            looker.run(*pytree.tree_leaves(inputs))
    return {
        node: Seen(looker.low[node], looker.high[node], looker.total[node] / looker.rows[node], torch.cat(looker.some[node]))
        for node in nodes
    }


class _Looker(fx.Interpreter):
    def __init__(self, body: fx.GraphModule, wanted: set[Node], share: int) -> None:
        super().__init__(body)
        self.wanted, self.share = wanted, share
        self.low: dict[Node, Tensor] = {}
        self.high: dict[Node, Tensor] = {}
        self.total: dict[Node, Tensor] = {}
        self.rows: dict[Node, int] = {}
        self.some: dict[Node, list[Tensor]] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n in self.wanted:
            x = value.reshape(-1, value.shape[-1])
            low, high, total = x.amin(0), x.amax(0), x.sum(0)
            if not torch.isfinite(total).all():
                raise DataError(
                    f"{module_path(n) or n.name}: what it hands on is nan or infinite on the calibration data; clean the data,"
                    " or look at that layer"
                )
            self.low[n] = torch.minimum(self.low.get(n, low), low)
            self.high[n] = torch.maximum(self.high.get(n, high), high)
            self.total[n] = self.total.get(n, 0) + total
            self.rows[n] = self.rows.get(n, 0) + len(x)
            every = max(1, len(x) // self.share)
            self.some.setdefault(n, []).append(x[::every][: self.share].clone())
        return value


def values(body: fx.GraphModule, batches: Sequence[Inputs], node: Node) -> Iterator[Tensor]:
    """What a node of the graph computes for each batch; nothing that it does not hang on is run."""
    needed, pending = {node}, [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in needed:
                needed.add(source)
                pending.append(source)
    order = [n for n in body.graph.nodes if n in needed or n.op == "placeholder"]
    for inputs in batches:
        with torch.no_grad():
            value = _run(body, order, inputs, node)
        yield value


def _run(body: fx.GraphModule, order: list[Node], inputs: Inputs, wanted: Node) -> Tensor:
    here: dict[Node, Any] = {}
    left = {node: sum(user in order_set for user in node.users) for order_set in [set(order)] for node in order}
    leaves = iter(pytree.tree_leaves(inputs))
    for node in order:
        if node.op == "placeholder":
            here[node] = next(leaves)
        elif node.op == "get_attr":
            here[node] = get_tensor(body, node.target)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), here.__getitem__)
            call = body.get_submodule(node.target) if node.op == "call_module" else node.target
            here[node] = call(*args, **kwargs)
        if node is wanted:
            break
        for source in node.all_input_nodes:
            left[source] -= 1
            if not left[source]:
                del here[source]
    value: Tensor = here[wanted]
    return value
