"""Products in integers whose result is read in float."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compresskit.export.rewrite.common import constant, dequantize_of, initializer, replace


def keep_products_apart(model: ir.Model) -> None:
    """Let ONNX Runtime run a layer in integers whose result is read in float.

    Its fusion wants readers that all quantize the result, or none that does; and it takes a Relu or Clip that is the only reader
    for a part of the quantization behind it, even where there is none. A Max between hides such readers; Max(x, 0) is Relu.
    """
    for node in list(model.graph):
        kernel = dequantize_of(node.inputs[1]) if node.op_type in ("Gemm", "MatMul") else None
        if kernel is not None and constant(kernel.inputs[0]) is not None and dequantize_of(node.inputs[0]) is not None:
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
