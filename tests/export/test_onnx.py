"""Files: written, proved, refused, audited."""

from __future__ import annotations

import networks
import numpy as np
import onnx
import pytest
import torch
from networks import NETWORKS, build, image
from onnx import numpy_helper
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ExportError, ModelError, SettingError
from compresskit.export.rewrite.common import DATA_MOVEMENT
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


def test_training_mode_is_left_alone(tmp_path) -> None:
    model = build(networks.Chain).train()
    ck.export_onnx(model, tmp_path / "f.onnx", image(1))
    assert model.training


def test_the_argument_order_of_torch_is_refused(tmp_path) -> None:
    message = r"wanted a path as the second argument, got tuple; .*here it is export_onnx\(model, path, example\)"
    with pytest.raises(SettingError, match=message):
        ck.export_onnx(build(networks.Chain), image(1), tmp_path / "f.onnx")
    assert not list(tmp_path.iterdir())


def damaged(path, out, name):
    """A copy of the file in which the rows of one initializer are turned around."""
    file = onnx.load(path)
    tensor = next(t for t in file.graph.initializer if name in t.name)
    values = numpy_helper.to_array(tensor)[::-1].copy()
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(file, out)
    return out


def test_a_wrong_float_file_is_refused_and_the_layer_named(tmp_path) -> None:
    model = build(networks.Residual)
    good = ck.export_onnx(model, tmp_path / "f.onnx", image(2))
    proof = ck.verify_onnx(damaged(good, tmp_path / "bad.onnx", "out.weight"), model, [image(16)])
    assert not proof.passed
    assert "the largest error is" in proof.reason
    assert "the first layer that differs is out " in proof.reason
    assert "DISAGREES" in str(proof)
    assert proof.to_json()["passed"] is False


def test_a_wrong_int8_file_is_refused(tmp_path) -> None:
    quantized = ck.quant.quantize_static(build(networks.Residual), [image(16)])
    good = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    proof = ck.verify_onnx(damaged(good, tmp_path / "bad.onnx", "inner_0_weight.integers"), quantized, [image(32)])
    assert not proof.passed
    assert "inner" in proof.reason


def test_a_file_with_other_outputs(tmp_path) -> None:
    path = ck.export_onnx(build(networks.Chain), tmp_path / "f.onnx", image(2))
    other = build(networks.Chain)
    other.head = nn.Linear(32, 7)
    with pytest.raises(ExportError, match=r"output of shape \(4, 10\) where the model gives \(4, 7\)"):
        ck.verify_onnx(path, other, [image(4)])


def test_files_that_do_not_load(tmp_path) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(b"not a model")
    model = build(networks.Chain)
    with pytest.raises(ExportError, match=r"x\.onnx: ONNX Runtime cannot load it"):
        ck.verify_onnx(path, model, [image(2)])
    with pytest.raises(ExportError, match="cannot load it"):
        ck.audit(path)
    good = ck.export_onnx(model, tmp_path / "f.onnx", image(2))
    with pytest.raises(DataError, match="no batch was given"):
        ck.verify_onnx(good, model, [])


def test_bad_settings_and_places(tmp_path) -> None:
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


def test_moves_run_on_integers(tmp_path) -> None:
    """Slicing, reshaping, concatenating and max pooling between integer operators handle uint8."""

    class Mover(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(16, 8, 1)

        def forward(self, x):
            x = torch.relu(self.a(x))
            x = torch.cat([nn.functional.max_pool2d(x, 2), x[:, :, ::2, ::2]], 1)
            n, c, h, w = x.shape
            x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
            return self.b(nn.functional.pad(x, (1, 1, 1, 1)))

    quantized = ck.quant.quantize_static(Mover().eval(), [image(16)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    audit = ck.audit(path)
    kinds = set(audit.operators) & DATA_MOVEMENT
    assert {"MaxPool", "Concat", "Transpose", "Slice"} <= kinds
    assert all(audit.operators[k][0] == audit.operators[k][1] for k in kinds), audit
    assert ck.verify_onnx(path, quantized, [image(16)]).passed


def test_levels_count_steps() -> None:
    from compresskit.export.check.verify import compare

    wanted = np.linspace(0, 255, 256, dtype=np.float32).reshape(-1, 1)
    level = compare([wanted], [wanted + np.where(np.arange(256) % 4 == 0, 1.5, 0.5).reshape(-1, 1)])
    assert level.agreement is None
    assert level.within_one == 0.75
    assert level.within_two == 1.0
    assert level.largest == pytest.approx(1.5)
    assert compare([wanted], [wanted * np.nan]).largest == np.inf
