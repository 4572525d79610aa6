"""What is in an ONNX file, of this library or of another tool."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import compresskit as ck
from compresskit.base.errors import ExportError
from compresskit.export.check.contents import inspect_onnx


def other_tool(folder, nodes, weights, inputs=(("x", ["batch", 4]),)):
    """A file as another tool writes it."""
    stored = [
        value if isinstance(value, TensorProto) else numpy_helper.from_array(value, name) for name, value in weights.items()
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs]
    graph = helper.make_graph(nodes, "g", values, [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])], stored)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="other", producer_version="1.2")
    onnx.save(model, folder / "other.onnx")
    return folder / "other.onnx"


def test_a_quantized_file_of_this_library(tmp_path) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).eval(), torch.rand(4, 3, 8, 8)
    path = ck.export_onnx(ck.quant.quantize_static(model, [(x,)]), tmp_path / "q.onnx", (x,))
    found = inspect_onnx(path)
    assert [(layer.shape, layer.dtype) for layer in found.layers] == [((8, 3, 3, 3), "int8"), ((10, 288), "int8")]
    convolution, linear = found.layers
    assert convolution.operator == "Conv"
    assert convolution.scales == 8
    assert 0 < convolution.scale_low < convolution.scale_high
    assert convolution.input_scale == pytest.approx(x.max().item() / 255, rel=0.05)
    assert linear.bytes >= 2880
    assert found.stored["int8"] >= 216 + 2880
    assert found.inputs[0][1:] == ("float", (found.inputs[0][2][0], 3, 8, 8))
    assert isinstance(found.inputs[0][2][0], str)
    text = str(found)
    assert "8x3x3x3" in text
    assert f"8: {convolution.scale_low:.3g} to {convolution.scale_high:.3g}" in text


def test_the_tensors_of_a_float_file_add_up(tmp_path) -> None:
    path = ck.export_onnx(nn.Linear(8, 4).eval(), tmp_path / "f.onnx", (torch.randn(2, 8),))
    (layer,) = inspect_onnx(path).layers
    assert (layer.dtype, layer.bytes, layer.scales, layer.input_scale) == ("float", 4 * (32 + 4), 0, None)


def test_operators_that_take_scales_themselves(tmp_path) -> None:
    names = ["x8", "xs", "xz", "w", "ws", "wz", "ys", "yz"]
    weights = {
        "xs": np.float32(0.5), "xz": np.uint8(128), "w": np.ones((4, 3), np.int8), "ws": np.array([0.1, 0.4, 0.2], np.float32),
        "wz": np.zeros(3, np.int8), "ys": np.float32(1), "yz": np.uint8(0),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["x8"]),
        helper.make_node("QLinearMatMul", names, ["y8"], name="product"),
        helper.make_node("DequantizeLinear", ["y8", "ys", "yz"], ["y"]),
    ]
    found = inspect_onnx(other_tool(tmp_path, nodes, weights))
    (layer,) = found.layers
    assert (layer.name, layer.weight, layer.dtype, layer.shape) == ("product", "w", "int8", (4, 3))
    assert (layer.scales, layer.input_scale) == (3, 0.5)
    assert (layer.scale_low, layer.scale_high) == pytest.approx((0.1, 0.4))
    assert layer.bytes == 12 + 3 * 4 + 3 + 4 + 1 + 4 + 1
    assert found.operators == {"QuantizeLinear": 1, "QLinearMatMul": 1, "DequantizeLinear": 1}
    assert found.producer == "other 1.2"
    assert found.opset == 21


def test_four_bits_shared_and_constant_weights(tmp_path) -> None:
    four = helper.make_tensor("w4", TensorProto.INT4, [4, 3], np.ones(12, np.int8))
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones(3, np.float16), "c"))
    nodes = [
        helper.make_node("DequantizeLinear", ["w4", "s"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("MatMul", ["x", "w"], ["b"]),
        constant,
        helper.make_node("Cast", ["c"], ["c32"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["a", "c32"], ["d"]),
        helper.make_node("Add", ["b", "d"], ["y"]),
    ]
    found = inspect_onnx(other_tool(tmp_path, nodes, {"w4": four, "s": np.float32(0.25)}))
    first, second, add = found.layers
    assert (first.dtype, first.bytes, first.scales, first.scale_low) == ("int4", 6 + 4, 1, 0.25)
    assert (second.weight, second.bytes) == ("w4", 0)  # stored once
    assert (add.dtype, add.bytes) == ("float16", 6)
    assert found.stored == {"int4": 6, "float16": 6, "float": 4}


def test_layers_inside_operators_are_found(tmp_path) -> None:
    def branch(name):
        weight = numpy_helper.from_array(np.ones((4, 3), np.float32), f"w_{name}")
        out = helper.make_tensor_value_info(f"o_{name}", TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node("MatMul", ["x", f"w_{name}"], [f"o_{name}"])], name, [], [out], [weight])

    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch("a"), else_branch=branch("b"))
    found = inspect_onnx(other_tool(tmp_path, [node], {"flag": np.array(True)}))
    assert sorted(layer.weight for layer in found.layers) == ["w_a", "w_b"]
    assert found.operators == {"MatMul": 2, "If": 1}


def test_what_is_no_file_is_refused(tmp_path) -> None:
    (tmp_path / "empty.onnx").write_bytes(b"")
    for path, message in (
        ("nothere.onnx", "^no such file: .*nothere.onnx$"),
        ("empty.onnx", "no graph in it; wanted an ONNX file"),
    ):
        with pytest.raises(ExportError, match=message):
            inspect_onnx(tmp_path / path)
