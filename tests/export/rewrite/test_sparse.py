"""Sparse models in files: compressed size, and sparse initializers."""

from __future__ import annotations

import io
import zipfile

import networks
import numpy as np
import onnx
import pytest
import torch
from networks import build, image

import compresskit as ck
from compresskit.base.errors import ExportError
from compresskit.export import compressed_bytes, export_onnx, store_sparse, verify_onnx
from compresskit.export.rewrite import sparse as engine


def test_compressed_bytes_are_those_of_a_zip(tmp_path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(5000) + torch.randn(500).numpy().tobytes())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.write(path, "x")
    assert compressed_bytes(path)["zip"] == pytest.approx(len(buffer.getvalue()), abs=150)  # a zip also has names and a directory
    before = compressed_bytes(path)["zip"]
    (tmp_path / "x.data").write_bytes(torch.randn(500).numpy().tobytes())
    assert compressed_bytes(path)["zip"] > before + 1500


@pytest.mark.parametrize("quantized", [False, True])
def test_sparse_initializers_load_and_compute_the_same(tmp_path, quantized) -> None:
    model = build(networks.Residual)
    masks = ck.prune.plan_mask(model, ck.remove(weights=0.95), allocation=ck.prune.allocations.uniform_ratios)
    masks.apply_(model)
    x = image(8)
    if quantized:
        model = ck.quant.quantize_static(model, [x])
    path = export_onnx(model, tmp_path / "dense.onnx", x)
    out = store_sparse(path, tmp_path / "sparse.onnx")
    assert verify_onnx(out, model, [x]).passed
    assert out.stat().st_size < path.stat().st_size
    dense = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    stored = onnx.load(out).graph
    assert len(stored.sparse_initializer) >= 4
    assert len(stored.sparse_initializer) + len(stored.initializer) == len(dense)
    for tensor in stored.sparse_initializer:
        full = np.zeros(int(np.prod(tensor.dims)), dense[tensor.values.name].dtype)
        full[onnx.numpy_helper.to_array(tensor.indices)] = onnx.numpy_helper.to_array(tensor.values)
        np.testing.assert_array_equal(full.reshape(tensor.dims), dense[tensor.values.name])
    kept = sum(len(onnx.numpy_helper.to_array(t.values)) for t in stored.sparse_initializer)
    assert kept <= masks.total - masks.removed


def test_dense_weights_stay_dense(tmp_path) -> None:
    path = export_onnx(build(networks.Chain), tmp_path / "dense.onnx", image(4))
    out = store_sparse(path, tmp_path / "sparse.onnx")
    assert not onnx.load(out).graph.sparse_initializer
    assert out.stat().st_size == pytest.approx(path.stat().st_size, abs=100)


def test_files_that_cannot_be_stored_sparse_are_refused(tmp_path, monkeypatch) -> None:
    model = build(networks.Chain)
    path = export_onnx(model, tmp_path / "model.onnx", image(4))
    loaded = onnx.load(path)
    onnx.save(loaded, tmp_path / "big.onnx", save_as_external_data=True, location="big.onnx.data", size_threshold=16)
    with pytest.raises(ExportError, match=r"big\.onnx: its weights lie in another file"):
        store_sparse(tmp_path / "big.onnx", tmp_path / "out.onnx")

    def refuses(_):
        raise ExportError("sparse tensors are not built in")

    monkeypatch.setattr(engine, "session", refuses)
    with pytest.raises(ExportError, match="does not load sparse initializers here: sparse tensors are not built in"):
        store_sparse(path, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()
