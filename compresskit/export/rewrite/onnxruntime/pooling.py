"""Pooling in integers as a convolution, and behind a float convolution in float.

AveragePool has no vectorized integer kernel in ONNX Runtime: on AVX512-VNNI a depthwise convolution takes a fifth of its time
(benchmarks/quantize_kernels.md).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compresskit.export.rewrite.common import constant, dequantize_of, initializer, replace

ELEMENTWISE = frozenset("Add Clip HardSigmoid HardSwish LeakyRelu Max Min Mul PRelu Relu Sigmoid".split())


def pool_as_convolution(model: ir.Model) -> None:
    """Average in a depthwise convolution: every weight is 1 step of a scale of 1 / positions, so the sum is exact."""
    for node in list(model.graph):
        if node.op_type == "AveragePool" and dequantize_of(node.inputs[0]) is not None:
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
