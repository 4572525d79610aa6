"""Verifying ONNX files against their model."""

from __future__ import annotations

import networks
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError
from compresskit.quant import quantize_static


def test_masked_outputs_and_scalars_among_them(tmp_path) -> None:
    class Masked(networks.Chain):
        def forward(self, x):
            y = super().forward(x)
            return y.masked_fill(torch.arange(10) == 3, float("-inf")), y.square().mean()

    model = build(Masked)
    proof = ck.verify_onnx(ck.export_onnx(model, tmp_path / "f.onnx", image(2)), model, [image(8), image(8)])
    assert proof.passed, proof
    with pytest.raises(DataError, match="verification data: the model does not run on inputs of shape"):
        ck.verify_onnx(tmp_path / "f.onnx", model, [(torch.randn(2, 5, 8, 8),)])


def test_one_wrong_output_among_many(tmp_path) -> None:
    import onnx
    from onnx import numpy_helper

    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.ReLU(), nn.Linear(32, 50)).eval()
    quantized = quantize_static(model, [image(64)])
    file = onnx.load(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2)))
    tensor = [t for t in file.graph.initializer if "bias" in t.name and t.data_type == onnx.TensorProto.INT32][-1]
    values = numpy_helper.to_array(tensor).copy()
    values[7] += values.max() * 100 + 10**6
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(file, tmp_path / "bad.onnx")
    assert not ck.verify_onnx(tmp_path / "bad.onnx", quantized, [image(64)]).passed
