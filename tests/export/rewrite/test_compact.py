"""Quantized files without what every runtime infers by itself."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import nn

import compresskit as ck
from compresskit.export.rewrite.compact import compact_


def test_a_compact_file_is_smaller_and_computes_the_same(tmp_path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)).eval()
    x = torch.randn(8, 4, 8, 8)
    path = ck.export_onnx(ck.quant.quantize_static(net, [x]), tmp_path / "m.onnx", (x,))
    file = onnx.load(path)
    assert not file.graph.value_info
    assert not any(t.name.startswith("quantizers.") or t.name.endswith(".integers") for t in file.graph.initializer)
    onnx.checker.check_model(file, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(file)
    assert len(inferred.graph.value_info) > 10, "what is left out can be inferred"
    run = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run
    assert run(None, {"input": x.numpy()})[0].shape == (8, 4)
    assert [v.name for v in file.graph.input] == ["input"], "the names of inputs and outputs stay"
    assert [v.name for v in file.graph.output] == ["output"]


def test_names_that_are_taken_stay() -> None:
    node = onnx.helper.make_node
    scale, zero = onnx.numpy_helper.from_array(np.float32(0.5), "q0"), onnx.numpy_helper.from_array(np.uint8(3), "d1")
    nodes = [node("QuantizeLinear", ["x", "q0", "d1"], ["a"], axis=1), node("DequantizeLinear", ["a", "q0", "d1"], ["y"], axis=0)]
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(nodes, "g", [value("x", 1, [4])], [value("y", 1, [4])], [scale, zero])
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9))
    compact_(model)
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    assert not any(n.attribute for n in after.graph.node)
    x = np.linspace(-3, 3, 4, dtype=np.float32)
    out = ort.InferenceSession(after.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    assert np.array_equal(out, (np.clip(np.round(x / 0.5) + 3, 0, 255) - 3) * 0.5)
