"""The exported file: what it stores, which operators it has, and that it computes what is simulated."""

from __future__ import annotations

import functools

import networks
import numpy as np
import onnx
import oracles
import pytest
import torch
from matrix import some
from networks import NETWORKS, build, image
from torch import nn

import compresskit as ck
from compresskit.quant import quantize_static


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Class of a network -> (the network, quantized, its file), each made once."""

    @functools.cache
    def make(kind):
        torch.manual_seed(0)
        model = build(kind)
        quantized = quantize_static(model, [image(16) for _ in range(3)])
        path = tmp_path_factory.mktemp("exported") / "q.onnx"
        return model, quantized, ck.export_onnx(quantized, path, image(2))

    return make


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("kind", some(NETWORKS), ids=lambda k: k.__name__)
def test_the_exported_file_computes_what_is_simulated(kind, exported) -> None:
    model, quantized, path = exported(kind)
    x = image(64)
    proof = ck.verify_onnx(path, quantized, [x])
    assert proof.passed, proof
    assert proof.plain.largest <= 2.5
    with torch.no_grad():
        expected, outputs = model(*x), quantized(*x)
    noise = oracles.sqnr(expected, outputs)
    assert noise > 20, f"only {noise:.1f} dB"


@pytest.mark.parametrize(
    "kind", [networks.Chain, networks.Residual, networks.PaddedShortcut, networks.Depthwise, networks.Concat]
)
def test_all_operators_run_in_integers(kind, exported) -> None:
    audit = ck.audit(exported(kind)[2])
    assert audit.integer_fraction == 1.0
    assert audit.floating == ()
    assert all(done == every for done, every in audit.operators.values()), audit
    assert audit.conversions <= 2, audit


@pytest.mark.parametrize("kind", [networks.PaddedShortcut, networks.Depthwise])
def test_the_float_file_has_the_same_multiply_accumulates(kind, exported, tmp_path) -> None:
    model, _, path = exported(kind)
    audit = ck.audit(ck.export_onnx(model, tmp_path / "f.onnx", image(2)))
    assert audit.integer_fraction == 0
    assert audit.macs == ck.audit(path).macs > 0


def test_weights_and_biases_are_stored_as_integers(exported) -> None:
    _, quantized, path = exported(networks.Residual)
    file = onnx.load(path)
    kinds = {}
    for tensor in file.graph.initializer:
        kinds.setdefault(onnx.TensorProto.DataType.Name(tensor.data_type), []).append(int(np.prod(tensor.dims)))
    weights = sum(p.numel() for n, p in quantized.named_parameters() if n.endswith("weight"))
    assert max(kinds["INT8"]) == 32 * 16 * 1 or sum(kinds["INT8"]) >= weights
    assert max(kinds["FLOAT"]) <= 32  # scales only: no dead float copies
    assert len(kinds["INT32"]) == 5  # a bias for each layer
    assert not file.graph.node[0].metadata_props


def test_hardsigmoid_needs_no_arithmetic(exported) -> None:
    """Its result is the integers of its input, clipped and read with other numbers: a Clip on uint8, no HardSigmoid."""
    _, quantized, path = exported(networks.Mobile)
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


def test_linear_layers_of_three_dimensions_are_integer_matmuls(exported) -> None:
    model, _, path = exported(networks.Tokens)
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
