"""Rewrites for all runtimes: the file computes the same values, in operators that runtimes have fast kernels for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.measure import numpy_inputs, session


@pytest.mark.parametrize(
    ("slopes", "operators"),
    [
        (torch.tensor([0.3]), {"LeakyRelu"}),
        (torch.tensor([0.3, -0.5, 1.0, 0.0]), {"Mul", "Max"}),
        (torch.tensor([0.3, -0.5, 1.5, 0.0]), {"Mul", "Relu", "Add"}),
        (torch.tensor([0.3, -0.5, 15.0, 0.0]), {"PRelu"}),
    ],
    ids=["one slope", "by channel", "above 1", "far above 1"],
)
def test_prelu_is_written_in_faster_operators(slopes: torch.Tensor, operators: set[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.PReLU(len(slopes))
    layer.weight.data.copy_(slopes)
    x = torch.randn(5, 4, 3, 3)
    path = ck.export_onnx(layer, tmp_path / "m.onnx", (x[:2],))
    assert {node.op_type for node in onnx.load(path).graph.node} == operators
    runtime = session(path)
    got, wanted = runtime.run(None, numpy_inputs(runtime, (x,)))[0], layer(x).detach().numpy()
    if "Add" in operators:
        np.testing.assert_allclose(got, wanted, rtol=5e-7)
    else:
        np.testing.assert_array_equal(got, wanted)


def test_prelu_after_a_convolution_keeps_the_blocked_layout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shared = nn.PReLU(16)
    shared.weight.data.uniform_(-0.5, 1.5)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), shared, nn.Conv2d(16, 16, 3), shared, nn.Conv2d(16, 8, 1)).eval()
    path = ck.export_onnx(model, tmp_path / "m.onnx", torch.randn(2, 8, 9, 9))
    assert ck.verify_onnx(path, model, [torch.randn(3, 8, 9, 9)]).passed
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert kinds["PRelu"] == kinds["Max"] == 0
    assert kinds["ReorderInput"] + kinds["ReorderOutput"] <= 2


class Clamped(nn.Module):
    """One value between several bounds, which are tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        for i, bound in enumerate((0.1, 0.3, 0.5)):
            self.register_buffer(f"low{i}", torch.tensor(-bound))
            self.register_buffer(f"high{i}", torch.tensor(bound))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return sum((i + 1) * torch.clamp(x, self.get_buffer(f"low{i}"), self.get_buffer(f"high{i}")) for i in range(3))


def test_each_clip_of_a_value_keeps_its_own_bounds(tmp_path: Path) -> None:
    model = Clamped().eval()
    path = ck.export_onnx(model, tmp_path / "m.onnx", torch.randn(4, 8))
    assert sum(node.op_type == "Clip" for node in onnx.load(path).graph.node) == 3
    assert ck.verify_onnx(path, model, [torch.randn(16, 8)]).passed


def test_windows_that_are_cut_at_the_border_are_averaged_in_float(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AvgPool2d(3, ceil_mode=True), nn.Conv2d(8, 8, 1)).eval()
    quantized = ck.quant.quantize_static(model, [torch.randn(16, 3, 8, 8)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", torch.randn(2, 3, 8, 8))
    assert ck.verify_onnx(path, quantized, [torch.randn(7, 3, 8, 8)]).passed
