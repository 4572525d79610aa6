"""Transposed convolutions whose output padding is the stride or more, which ONNX Runtime does not run as they are."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn

import compresskit as ck

TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SETTINGS = {  # rank, kernel, stride, padding, output padding, dilation; whether the input is padded
    "less cut off": (2, 3, 1, 1, 1, 2, False),
    "zeros behind": (2, 3, 1, 0, 1, 2, True),
    "zeros behind, stride 2": (2, 3, 2, 1, 2, 3, True),
    "more than two strides": (2, 3, 2, 0, 4, 5, True),
    "one dimension of two": (2, 3, (1, 2), 0, (1, 0), 2, True),
    "sequence": (1, 3, 1, 1, 1, 2, False),
    "volume": (3, (3, 2, 3), (1, 2, 1), (0, 1, 0), (1, 1, 0), (2, 2, 1), True),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_file_runs_and_agrees(name: str, bias: bool, tmp_path) -> None:
    rank, kernel, stride, padding, output_padding, dilation, padded = SETTINGS[name]
    torch.manual_seed(0)
    model = TRANSPOSED[rank](3, 4, kernel, stride, padding, output_padding, bias=bias, dilation=dilation).eval()
    x = torch.randn(2, 3, *[5, 6, 4][:rank])
    path = ck.export_onnx(model, tmp_path / "f.onnx", (x,))
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds == (["Pad", "ConvTranspose"] if padded else ["ConvTranspose"])
    assert ck.verify_onnx(path, model, [(x,), (x[:1],)]).passed


def test_usual_settings_stay_as_they_are(tmp_path) -> None:
    x = torch.randn(2, 3, 5, 6)
    path = ck.export_onnx(nn.ConvTranspose2d(3, 4, 3, 2, 1, 1).eval(), tmp_path / "f.onnx", (x,))
    (node,) = onnx.load(path).graph.node
    assert {a.name: list(a.ints) for a in node.attribute if a.ints}["output_padding"] == [1, 1]


def test_old_opsets_and_layers_that_stay_float_run_too(tmp_path) -> None:
    """A depthwise layer is not rounded; it stays a transposed convolution among integer operators."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 3, 1, 0, 1, groups=8, dilation=2), nn.Conv2d(8, 4, 1))
    x = torch.randn(8, 3, 8, 8)
    assert ck.verify_onnx(ck.export_onnx(model.eval(), tmp_path / "f.onnx", (x,), opset=13), model, [(x,)]).passed
    quantized = ck.quant.quantize_static(model, [(x,)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", (x,))
    assert "ConvTranspose" in {node.op_type for node in onnx.load(path).graph.node}
    assert ck.verify_onnx(path, quantized, [(x,)]).passed
