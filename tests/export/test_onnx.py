"""Exporting models to ONNX files: what is written, and what is refused."""

from __future__ import annotations

import networks
import onnx
import pytest
import torch
from networks import NETWORKS, build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import ExportError, ModelError, SettingError
from compresskit.measure import session


@pytest.mark.parametrize("kind", NETWORKS, ids=lambda k: k.__name__)
def test_float_files_agree(kind, tmp_path) -> None:
    model = build(kind)
    path = ck.export_onnx(model, tmp_path / "f.onnx", image(2), metadata={"who": "test"})
    proof = ck.verify_onnx(path, model, [image(16), image(5)])
    assert proof.passed, proof
    assert proof.samples == 21
    assert proof.plain.largest < 0.05
    file = onnx.load(path)
    about = ck.export.read_metadata(path)
    assert about["who"] == "test"
    assert about["model"] == kind.__name__
    assert about["versions"] == {"compresskit": ck.__version__, "torch": torch.__version__}
    assert file.producer_name == "compresskit"
    assert session(path).get_inputs()[0].shape == ["batch", 3, 16, 16]
    # Folded by the exporter, but for a layer that is used twice and where nothing stands before it.
    assert kind in (networks.Twice, networks.Preactivation) or not any(n.op_type == "BatchNormalization" for n in file.graph.node)


def test_training_mode_is_kept(tmp_path) -> None:
    model = build(networks.Chain).train()
    ck.export_onnx(model, tmp_path / "f.onnx", image(1))
    assert model.training


def test_the_argument_order_of_torch_is_refused(tmp_path) -> None:
    message = r"wanted a path as the second argument, got tuple; .*here it is export_onnx\(model, path, example\)"
    with pytest.raises(SettingError, match=message):
        ck.export_onnx(build(networks.Chain), image(1), tmp_path / "f.onnx")
    assert not list(tmp_path.iterdir())


def test_bad_settings_and_paths_are_refused(tmp_path) -> None:
    model = build(networks.Chain)
    with pytest.raises(SettingError, match=r"wanted 19\.\.23, got 9"):
        ck.export_onnx(model, tmp_path / "f.onnx", image(2), opset=9)
    with pytest.raises(ExportError, match="does not exist"):
        ck.export_onnx(model, tmp_path / "nowhere" / "f.onnx", image(2))

    class Untranslatable(nn.Module):
        def forward(self, x):
            return torch.linalg.eigvalsh(x @ x.mT)

    with pytest.raises((ExportError, ModelError), match=r"f\.onnx: the ONNX exporter failed"):
        ck.export_onnx(Untranslatable(), tmp_path / "f.onnx", (torch.randn(2, 3, 3),))
    assert list(tmp_path.iterdir()) == []  # nothing half-written


def test_an_old_file_survives_a_failed_export(tmp_path) -> None:
    path = ck.export_onnx(build(networks.Chain), tmp_path / "f.onnx", image(2))
    before = path.read_bytes()

    class Untranslatable(nn.Module):
        def forward(self, x):
            return torch.linalg.eigvalsh(x @ x.mT)

    with pytest.raises(ExportError):
        ck.export_onnx(Untranslatable(), path, (torch.randn(2, 3, 3),))
    assert path.read_bytes() == before
