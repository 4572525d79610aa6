"""Weights that float operators read are decoded when the file is loaded: the same values, as fast as the float file."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.export.check.contents import inspect_onnx
from compresskit.quant import BlockScheme, quantize_static, quantize_weights


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16)
    ).eval()


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_runtime_keeps_no_decoding(bits, symmetric, tmp_path) -> None:
    rows = BlockScheme(bits=bits, block_size=None, symmetric=symmetric)
    quantized = quantize_weights(network(), X, scheme=rows, convolutions=rows)
    path = ck.export_onnx(quantized, tmp_path / "weights.onnx", (X,))
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert "DequantizeLinear" not in kinds
    assert kinds.count("Mul") == 3
    assert kinds.count("Sub") == (0 if symmetric else 3)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    left = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert not left & {"DequantizeLinear", "Cast", "Sub", "Mul"}, "constants are computed once"
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    np.testing.assert_allclose(found, quantized(X).detach().numpy(), rtol=1e-4, atol=1e-5)
    layers = {layer.operator: layer for layer in inspect_onnx(path).layers}
    assert layers["Conv"].dtype == f"{'' if symmetric else 'u'}int{bits}"
    assert layers["Conv"].scales == 8
    assert ck.audit(path).macs > 0


def test_layers_in_integers_and_blocks_stay(tmp_path) -> None:
    static = ck.export_onnx(quantize_static(network(), X), tmp_path / "static.onnx", (X,))
    assert "Mul" not in [node.op_type for node in onnx.load(static).graph.node]
    blocks = quantize_weights(network(), X, scheme=BlockScheme(bits=4, block_size=32))
    kinds = [node.op_type for node in onnx.load(ck.export_onnx(blocks, tmp_path / "blocks.onnx", (X,))).graph.node]
    assert kinds.count("DequantizeLinear") == 1
