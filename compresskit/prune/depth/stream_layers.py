"""Find the layers that write into a residual stream, and what each should give once blocks are removed.

The network is captured as a graph, and a copy of it is cut: what reads a removed block's output reads its input instead. At each
point of the stream that the two graphs share, a walk goes backwards, through the activations that both have there and the
addition, to the last layer whose output enters. Its target is the value that the whole network had at that point: behind a run of
removed blocks, what the last of them gave.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, fx, nn

from compresskit.base.errors import ModelError
from compresskit.base.task import Inputs
from compresskit.graph.capture import Captured, calls_inside, capture_or_fix_batch, module_path, parameter_name
from compresskit.graph.layers.channel_affine import affine_of, constant_nodes
from compresskit.graph.layers.stored import CONVS, readers_of
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor
from compresskit.prune.channels.reconstruct import can_refit
from compresskit.prune.depth.find_blocks import ADDITIONS, RECTIFIERS, covered, find_blocks, inside, outermost, way_back

STREAM_ACTIVATIONS = RECTIFIERS | {aten.gelu.default, aten.silu.default, aten.hardswish.default, aten.leaky_relu.default}
STREAM_ACTIVATIONS |= {aten.elu.default, aten.tanh.default, aten.sigmoid.default, aten.mish.default, aten.softplus.default}


@dataclass(frozen=True, kw_only=True)
class StreamLayer:
    """A layer whose output enters the stream, and what it should give there. Nodes are of the cut graph, but `target`.

    weight: dotted name of its weight. layer: its node. value: the sum that it enters, or what its own output becomes.
    steps: from the layer's output to `value` or its operand: BatchNorms, factors and constants, and permutations.
    rest: the other operand of the sum; None where there is none.
    target: the node of the whole graph whose value `value` should have.
    norms: names of a norm's tensors behind the sum -> of those of the norm that the whole network has there.
    """

    weight: str
    layer: Node
    value: Node
    steps: tuple[Node, ...]
    rest: Node | None
    target: Node
    norms: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class CutGraph:
    """A network and the same network without blocks, as graphs, and the layers to fit, in the order in which they run."""

    whole: Captured
    cut: fx.GraphModule
    layers: tuple[StreamLayer, ...]


def cut_graph(dense: nn.Module, paths: Sequence[str], example: Inputs) -> CutGraph:
    """Capture a network, cut it, and find the layers to fit.

    Args:
        dense: the whole network, which is not changed.
        paths: dotted names of the blocks that are removed.
        example: inputs.

    Raises ModelError where the network cannot be captured as a graph, a block has no place of its own in it, or is called several
    times.
    """
    removed, blocks = outermost(paths), find_blocks(dense, example).removable
    if several := [path for path in removed if path in blocks and blocks[path].calls > 1]:
        raise ModelError(f"{several[0]}: it is called {blocks[several[0]].calls} times, in no part of the model alone")
    captured = capture_or_fix_batch(dense, example)
    around = [path for path in blocks if not any(inside(gone, [path]) for gone in removed)]
    kept = outermost([path for path in around if not covered(path, removed)])
    order = {node: number for number, node in enumerate(captured.module.graph.nodes)}
    ends = {path: found for path in (*removed, *kept) if (found := _block_ends(captured, path)) is not None}
    if missing := [path for path in removed if path not in ends]:
        raise ModelError(f"{missing[0]}: the graph of the network has no single input and output of this block")
    in_place_of: dict[Node, Node] = {}  # output of a removed block -> what is read instead
    targets: dict[Node, Node] = {}  # a point of the stream that stays -> what the whole network had there
    for path, (entry, exit_) in sorted(ends.items(), key=lambda item: order[item[1][1]]):
        if path in removed:
            in_place_of[exit_] = in_place_of.get(entry, entry)
            targets[in_place_of[exit_]] = exit_
        else:
            targets.setdefault(exit_, exit_)
    cut = copy.deepcopy(captured.module)
    here = {node.name: node for node in cut.graph.nodes}
    for exit_, entry in in_place_of.items():
        here[exit_.name].replace_all_uses_with(here[entry.name])
    cut.graph.eliminate_dead_code()
    cut.recompile()
    finder = _LayerFinder(dense, captured, cut)
    first = min((order[point] for point, target in targets.items() if point is not target), default=len(order))
    points = [point for point in sorted(targets, key=order.__getitem__) if order[point] >= first]
    layers = (finder.at(here[point.name], targets[point]) for point in points)
    place = {node: number for number, node in enumerate(cut.graph.nodes)}
    in_order = sorted((layer for layer in layers if layer is not None), key=lambda layer: place[layer.value])
    return CutGraph(whole=captured, cut=cut, layers=tuple(in_order))


@torch.no_grad()
def shared_part(dense: nn.Module, paths: Sequence[str], example: Inputs) -> str | None:
    """The dotted name of the largest part that is called several times and holds all blocks to remove, each called once in it.

    None where they are called once, or there is no such part.
    """
    calls = {path: block.calls for path, block in find_blocks(dense, example).removable.items() if path in paths}
    if len(set(calls.values())) != 1 or 1 in calls.values():
        return None
    around = [name for name, _ in dense.named_modules() if name and all(inside(path, [name]) for path in paths)]
    return next((name for name in around if len(calls_inside(dense, example, name)) in calls.values()), None)


def _block_ends(captured: Captured, path: str) -> tuple[Node, Node] | None:
    """The nodes of a block's input and output; None where it has several."""
    nodes = [n for n in captured.module.graph.nodes if n.op == "call_function" and covered(module_path(n), [path])]
    among = set(nodes)
    exits = [n for n in nodes if n.name in captured.shapes and any(user not in among for user in n.users)]
    for source in dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in among and n.op != "get_attr"):
        way = way_back(exits[0], source, captured.shapes) if len(exits) == 1 else None
        if way is not None and any(node.target in ADDITIONS for node, _ in way):
            return source, exits[0]
    return None


class _LayerFinder:
    """Looks for the layer behind a point of the cut graph."""

    def __init__(self, dense: nn.Module, captured: Captured, cut: fx.GraphModule) -> None:
        self.dense, self.captured, self.cut = dense, captured, cut
        self.constants, self.readers = constant_nodes(cut.graph), readers_of(cut)

    def at(self, point: Node, target: Node) -> StreamLayer | None:
        """The layer whose output makes the value at a point, where that shall be what another node of the whole graph had."""
        norms: dict[str, str] = {}
        while point.target is target.target and point.op == "call_function":
            if point.target in STREAM_ACTIVATIONS and point.args[1:] == target.args[1:] and point.kwargs == target.kwargs:
                pass
            elif point.target is aten.layer_norm.default and (names := self._same_norm(point, target)) is not None:
                norms |= names
            else:
                break
            point, target = point.args[0], target.args[0]
        candidates = list(self._layers_into(point))
        if not candidates:
            return None
        layer, steps, rest = max(candidates, key=lambda found: self._columns(found[0]))
        return StreamLayer(
            weight=str(layer.args[1].target), layer=layer, value=point, steps=steps, rest=rest, target=target, norms=norms
        )

    def _same_norm(self, norm: Node, other: Node) -> dict[str, str] | None:
        """Names of a LayerNorm's tensors, which nothing else reads -> of those of another one of the same form."""
        mine, theirs = ([parameter_name(n) for n in node.args[2:4]] for node in (norm, other))
        pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if (a, b) != (None, None)]
        if norm.args[1] != other.args[1] or norm.args[4:] != other.args[4:] or any(None in pair for pair in pairs):
            return None
        if mine != theirs and any(len(self.readers[id(get_tensor(self.cut, str(a)))]) > 1 for a, _ in pairs):
            return None
        return {str(a): str(b) for a, b in pairs if a != b}

    def _layers_into(self, value: Node) -> Iterator[tuple[Node, tuple[Node, ...], Node | None]]:
        """(layer, steps to the value or its operand, other operand) of the layers that can be fitted."""
        operands: list[tuple[Node, Node | None]] = [(value, None)]
        if value.target in ADDITIONS and not value.kwargs and not self.constants.intersection(value.all_input_nodes):
            operands = self._operands(value)
        for start, rest in operands:
            node, steps = start, list[Node]()
            while node.op == "call_function" and (node is value or len(node.users) == 1):
                if node.target in CONVS or node.target is aten.linear.default:
                    if self._can_fit(node):
                        yield node, tuple(reversed(steps)), rest
                    break
                before = node.args[0] if node.target is aten.permute.default else self._scaled(node)
                if before is None:
                    break
                steps.append(node)
                node = before

    def _operands(self, total: Node) -> list[tuple[Node, Node | None]]:
        """The operands of a sum of two values of one shape, each with the other."""
        first, second = total.args[:2]
        shapes = [self.captured.shapes.get(getattr(operand, "name", "")) for operand in (first, second)]
        return [] if first is second or None in shapes or shapes[0] != shapes[1] else [(first, second), (second, first)]

    def _scaled(self, node: Node) -> Node | None:
        """What a node gives a factor and a constant by channel; None where it computes something else, or where a factor is 0."""
        found = affine_of(self.cut, node, self.constants)
        return found.x if found is not None and bool((found.scale != 0).all()) else None

    def _columns(self, layer: Node) -> int:
        return get_tensor(self.cut, str(parameter_name(layer.args[1])))[0].numel()

    def _can_fit(self, layer: Node) -> bool:
        name = parameter_name(layer.args[1])
        if name is None or not can_refit(self.dense, self.captured.name_in_model(name)):
            return False
        x = layer.args[0]  # where padding="same" is not symmetric, the graph pads before the layer
        padded = x.target is aten.pad.default and module_path(x) == module_path(layer)
        return len(self.readers[id(get_tensor(self.cut, name))]) == 1 and not padded


def unpermuted(steps: Sequence[Node], value: Tensor) -> Tensor:
    """A value behind the steps, in the layout of the layer's output."""
    for step in reversed(steps):
        if step.target is aten.permute.default:
            value = value.permute(torch.tensor([d % value.ndim for d in step.args[1]]).argsort().tolist())
    return value


def affine_between(cut: CutGraph, layer: StreamLayer, channels: int) -> tuple[Tensor, Tensor]:
    """Scale and shift by channel, (channels,) in float64, that the steps behind a layer compute with its output."""
    constants = constant_nodes(cut.cut.graph)
    affine = [a for step in layer.steps if (a := affine_of(cut.cut, step, constants)) is not None]
    scales = [a.scale.expand(channels) for a in affine]
    shift = reduce(lambda before, a: before * a.scale + a.shift, affine, torch.zeros(channels, dtype=torch.float64))
    return reduce(operator.mul, scales, torch.ones(channels, dtype=torch.float64)), shift
