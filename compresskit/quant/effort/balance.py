"""Balance the ranges of channels by the values that they take, on a captured graph (data-driven cross-layer equalization).

A tensor has one scale, so a channel of small values gets few steps. Channel c of a value is divided by s_c in the layers that
make it and multiplied again in the layers that read it, through all that hands factors on (`channel_ties`); the float model
computes the same. Weights have a scale for each output channel, so the makers lose nothing, nor do depthwise readers: there s_c
is the range of the channel. Other readers have one scale for all their inputs: there s_c is a compromise between its range and
that of its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs
from compresskit.graph.interpreter import run_graph
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor
from compresskit.quant.effort.channel_ties import ChannelTies

LEAST_RANGE = 1 / 32  # a channel is enlarged by at most 32: other data may bring larger values


def balance_channels_(
    module: fx.GraphModule, batches: Sequence[Inputs], *, rounded: Collection[str] | None = None, strength: float = 1.0
) -> int:
    """Balance the ranges of channels in place; the graph computes the same in float.

    Args:
        module: a prepared graph, without BatchNorm and quantizers.
        batches: inputs that show the range of each channel.
        rounded: names of the nodes whose values are rounded; None for all but those that a ReLU alone reads.
        strength: in (0, 1], a power that all factors are raised to. At 1 all channels of what a depthwise layer reads have one
            range; where a reader has one scale for all its inputs, s = sqrt(range / range of its weights).

    Returns the number of channels whose factor is not 1.
    """
    ties = ChannelTies(module)
    ranges, columns = _ranges(ties, module, batches, rounded), _weight_ranges(ties, module)
    factors = {
        root: value if root not in columns else (value / max(columns[root], LEAST_RANGE)) ** 0.5 for root, value in ranges.items()
    }
    return _divide_channels_(ties, module, {root: factor**strength for root, factor in factors.items()})


def scale_channels_(module: fx.GraphModule, factors: Mapping[int, float]) -> int:
    """Divide channels by factors (`least_noise_factors`), in place, and return how many are not 1. module: the graph of these."""
    return _divide_channels_(ChannelTies(module), module, factors)


def _divide_channels_(ties: ChannelTies, module: fx.GraphModule, factors: Mapping[int, float]) -> int:
    """Divide channels by their factors where they are made, and multiply where they are read; returns how many are not 1."""
    with torch.no_grad():
        for layer in ties.layers:
            bias = None if layer.bias is None else get_tensor(module, layer.bias)
            made, read = (_factors(ties, factors, node) for node in (layer.node, layer.node.args[0]))
            layer.scale_(get_tensor(module, layer.weight), bias, made, read)
    return sum(factor != 1 for factor in factors.values())


def _weight_ranges(ties: ChannelTies, module: fx.GraphModule) -> dict[int, float]:
    """The largest weight that layers give to each group of channels, relative to the largest of its row."""
    columns: dict[int, float] = {}
    for layer in ties.layers:
        if layer.reads_one:
            continue
        column = layer.columns(get_tensor(module, layer.weight))
        for channel, value in zip(ties.of[layer.node.args[0]], column.tolist(), strict=True):
            root = ties.root(channel)
            columns[root] = max(columns.get(root, 0.0), value)
    return columns


def _factors(ties: ChannelTies, factors: Mapping[int, float], node: Node) -> Tensor:
    return torch.tensor([factors.get(ties.root(c), 1.0) for c in ties.of[node]])


def _ranges(
    ties: ChannelTies, module: fx.GraphModule, batches: Sequence[Inputs], rounded: Collection[str] | None
) -> dict[int, float]:
    """The largest |value| of each group of channels, as a fraction of that of the tensor; at least `LEAST_RANGE`."""
    free = ties.free_roots()
    seen = {node for node, channels in ties.of.items() if free.intersection(map(ties.root, channels))}
    if rounded is None:
        seen = {node for node in seen if not all(user.target is aten.relu.default for user in node.users)}
    else:
        seen = {node for node in seen if node.name in rounded}
    largest: dict[Node, Tensor] = {}

    def visit(node: Node, value: object) -> None:
        if node in seen and isinstance(value, Tensor):
            here = value.abs().transpose(0, 1).flatten(1).amax(1)
            largest[node] = here if node not in largest else torch.maximum(largest[node], here)

    with torch.no_grad():
        for inputs in batches:
            run_graph(module, pytree.tree_leaves(inputs), visit)
    ranges: dict[int, float] = {}
    for node, values in largest.items():
        relative = (values / values.max().clamp(min=1e-30)).clamp(min=LEAST_RANGE).tolist()
        for channel, value in zip(ties.of[node], relative, strict=True):
            root = ties.root(channel)
            if root in free:
                ranges[root] = max(ranges.get(root, 0.0), value)
    return ranges
