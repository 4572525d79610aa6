"""Which channels of which values of a graph must be scaled alike, such that its outputs stay as they are.

Union-find over the channels of all values. Layers with weights take any factors at both ends. Operators f on each channel with
f(s x) = s f(x), s > 0, hand factors on (ReLU, pooling, resizing, padding by zeros), as do sums, concatenation, cutting, and
products by a gate, whose own factor is 1. All other operators, and what the model reads and returns, fix the factor at 1.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, fx

from compresskit.graph.capture import parameter_name
from compresskit.graph.layers.stored import CONVS, parameter_reads
from compresskit.graph.normalize import Node, aten
from compresskit.quant.numerics.scheme import channelwise

_HOMOGENEOUS = frozenset(
    getattr(aten, name)
    for name in """relu leaky_relu prelu abs max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
    upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d""".split()
)
#: Number of dimensions of a batch of what they take, where that is always the same.
_RANKS = {packet: 2 + int(name[-2]) for packet in _HOMOGENEOUS if (name := packet.__name__).endswith("d") and name[-2].isdigit()}
_ADDED = frozenset({aten.add.Tensor, aten.sub.Tensor})
_INTO_PARTS = frozenset({aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default})
_OVER_POSITIONS = frozenset({aten.mean.dim, aten.sum.dim_IntList, aten.amax.default})


@dataclass
class _Sets:
    """Which channels must have the same factor: union-find over numbers, some of which are fixed at 1."""

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


@dataclass(frozen=True)
class ScaledLayer:
    """A convolution or linear layer: names of its parameters, and its groups of channels."""

    node: Node
    weight: str
    bias: str | None
    groups: int

    @property
    def reads_one(self) -> bool:
        """Whether each channel that it makes reads one channel, as those of a depthwise convolution do."""
        return bool(self.node.args[1].meta["val"].shape[1] == 1)

    def scale_(self, weight: Tensor, bias: Tensor | None, made: Tensor, read: Tensor) -> None:
        """Divide what it makes by factors (channels made,) and multiply what it reads by others (channels read,), in place."""
        weight.div_(channelwise(made, weight, 0))
        in_groups = weight.view(self.groups, -1, *weight.shape[1:])
        in_groups.mul_(read.view(self.groups, 1, -1, *[1] * (weight.ndim - 2)))
        if bias is not None:
            bias.div_(made)

    def columns(self, weight: Tensor) -> Tensor:
        """The largest |weight| that each channel read meets, as a fraction of the largest of its row, (channels read,)."""
        sizes = weight.detach().abs()
        sizes = sizes.flatten(2).amax(2) if sizes.ndim > 2 else sizes
        sizes = sizes / sizes.amax(1, keepdim=True).clamp(min=1e-30)
        return sizes.view(self.groups, -1, sizes.shape[1]).amax(1).flatten()


class ChannelTies:
    """The channels of every value of a graph, by a number for each, and the layers that can be scaled.

    of: value -> the numbers of its channels. layers: in the order of the graph.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._sets = _Sets()
        self.of: dict[Node, list[int]] = {}
        self.layers: list[ScaledLayer] = []
        reads = parameter_reads(module)
        for node in module.graph.nodes:
            value = node.meta.get("val")
            if node.op != "get_attr" and isinstance(value, Tensor) and value.ndim > 1 and isinstance(value.shape[1], int):
                self.of[node] = self._sets.new(value.shape[1])
            layer = self._layer(node, reads)
            if layer is not None:
                self.layers.append(layer)
            elif not self._tie(node):
                self._fix(node, *node.all_input_nodes)

    def root(self, channel: int) -> int:
        """The number that stands for all channels with the same factor."""
        return self._sets.root(channel)

    def free_roots(self) -> set[int]:
        """Those of the factors that are not fixed at 1."""
        fixed = set(map(self.root, self._sets.fixed))
        return {root for root in map(self.root, range(len(self._sets.parent))) if root not in fixed}

    def _fix(self, *values: Node) -> None:
        for value in values:
            self._sets.fixed.update(self.of.get(value, ()))

    def _layer(self, node: Node, reads: dict[str, int]) -> ScaledLayer | None:
        if node.target not in CONVS and node.target is not aten.linear.default:
            return None
        weight, bias = (parameter_name(a) if isinstance(a, fx.Node) else None for a in (*node.args[1:3], None)[:2])
        given_bias = len(node.args) > 2 and node.args[2] is not None
        if weight is None or reads[weight] != 1 or (given_bias and (bias is None or reads[bias] != 1)):
            return None
        if node not in self.of or node.args[0] not in self.of:
            return None
        if node.meta["val"].ndim != node.args[1].meta["val"].ndim:  # without a batch, or with more dimensions than that one
            return None
        return ScaledLayer(node, weight, bias, node.args[6] if node.target in CONVS and len(node.args) > 6 else 1)

    def _tie(self, node: Node) -> bool:
        """Tie what an operator returns to what it reads, where it hands factors on; returns whether it does."""
        target = node.target
        if target in _INTO_PARTS and _worked_along(node) == 1:
            return node.args[0] in self.of and all(user.target is operator.getitem for user in node.users)
        if node not in self.of:
            return False
        packet = getattr(target, "overloadpacket", None)
        if packet in _HOMOGENEOUS:
            source = node.args[0]
            if node.meta["val"].ndim != _RANKS.get(packet, node.meta["val"].ndim):
                return False  # it pools channels, of a value that it takes for one without a batch
            constants = [a for a in node.all_input_nodes[1:] if a.op != "get_attr" or target is not aten.prelu.default]
            return not constants and self._tie_to(node, self.of.get(source))
        rule = _TIED_BY.get(target)
        return rule is not None and rule(self, node)

    def _tie_to(self, node: Node, channels: Sequence[int] | None) -> bool:
        own = self.of[node]
        if channels is None or len(own) != len(channels):  # channels that are repeated, or in another place
            return False
        self._sets.tie(own, channels)
        return True

    def _sum(self, node: Node) -> bool:
        if len(node.args) != 2 or not all(isinstance(a, fx.Node) and a in self.of for a in node.args):
            return False
        if len({tuple(map(str, a.meta["val"].shape[1:])) for a in node.args}) > 1:  # as text: sizes that vary have no hash
            return False
        return all(self._tie_to(node, self.of[a]) for a in node.args)

    def _product(self, node: Node) -> bool:
        """By what is stored, or by a gate: a value with one number for all positions of a channel, whose own factor is 1."""
        computed = [a for a in node.args if isinstance(a, fx.Node) and a.op != "get_attr"]
        divides = node.target is aten.div.Tensor
        if not computed:
            return False
        if len(computed) == 1:
            return not (divides and computed[0] is not node.args[0]) and self._tie_to(node, self.of.get(computed[0]))
        value, gate = computed if divides else sorted(computed, key=_positions_of, reverse=True)
        if value not in self.of or gate not in self.of or not 1 == _positions_of(gate) < _positions_of(value):
            return False
        self._fix(gate)
        return self._tie_to(node, self.of[value])

    def _joined(self, node: Node) -> bool:
        parts = [self.of.get(part) for part in node.args[0]]
        if _worked_along(node) != 1 or None in parts:
            return False
        return self._tie_to(node, [c for part in parts if part is not None for c in part])

    def _part(self, node: Node) -> bool:
        whole, place = node.args
        if whole.target not in _INTO_PARTS or _worked_along(whole) != 1 or whole.args[0] not in self.of:
            return False
        ends = list(accumulate(part.shape[1] for part in whole.meta["val"]))
        start = ends[place] - whole.meta["val"][place].shape[1]
        return self._tie_to(node, self.of[whole.args[0]][start : ends[place]])

    def _slice(self, node: Node) -> bool:
        channels = self.of.get(node.args[0])
        if channels is not None and _worked_along(node) == 1:
            start, end, step = (*node.args[2:], *[None] * 3)[:3]
            if not all(bound is None or isinstance(bound, int) for bound in (start, end, step)):
                return False
            channels = channels[start:end:step]
        return self._tie_to(node, channels)

    def _padded(self, node: Node) -> bool:
        """By zeros, also of channels, or by repeating positions."""
        channels, own, pads = self.of.get(node.args[0]), self.of[node], node.args[1]
        how = node.args[2] if node.target is aten.pad.default and len(node.args) > 2 else "constant"
        value = node.args[-1] if len(node.args) > (3 if node.target is aten.pad.default else 2) else None
        of_channels = 2 * (node.meta["val"].ndim - 2)
        left, right = (*pads[of_channels : of_channels + 2], 0, 0)[:2]
        if channels is None or (how == "constant" and value not in (None, 0)) or (how != "constant" and (left or right)):
            return False
        if not isinstance(left, int) or left < 0 or right < 0 or left + len(channels) + right != len(own):
            return False
        self._sets.tie(own[left : left + len(channels)], channels)
        return True

    def _reduced(self, node: Node) -> bool:
        dims, keep = node.args[1], len(node.args) > 2 and node.args[2]
        rank = node.args[0].meta["val"].ndim
        reduced = {d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))}
        return 1 not in reduced and (keep or 0 not in reduced) and self._tie_to(node, self.of.get(node.args[0]))

    def _reshaped(self, node: Node) -> bool:
        """(N, C, 1, 1) to (N, C)."""
        source, value = node.args[0].meta["val"], node.meta["val"]
        return value.ndim == 2 and all(n == 1 for n in source.shape[2:]) and self._tie_to(node, self.of.get(node.args[0]))


def _worked_along(node: Node) -> int | None:
    """The dimension that an operator works along; None for a value without any."""
    place = {aten.cat.default: 1, aten.slice.Tensor: 1}.get(node.target, 2)
    given = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    value = node.args[0][0] if node.target is aten.cat.default else node.args[0]
    rank = value.meta["val"].ndim
    return int(given) % rank if rank else None


def _positions_of(node: Node) -> int:
    """Positions of a value, as far as they are known: how many numbers a channel of one sample has at least."""
    shape = node.meta["val"].shape[2:] if isinstance(node.meta.get("val"), Tensor) else ()
    return int(torch.Size([n if isinstance(n, int) else 2 for n in shape]).numel())


_TIED_BY: dict[object, Callable[[ChannelTies, Node], bool]] = {
    **dict.fromkeys(_ADDED, ChannelTies._sum),
    **dict.fromkeys((aten.mul.Tensor, aten.div.Tensor), ChannelTies._product),
    aten.cat.default: ChannelTies._joined,
    operator.getitem: ChannelTies._part,
    aten.slice.Tensor: ChannelTies._slice,
    **dict.fromkeys((aten.pad.default, aten.constant_pad_nd.default), ChannelTies._padded),
    **dict.fromkeys(_OVER_POSITIONS, ChannelTies._reduced),
    **dict.fromkeys((aten.flatten.using_ints, aten.reshape.default), ChannelTies._reshaped),
}
