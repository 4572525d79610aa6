"""Rewrites of an ONNX graph (onnx-ir) for all runtimes: more operators run in integers, and the file is smaller.

    ReduceMean over all spatial axes       -> GlobalAveragePool, for which runtimes have an integer kernel
    move -> QuantizeLinear                 -> QuantizeLinear -> move, so that Q directly follows the operator it belongs to
    DequantizeLinear -> move               -> move (on the integers) -> DequantizeLinear
    DequantizeLinear -> layer with a float weight   -> a Clip without bounds between, which keeps the layer in float
    AveragePool whose windows are cut at the border   -> a Clip without bounds before it, as above
    DequantizeLinear of looked-up rows -> product of integers   -> a Clip without bounds between
    GlobalAveragePool between scales that are too far apart   -> a Clip without bounds before it
    constants that the exporter lost       -> initializers again
    names of the exporter, metadata        -> dropped

A *move* is an operator that only moves values (Reshape, Transpose, Slice, Pad, Concat, MaxPool, ...). Rounding commutes with it,
so that it can run on integers, a quarter of the bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from compresskit.export.ops.blocks import NARROW

DATA_MOVEMENT = frozenset(
    "Reshape Flatten Transpose Squeeze Unsqueeze Slice Split Expand Tile Gather Identity MaxPool Pad Concat DepthToSpace"
    " SpaceToDepth Resize".split()
)
#: Those for which ONNX Runtime has no kernel of 16 bits.
ONLY_OF_BYTES = frozenset("MaxPool Pad Resize DepthToSpace SpaceToDepth Tile".split())
#: What ONNX Runtime's integer GlobalAveragePool takes of (scale of the input) / (scale of the output * positions).
STEPS_OF_MEAN = (2.0**-32, 255.0)


def optimize_(model: ir.Model, rewrites: Sequence[Callable[[ir.Model], None]] = ()) -> None:
    """Apply every rewrite of this module in place, then those of the target."""
    _register_constants(model.graph)
    integers = any(node.op_type == "QuantizeLinear" for node in model.graph)
    for node in list(model.graph) if integers else ():
        if node.op_type == "ReduceMean":
            _global_average_pool(model.graph, node)
    for node in list(model.graph):
        if node.op_type == "QuantizeLinear":
            _hoist_quantize(model.graph, node)
    for node in list(model.graph):
        if node.op_type in DATA_MOVEMENT:
            _sink_dequantize(model.graph, node)
    for node in list(model.graph):
        if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            _keep_layer_float(model.graph, node)
        if node.op_type in ("Gemm", "MatMul"):
            _keep_rows_float(model.graph, node)
        if node.op_type == "AveragePool":
            _keep_partial_windows_float(model.graph, node)
        if node.op_type == "GlobalAveragePool":
            _keep_fine_mean_float(model.graph, node)
    for rewrite in rewrites:
        rewrite(model)
    _remove_unused(model.graph)
    _drop_exporter_metadata(model)


def _register_constants(graph: ir.Graph) -> None:
    """Make initializers of constants that nodes read and the graph does not hold: onnxscript names the bounds of all clips of one
    value alike, and of constants of one name a graph keeps the last.
    """
    for node in graph:
        for value in node.inputs:
            if value is None or value.const_value is None or value.producer() is not None or value.is_graph_input():
                continue
            if graph.initializers.get(value.name or "") is not value:
                names = (f"{value.name}_of_{node.name}_{i}" for i in itertools.count(1))
                value.name = next(name for name in names if name not in graph.initializers)
                graph.register_initializer(value)


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The array of a constant value, or None."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Register a tensor as an initializer of a graph, by a name of its own; returns its value."""
    names = itertools.chain([tensor.name], (f"{tensor.name}_{i}" for i in itertools.count(1)))
    name = next(name for name in names if name not in graph.initializers)
    value = ir.Value(name=name, shape=ir.Shape(tensor.numpy().shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def replace_stored(graph: ir.Graph, node: ir.Node, index: int, values: np.ndarray) -> None:
    """Give a node another stored tensor as one of its inputs, by the same name where nothing else reads the one before."""
    old = node.inputs[index]
    name = "stored" if old is None else old.name
    if old is not None and old.is_initializer() and len(old.uses()) == 1 and not old.is_graph_output():
        del graph.initializers[str(name)]
    node.replace_input_with(index, initializer(graph, ir.tensor(np.ascontiguousarray(values), name=name)))


def own_decoder(graph: ir.Graph, node: ir.Node, index: int) -> ir.Node | None:
    """The DequantizeLinear that makes an input of a node, and nothing else: a copy where others read it. None of other inputs."""
    value = node.inputs[index] if index < len(node.inputs) else None
    decode = decoder_of(value)
    if value is None or decode is None:
        return None
    if len(value.uses()) == 1 and not value.is_graph_output():
        return decode
    copy = ir.Node("", "DequantizeLinear", decode.inputs, decode.attributes)
    copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
    graph.insert_before(node, copy)
    node.replace_input_with(index, copy.outputs[0])
    return copy


def decoder_of(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear that makes a value, with a zero point or without; else None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def dequantize_of(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear with a zero point that makes a value, or None."""
    node = decoder_of(value)
    return node if node is not None and len(node.inputs) > 2 else None


def symmetric_integers(decode: ir.Node | None) -> np.ndarray | None:
    """The stored integers that a DequantizeLinear without blocks decodes, where 0 stands for 0.0; else None."""
    if decode is None or "block_size" in decode.attributes:
        return None
    zero_points = constant(decode.inputs[2]) if len(decode.inputs) > 2 else np.zeros(1)
    return None if zero_points is None or zero_points.any() else constant(decode.inputs[0])


def replace(graph: ir.Graph, old: ir.Node, nodes: list[ir.Node], output: ir.Value) -> None:
    """Replace a node of one result with several nodes; `output`, of the last one, takes the place of the result."""
    result = old.outputs[0]
    output.shape, output.type = result.shape, result.type
    ir.convenience.replace_nodes_and_values(graph, old, [old], nodes, [result], [output])


def _global_average_pool(graph: ir.Graph, node: ir.Node) -> None:
    x, axes = node.inputs[0], constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if x is None or x.shape is None or axes is None or len(x.shape) < 3:
        return
    rank = len(x.shape)
    if sorted(int(a) % rank for a in axes) != list(range(2, rank)):
        return
    pool = ir.Node("", "GlobalAveragePool", [x], name=node.name)
    pool.outputs[0].type = node.outputs[0].type
    keep = node.attributes.get_int("keepdims", 1)
    if keep:
        replace(graph, node, [pool], pool.outputs[0])
        return
    pool.outputs[0].shape = ir.Shape([*x.shape[:2], *[1] * (rank - 2)])
    flat = ir.Node("", "Flatten", [pool.outputs[0]], {"axis": ir.AttrInt64("axis", 1)})
    replace(graph, node, [pool, flat], flat.outputs[0])


def _hoist_quantize(graph: ir.Graph, quantize: ir.Node) -> None:
    """`move(x) -> Q` to `Q(x) -> move` while the moved value has no other reader."""
    while True:
        moved = quantize.inputs[0]
        move = None if moved is None else moved.producer()
        if moved is None or move is None or move.op_type not in ("Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze"):
            return
        source = move.inputs[0]
        if len(list(moved.uses())) != 1 or source is None or source.producer() is None or moved.is_graph_output():
            return
        early = ir.Node("", "QuantizeLinear", [source, *quantize.inputs[1:]], quantize.attributes)
        early.outputs[0].shape, early.outputs[0].type = source.shape, quantize.outputs[0].type
        late = ir.Node("", move.op_type, [early.outputs[0], *move.inputs[1:]], move.attributes)
        replace(graph, quantize, [early, late], late.outputs[0])
        graph.remove(move, safe=True)
        quantize = early


def _dequantize_before(value: ir.Value | None) -> ir.Node | None:
    node = decoder_of(value)
    return node if node is not None and _is_scalar(node.inputs[1]) else None


def _is_scalar(value: ir.Value | None) -> bool:
    array = constant(value)
    return array is not None and array.ndim == 0


def _sink_dequantize(graph: ir.Graph, move: ir.Node) -> None:
    """`DQ -> move` to `move -> DQ`, on integers; a Concat moves if all its inputs share one scale and zero point."""
    count = len(move.inputs) if move.op_type == "Concat" else 1
    sources = [_dequantize_before(value) for value in move.inputs[:count]]
    first = sources[0]
    if first is None or any(s is None or not _same_qparams(first, s) for s in sources):
        return
    scale, zero_point = first.inputs[1], first.inputs[2] if len(first.inputs) > 2 else None
    if scale is None or zero_point is None or (len(move.outputs) > 1 and move.op_type != "Split"):
        return
    if move.op_type in ONLY_OF_BYTES and zero_point.dtype in (ir.DataType.UINT16, ir.DataType.INT16):
        return
    others = list(move.inputs[count:])
    if move.op_type == "Pad" and not _pad_with(move, others, zero_point):
        return
    if move.op_type == "Resize" and move.attributes.get_string("mode", "nearest") != "nearest":
        return
    integers = [s.inputs[0] for s in sources if s is not None]
    early = ir.Node("", move.op_type, [*integers, *others], move.attributes, num_outputs=len(move.outputs), name=move.name)
    late = []
    for narrow, wide in zip(early.outputs, move.outputs, strict=True):
        narrow.shape, narrow.type = wide.shape, zero_point.type
        late.append(ir.Node("", "DequantizeLinear", [narrow, scale, zero_point]))
        late[-1].outputs[0].shape, late[-1].outputs[0].type = wide.shape, wide.type
    results = [node.outputs[0] for node in late]
    ir.convenience.replace_nodes_and_values(graph, move, [move], [early, *late], list(move.outputs), results)


def _keep_layer_float(graph: ir.Graph, layer: ir.Node) -> None:
    """ONNX Runtime rounds the float weight of a layer between DQ and Q by itself (WeightBiasQuantization), whatever the user
    decided; it does not look through a Clip.
    """
    x, weight = layer.inputs[0], layer.inputs[1]
    if x is None or weight is None or _dequantize_before(x) is None or not weight.is_initializer():
        return
    _hide_from_fusion(graph, layer, x)


def _keep_partial_windows_float(graph: ir.Graph, pool: ir.Node) -> None:
    """ONNX Runtime's integer kernel divides windows that are cut at the border (`ceil_mode`) by all of their positions."""
    x = pool.inputs[0]
    if x is not None and pool.attributes.get_int("ceil_mode", 0) == 1 and _dequantize_before(x) is not None:
        _hide_from_fusion(graph, pool, x)


def _keep_rows_float(graph: ir.Graph, product: ir.Node) -> None:
    """ONNX Runtime multiplies two operands of bytes in integers (MatMulIntegerToFloat), where it refuses to run if the first has
    several zero points, as the rows of a table have that are looked up.
    """
    x = product.inputs[0]
    rows, other = dequantize_of(x), decoder_of(product.inputs[1])
    if x is None or rows is None or other is None:
        return
    points, integers = rows.inputs[2], other.inputs[0]
    looked_up = points is not None and points.producer() is not None and (points.shape is None or len(points.shape) > 0)
    if looked_up and integers is not None and not str(integers.name).endswith(NARROW):  # it multiplies 4 bits in float
        _hide_from_fusion(graph, product, x)


def _keep_fine_mean_float(graph: ir.Graph, pool: ir.Node) -> None:
    """ONNX Runtime's integer kernel refuses to run where a step of the input is too many of the output: where a mean of large
    values is always close to zero, as behind filters whose weights sum to zero.
    """
    x, decode = pool.inputs[0], _dequantize_before(pool.inputs[0])
    if x is None or x.shape is None or decode is None:
        return
    sizes = [n if isinstance(n, int) else 1 for n in list(x.shape)[2:]]  # of what varies the least, for which steps are largest
    for user in [use.node for use in pool.outputs[0].uses()]:
        scales = [constant(scale) for scale in (decode.inputs[1], user.inputs[1])] if user.op_type == "QuantizeLinear" else []
        if len(scales) == 2 and all(scale is not None and scale.size == 1 for scale in scales):
            before, after = (float(scale.item()) for scale in scales if scale is not None)
            if not STEPS_OF_MEAN[0] <= before / (after * math.prod(sizes)) < STEPS_OF_MEAN[1]:
                _hide_from_fusion(graph, pool, x)
                return


def _hide_from_fusion(graph: ir.Graph, layer: ir.Node, x: ir.Value) -> None:
    """Put a Clip without bounds before a node, through which ONNX Runtime does not look."""
    clip = ir.Node("", "Clip", [x])
    clip.outputs[0].shape, clip.outputs[0].type = x.shape, x.type
    graph.insert_before(layer, clip)
    layer.replace_input_with(0, clip.outputs[0])


def _pad_with(pad: ir.Node, others: list[ir.Value | None], zero_point: ir.Value) -> bool:
    """Make a zero-padding pad with the zero point; False for padding with another number."""
    if pad.attributes.get_string("mode", "constant") != "constant":
        others[1:2] = [None] * len(others[1:2])  # a number that is never read, of another dtype
        return True
    fill = constant(others[1]) if len(others) > 1 and others[1] is not None else np.float32(0)
    if fill is None or float(fill) != 0.0:
        return False
    others[1:2] = [zero_point]
    return True


def _same_qparams(a: ir.Node, b: ir.Node) -> bool:
    return all(
        x is y or (constant(x) is not None and np.array_equal(constant(x), constant(y)))  # type: ignore[arg-type]
        for x, y in zip(a.inputs[1:], b.inputs[1:], strict=False)
    )


def _remove_unused(graph: ir.Graph) -> None:
    for node in reversed(list(graph)):
        if all(not list(o.uses()) and not o.is_graph_output() for o in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not list(value.uses()) and not value.is_graph_output():
            del graph.initializers[name]


def _drop_exporter_metadata(model: ir.Model) -> None:
    """Drop what the exporter notes about where each node came from: in a small model it outweighs the weights."""
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        values.extend(node.outputs)
    for value in values:
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.functions.clear()
