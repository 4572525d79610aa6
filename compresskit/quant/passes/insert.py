"""Insert quantizer modules into a captured graph, at the points of a placement; find the quantizer of a value."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import fx

from compresskit.base.errors import SettingError
from compresskit.graph.capture import module_path, parameter_name
from compresskit.graph.layers.stored import CONVS, each_dimension
from compresskit.graph.normalize import GIVES_OUTPUT_OF, Node
from compresskit.graph.surgery import get_tensor
from compresskit.quant.numerics.bit_widths import TARGET_BITS, Bits, BitWidths, bits_of_layer, check_bit_names, check_target_takes
from compresskit.quant.numerics.dynamic_quantizers import DynamicActivation, RowQuantizer
from compresskit.quant.numerics.observers import HistogramMSE, KnownRange, MinMax, Observer
from compresskit.quant.numerics.operators import KNOWN_RANGES, moved_input, moved_inputs
from compresskit.quant.numerics.quantizers import ActivationQuantizer, BiasQuantizer, WeightQuantizer
from compresskit.quant.numerics.saturation import PairPacking, can_overflow, conv_packing
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.numerics.targets import Target
from compresskit.quant.passes.placement import Placement, QuantizationPoint
from compresskit.quant.passes.quantizer_names import add_quantizer_, stored_name

KEPT_META = ("val", "nn_module_stack", GIVES_OUTPUT_OF)  # of a value, that its quantizer has, too


def insert_quantizers_(
    body: fx.GraphModule,
    placement: Placement,
    target: Target,
    observer: Callable[[], Observer] | None,
    bits: BitWidths = TARGET_BITS,
) -> None:
    """Insert quantizer modules into a prepared graph, in place.

    observer: makes an observer for each group of points; None takes `default_observer`.
    bits: of weights and activations, where they are other than the target's.

    Raises SettingError where `bits` names no layer, or the target cannot express them.
    """
    nodes = {node.name: node for node in body.graph.nodes}
    integer = {nodes[name] for name in (*placement.integer, *placement.carried)}
    layers = {name: bits_of_layer(bits, placement.layers[name]) for name in _layers_with_weights(placement)}
    check_bit_names(bits, [placement.layers[name] for name in placement.costs if name in placement.layers])
    for name, widths in layers.items():
        check_target_takes(widths, target, placement.layers[name])
    formats = _activation_formats(nodes, placement, target, layers, bits)
    shared: dict[int, tuple[str, ActivationQuantizer]] = {}
    for point in placement.points:
        if point.group not in shared:
            clamp = _common_clamp([p for p in placement.points if p.group == point.group])
            clamp = None if target.activations.symmetric else clamp  # a symmetric range does not end at 0
            label = module_path(nodes[point.node]) or point.node
            scheme = formats.get(point.group, target.activations)
            known = _known_range([nodes[p.node] for p in placement.points if p.group == point.group], target, point, scheme)
            watching = (known or observer or default_observer(nodes[point.node], placement, scheme))()
            if isinstance(watching, HistogramMSE):
                watching.bits = min(watching.bits, scheme.bits)
            made = ActivationQuantizer(_two_values_fit(scheme, clamp, label), watching, clamp, point.anchor, label)
            shared[point.group] = (add_quantizer_(body, point.node, made), made)
        name, quantizer = shared[point.group]
        _insert_activation(body, nodes[point.node], name, point, quantizer, integer)
    _round_again_(body, {nodes[name]: _widened(target, widths.activations) for name, widths in layers.items()}, observer)
    weights: dict[str, str] = {}
    for name, widths in layers.items():
        _insert_weight(body, nodes[name], target.operators[placement.integer[name]].axis, _with_widths(target, widths), weights)
    lookups = [nodes[name] for name in placement.lookups]
    for stored in dict.fromkeys(str(parameter_name(lookup.args[0])) for lookup in lookups):
        found = [lookup for lookup in lookups if parameter_name(lookup.args[0]) == stored]
        if stored in weights:
            _look_up_rounded_(body, found, weights[stored])
        else:
            round_rows_(body, found, RowQuantizer(replace(target.weights, bits=8)))  # fewer are for products
    body.graph.lint()
    body.recompile()


def round_rows_(body: fx.GraphModule, lookups: Sequence[Node], quantizer: RowQuantizer) -> None:
    """Round the rows that lookups in one table return."""
    name = add_quantizer_(body, lookups[0].name, quantizer)
    for lookup in lookups:
        with body.graph.inserting_after(lookup):
            rows = body.graph.call_module(name, (lookup, lookup.args[0]))
        rows.meta = copy.copy(lookup.meta)
        for reader in [user for user in lookup.users if user is not rows]:
            reader.replace_input_with(lookup, rows)


def _look_up_rounded_(body: fx.GraphModule, lookups: list[Node], quantizer: str) -> None:
    """Let lookups read the rounded rows of a table that is a layer's weight, too, which is rounded once for them and the layers.

    quantizer: its name.
    """
    calls = [node for node in body.graph.nodes if node.op == "call_module" and node.target == quantizer]
    first = next(node for node in body.graph.nodes if node in calls or node in lookups)
    with body.graph.inserting_before(first):
        rounded = body.graph.call_module(quantizer, (first.args[0],))
    for lookup in lookups:
        lookup.replace_input_with(lookup.args[0], rounded)
    for call in calls:
        call.replace_all_uses_with(rounded)
        body.graph.erase_node(call)


def _layers_with_weights(placement: Placement) -> list[str]:
    """Names of the nodes with weights that run in integers."""
    return [name for name, kind in placement.integer.items() if kind in ("conv", "linear")]


def _with_widths(target: Target, widths: Bits) -> Target:
    return replace(target, weights=replace(target.weights, bits=widths.weights or target.weights.bits))


def _widened(target: Target, bits: int | None) -> Scheme:
    return replace(target.activations, bits=bits or target.activations.bits)


def _activation_formats(
    nodes: dict[str, Node], placement: Placement, target: Target, layers: dict[str, Bits], bits: BitWidths
) -> dict[int, Scheme]:
    """The number format of each group of points: the widest that a reader wants; of values that no layer reads, that of the whole
    model. At most 8 bits where a hardsigmoid runs on the integers.
    """
    rest = bits_of_layer(bits, "")
    groups = {nodes[point.node]: point.group for point in placement.points}
    wanted: dict[int, list[int]] = {}
    for name in placement.integer:
        shortcuts = None if name in layers else bits_of_layer(bits, placement.layers.get(name, "")).shortcuts
        if shortcuts is not None:
            for source in [source for operand in nodes[name].all_input_nodes for source in _computed(operand, groups)]:
                wanted.setdefault(groups[source], []).append(shortcuts)
    for name, widths in layers.items():
        for source in _computed(nodes[name].args[0], groups):
            wanted.setdefault(groups[source], []).append(widths.activations or target.activations.bits)
    anchored = {point.group for point in placement.points if point.anchor is not None}
    formats = {}
    for group in groups.values():
        width = max(wanted[group]) if group in wanted else rest.activations or target.activations.bits
        formats[group] = _widened(target, min(width, 8) if group in anchored else width)
    return formats


def _known_range(values: list[Node], target: Target, point: QuantizationPoint, scheme: Scheme) -> Callable[[], Observer] | None:
    """Makes the observer of values that share a quantizer, if the range of each is known from its operator.

    The range of a hardsigmoid that saturates ends half a step below 1, so that 1 is rounded to the largest integer, and 1/2,
    which an input of 0 gives, does not lie halfway between two integers, as it would with a range up to 1.
    """
    if point.saturates:
        return partial(KnownRange, 0.0, 1 - 1 / (2 * (scheme.high - scheme.low) + 1), fixed=True)
    if not target.known_ranges:
        return None
    found = [KNOWN_RANGES.get(node.target) for value in values for node in _origins(value)]
    known = [entry for entry in found if entry is not None]
    if len(known) < len(found):
        return None
    return partial(KnownRange, min(low for low, _ in known), max(high for _, high in known))


def _origins(value: Node) -> Iterator[Node]:
    """What a value comes from through operators that only move or join values."""
    inputs = moved_inputs(value)
    if not inputs:
        yield value
    for source in inputs:
        yield from _origins(source)


def _two_values_fit(scheme: Scheme, clamp: tuple[float, float | None] | None, label: str) -> Scheme:
    """The format itself. Raises SettingError where it has two values, 0 and the scale, and the activation both signs."""
    if scheme.bits == 1 and (clamp is None or clamp[0] != 0):
        raise SettingError(
            f"{label}: Bits(activations=1) wanted for a value that no ReLU has made; one bit is 0 and the scale, which loses"
            " every negative value. Give the layers that read it more:"
            ' bits={"": Bits(...), "name of the layer": Bits(activations=8)}'
        )
    return scheme


def _round_again_(body: fx.GraphModule, layers: dict[Node, Scheme], observer: Callable[[], Observer] | None) -> None:
    """Round the input of each layer again where its format has fewer bits than the value has, in place.

    Only `Bits.shortcuts` makes a value so; where two layers read one value, it has the wider format for both.
    """
    inputs: dict[tuple[Node, int], Node] = {}
    widest: dict[Node, int] = {}
    for layer, scheme in layers.items():
        widest[layer.args[0]] = max(scheme.bits, widest.get(layer.args[0], 0))
    for layer in layers:
        value = layer.args[0]
        source, scheme = quantizer_of(body, value), replace(layers[layer], bits=widest[value])
        if not isinstance(source, ActivationQuantizer) or source.scheme.bits <= scheme.bits or source.anchor is not None:
            continue
        if (value, scheme.bits) not in inputs:
            label = f"input of {module_path(layer) or layer.name}"
            watching = (observer or partial(HistogramMSE, symmetric=scheme.symmetric))()
            if isinstance(watching, HistogramMSE):
                watching.bits = min(watching.bits, scheme.bits)
            clamp = source.clamp if source.clamp is not None and source.clamp[0] == 0 else None
            made = ActivationQuantizer(_two_values_fit(scheme, clamp, label), watching, clamp, label=label)
            name = add_quantizer_(body, f"input_{layer.name}", made)
            with body.graph.inserting_before(layer):
                inputs[value, scheme.bits] = body.graph.call_module(name, (value,))
            inputs[value, scheme.bits].meta = {key: value.meta[key] for key in KEPT_META if key in value.meta}
        layer.replace_input_with(value, inputs[value, scheme.bits])


def _computed(value: object, points: Container[Node]) -> Iterator[Node]:
    """The points that a value comes from through operators that only move values."""
    if isinstance(value, fx.Node) and value in points:
        yield value
    elif isinstance(value, fx.Node):
        for source in moved_inputs(value):
            yield from _computed(source, points)


def default_observer(value: Node, placement: Placement, scheme: Scheme) -> Callable[[], Observer]:
    """The observer of a value: `HistogramMSE` where it has less than 8 bits, or is computed in float and only products over
    tokens read it, else `MinMax`.

    Such values have long tails. Measured on ViT-B/16: 28.6 -> 29.9 dB.
    """
    if scheme.bits < 8:
        return partial(HistogramMSE, symmetric=scheme.symmetric)
    readers = [user for user in value.users if user.name in placement.integer]
    tokens = all(placement.integer[user.name] == "linear" and user.meta["val"].ndim > 2 for user in readers)
    return HistogramMSE if readers and tokens and value.name not in placement.integer else MinMax


def quantizer_of(body: fx.GraphModule, value: object) -> ActivationQuantizer | DynamicActivation | None:
    """The quantizer on whose grid a value lies, found through operators that only move values; None for a float value."""
    while isinstance(value, fx.Node):
        module = body.get_submodule(str(value.target)) if value.op == "call_module" else None
        if isinstance(module, ActivationQuantizer | DynamicActivation):
            return module
        value = moved_input(value)
    return None


def stored_roundings(body: fx.GraphModule) -> Iterator[tuple[WeightQuantizer, str]]:
    """Each call of a quantizer of a weight, or of rows that are looked up in one: the quantizer and the name of the weight."""
    for node in body.graph.nodes:
        module = body.get_submodule(str(node.target)) if node.op == "call_module" else None
        rounding = module.table if isinstance(module, RowQuantizer) else module
        if isinstance(rounding, WeightQuantizer):
            yield rounding, str(node.args[-1].target)


def _common_clamp(points: list[QuantizationPoint]) -> tuple[float, float | None] | None:
    clamps = {p.clamp for p in points}
    return clamps.pop() if len(clamps) == 1 else None


def _insert_activation(
    body: fx.GraphModule, node: Node, name: str, point: QuantizationPoint, quantizer: ActivationQuantizer, integer: set[Node]
) -> None:
    readers = [user for user in node.users if point.everywhere or user in integer]
    with body.graph.inserting_after(node):
        new = body.graph.call_module(name, (node,))
    new.meta = {key: node.meta[key] for key in KEPT_META if key in node.meta}
    for user in readers:
        user.replace_input_with(node, new)
    if point.clamp is not None and quantizer.clamp == point.clamp and len(node.users) == 1:
        # The range of the quantizer replaces the clamp.
        new.replace_input_with(node, node.args[0])
        body.graph.erase_node(node)


def _insert_weight(body: fx.GraphModule, node: Node, axis: int | None, target: Target, weights: dict[str, str]) -> None:
    """weights: name of each weight that has a quantizer -> name of the quantizer."""
    weight = node.args[1]
    stored = str(parameter_name(weight))
    source = quantizer_of(body, node.args[0])
    shape = get_tensor(body, stored).shape
    if stored not in weights:
        scheme = replace(target.weights, per_channel=target.weights.per_channel and axis is not None)
        weights[stored] = add_quantizer_(body, stored_name(stored), WeightQuantizer(scheme, axis or 0, shape[axis or 0]))
    quantizer = body.get_submodule(weights[stored])
    assert isinstance(quantizer, WeightQuantizer)
    activations = source.scheme if isinstance(source, ActivationQuantizer) else target.activations
    if target.saturates and can_overflow(quantizer.scheme, activations):
        quantizer.pack_(_packing(node, shape, source), get_tensor(body, stored))
    with body.graph.inserting_before(node):
        rounded = body.graph.call_module(weights[stored], (weight,))
    node.replace_input_with(weight, rounded)
    bias = node.args[2] if len(node.args) > 2 else None
    if bias is not None and parameter_name(bias) is not None and isinstance(source, ActivationQuantizer):
        name = add_quantizer_(body, f"bias_{node.name}", BiasQuantizer(source, quantizer))
        with body.graph.inserting_before(node):
            node.replace_input_with(bias, body.graph.call_module(name, (bias, weight)))


def _packing(node: Node, shape: tuple[int, ...], source: ActivationQuantizer | DynamicActivation | None) -> PairPacking | None:
    """How kernels pair the weights of a convolution or linear layer."""
    nonnegative = isinstance(source, ActivationQuantizer) and source.clamp is not None and source.clamp[0] == 0
    if node.target not in CONVS:
        return PairPacking(nonnegative=nonnegative)
    given = [*node.args[3:7], *(1, 0, 1, 1)[max(0, len(node.args) - 3) :]]
    stride, padding = (each_dimension(v, len(shape) - 2) for v in given[:2])
    return conv_packing(tuple(shape), int(given[3]), stride, padding, nonnegative=nonnegative)
