"""Balance the ranges of channels by the values that they take, on a captured graph (data-driven cross-layer equalization).

A tensor has one scale, so a channel of small values gets few steps. Channel c of a value is divided by s_c in the layers that
make it and multiplied again in the layers that read it, through ReLU, pooling, sums and concatenation; the float model computes
the same. Weights have a scale for each output channel, so the makers lose nothing, nor do depthwise readers: there s_c is the
range of the channel. Other readers have one scale for all their inputs: there s_c is a compromise between its range and that of
its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs
from compresskit.graph.capture import parameter_name
from compresskit.graph.interpreter import run_graph
from compresskit.graph.layers.stored import CONVS
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor
from compresskit.quant.numerics.scheme import channelwise

#: Operators f on each channel with f(s x) = s f(x) for s > 0. A PReLU has a slope for each channel, or one for all.
_HOMOGENEOUS = frozenset(
    {aten.relu.default, aten.leaky_relu.default, aten.prelu.default, aten.max_pool2d.default, aten.avg_pool2d.default}
    | {aten.adaptive_avg_pool2d.default}
)
LEAST_RANGE = 1 / 32  # a channel is enlarged by at most 32: other data may bring larger values


@dataclass
class _Channels:
    """Which channels of which values must have the same factor: union-find over numbers, some of which are fixed at 1."""

    parent: list[int] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)

    def new(self, count: int) -> list[int]:
        first = len(self.parent)
        self.parent += range(first, first + count)
        return list(range(first, first + count))

    def root(self, channel: int) -> int:
        while self.parent[channel] != channel:
            self.parent[channel] = channel = self.parent[self.parent[channel]]
        return channel

    def tie(self, some: Sequence[int], others: Sequence[int]) -> None:
        for a, b in zip(some, others, strict=True):
            self.parent[self.root(a)] = self.root(b)

    def fix(self, channels: Sequence[int]) -> None:
        self.fixed.update(channels)

    def free_roots(self) -> set[int]:
        fixed = {self.root(c) for c in self.fixed}
        return {r for r in map(self.root, range(len(self.parent))) if r not in fixed}


@dataclass(frozen=True)
class _Layer:
    """A convolution or linear layer: names of its parameters, and the channels that it reads and makes.

    depthwise: whether channel c of the result reads channel c alone.
    """

    node: Node
    weight: str
    bias: str | None
    depthwise: bool


class _Model:
    """The channels of every value of a graph, and the layers that can be scaled."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.channels = module, _Channels()
        self.of: dict[Node, list[int]] = {}
        self.layers: list[_Layer] = []
        reads: dict[str, int] = {}
        for node in module.graph.nodes:
            if (name := parameter_name(node)) is not None:
                reads[name] = reads.get(name, 0) + len(node.users)
        for node in module.graph.nodes:
            value = node.meta.get("val")
            if node.op != "get_attr" and isinstance(value, Tensor) and value.ndim > 1 and isinstance(value.shape[1], int):
                self.of[node] = self.channels.new(value.shape[1])
            layer = self._layer(node, reads)
            if layer is not None:
                self.layers.append(layer)
            elif not self._tied(node):
                self._fix(node)

    def _layer(self, node: Node, reads: dict[str, int]) -> _Layer | None:
        if node.target not in CONVS and node.target is not aten.linear.default:
            return None
        weight, bias = (parameter_name(a) if isinstance(a, fx.Node) else None for a in (*node.args[1:3], None)[:2])
        given_bias = len(node.args) > 2 and node.args[2] is not None
        source = self.of.get(node.args[0])
        if weight is None or reads[weight] != 1 or (given_bias and (bias is None or reads[bias] != 1)) or source is None:
            return None
        if node not in self.of or (node.target is aten.linear.default and node.meta["val"].ndim != 2):
            return None
        groups = node.args[6] if node.target in CONVS and len(node.args) > 6 else 1
        depthwise = groups > 1
        if depthwise and not groups == len(source) == len(self.of[node]):
            return None
        return _Layer(node, weight, bias, depthwise)

    def _tied(self, node: Node) -> bool:
        """Tie what an operator returns to what it reads, where it hands factors on."""
        sources = [self.of.get(a) for a in node.all_input_nodes if a.op != "get_attr"]
        if node not in self.of or not sources or any(s is None for s in sources):
            return False
        own, known = self.of[node], [s for s in sources if s is not None]
        if node.target in _HOMOGENEOUS:
            if any(a.op == "get_attr" for a in node.all_input_nodes) and node.target is not aten.prelu.default:
                return False
            self.channels.tie(own, known[0])
        elif node.target is aten.add.Tensor:
            shapes = {tuple(a.meta["val"].shape[1:]) for a in node.args if isinstance(a, fx.Node)}
            if len(shapes) > 1 or len(node.args) != 2 or not all(isinstance(a, fx.Node) and a in self.of for a in node.args):
                return False
            for other in known:
                self.channels.tie(own, other)
        elif node.target is aten.cat.default and (node.args[1] if len(node.args) > 1 else 0) == 1:
            self.channels.tie(own, [c for part in node.args[0] for c in self.of[part]])
        elif node.target in (aten.flatten.using_ints, aten.reshape.default, aten.view.default):
            shape = node.args[0].meta["val"].shape
            if len(own) != len(known[0]) or any(n != 1 for n in shape[2:]) or node.meta["val"].ndim != 2:
                return False
            self.channels.tie(own, known[0])
        else:
            return False
        return True

    def _fix(self, node: Node) -> None:
        for value in (node, *node.all_input_nodes):
            self.channels.fix(self.of.get(value, ()))


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
    model = _Model(module)
    free = model.channels.free_roots()
    ranges = _ranges(model, batches, free, rounded)
    columns = _weight_ranges(model)
    factors = {
        root: value if root not in columns else (value / max(columns[root], LEAST_RANGE)) ** 0.5 for root, value in ranges.items()
    }
    factors = {root: factor**strength for root, factor in factors.items()}
    with torch.no_grad():
        for layer in model.layers:
            weight = get_tensor(module, layer.weight)
            made, read = (_factors(model, factors, node) for node in (layer.node, layer.node.args[0]))
            weight.div_(channelwise(made, weight, 0)).mul_(channelwise(read, weight, 0 if layer.depthwise else 1))
            if layer.bias is not None:
                get_tensor(module, layer.bias).div_(made)
    return sum(factor != 1 for factor in factors.values())


def _weight_ranges(model: _Model) -> dict[int, float]:
    """The largest weight that layers give to each group of channels, relative to the largest of its row."""
    columns: dict[int, float] = {}
    for layer in model.layers:
        if layer.depthwise:
            continue
        weight = get_tensor(model.module, layer.weight).detach().abs()
        weight = weight.flatten(2).amax(2) if weight.ndim > 2 else weight
        column = (weight / weight.amax(1, keepdim=True).clamp(min=1e-30)).amax(0)
        for channel, value in zip(model.of[layer.node.args[0]], column.tolist(), strict=True):
            root = model.channels.root(channel)
            columns[root] = max(columns.get(root, 0.0), value)
    return columns


def _factors(model: _Model, factors: dict[int, float], node: Node) -> Tensor:
    return torch.tensor([factors.get(model.channels.root(c), 1.0) for c in model.of[node]])


def _ranges(model: _Model, batches: Sequence[Inputs], free: set[int], rounded: Collection[str] | None) -> dict[int, float]:
    """The largest |value| of each group of channels, as a fraction of that of the tensor; at least `LEAST_RANGE`."""
    seen = {node for node, channels in model.of.items() if free.intersection(map(model.channels.root, channels))}
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
            run_graph(model.module, pytree.tree_leaves(inputs), visit)
    ranges: dict[int, float] = {}
    for node, values in largest.items():
        relative = (values / values.max().clamp(min=1e-30)).clamp(min=LEAST_RANGE).tolist()
        for channel, value in zip(model.of[node], relative, strict=True):
            root = model.channels.root(channel)
            if root in free:
                ranges[root] = max(ranges.get(root, 0.0), value)
    return ranges
