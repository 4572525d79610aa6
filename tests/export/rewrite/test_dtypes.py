"""Files of half precision models."""

from __future__ import annotations

import networks
import onnx
import pytest
import torch
from networks import build, image

import compresskit as ck
from compresskit.base.errors import ExportError


def test_bf16_and_fp16_models_are_stored_and_verified_in_their_dtype(tmp_path) -> None:
    wide = ck.export_onnx(build(networks.Residual), tmp_path / "f.onnx", image(2))
    for dtype, onnx_type in ((torch.float16, onnx.TensorProto.FLOAT16), (torch.bfloat16, onnx.TensorProto.BFLOAT16)):
        model = build(networks.Residual).to(dtype)
        x = (torch.randn(32, 3, 16, 16).to(dtype),)
        path = ck.export_onnx(model, tmp_path / "h.onnx", x)
        proof = ck.verify_onnx(path, model, [x])
        assert proof.passed, proof
        stored = [t.data_type for t in onnx.load(path).graph.initializer if len(t.dims) >= 2]
        assert stored == [onnx_type] * len(stored)
        assert len(stored) == 5
        assert path.stat().st_size < 0.75 * wide.stat().st_size
        with torch.no_grad():
            model.head.weight += 0.3
        assert not ck.verify_onnx(path, model, [x]).passed
    with pytest.raises(ExportError):
        ck.verify_onnx(tmp_path / "none.onnx", model, [x])
