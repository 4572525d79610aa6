"""Weights of an ONNX graph (onnx-ir) that a float operator reads: written such that a runtime decodes them once, on loading.

DequantizeLinear(integers) -> Cast to float, Sub of the zero points where they are not zero, Mul by the scales

ONNX Runtime computes constants when it loads a file, but leaves DequantizeLinear for its integer kernels. Where none takes it, a
weight would be decoded, and packed for the product, in every run.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compresskit.export.rewrite.common import constant, replace

#: Operator -> place of the weight among its inputs. Products with weights in blocks have kernels of their own.
WEIGHT_PLACES = {"Conv": 1, "ConvTranspose": 1, "Gemm": 1, "MatMul": 1}


def decode_on_loading(model: ir.Model) -> None:
    """Replace every DequantizeLinear of a stored weight without blocks that only float operators read, in place."""
    for node in [n for n in model.graph if n.op_type == "DequantizeLinear" and n.domain == ""]:
        integers, scale, zero_point = (*node.inputs, None)[:3]
        if integers is None or integers.const_value is None or integers.shape is None or not integers.is_initializer():
            continue
        scales, zeros, uses = constant(scale), constant(zero_point), node.outputs[0].uses()
        block = node.attributes["block_size"].as_int() if "block_size" in node.attributes else 0
        if scales is None or block or not uses or not all(_reads_floats(use.node, use.idx) for use in uses):
            continue
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
        shape = [1] * len(integers.shape)
        if scales.ndim:
            shape[axis] = scales.size
        name = str(node.outputs[0].name)
        cast = ir.Node("", "Cast", [integers], {"to": ir.AttrInt64("to", ir.DataType.FLOAT.value)})
        made = [cast]
        if zeros is not None and zeros.any():
            made.append(
                ir.Node("", "Sub", [cast.outputs[0], _new_initializer(model, f"{name}_zero", zeros.astype(np.float32), shape)])
            )
        made.append(ir.Node("", "Mul", [made[-1].outputs[0], _new_initializer(model, f"{name}_scale", scales, shape)]))
        for part in made:
            part.name = f"{node.name}_{part.op_type}"
            part.outputs[0].name = f"{name}_{part.op_type}"
            part.outputs[0].shape, part.outputs[0].type = node.outputs[0].shape, ir.TensorType(ir.DataType.FLOAT)
        replace(model.graph, node, made, made[-1].outputs[0])
        for value in (scale, zero_point):
            if value is not None and not value.uses() and value.is_initializer():
                del model.graph.initializers[str(value.name)]


def _reads_floats(node: ir.Node, place: int) -> bool:
    """Whether a layer reads a weight at this place, and an input that was not rounded."""
    if WEIGHT_PLACES.get(node.op_type) != place or node.domain != "":
        return False
    maker = node.inputs[0].producer() if node.inputs[0] is not None else None
    return maker is None or maker.op_type not in ("DequantizeLinear", "QuantizeLinear")


def _new_initializer(model: ir.Model, name: str, values: np.ndarray, shape: list[int]) -> ir.Value:
    """A new initializer."""
    tensor = ir.tensor(np.ascontiguousarray(values.reshape(shape)), name=name)
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value
