"""Rewrites of a quantized ONNX graph (onnx-ir) for the integer kernels of ONNX Runtime on a CPU; its integers stay the same.

    pad_input_channels    Conv on an image of 3 channels   -> the image padded to 4, or folded 2x2 into 12
    pool_as_convolution   AveragePool                      -> a depthwise Conv whose weights are all 1 / positions
    keep_products_apart   Gemm whose result stays float    -> Max between it and readers that would take it back to float
    pool_in_float         MaxPool behind a float Conv      -> before the rounding, with a Clip without bounds between

The symmetric kernel wants input channels in fours, and AveragePool has no vectorized integer kernel: on AVX512-VNNI a first
convolution takes a third to a half less time so, pooling a fifth (benchmarks/quantize_kernels.md).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compresskit.export.rewrite.attention import avoid_skip_layernorm, merge_attention_heads
from compresskit.export.rewrite.common import constant, initializer, replace

LANES = 4  # input channels that one VNNI instruction multiplies and sums
ELEMENTWISE = frozenset("Add Clip HardSigmoid HardSwish LeakyRelu Max Min Mul PRelu Relu Sigmoid".split())
SMALLEST = 24  # height and width below which padding costs what it saves


def pad_input_channels(model: ir.Model) -> None:
    """Give convolutions that read the quantized input of the model a multiple of four channels, the new ones zero."""
    for node in list(model.graph):
        if node.op_type == "Conv" and node.attributes.get_int("group", 1) == 1:
            _pad_channels(model.graph, node)


def _pad_channels(graph: ir.Graph, conv: ir.Node) -> None:
    x, weight = conv.inputs[0], conv.inputs[1]
    wide, kernel = _dequantize(x), _dequantize(weight)
    integers = None if kernel is None else constant(kernel.inputs[0])
    if wide is None or integers is None or integers.ndim != 4 or not _is_quantized_input(wide.inputs[0]):
        return
    if x is None or x.shape is None or any(not isinstance(s, int) or s < SMALLEST for s in list(x.shape)[2:]):
        return
    channels = integers.shape[1]
    if channels % LANES == 0 or integers.shape[2] > 7:
        return
    if _can_fold(conv, integers, x):
        moved, integers = _fold_pixels(conv, wide, integers)
    else:
        extra = -channels % LANES
        pads = ir.tensor(np.array([0, 0, 0, 0, 0, extra, 0, 0], np.int64), name=f"{conv.name}_pads")
        moved = ir.Node("", "Pad", [wide.inputs[0], initializer(graph, pads), wide.inputs[2]])
        integers = np.pad(integers, ((0, 0), (0, extra), (0, 0), (0, 0)))
    source = wide.inputs[0]
    assert source is not None
    moved.outputs[0].type = source.type
    again = ir.Node("", "DequantizeLinear", [moved.outputs[0], *wide.inputs[1:]], wide.attributes)
    again.outputs[0].type = x.type
    assert kernel is not None
    stored = initializer(graph, ir.tensor(integers, name=f"{conv.name}_weight"))
    turned = ir.Node("", "DequantizeLinear", [stored, *kernel.inputs[1:]], kernel.attributes)
    graph.insert_before(conv, [moved, again, turned])
    conv.replace_input_with(0, again.outputs[0])
    conv.replace_input_with(1, turned.outputs[0])


def _can_fold(conv: ir.Node, integers: np.ndarray, x: ir.Value) -> bool:
    """Whether folding 2x2 pixels into channels is possible and faster: kernels of 5 or more, stride 2, even height and width."""
    plain = conv.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    plain = plain and list(conv.attributes.get_ints("dilations", [1, 1])) == [1, 1]
    strided = list(conv.attributes.get_ints("strides", [1, 1])) == [2, 2]
    assert x.shape is not None
    even = all(isinstance(s, int) and s % 2 == 0 for s in list(x.shape)[2:])
    return bool(plain and strided and even and min(integers.shape[2:]) >= 5)


def _fold_pixels(conv: ir.Node, wide: ir.Node, integers: np.ndarray) -> tuple[ir.Node, np.ndarray]:
    """SpaceToDepth of the input, and the kernel in its terms: tap d of a row, counted from the window's middle pixel 2 o, is tap
    d // 2 of the folded row and pixel d % 2 of its four.
    """
    out, channels, *kernel = integers.shape
    pads = list(conv.attributes.get_ints("pads", [0, 0, 0, 0]))
    low = [-((p + 1) // 2) for p in pads[:2]]
    high = [(k - 1 - p) // 2 for k, p in zip(kernel, pads[:2], strict=True)]
    size = [h - lo + 1 for h, lo in zip(high, low, strict=True)]
    folded = np.zeros((out, 2, 2, channels, *size), integers.dtype)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            (row, a), (column, b) = divmod(i - pads[0], 2), divmod(j - pads[1], 2)
            folded[:, a, b, :, row - low[0], column - low[1]] = integers[:, :, i, j]
    shape = wide.outputs[0].shape
    assert shape is not None
    ends = []
    for axis in range(2):
        positions = int(shape[2 + axis])  # type: ignore[arg-type]
        outputs = (positions + pads[axis] + pads[2 + axis] - kernel[axis]) // 2 + 1
        ends.append(outputs - 1 + size[axis] - positions // 2 + low[axis])
    conv.attributes["pads"] = ir.AttrInt64s("pads", [-low[0], -low[1], *ends])
    conv.attributes["strides"] = ir.AttrInt64s("strides", [1, 1])
    conv.attributes["kernel_shape"] = ir.AttrInt64s("kernel_shape", size)
    move = ir.Node("", "SpaceToDepth", [wide.inputs[0]], {"blocksize": ir.AttrInt64("blocksize", 2)})
    return move, folded.reshape(out, 4 * channels, *size)


def pool_as_convolution(model: ir.Model) -> None:
    """Average in a depthwise convolution: every weight is 1 step of a scale of 1 / positions, so the sum is exact."""
    for node in list(model.graph):
        if node.op_type == "AveragePool" and _dequantize(node.inputs[0]) is not None:
            _pool_to_convolution(model.graph, node)


def _pool_to_convolution(graph: ir.Graph, pool: ir.Node) -> None:
    x, kernel = pool.inputs[0], list(pool.attributes.get_ints("kernel_shape", []))
    pads = list(pool.attributes.get_ints("pads", [0] * 2 * len(kernel)))
    divides_by_all = pool.attributes.get_int("count_include_pad", 0) == 1 or not any(pads)
    settings = ("auto_pad", "dilations", "kernel_shape", "pads", "strides")
    if not divides_by_all or pool.attributes.get_int("ceil_mode", 0) != 0 or len(kernel) != 2:
        return
    if x is None or x.shape is None or not isinstance(x.shape[1], int):
        return
    if {user.node.op_type for user in pool.outputs[0].uses()} != {"QuantizeLinear"}:
        return
    channels = int(x.shape[1])
    weight = [
        ir.tensor(np.ones((channels, 1, *kernel), np.int8), name=f"{pool.name}_weight"),
        ir.tensor(np.float32(1 / np.prod(kernel)), name=f"{pool.name}_scale"),
        ir.tensor(np.int8(0), name=f"{pool.name}_zero_point"),
    ]
    ones = ir.Node("", "DequantizeLinear", [initializer(graph, tensor) for tensor in weight])
    ones.outputs[0].shape, ones.outputs[0].type = ir.Shape([channels, 1, *kernel]), x.type
    attributes = {name: pool.attributes[name] for name in settings if name in pool.attributes}
    attributes["group"] = ir.AttrInt64("group", channels)
    conv = ir.Node("", "Conv", [x, ones.outputs[0]], attributes, name=pool.name)
    replace(graph, pool, [ones, conv], conv.outputs[0])


def keep_products_apart(model: ir.Model) -> None:
    """Let ONNX Runtime run a layer in integers whose result is read in float.

    Its fusion wants readers that all quantize the result, or none that does; and it takes a Relu or Clip that is the only reader
    for a part of the quantization behind it, even where there is none. A Max between hides such readers; Max(x, 0) is Relu.
    """
    for node in list(model.graph):
        kernel = _dequantize(node.inputs[1]) if node.op_type in ("Gemm", "MatMul") else None
        if kernel is not None and constant(kernel.inputs[0]) is not None and _dequantize(node.inputs[0]) is not None:
            _keep_apart(model.graph, node)


def _keep_apart(graph: ir.Graph, product: ir.Node) -> None:
    result = product.outputs[0]
    quantized = [use.node.op_type == "QuantizeLinear" for use in result.uses()] + [False] * result.is_graph_output()
    clamp = _only_clamp(result)
    if clamp is None and len(set(quantized)) < 2:
        return
    relu = clamp is not None and clamp.op_type == "Relu"
    least = ir.tensor(np.float32(0 if relu else -np.inf), name=f"{product.name}_least")
    again = ir.Node("", product.op_type, product.inputs, product.attributes, name=product.name)
    again.outputs[0].shape, again.outputs[0].type = result.shape, result.type
    bound = ir.Node("", "Max", [again.outputs[0], initializer(graph, least)])
    replace(graph, product, [again, bound], bound.outputs[0])
    if relu:
        assert clamp is not None
        ir.convenience.replace_all_uses_with(clamp.outputs[0], bound.outputs[0])


def _only_clamp(value: ir.Value) -> ir.Node | None:
    """The Relu or Clip that alone reads a value, and is read at one place, other than by a QuantizeLinear that clips as much."""
    readers = [use.node for use in value.uses()]
    if len(readers) != 1 or value.is_graph_output() or readers[0].op_type not in ("Relu", "Clip"):
        return None
    behind = [use.node for use in readers[0].outputs[0].uses()]
    alone = len(behind) == 1 and not readers[0].outputs[0].is_graph_output()
    return readers[0] if alone and not _clips_as_much(behind[0], readers[0]) else None


def _clips_as_much(quantize: ir.Node, clamp: ir.Node) -> bool:
    """Whether a node is a QuantizeLinear whose range is inside that of a Relu or Clip."""
    if quantize.op_type != "QuantizeLinear" or len(quantize.inputs) < 3:
        return False
    scale, zero_point = (constant(value) for value in quantize.inputs[1:3])
    ends = [np.float32(0), np.float32(np.inf)] if clamp.op_type == "Relu" else [constant(value) for value in clamp.inputs[1:3]]
    if scale is None or zero_point is None or len(ends) < 2:
        return False
    low, high = ends
    if low is None or high is None:
        return False
    integers = np.iinfo(zero_point.dtype)
    lowest, highest = ((end - float(zero_point)) * float(scale) for end in (integers.min, integers.max))
    return bool(lowest >= float(low) and highest <= float(high))


def pool_in_float(model: ir.Model) -> None:
    """Let a MaxPool behind a float convolution run in float, as rounding commutes with it.

    In float it keeps the blocked layout of the convolution. ONNX Runtime moves the rounding before the MaxPool, whose integer
    kernel for channels first is not vectorized. It does not move it through a Clip.
    """
    for node in list(model.graph):
        if node.op_type == "MaxPool" and len(node.outputs) == 1:
            pool = _pool_before_rounding(model.graph, node)
            readers = [use.node for use in pool.outputs[0].uses()]
            if readers and {r.op_type for r in readers} == {"QuantizeLinear"} and _made_by_float_conv(pool.inputs[0]):
                clip = ir.Node("", "Clip", [pool.outputs[0]])
                clip.outputs[0].shape, clip.outputs[0].type = pool.outputs[0].shape, pool.outputs[0].type
                model.graph.insert_after(pool, clip)
                for reader in readers:
                    reader.replace_input_with(0, clip.outputs[0])


def _pool_before_rounding(graph: ir.Graph, pool: ir.Node) -> ir.Node:
    """`x -> Q -> MaxPool` to `x -> MaxPool -> Q`, where a float convolution made x and nothing else reads it rounded."""
    narrow = None if pool.inputs[0] is None else pool.inputs[0].producer()
    if narrow is None or narrow.op_type != "QuantizeLinear" or len(list(narrow.outputs[0].uses())) != 1:
        return pool
    x = narrow.inputs[0]
    if x is None or not _made_by_float_conv(x):
        return pool
    early = ir.Node("", "MaxPool", [x], pool.attributes, name=pool.name)
    early.outputs[0].shape, early.outputs[0].type = pool.outputs[0].shape, x.type
    rounded = ir.Node("", "QuantizeLinear", [early.outputs[0], *narrow.inputs[1:]], narrow.attributes)
    replace(graph, pool, [early, rounded], rounded.outputs[0])
    return early


def _made_by_float_conv(value: ir.Value | None) -> bool:
    """Whether a value comes from a convolution with a float weight, through operators on single values alone."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in ELEMENTWISE:
        sources = [v for v in node.inputs if v is not None and constant(v) is None]
        node = sources[0].producer() if sources else None
    return node is not None and node.op_type == "Conv" and constant(node.inputs[1]) is not None


def _dequantize(value: ir.Value | None) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == "DequantizeLinear" and len(node.inputs) > 2 else None


def _is_quantized_input(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    return bool(node is not None and node.op_type == "QuantizeLinear" and node.inputs[0] and node.inputs[0].is_graph_input())


#: Rewrites for files that ONNX Runtime runs on x86.
X86_REWRITES = (pad_input_channels, pool_as_convolution, merge_attention_heads, avoid_skip_layernorm)
#: Rewrites for files that ONNX Runtime runs on any machine.
CPU_REWRITES = (keep_products_apart, pool_in_float)
