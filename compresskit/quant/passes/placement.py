"""Place quantizers: decide which operators of a captured graph run in integers, and which values are quantized for that.

Nothing is changed; `passes.insert` carries the decision out.

* kinds: each operator has a kind ("conv", "add", "move", "clamp", ...), or is unknown and stays float.
* points: the values that are quantized. A value that is only moved (reshaped, sliced, padded, concatenated, max-pooled) is
  quantized where it was computed and keeps its scale and zero point; a value that only a clamp reads is quantized after it.
* groups: points that must share scale and zero point, such as the inputs of a concatenation.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from compresskit.base.errors import SettingError
from compresskit.base.settings import stands_in
from compresskit.export.ops.blocks import LEAST_SHARED
from compresskit.graph.capture import module_path, parameter_name
from compresskit.graph.interpreter import read_count
from compresskit.graph.normalize import Node, aten
from compresskit.graph.rewrites.stored_products import why_no_linear
from compresskit.quant.numerics.bit_widths import TARGET_BITS, BitWidths, bits_of_layer
from compresskit.quant.numerics.operators import OPERATOR_KINDS, bounds, fusible, is_float_tensor, is_global, keeps_grid
from compresskit.quant.numerics.targets import Target
from compresskit.quant.passes.coverage import ONCE, Coverage, LayerCost, computed_once, costs_of_runs, coverage_of

MOST_BENT = 20_000  # weights of a convolution that is given twice or thrice the filters, for the size of the file
LEAST_OF_WEIGHTS = 0.02  # of the bytes of all weights, by a table of rows that are looked up in integers
SLOPES_DIFFER = "its slopes differ between channels"
JOINED = "it joins values of very different ranges"  # how the reason of a concatenation begins that `floating` leaves float
UNANCHORED = "its bounds are no integers of its input"  # how that of a hardsigmoid begins whose own rounding clips it instead


@dataclass(frozen=True, kw_only=True)
class QuantizationPoint:
    """A value of the graph that is quantized.

    node: name of the node that computes it.
    group: points of the same group share scale and zero point.
    clamp: bounds of a clamp that the range of the quantizer replaces, or None.
    everywhere: all readers see the rounded value, because the runtime has no other; else only those that run in integers.
    anchor: a number that must be exactly representable, like its negative, or None. A hardsigmoid then needs no arithmetic: its
        result is the same integers, clipped, read with another zero point and a sixth of the scale.
    saturates: a hardsigmoid whose input has no anchor: its smallest and largest integer are its bounds, so that its rounding
        clips it. Its range is fixed.
    """

    node: str
    group: int
    clamp: tuple[float, float | None] | None = None
    everywhere: bool = True
    anchor: float | None = None
    saturates: bool = False


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which operators run in integers, and which values are quantized for that. Prints as a table.

    target: name of the target.
    integer: operators that run in integers, node name -> kind.
    carried: operators that only move integers, node name -> kind.
    floating: operators that stay float, node name -> reason.
    points: the values that are quantized.
    lookups: those of rows that read a rounded table, node name -> node name of the layer whose weight the table is, or "".
    layers: node name -> dotted path of the module that it is in.
    costs: parameters and MACs of each layer, by node name.
    """

    target: str
    integer: dict[str, str] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    floating: dict[str, str] = field(default_factory=dict)
    points: tuple[QuantizationPoint, ...] = ()
    lookups: dict[str, str] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)
    costs: dict[str, LayerCost] = field(default_factory=dict)

    @property
    def coverage(self) -> Coverage:
        """How much of the model runs in integers, by layers, parameters and MACs, and why the rest does not."""
        return coverage_of(self.costs, self.integer, self.floating, self.layers)

    def __str__(self) -> str:
        rows = [(name, self.layers.get(name, ""), f"integer {kind}") for name, kind in self.integer.items()]
        rows += [(name, self.layers.get(name, ""), f"float: {reason}") for name, reason in self.floating.items()]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        head = f"{len(self.integer)} operators in integers for {self.target}, {len(self.points)} values rounded"
        return "\n".join([head, *(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)])

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        points = [
            {
                "node": p.node,
                "group": p.group,
                "clamp": None if p.clamp is None else list(p.clamp),
                "everywhere": p.everywhere,
                "anchor": p.anchor,
            }
            | ({"saturates": True} if p.saturates else {})  # records of before know no such key
            for p in self.points
        ]
        return {"target": self.target, "integer": self.integer, "floating": self.floating, "points": points}

    def with_groups(self, groups: Mapping[str, int]) -> Placement:
        """The placement with other groups of its points, by the names of their nodes; itself where those are other nodes."""
        if groups.keys() != {point.node for point in self.points}:
            return self
        return replace(self, points=tuple(replace(point, group=groups[point.node]) for point in self.points))


def place_quantizers(
    graph: fx.Graph,
    target: Target,
    *,
    skip: tuple[str, ...] = (),
    floating: Mapping[str, str] | None = None,
    slow: bool = False,
    bits: BitWidths = TARGET_BITS,
) -> Placement:
    """Decide which operators run in integers and which values are quantized.

    Args:
        graph: a prepared graph, see `prepare_graph`.
        target: the runtime.
        skip: dotted paths of modules whose operators stay float; or names of nodes, whose values are then not rounded, so that
            operators that read them stay float, too.
        floating: names of nodes that stay float, each with its reason.
        slow: run in integers also what is slower so by a rule of the target, `Support.volume`; it is, too, where nothing else
            would.
        bits: of the weights of each layer, where they are other than the target's.

    Raises SettingError where `skip` names neither a module with operators nor a node.
    """
    paths = {module_path(node) for node in graph.nodes}
    values = {node.name for node in graph.nodes if node.op in ("placeholder", "call_function")}
    if unknown := [s for s in skip if s not in values and not any(stands_in(path, [s]) for path in paths)]:
        inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
        raise SettingError(
            f"skip={unknown}: no operator of the model stands in a module of that name, and no value is called so;"
            f" print(quantized.placement) lists both, and the inputs are {inputs}"
        )
    placement = _Placer(graph, target, skip, floating or {}, slow=slow).run(bits)
    return placement if placement.integer or slow else _Placer(graph, target, skip, floating or {}, slow=True).run(bits)


#: Operators that are in integers where what they read is, and gain nothing by it themselves.
_BETWEEN_OTHERS = frozenset({"move", "concat", "clamp", "leaky_relu", "add", "mul"})


class _Placer:
    """One pass over the graph in the order of execution."""

    def __init__(self, graph: fx.Graph, target: Target, skip: tuple[str, ...], kept: Mapping[str, str], *, slow: bool) -> None:
        self.graph, self.target, self.skip, self.kept, self.slow = graph, target, skip, kept, slow
        self.integer: dict[Node, str] = {}
        self.floating: dict[Node, str] = {}
        self.carried: dict[Node, str] = {}
        self.rounded: dict[Node, bool] = {}  # value -> everywhere
        self.group: dict[Node, Node] = {}  # union-find over rounded values
        self.anchored: set[Node] = set()
        paths = {module_path(node) for node in graph.nodes}
        modules = {s for s in skip if any(stands_in(path, [s]) for path in paths)}
        self.unrounded = {node for node in graph.nodes if node.name in skip and node.name not in modules}
        self.read_in_integers = self._read_in_integers()
        self.once = computed_once(graph)

    def run(self, bits: BitWidths) -> Placement:
        for node in self.graph.nodes:
            if node.op == "call_function" and is_float_tensor(node):
                self._visit(node)
        numbers: dict[Node, int] = {}
        points = []
        for node in self.graph.nodes:
            if node in self.rounded:
                number = numbers.setdefault(self._root(node), len(numbers))
                clamp = self._clamp(node)
                anchor = 3.0 if self._root(node) in {self._root(a) for a in self.anchored} else None
                everywhere, saturates = self.rounded[node], self._saturates(node)
                points.append(
                    QuantizationPoint(
                        node=node.name, group=number, clamp=clamp, everywhere=everywhere, anchor=anchor, saturates=saturates
                    )
                )
        named = {node.name: module_path(node) for node in (*self.integer, *self.floating)}
        lookups = self._lookups_of_integers(bits)
        for lookup, layer in lookups.items():
            where = "" if layer is None else module_path(layer) or layer.name
            whose = f"its table is the weight of {where}: it decodes rows of those integers"
            self.floating[lookup] = whose if where else "it decodes rows of its table's integers"
        return Placement(
            target=self.target.name,
            integer={n.name: kind for n, kind in self.integer.items()},
            carried={n.name: kind for n, kind in self.carried.items()},
            floating={n.name: reason for n, reason in self.floating.items()},
            points=tuple(points),
            lookups={lookup.name: "" if layer is None else layer.name for lookup, layer in lookups.items()},
            layers=named,
            costs=costs_of_runs(self.graph, self.once),
        )

    def _visit(self, node: Node) -> None:
        kind = OPERATOR_KINDS.get(node.target, "unknown")
        if node.target is operator.getitem and node.args[0] not in self.carried:
            return  # one result of an operator that was visited
        if kind == "move" or kind == "concat":
            self._carry(node, kind)
            return
        if kind in ("clamp", "leaky_relu") and self._fused(node):
            return  # quantized after it, when its producer was visited
        reason = self._reason_to_stay_float(node, kind)
        if reason is not None:
            self.floating[node] = reason
            return
        rule = self.target.operators[kind]
        self.integer[node] = kind
        for value in self._rounded_operands(node, kind):
            if self.integer.get(value) == "hardsigmoid":
                continue  # it keeps the integers of its input, or has its own
            for source in self._sources(value):
                self._round(source, everywhere=False)
        if self._saturates(node):
            self._round(node, everywhere=True)
        elif kind == "hardsigmoid":
            self.anchored.add(self._root(node.args[0]))
        if rule.output or (rule.whole and _is_read_twice(node)):
            self._round(self._clamped(node), everywhere=True)
        if rule.shared:
            self._share([*self._operands(node, kind), self._clamped(node)])

    def _reason_to_stay_float(self, node: Node, kind: str) -> str | None:
        if (chosen := self._chosen(node)) is not None:
            return chosen
        if node in self.once:
            return ONCE
        if kind == "unknown":
            return f"no rule for {node.target}"
        if kind not in self.target.operators:
            return why_no_linear(node) or f"{self.target.name} runs no {kind} in integers"
        operands = self._operands(node, kind)
        if skipped := [value for value in operands if self.unrounded.intersection(self._sources(value))]:
            return f"it reads {skipped[0].name}, which the user skipped"
        if kind in ("conv", "linear") and parameter_name(node.args[1]) is None:
            return "its weight is computed during the forward pass"
        if kind in ("conv", "linear") and node.args[0] is node.args[1]:
            return "it multiplies its weight by itself"
        if kind == "conv" and not self.slow and self._is_narrow_volume(node):
            return "a convolution of so few channels over three dimensions is faster in float"
        if kind in ("add", "mul"):
            if len(operands) < 2 or operands[0] is operands[1]:
                return "one of its operands is a constant"
            if node.kwargs.get("alpha", 1) != 1:
                return "it scales an operand (alpha)"
        if node.target is aten.prelu.default and node.args[1].meta["val"].numel() > 1:
            return SLOPES_DIFFER
        if kind == "mean" and not is_global(node):
            return "it does not average over all spatial positions"
        if kind == "hardsigmoid" and (operands[0] not in self.rounded or self._fused(operands[0])):
            return "it does not stand directly behind an integer operator"
        if self.target.operators[kind].follow and not any(self._is_rounded(value) for value in operands):
            return "none of its inputs is in integers"
        if kind in ("add", "mul") and node not in self.read_in_integers:
            sources = {source for value in self._rounded_operands(node, kind) for source in self._sources(value)}
            if not sources <= self.rounded.keys():
                # Coordinates plus an offset, or weights of an attention: a range that 8 bits may not hold, and no faster for it.
                return "it reads a value in float, and nothing in integers reads it"
        return None

    def _chosen(self, node: Node) -> str | None:
        """Why an operator stays float where the caller asks for it, else None."""
        if node in self.unrounded or stands_in(module_path(node), self.skip):
            return "skipped by the user"
        return self.kept[node.name] if node.name in self.kept and not self._may_saturate(node) else None

    def _lookups_of_integers(self, bits: BitWidths) -> dict[Node, Node | None]:
        """The lookups of rows that are to read a rounded table, each with the layer whose weight the table is, too, if any.

        A file holds such a table once if the lookup reads the integers, which ONNX Runtime can where each row has its scale.
        Fewer bits than the target's are a choice for a layer, and too few for what the whole model reads.
        """
        rule, weights = self.target.operators.get("linear"), self.target.weights
        if rule is None or rule.axis != 0 or not (self.target.onnxruntime and weights.per_channel and weights.symmetric):
            return {}
        layers: dict[str | None, Node] = {}
        for node, kind in self.integer.items():
            if kind == "linear":
                layers.setdefault(parameter_name(node.args[1]), node)  # whose quantizer the others take
        found: dict[Node, Node | None] = {}
        for node in self.graph.nodes:
            if node.target is not aten.embedding.default or self._chosen(node) is not None:
                continue
            layer = layers.get(parameter_name(node.args[0]))
            if layer is None:
                if self._is_only_looked_up(node.args[0]):
                    found[node] = None
            elif (bits_of_layer(bits, module_path(layer)).weights or weights.bits) >= weights.bits:
                found[node] = layer
        return found

    def _is_only_looked_up(self, table: Node) -> bool:
        """Whether a table is stored in fp32, is worth it in integers with a scale for each row, and nothing but lookups that may
        read these read it. To decode rows takes three small operators, which the tables of positions of most networks are not.
        """
        name, values = parameter_name(table), table.meta.get("val")
        if name is None or values is None or values.dtype != torch.float32:
            return False
        readers = [user for node in self.graph.nodes if parameter_name(node) == name for user in node.users]
        if any(user.target is not aten.embedding.default or user.args[0].target != name for user in readers):
            return False
        stored = {node.target: node.meta["val"] for node in self.graph.nodes if node.op == "get_attr" and "val" in node.meta}
        least = max(LEAST_SHARED, LEAST_OF_WEIGHTS * sum(value.nbytes for value in stored.values()))
        return 3 * values.numel() - 4 * len(values) >= least and all(self._chosen(user) is None for user in readers)

    def _may_saturate(self, node: Node) -> bool:
        """Whether a hardsigmoid is to be clipped by its own rounding, and the target can: its smallest integer must stand for 0,
        also where the product that reads it is rounded.
        """
        rule = self.target.operators.get("mul")
        able = rule is not None and not rule.shared and not self.target.activations.symmetric
        chosen = self.kept.get(node.name, "").startswith(UNANCHORED)
        return chosen and able and OPERATOR_KINDS.get(node.target) == "hardsigmoid"

    def _saturates(self, node: Node) -> bool:
        """Whether it is a hardsigmoid that runs in integers and is clipped by its own rounding."""
        return node in self.integer and self._may_saturate(node)

    def _read_in_integers(self) -> set[Node]:
        """Values that an operator may read in integers, also behind others that only hand them on."""
        found = set[Node]()
        for node in reversed(self.graph.nodes):
            kind = OPERATOR_KINDS.get(node.target, "unknown") if node.op == "call_function" else "unknown"
            with_constant = kind in ("add", "mul") and len(self._operands(node, kind)) < 2
            if (node in found and not with_constant) if kind in _BETWEEN_OTHERS else kind in self.target.operators:
                found.update(node.all_input_nodes)
        return found

    def _is_narrow_volume(self, node: Node) -> bool:
        """Whether a convolution over three dimensions has so few channels, a depthwise one aside, that integers are slower."""
        outputs, inputs, *window = node.args[1].meta["val"].shape
        groups = int(node.args[6]) if len(node.args) > 6 else 1
        depthwise = groups > 1 and inputs == 1
        return len(window) == 3 and not depthwise and inputs * outputs // groups < self.target.operators["conv"].volume

    def _rounded_operands(self, node: Node, kind: str) -> list[Node]:
        """The operands that are quantized: all but one that a convolution adds inside its kernel."""
        operands = self._operands(node, kind)
        if self.target.operators[kind].fuses:
            fused = [v for v in operands if self.integer.get(v) == "conv" and len(v.users) == 1]
            operands = [v for v in operands if v not in fused[:1]]
        return operands

    def _share(self, values: list[Node]) -> None:
        """Give all of them one scale and zero point."""
        sources = [s for value in values for s in self._sources(value) if s in self.rounded]
        for other in sources[1:]:
            self.group[self._root(other)] = self._root(sources[0])

    @staticmethod
    def _operands(node: Node, kind: str) -> list[Node]:
        if kind in ("conv", "linear"):
            return [node.args[0]]
        return [a for a in node.args if isinstance(a, fx.Node) and a.op != "get_attr" and is_float_tensor(a)]

    def _carry(self, node: Node, kind: str) -> None:
        if node in self.unrounded:
            self.floating[node] = "skipped by the user"
            return
        # A choice of layers may name a concatenation, too, for another reason: it goes by what it joins, as it always did.
        if kind == "concat" and self.kept.get(node.name, "").startswith(JOINED):
            self.floating[node] = self.kept[node.name]
            return
        values = node.args[0] if kind == "concat" else [node.args[0]]
        rounded = [isinstance(v, fx.Node) and v.op != "get_attr" and self._is_rounded(v) for v in values]
        # Quantizing the inputs of a concat that are mostly float would cost more than it saves.
        if sum(rounded) * 2 < len(rounded) or not any(rounded) or not keeps_grid(node):
            if kind == "concat":
                self.floating[node] = "most of what it joins is float"
            return
        if any(not isinstance(v, fx.Node) or v.op == "get_attr" for v in values):
            self.floating[node] = "it joins a constant"
            return
        sources = [s for value in values for s in self._sources(value)]
        if self.unrounded.intersection(sources):
            self.floating[node] = "it joins a value that the user skipped"
            return
        for source in sources:
            self._round(source, everywhere=self.rounded.get(source, False))
        if kind == "concat" and len({self._clamp(source) for source in sources}) > 1:
            # One range for all cannot replace different clamps; they would have to be computed in float.
            if kind not in self.target.operators:
                self.floating[node] = "what it joins is clamped differently"
                return
            self.integer[node] = kind
            self._round(self._clamped(node), everywhere=True)
            return
        self.carried[node] = kind
        self._share(sources)

    def _sources(self, value: Node) -> list[Node]:
        """The nodes that compute a value, before all moves."""
        if value in self.carried:
            inputs = value.args[0] if self.carried[value] == "concat" else [value.args[0]]
            return [s for v in inputs for s in self._sources(v)]
        return [value]

    def _is_rounded(self, value: Node) -> bool:
        """Whether the runtime holds the value in integers only."""
        if self.integer.get(value) == "hardsigmoid":
            return True
        return all(self.rounded.get(source, False) for source in self._sources(value))

    def _round(self, value: Node, *, everywhere: bool) -> None:
        self.group.setdefault(value, value)
        self.rounded[value] = self.rounded.get(value, False) or everywhere

    def _root(self, value: Node) -> Node:
        while self.group.setdefault(value, value) is not value:
            value = self.group[value]
        return value

    def _clamped(self, node: Node) -> Node:
        """The clamp that is the only reader of a node, or a PReLU that its kernel computes; or the node itself."""
        users = list(node.users)
        if len(users) == 1 and self._bends(node, users[0]):
            return users[0]
        if len(users) == 1 and OPERATOR_KINDS.get(users[0].target) == "clamp" and fusible(users[0]):
            return node if users[0] in self.unrounded else users[0]
        return node

    def _bends(self, node: Node, reader: Node) -> bool:
        """Whether a convolution computes a PReLU that reads it, with twice the filters."""
        if reader.target is not aten.prelu.default or self.integer.get(node) != "conv" or reader in self.unrounded:
            return False
        slopes, weight = reader.args[1].meta["val"], node.args[1].meta["val"]
        if slopes.numel() == 1 or self._reason_to_stay_float(reader, "leaky_relu") not in (None, SLOPES_DIFFER):
            return False
        groups, rule = node.args[6] if len(node.args) > 6 else 1, self.target.operators["conv"]
        fits = math.prod(weight.shape[1:]) <= rule.slopes and math.prod(weight.shape) <= MOST_BENT
        fits = fits and groups == 1 and weight.ndim == node.meta["val"].ndim
        stored = parameter_name(reader.args[1]) is not None
        return fits and stored and rule.output and self.target.tuned and not self.target.activations.signed

    def _fused(self, node: Node) -> bool:
        """Whether the quantizer replaces this clamp: it is the only reader of a node that runs in integers."""
        return node.op == "call_function" and node.args[0] in self.integer and self._clamped(node.args[0]) is node

    def _clamp(self, source: Node) -> tuple[float, float | None] | None:
        return bounds(source) if OPERATOR_KINDS.get(source.target) == "clamp" and self._fused(source) else None


def _is_read_twice(value: Node) -> bool:
    """Whether a value is read at more than one place, after operators that only move or scale it or add a constant."""
    readers = list(value.users)
    if len(readers) != 1:
        return len(readers) > 1
    reader = readers[0]
    if read_count(value) > 1:
        return True
    kind = OPERATOR_KINDS.get(reader.target)
    scales = kind in ("add", "mul") and all(n is value or n.op == "get_attr" for n in reader.all_input_nodes)
    return (scales or kind == "move") and _is_read_twice(reader)
