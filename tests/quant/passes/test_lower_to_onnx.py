"""The exported file: what it stores, which operators it has, and that it computes what is simulated."""

from __future__ import annotations

import networks
import numpy as np
import onnx
import oracles
import pytest
import torch
from networks import NETWORKS, build, image
from torch import nn

import compresskit as ck
from compresskit.quant import quantize_static


@pytest.mark.parametrize("kind", NETWORKS, ids=lambda k: k.__name__)
def test_the_exported_file_computes_what_is_simulated(kind, tmp_path) -> None:
    model = build(kind)
    quantized = quantize_static(model, [image(16) for _ in range(3)])
    x = image(64)
    ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    proof = ck.verify_onnx(tmp_path / "q.onnx", quantized, [x])
    assert proof.passed, proof
    assert proof.plain.largest <= 2.5
    with torch.no_grad():
        wanted, got = model(*x), quantized(*x)
    noise = oracles.sqnr(wanted, got)
    assert noise > 20, f"only {noise:.1f} dB"


def test_weights_and_biases_are_stored_as_integers(tmp_path) -> None:
    quantized = quantize_static(build(networks.Residual), [image(16)])
    file = onnx.load(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2)))
    kinds = {}
    for tensor in file.graph.initializer:
        kinds.setdefault(onnx.TensorProto.DataType.Name(tensor.data_type), []).append(int(np.prod(tensor.dims)))
    weights = sum(p.numel() for n, p in quantized.named_parameters() if n.endswith("weight"))
    assert max(kinds["INT8"]) == 32 * 16 * 1 or sum(kinds["INT8"]) >= weights
    assert max(kinds["FLOAT"]) <= 32  # scales only: no dead float copies
    assert len(kinds["INT32"]) == 5  # a bias for each layer
    assert not file.graph.node[0].metadata_props


def test_hardsigmoid_needs_no_arithmetic(tmp_path) -> None:
    """Its result is the integers of its input, clipped and read with other numbers: a Clip on uint8, no HardSigmoid."""
    model = build(networks.Mobile)
    quantized = quantize_static(model, [image(16)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert "HardSigmoid" not in kinds
    assert "HardSwish" not in kinds
    assert kinds.count("Clip") == 2
    audit = ck.audit(path)
    assert audit.operators["Mul"] == (3, 3)
    assert audit.operators["Sigmoid"] == (1, 1)
    assert audit.conversions == 1
    anchors = [q for q in quantized.activation_quantizers() if q.anchor]
    assert len(anchors) == 2
    for q in anchors:
        steps = 3 / q.scale.item()
        assert steps == pytest.approx(round(steps), abs=1e-4)
        assert round(steps) <= q.zero_point.item() <= 255 - round(steps)
    x = torch.linspace(-5, 5, 101)
    rounded = anchors[0](x)
    from compresskit.quant.numerics.quantizers import DeployedHardSigmoid

    torch.testing.assert_close(DeployedHardSigmoid(anchors[0])(rounded), nn.functional.hardsigmoid(rounded))


def test_linear_layers_of_three_dimensions_are_integer_matmuls(tmp_path) -> None:
    model = build(networks.Tokens)
    quantized = quantize_static(model, [image(16)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    audit = ck.audit(path)
    assert audit.operators["MatMul"] == (3, 3), audit
    assert audit.operators["Gemm"] == (0, 1)  # a last layer of next to no work stays float
    assert audit.floating == ("node_linear",)
    head = model.head.weight.numel()
    assert audit.macs - audit.macs_integer == head
    assert audit.operators["LayerNormalization"] == (0, 1)
    assert audit.operators["Add"][0] == 0  # a residual between float layers gains nothing
    floats = [t for t in onnx.load(path).graph.initializer if t.data_type == onnx.TensorProto.FLOAT and len(t.dims) == 2]
    assert [list(t.dims) for t in floats] == [list(model.head.weight.shape)]


def test_channels_without_weights_keep_their_bias(tmp_path) -> None:
    model = build(networks.Chain)
    with torch.no_grad():
        model.b[1].weight[3], model.b[1].bias[3] = 1e-9, 1.0
    quantized = quantize_static(model, [image(16)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    assert ck.verify_onnx(path, quantized, [image(32)]).passed
