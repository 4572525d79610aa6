"""Find the blocks of a quantized graph: parts with one output, such as a residual block or a sublayer of a transformer.

The graph is cut at values that every path to the outputs passes (post-dominators): between two residual blocks one tensor is
alive. What stands beside the trunk of a network with several outputs is cut in the same way, each head from where it begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.errors import SettingError
from compresskit.graph.normalize import Node
from compresskit.quant.calibration.layer_outputs import IntegerLayer, integer_layers
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.operators import OPERATOR_KINDS

#: Parts are joined only where the second returns at least this share of as many values as it (pooling) or both of them (runs)
#: read: of few values, such as logits, the weights of the layers before them cannot be learned.
LEAST_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class GraphBlock:
    """A part of a graph whose values are read outside it at one point.

    nodes: its operators and quantizers, in the order of the graph. output: the last of them, whose value is read outside.
    inputs: inputs of the model and outputs of other blocks that it reads. layers: those of its layers that run in integers, each
    weight in the first block that reads it.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    layers: tuple[IntegerLayer, ...]

    @property
    def output(self) -> Node:
        """The node whose value is read outside."""
        return self.nodes[-1]

    def __str__(self) -> str:
        names = ", ".join(layer.node.name for layer in self.layers)
        return f"{self.output.name}: {names or 'no layers'}"


def find_graph_blocks(quantized: Quantized, *, run: int = 3, most: int = 12) -> list[GraphBlock]:
    """Divide a quantized graph into blocks, in an order in which each reads only the outputs of those before it.

    Args:
        quantized: a model with quantizers.
        run: layers that follow one another without a branch become one block of at most this many.
        most: a branched part of more layers, such as a whole U-Net, is divided into runs.

    `find_graph_blocks(quantized, run=1, most=1)` gives each layer a block of its own.
    Raises SettingError for numbers below 1.
    """
    for name, value in (("run", run), ("most", most)):
        if value < 1:
            raise SettingError(f"find_graph_blocks({name}=...): wanted a whole number >= 1, got {value}")
    graph = quantized.body.graph
    layers = {layer.node: layer for layer in integer_layers(quantized)}
    given = given_nodes(graph)
    nodes = _computed_nodes(graph, given)
    exits = _post_dominators(nodes)
    cuts = _cuts(given, nodes, exits)
    parts = _divided(nodes, exits, cuts)
    cuts.update(n for part in parts for n in part if sum(node in layers for node in part) > most)
    values = {*given, *nodes}
    parts = _join_parts(_divided(nodes, exits, cuts), _Shape(layers, values), run)
    return [_graph_block(part, layers, values) for part in parts]


def given_nodes(graph: fx.Graph) -> list[Node]:
    """The inputs of the model, and sizes that are read off them, in the order of the graph."""
    found: dict[Node, None] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        of_inputs = bool(sources) and all(source in found for source in sources) and node.op != "output"
        if node.op == "placeholder" or (of_inputs and not isinstance(node.meta.get("val"), Tensor | tuple | list)):
            found[node] = None
    return list(found)


def _computed_nodes(graph: fx.Graph, given: Sequence[Node]) -> list[Node]:
    """The other nodes whose values depend on the inputs, without the output, in the order of the graph."""
    known, found = set(given), list[Node]()
    for node in graph.nodes:
        if node.op != "output" and node not in known and not known.isdisjoint(node.all_input_nodes):
            known.add(node)
            found.append(node)
    return found


# -- where to cut

Exits = Mapping[Node, Node | None]  # the next node that every path from a node to the outputs passes; None: the outputs


def _post_dominators(nodes: Sequence[Node]) -> Exits:
    """Of nodes in the order of the graph (Cooper, Harvey and Kennedy, 2001, for a graph without cycles)."""
    place = {node: i for i, node in enumerate(nodes)}
    exits: dict[Node, Node | None] = {}
    for node in reversed(nodes):
        exits[node] = _meeting([user if user in place else None for user in node.users], exits, place)
    return exits


def _meeting(readers: Iterable[Node | None], exits: Exits, place: Mapping[Node, int]) -> Node | None:
    """The first node that all paths from some nodes pass; None among them is the outputs."""
    readers = list(readers)
    if not readers:
        return None
    meeting = readers[0]
    for reader in readers[1:]:
        other = reader
        while meeting is not other:
            if meeting is None or other is None:
                return None
            if place[meeting] < place[other]:
                meeting = exits[meeting]
            else:
                other = exits[other]
    return meeting


def _chain(node: Node | None, exits: Exits) -> Iterator[Node]:
    """A node and those that every path from it passes."""
    while node is not None:
        yield node
        node = exits[node]


def _cuts(given: Sequence[Node], nodes: Sequence[Node], exits: Exits) -> set[Node]:
    """The outputs of the smallest blocks: what every path from an input, or from a fork towards several outputs, passes."""
    place = {node: i for i, node in enumerate(nodes)}
    forks = [node for node in nodes if exits[node] is None]
    cuts = set[Node](forks)
    for source in (*(n for n in given if n.op == "placeholder"), *forks):
        readers = [user for user in source.users if user in place]
        together = _meeting(readers, exits, place) if source.op == "placeholder" else None
        for start in readers if together is None else [together]:
            cuts.update(_chain(start, exits))
    return cuts


def _divided(nodes: Sequence[Node], exits: Exits, cuts: set[Node]) -> list[list[Node]]:
    """The nodes of each block by its output; `cuts` grows where a value would be read in a block other than its own."""
    while True:
        of: dict[Node, Node] = {}
        for node in reversed(nodes):
            after = exits[node]
            assert node in cuts or after is not None
            of[node] = node if node in cuts or after is None else of[after]
        leaks = {node for node in nodes if node not in cuts and any(of[user] is not of[node] for user in node.users)}
        if not leaks:
            break
        cuts |= leaks
    parts: dict[Node, list[Node]] = {}
    for node in nodes:
        parts.setdefault(of[node], []).append(node)
    return [parts[node] for node in nodes if node in parts]


# -- which parts are one block


@dataclass(frozen=True, eq=False)
class _Shape:
    """What decides whether two parts are joined. layers: of the graph. values: its nodes that depend on the inputs."""

    layers: Mapping[Node, IntegerLayer]
    values: set[Node]

    def count(self, part: list[Node]) -> int:
        """Number of layers."""
        return sum(node in self.layers for node in part)

    def entries(self, part: list[Node]) -> set[Node]:
        """Values from outside that a part reads."""
        return {a for node in part for a in node.all_input_nodes if a in self.values}.difference(part)

    def is_run(self, part: list[Node]) -> bool:
        """Whether a part has no branches."""
        inside, entries = set(part), self.entries(part)
        forks = [node for node in (*entries, *part[:-1]) if len(inside.intersection(node.users)) > 1]
        return len(entries) == 1 and not forks

    def ends(self, earlier: list[Node], later: list[Node]) -> bool:
        """Whether the later part is an ending of the earlier one, such as a quantizer, or pooling that leaves most values."""
        if not self.count(earlier) or self.count(later) or self.entries(later) != {earlier[-1]}:
            return False
        known = all(node.op == "call_module" or node.target in OPERATOR_KINDS for node in later)  # others may have no derivative
        return known and _value_count(later[-1]) >= LEAST_SHARE * _value_count(earlier[-1])

    def runs_on(self, earlier: list[Node], later: list[Node], most: int) -> bool:
        """Whether both are of a run of at most so many layers."""
        if not (self.is_run(earlier) and self.is_run(later)) or self.count(earlier) + self.count(later) > most:
            return False
        return _value_count(later[-1]) >= LEAST_SHARE * sum(map(_value_count, self.entries(earlier)))

    def begins(self, earlier: list[Node]) -> bool:
        """Whether a part has no layers, and so belongs to the part that reads it."""
        return not self.count(earlier)


def _join_parts(parts: Sequence[list[Node]], shape: _Shape, run: int) -> list[list[Node]]:
    """Join parts without layers, and short runs, with the only part that reads them."""
    rules: list[Callable[[list[Node], list[Node]], bool]] = [
        shape.ends,
        lambda earlier, _: shape.begins(earlier),
        lambda earlier, later: shape.runs_on(earlier, later, run),
    ]
    for rule in rules:
        done: list[list[Node]] = []
        for part in parts:
            joined = part
            for earlier in [p for p in reversed(done) if set(p[-1].users) <= set(part)]:
                if rule(earlier, joined):
                    done.remove(earlier)
                    joined = [*earlier, *joined]
            done.append(joined)
        parts = done
    return list(parts)


def _value_count(node: Node) -> int:
    """How many values a node has in the example."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return sum(math.prod(int(n) for n in value.shape) for value in leaves if isinstance(value, Tensor))


def _graph_block(part: Sequence[Node], layers: Mapping[Node, IntegerLayer], values: set[Node]) -> GraphBlock:
    order = sorted(part)
    inputs = {a: None for node in order for a in node.all_input_nodes if a in values and a not in part}
    return GraphBlock(tuple(order), tuple(inputs), tuple(layers[node] for node in order if node in layers))
