"""Rewrites of a quantized ONNX graph (onnx-ir) for OpenVINO; they do not change what it computes.

ReduceMax, ReduceMin without the reduced dimensions   -> with them -> Squeeze
the same with them                                    -> without them -> Unsqueeze
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compresskit.export.rewrite.common import constant, initializer, replace


def keep_extremes_apart(model: ir.Model) -> None:
    """Let no rounding run inside the kernel of a largest or a smallest value.

    OpenVINO (2026.4) fuses a QuantizeLinear behind it, also one behind activations, into its kernel, which then compares values
    that are cut to the integers of the result. It fuses nothing past an operator that changes the shape.
    """
    for node in list(model.graph):
        if node.op_type in ("ReduceMax", "ReduceMin") and not node.domain:
            _change_shape_behind(model.graph, node)


def _change_shape_behind(graph: ir.Graph, node: ir.Node) -> None:
    x, keeps = node.inputs[0], node.attributes.get_int("keepdims", 1) == 1
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    given = constant(axes)
    if axes is None or (given is not None and not given.size):  # of all dimensions
        if x is None or x.shape is None or node.attributes.get_int("noop_with_empty_axes", 0) == 1:
            return
        axes = initializer(graph, ir.tensor(np.arange(len(x.shape)), name=f"{node.name}_axes"))
    reduced = ir.Node("", node.op_type, [x, axes], {"keepdims": ir.AttrInt64("keepdims", int(not keeps))}, name=node.name)
    reduced.outputs[0].type = node.outputs[0].type
    shaped = ir.Node("", "Unsqueeze" if keeps else "Squeeze", [reduced.outputs[0], axes])
    replace(graph, node, [reduced, shaped], shaped.outputs[0])
