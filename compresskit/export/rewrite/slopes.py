"""Rewrites of PRelu (onnx-ir): with one slope, with one for each channel, and behind a convolution that runs in integers.

    PRelu with one slope                   -> LeakyRelu, for which runtimes have an integer kernel
    PRelu with a slope a for each channel   -> a x + (1 - a) Relu(x) after a float convolution, whose blocked layout these
        operators keep; elsewhere Max(x, a x), where no slope is above 1: faster kernels than that of PRelu
    integer Conv -> PRelu -> QuantizeLinear   -> a Conv with the filters w and a w -> QuantizeLinear -> the larger half, where no
        slope is above 1; a third filter where some are, see `_filters`

The last form rounds once, where it would be twice, and leaves no value in float. The integers of a w are those of w, with the
sign of a, and its scale is |a| times as large, so the sums in the kernel are exactly those that PRelu would read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from compresskit.export.rewrite.common import DATA_MOVEMENT, constant, decoder_of, initializer, replace, symmetric_integers

#: Largest |1 - slope| of a PRelu that is written as a sum: beyond it the two terms cancel too many digits.
LARGEST_COMPLEMENT = 8
LARGEST_BIAS = 2**30  # integer of a bias that no value exceeds


def write_slopes(model: ir.Model) -> None:
    """Write every PRelu in operators for which runtimes have fast kernels."""
    for node in list(model.graph):
        if node.op_type == "PRelu":
            _write_in_float(model.graph, node)


def slopes_in_convolutions(model: ir.Model) -> None:
    """Let a convolution that runs in integers compute the PRelu behind it, with two or three filters for each output."""
    made: dict[Any, ir.Node] = {}
    for node in list(model.graph):
        if node.op_type == "PRelu":
            _several_filters(model.graph, node, made)


def _write_in_float(graph: ir.Graph, node: ir.Node) -> None:
    (x, stored), slopes = node.inputs, constant(node.inputs[1])
    if x is None or stored is None or slopes is None or slopes.dtype not in (np.float32, np.float16):
        return
    if slopes.size == 1:
        leaky = ir.Node("", "LeakyRelu", [x], {"alpha": ir.AttrFloat32("alpha", float(slopes.reshape(())))}, name=node.name)
        replace(graph, node, [leaky], leaky.outputs[0])
        return
    producer = x.producer()
    scaled = _elementwise("Mul", x, stored)
    if (slopes <= 1).all() and (producer is None or producer.op_type != "Conv"):
        larger = _elementwise("Max", x, scaled.outputs[0])
        replace(graph, node, [scaled, larger], larger.outputs[0])
    elif np.abs(1 - slopes).max() <= LARGEST_COMPLEMENT:
        rest = ir.Value(name=f"{stored.name}.complement.{node.name}", const_value=ir.tensor(1 - slopes))
        graph.register_initializer(rest)
        positive = _elementwise("Relu", x)
        bent = _elementwise("Mul", positive.outputs[0], rest)
        both = _elementwise("Add", scaled.outputs[0], bent.outputs[0])
        replace(graph, node, [scaled, positive, bent, both], both.outputs[0])


def _several_filters(graph: ir.Graph, node: ir.Node, made: dict[Any, ir.Node]) -> None:
    """made: weights and biases with several filters that other convolutions have, by what they were made from."""
    conv, slopes = None if node.inputs[0] is None else node.inputs[0].producer(), constant(node.inputs[1])
    readers = [use.node for use in node.outputs[0].uses()]
    if conv is None or conv.op_type != "Conv" or slopes is None or slopes.size == 1:
        return
    if [reader.op_type for reader in readers] != ["QuantizeLinear"] or node.outputs[0].is_graph_output():
        return
    if len(list(conv.outputs[0].uses())) != 1 or conv.attributes.get_int("group", 1) != 1:
        return
    weight, step = decoder_of(conv.inputs[1]), constant(readers[0].inputs[1])
    bias = decoder_of(conv.inputs[2]) if len(conv.inputs) > 2 else _no_bias(graph, conv, weight)
    if weight is None or bias is None or step is None:
        return
    if readers[0].outputs[0].dtype not in (ir.DataType.UINT8, ir.DataType.INT8) or constant(bias.inputs[1]) is None:
        return
    slopes = slopes.reshape(-1).astype(np.float64)
    filters = _filters(slopes)
    # A constant is beyond the range of the result, whatever the scales are.
    stretch = max(1.0, 2 * 2**8 * float(step) / (LARGEST_BIAS * float(constant(bias.inputs[1]).max())))  # type: ignore[union-attr]
    if not all(_takes_signs(given, slopes) for given in (weight, bias)):
        return
    operands, inserted = list[ir.Node](), list[ir.Node]()
    for given in (weight, bias):
        key = (*(value.name for value in given.inputs if value is not None), slopes.tobytes(), stretch)
        if key not in made:
            made[key] = _with_filters(graph, given, filters, stretch)
            inserted.append(made[key])
        operands.append(made[key])
    again = ir.Node("", "Conv", [conv.inputs[0], *(node.outputs[0] for node in operands)], conv.attributes, name=conv.name)
    rounded = ir.Node("", "QuantizeLinear", [again.outputs[0], *readers[0].inputs[1:]], readers[0].attributes)
    shape = conv.outputs[0].shape
    again.outputs[0].type, rounded.outputs[0].type = conv.outputs[0].type, readers[0].outputs[0].type
    if shape is not None:
        again.outputs[0].shape = ir.Shape([shape[0], len(filters) * slopes.size, *list(shape)[2:]])
    rounded.outputs[0].shape = again.outputs[0].shape
    count = initializer(graph, ir.tensor([slopes.size] * len(filters), ir.DataType.INT64, name=f"{node.name or 'prelu'}_parts"))
    axis = {"axis": ir.AttrInt64("axis", 1)}
    split = ir.Node("", "Split", [rounded.outputs[0], count], axis, num_outputs=len(filters))
    chosen = [ir.Node("", "Min" if (slopes >= 1).all() else "Max", split.outputs[:2])]
    if len(filters) > 2:
        chosen.append(ir.Node("", "Min", [chosen[0].outputs[0], split.outputs[2]]))
    replace(graph, readers[0], [*inserted, again, rounded, split, *chosen], chosen[-1].outputs[0])
    graph.remove([node, conv], safe=True)


def _filters(slopes: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Filters for each output, as (factor for each channel, whether it is a constant that no value exceeds).

    With slopes a <= 1, max(x, a x); with slopes >= 1, min(x, a x); with both, min(max(x, a x), infinity) and min(max(x, x), a x).
    """
    never, ones = np.zeros(slopes.shape, bool), np.ones(slopes.shape)
    if (slopes <= 1).all() or (slopes >= 1).all():
        return [(ones, never), (slopes, never)]
    gentle = slopes <= 1
    return [(ones, never), (np.where(gentle, slopes, 1), never), (np.where(gentle, 0, slopes), gentle)]


def _no_bias(graph: ir.Graph, conv: ir.Node, weight: ir.Node | None) -> ir.Node | None:
    """A DequantizeLinear of a bias of zeros, for a convolution without one; None where the scale of its input is not known."""
    source = None if conv.inputs[0] is None else conv.inputs[0].producer()
    while source is not None and source.op_type in DATA_MOVEMENT and source.inputs[0] is not None:
        source = source.inputs[0].producer()
    if source is None or source.op_type != "DequantizeLinear" or weight is None:
        return None
    integers, *scales = (constant(value) for value in (weight.inputs[0], weight.inputs[1], source.inputs[1]))
    if integers is None or scales[0] is None or scales[1] is None or scales[1].size != 1:
        return None
    scale = np.broadcast_to(scales[0].reshape(-1) * scales[1].reshape(()), (integers.shape[0],)).astype(np.float32)
    name = f"{conv.name}_zeros"
    inputs = [
        initializer(graph, ir.tensor(np.zeros(scale.shape, np.int32), name=name)),
        initializer(graph, ir.tensor(np.ascontiguousarray(scale), name=f"{name}.scale")),
    ]
    node = ir.Node("", "DequantizeLinear", inputs, {"axis": ir.AttrInt64("axis", 0)})
    node.outputs[0].type = conv.outputs[0].type
    return node


def _takes_signs(dequantize: ir.Node, slopes: np.ndarray) -> bool:
    """Whether a DequantizeLinear is of stored integers with a scale for each output, or for all, that have opposites."""
    integers, scale = symmetric_integers(dequantize), constant(dequantize.inputs[1])
    if integers is None or scale is None or scale.size not in (1, slopes.size):
        return False
    if scale.size > 1 and dequantize.attributes.get_int("axis", 1) != 0:
        return False
    opposite = -integers.astype(np.int64)
    return bool((slopes >= 0).all() or (opposite.astype(integers.dtype).astype(np.int64) == opposite).all())


def _with_filters(
    graph: ir.Graph, dequantize: ir.Node, filters: Sequence[tuple[np.ndarray, np.ndarray]], stretch: float
) -> ir.Node:
    """A DequantizeLinear of the weights, or biases, of several filters.

    stretch: factor to the scale of constants.
    """
    integers, scale = constant(dequantize.inputs[0]), constant(dequantize.inputs[1])
    zero_point = constant(dequantize.inputs[2]) if len(dequantize.inputs) > 2 else None
    assert integers is not None
    assert scale is not None
    wide, scale = integers.astype(np.int64), np.broadcast_to(scale.reshape(-1), filters[0][0].shape)
    parts = [np.sign(factors).astype(np.int64).reshape(-1, *[1] * (wide.ndim - 1)) * wide for factors, _ in filters]
    if wide.ndim == 1:
        parts = [np.where(constants, LARGEST_BIAS, part) for part, (_, constants) in zip(parts, filters, strict=True)]
    both = np.concatenate(parts)
    stretched = [np.where(constants, scale.max() * stretch, scale) for _, constants in filters]
    sizes = [np.where(factors == 0, 1, np.abs(factors)) for factors, _ in filters]
    scales = np.concatenate([one * size for one, size in zip(stretched, sizes, strict=True)])
    source = dequantize.inputs[0]
    assert source is not None
    inputs = [
        initializer(graph, ir.tensor(both.astype(integers.dtype), source.dtype, name=f"{source.name}.filters")),
        initializer(graph, ir.tensor(scales.astype(scale.dtype), name=f"{source.name}.filters.scale")),
    ]
    if zero_point is not None:
        like = dequantize.inputs[2]
        assert like is not None
        zeros = np.zeros(scales.shape, zero_point.dtype)
        inputs.append(initializer(graph, ir.tensor(zeros, like.dtype, name=f"{source.name}.filters.zero_point")))
    node = ir.Node("", "DequantizeLinear", inputs, {"axis": ir.AttrInt64("axis", 0)})
    node.outputs[0].type = dequantize.outputs[0].type
    return node


def _elementwise(operator: str, x: ir.Value, *others: ir.Value) -> ir.Node:
    """A node whose result has the shape and type of its first input."""
    node = ir.Node("", operator, [x, *others])
    node.outputs[0].shape, node.outputs[0].type = x.shape, x.type
    return node
