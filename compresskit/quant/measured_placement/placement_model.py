"""Predict a placement from the measured times of layers: the cheapest division of a graph into integers and float.

The profile of the float file and of the file with everything in integers tells what each layer takes in either. Where a value
passes from a layer of one kind to one of the other, converting it costs time in proportion to its size. The division with the
least sum is a minimum cut of the graph of layers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from compresskit.export.check.profile.layers import INPUTS, Profile
from compresskit.quant.numerics.minimum_cut import minimum_cut
from compresskit.quant.passes.coverage import element_count, example_rows
from compresskit.quant.passes.placement import Placement

#: Milliseconds for each value that is converted, where the profile shows no conversion.
USUAL_CONVERSION = 1e-6
#: Factors to the measured cost of a conversion: leaving a region also costs changes of the memory layout and fusions.
CONVERSION_FACTORS = (1.0, 3.0, 10.0)
LAYOUT_CHANGES = 2.0  # factor to it where the rest is not tried
BEFORE_LAYERS = -1


@dataclass(frozen=True)
class LayerGraph:
    """Layers of a captured graph, numbered in its order.

    members: operators that may run in integers, for each layer; those before the first layer belong to none.
    sizes: (from, to) -> number of values that pass from a layer to another for one sample; from -1 for inputs of the model.
    """

    members: tuple[tuple[str, ...], ...]
    sizes: Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class OperatorTimes:
    """What operators of a quantized model would take in float, measured.

    extra: milliseconds that an operator takes longer in float than in integers, negative where float is faster; of the operators
    of a layer, its first has the time of all. conversion: milliseconds for a value of a sample that is converted from one to
    the other, its layout with it. milliseconds: of the model. All for the batch that was timed.
    """

    extra: Mapping[str, float]
    conversion: float
    milliseconds: float


def operator_times(graph: fx.Graph, placement: Placement, profile: Profile) -> OperatorTimes | None:
    """The times of a placed graph, with quantizers or without; None where the profile does not fit it.

    profile: of the file of the placement against that of the float model.
    """
    layers = layer_graph(graph, placement)
    times = {layer.place: layer for layer in profile.layers if layer.place is not None}
    if not layers.members or max(times, default=0) >= len(layers.members):
        return None
    extra = {name: 0.0 for some in layers.members for name in some}
    for place, layer in times.items():
        if layer.this is None or layer.other is None:
            return None
        for name in layers.members[place][:1]:
            integer, floating = (time.milliseconds - time.conversions for time in (layer.this, layer.other))
            extra[name] = floating - integer
    return OperatorTimes(extra, LAYOUT_CHANGES * profile.rows * _conversion_cost(layers, profile), profile.milliseconds)


def layer_graph(graph: fx.Graph, placement: Placement) -> LayerGraph:
    """Number the layers of a prepared graph as `export.check.profile.file_layers` numbers those of its file."""
    layer_of: dict[fx.Node, int] = {}
    members: list[list[str]] = []
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    passed: set[tuple[fx.Node, int]] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            layer_of[node] = BEFORE_LAYERS
        if node.op == "call_module" and node.args and node.args[0] in layer_of:  # a quantizer belongs to what it rounds
            layer_of[node] = layer_of[node.args[0]]
        reads = [(source, layer_of[source]) for source in node.all_input_nodes if source in layer_of]
        if node.op != "call_function" or not reads:
            continue
        cost = placement.costs.get(node.name)
        if cost is not None and cost.parameters > 0:
            layer_of[node] = len(members)
            members.append([])
        else:
            layer_of[node] = max(layer for _, layer in reads)
        here = layer_of[node]
        if here >= 0 and node.name in placement.integer:
            members[here].append(node.name)
        for source, layer in reads:
            if layer != here and (source, here) not in passed:  # one conversion serves all readers in a layer
                passed.add((source, here))
                sizes[layer, here] += _values_of_a_sample(source)
    return LayerGraph(tuple(map(tuple, members)), dict(sizes))


def _values_of_a_sample(node: fx.Node) -> int:
    value, rows = node.meta.get("val"), example_rows(node.graph)
    return element_count(value, rows) // rows if isinstance(value, Tensor) else 0


def predicted_placements(graph: LayerGraph, profile: Profile) -> Iterator[tuple[str, ...]]:
    """Operators that should stay float, for each cost of conversions that is assumed; none where the profile does not fit.

    Where all of them should, all but those of the one layer that loses least in integers: a quantized model has one.
    profile: of the file with everything in integers against the float one.
    """
    times = {layer.place: layer for layer in profile.layers if layer.place is not None}
    if not graph.members or max(times, default=0) >= len(graph.members):
        return
    integer, floating = ([0.0] * len(graph.members) for _ in range(2))
    for place, layer in times.items():
        if layer.this is None or layer.other is None:
            return  # the files have other layers
        integer[place] = layer.this.milliseconds - layer.this.conversions
        floating[place] = layer.other.milliseconds - layer.other.conversions
    each = _conversion_cost(graph, profile)
    for factor in CONVERSION_FACTORS:
        edges = {pair: size * profile.rows * each * factor for pair, size in graph.sizes.items()}
        fixed = [i for i, some in enumerate(graph.members) if not some]
        kept = cheapest_division(integer, floating, edges, fixed) or _least_loss(integer, floating, edges, fixed)
        yield tuple(name for i, some in enumerate(graph.members) if i not in kept for name in some)


def _least_loss(
    integer: Sequence[float], floating: Sequence[float], edges: Mapping[tuple[int, int], float], fixed: Collection[int]
) -> frozenset[int]:
    """The one layer that costs least in integers where all others are float; arguments as for `cheapest_division`."""

    def loss(layer: int) -> float:
        return integer[layer] - floating[layer] + sum(cost for pair, cost in edges.items() if layer in pair)

    return frozenset(sorted(set(range(len(integer))) - set(fixed), key=loss)[:1])


def _conversion_cost(graph: LayerGraph, profile: Profile) -> float:
    """Milliseconds for each value that is converted, measured where the inputs become integers."""
    before = next((layer.this for layer in profile.layers if layer.name == INPUTS), None)
    read = sum(size for (start, _), size in graph.sizes.items() if start == BEFORE_LAYERS) * profile.rows
    return before.conversions / read if before is not None and before.conversions and read else USUAL_CONVERSION


def cheapest_division(
    integer: Sequence[float],
    floating: Sequence[float],
    edges: Mapping[tuple[int, int], float],
    fixed: Collection[int] = (),
) -> frozenset[int]:
    """The layers that should run in integers: least sum of the layers' times and of the edges between layers of the two kinds.

    Args:
        integer, floating: time of each layer in integers and in float.
        edges: (layer, layer) -> time of a conversion where one is in integers and the other is not; layer -1 is float.
        fixed: layers that can only be float.
    """
    source, sink = len(integer), len(integer) + 1
    both: dict[tuple[int, int], float] = defaultdict(float)
    for i, (low, high) in enumerate(zip(integer, floating, strict=True)):
        both[source, i] += high
        both[i, sink] += math.inf if i in fixed else low
    for (start, end), cost in edges.items():
        a, b = (sink if i < 0 else i for i in (start, end))
        both[a, b] += cost
        both[b, a] += cost
    return frozenset(i for i in minimum_cut(both, source, sink) if i < len(integer))
