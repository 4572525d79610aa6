"""Exporting models to ONNX files: what is written, and what is refused."""

from __future__ import annotations

import os

import networks
import onnx
import pytest
import torch
from networks import NETWORKS, build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import ExportError, ModelError, SettingError
from compresskit.measure import session


@pytest.mark.matrix(every=2)
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


def test_bad_settings_and_paths_are_refused(tmp_path, monkeypatch) -> None:
    model = build(networks.Chain)
    with pytest.raises(SettingError, match=r"wanted 13\.\.25, \"lowest\" or None, got 9"):
        ck.export_onnx(model, tmp_path / "f.onnx", image(2), opset=9)
    with pytest.raises(ExportError, match="does not exist"):
        ck.export_onnx(model, tmp_path / "nowhere" / "f.onnx", image(2))
    with pytest.raises(ExportError, match=r": a folder; wanted the path of a file in it, such as .*model\.onnx$"):
        ck.export_onnx(model, tmp_path, image(2))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match=": a folder; wanted the path of a file in it"):
        ck.export_onnx(model, "", image(2))
    with pytest.raises(SettingError, match=r"wanted 13\.\.25, \"lowest\" or None, got 20\.0"):
        ck.export_onnx(model, tmp_path / "f.onnx", image(2), opset=20.0)
    with pytest.raises(SettingError, match=r"export_onnx\(metadata={'epochs': ...}\): wanted a text, got 3; write str"):
        ck.export_onnx(model, tmp_path / "f.onnx", image(2), metadata={"epochs": 3})
    with pytest.raises(SettingError, match=r"export_onnx\(metadata=...\): wanted texts by name, .*, got 'abc'"):
        ck.export_onnx(model, tmp_path / "f.onnx", image(2), metadata="abc")

    class Untranslatable(nn.Module):
        def forward(self, x):
            return torch.linalg.eigvalsh(x @ x.mT)

    with pytest.raises((ExportError, ModelError), match=r"f\.onnx: the ONNX exporter failed"):
        ck.export_onnx(Untranslatable(), tmp_path / "f.onnx", (torch.randn(2, 3, 3),))
    assert list(tmp_path.iterdir()) == []  # nothing half-written


def test_an_operator_without_a_translation_is_named_with_its_line_and_what_to_write(tmp_path) -> None:
    class Untranslatable(nn.Module):
        def __init__(self, code) -> None:
            super().__init__()
            self.code = code

        def forward(self, x):
            return self.code(x * 2)

    def search(y):
        return torch.searchsorted(y[0, 0], y, sorter=y[0, 0].argsort())

    for code, name, remedy in (
        (lambda y: y.cummax(1).values, "cummax", "write torch.cummax over few positions as a loop of torch.maximum"),
        (lambda y: y.round().mode(1).values, "mode", "write it with other operators"),
        (search, "searchsorted", "write torch.searchsorted without sorter="),
    ):
        wanted = rf"it has no form of aten\.{name} \(at .*test_onnx\.py:\d+: .*\): {remedy}, or leave it out of the file"
        with pytest.raises(ExportError, match=wanted):
            ck.export_onnx(Untranslatable(code), tmp_path / "f.onnx", (torch.randn(2, 3, 3),))


def test_an_old_file_survives_a_failed_export(tmp_path) -> None:
    path = ck.export_onnx(build(networks.Chain), tmp_path / "f.onnx", image(2))
    before = path.read_bytes()

    class Untranslatable(nn.Module):
        def forward(self, x):
            return torch.linalg.eigvalsh(x @ x.mT)

    with pytest.raises(ExportError):
        ck.export_onnx(Untranslatable(), path, (torch.randn(2, 3, 3),))
    assert path.read_bytes() == before


class Named(nn.Linear):
    """Outputs called like an input, a weight, and the name that the first would get."""

    def forward(self, x):
        return {"x": 2 * x, "weight": super().forward(x), "x_out": x + 1}


class Single(nn.Linear):
    """Its only output gets the name of its input."""

    def forward(self, output):
        return super().forward(output)


@pytest.mark.parametrize(
    ("kind", "names"), [(Named, ["x_out_out", "weight_out", "x_out"]), (Single, ["output_out"])], ids=["dict", "tensor"]
)
def test_outputs_called_like_another_value_get_a_name_of_their_own(kind, names, tmp_path) -> None:
    model, x = kind(8, 8).eval(), torch.randn(2, 8)
    path = ck.export_onnx(model, tmp_path / "f.onnx", (x,))
    assert [value.name for value in onnx.load(path).graph.output] == names
    assert ck.verify_onnx(path, model, [(x,)]).passed


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (nn.AvgPool2d(2, divisor_override=3), (12, 12)),
        (nn.AvgPool2d((3, 2), stride=2, padding=1, divisor_override=5), (12, 12)),
        (nn.AvgPool3d(2, divisor_override=3), (4, 6, 6)),
    ],
)
def test_the_divisor_of_average_pooling_is_exported(pool, shape, tmp_path) -> None:
    model, x = nn.Sequential(pool, nn.Flatten()).eval(), torch.randn(4, 3, *shape)
    assert ck.verify_onnx(ck.export_onnx(model, tmp_path / "f.onnx", (x,)), model, [(x,)]).passed


def test_a_divisor_that_onnx_cannot_express_is_refused(tmp_path) -> None:
    model = nn.AvgPool2d(2, ceil_mode=True, divisor_override=3)
    with pytest.raises(ModelError, match=r"divisor_override=3 and ceil_mode=True has no form in ONNX: pad the input"):
        ck.export_onnx(model, tmp_path / "f.onnx", (torch.randn(2, 3, 5, 5),))


@pytest.mark.parametrize(("opset", "version"), [(19, 9), (20, 9), (21, 10)])
def test_files_have_the_oldest_ir_version_of_their_operators(opset, version, tmp_path) -> None:
    path = ck.export_onnx(nn.Linear(8, 4).eval(), tmp_path / "f.onnx", (torch.randn(2, 8),), opset=opset)
    assert onnx.load(path).ir_version == version


def test_export_is_silent_about_tables_that_stay_unfolded(tmp_path, caplog) -> None:
    class Types(nn.Embedding):
        def forward(self, x):
            return super().forward(x + torch.gather(self.table, 1, torch.arange(6)[None]))

    model = Types(99, 8).eval()
    model.register_buffer("table", torch.zeros(1, 99).long())
    ck.export_onnx(model, tmp_path / "f.onnx", (torch.randint(0, 20, (4, 6)),))
    assert not [record for record in caplog.records if record.name.startswith("onnxscript")]


def test_export_is_silent_about_attributes_that_are_empty(tmp_path, caplog) -> None:
    class Upper(nn.Linear):
        """Writes single places of a matrix, as layers of flows do."""

        def forward(self, x):
            weight, rows = self.weight.new_zeros(6, 6), torch.arange(6)
            weight[rows, rows] = self.bias
            return super().forward(x) @ weight

    ck.export_onnx(Upper(6, 6).eval(), tmp_path / "f.onnx", (torch.randn(4, 6),))
    assert not [record for record in caplog.records if record.name.startswith("onnx_ir")]


def test_what_the_exporter_prints_is_no_output_of_a_command(tmp_path, capsys, monkeypatch) -> None:
    """Older releases of onnxscript print how many rules they applied."""
    export = torch.onnx.export

    def loud(*args, **settings):
        print("Applied 3 of general pattern rewrite rules.")
        return export(*args, **settings)

    monkeypatch.setattr(torch.onnx, "export", loud)
    ck.export_onnx(nn.Linear(4, 2), tmp_path / "f.onnx", (torch.ones(2, 4),))
    assert capsys.readouterr().out == ""


def test_a_file_lies_where_it_was_asked_for_though_the_forward_pass_changes_the_working_directory(tmp_path, monkeypatch) -> None:
    class Moves(nn.Linear):
        def forward(self, x):
            os.chdir(elsewhere)
            return super().forward(x)

    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    assert ck.export_onnx(Moves(8, 4), "f.onnx", torch.randn(2, 8)) == tmp_path / "f.onnx"
    assert (tmp_path / "f.onnx").exists()
