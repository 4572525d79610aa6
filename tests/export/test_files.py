"""ONNX files on disk: external data, paths outside the folder, metadata."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import networks
import onnx
import onnxruntime as ort
import pytest
import torch
from networks import build, image, images_task
from onnx import external_data_helper
from torch import nn

import compresskit as ck
from compresskit.base.errors import ExportError, runtime_message
from compresskit.cli import main
from compresskit.export import files
from compresskit.measure import session


@pytest.fixture
def large(monkeypatch):
    """As if 1000 bytes were more than a file can hold."""
    monkeypatch.setattr(files, "LIMIT", 1000)


def test_weights_past_the_limit_go_to_a_second_file(large, tmp_path) -> None:
    model = build(networks.Residual)
    quantized = ck.quant.quantize_static(model, [image(16)])
    for i, (part, share) in enumerate(((model, 0.0), (quantized, 1.0))):
        path = ck.export_onnx(part, tmp_path / f"{i}.onnx", image(2))
        assert sorted(p.name for p in tmp_path.glob(f"{i}.*")) == [f"{i}.onnx", f"{i}.onnx.data"]
        places = {
            e.value for t in onnx.load(path, load_external_data=False).graph.initializer for e in t.external_data
            if e.key == "location"
        }  # fmt: skip
        assert places == {f"{i}.onnx.data"}
        assert ck.verify_onnx(path, part, [image(16)]).passed
        assert ck.audit(path).integer_fraction == share
        assert main(["verify", str(path)]) == 0
        assert files.file_bytes(path) > path.stat().st_size
        ck.export.annotate(path, note="kept apart")
        assert ck.export.read_metadata(path)["note"] == "kept apart"
        assert session(path).get_inputs()[0].shape[0] == "batch"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_small_file_deletes_the_external_data_of_a_larger_one(large, monkeypatch, tmp_path) -> None:
    path = ck.export_onnx(build(networks.Chain), tmp_path / "f.onnx", image(2))
    monkeypatch.setattr(files, "LIMIT", 10**9)
    ck.export_onnx(build(networks.Chain), path, image(2))
    assert [p.name for p in tmp_path.iterdir()] == ["f.onnx"]


def test_the_first_differing_layer_is_named_with_external_data(large, tmp_path) -> None:
    path = ck.export_onnx(build(networks.Residual), tmp_path / "f.onnx", image(2))
    proof = ck.verify_onnx(path, build(networks.Residual), [image(16)])
    assert "the first layer that differs is stem" in proof.reason
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("place", ["model.onnx_data", "weights/all.bin"], ids=["underscore", "folder"])
def test_external_data_of_any_name_is_counted_and_copied(place, tmp_path) -> None:
    """Other tools give their second file other names."""
    plain = ck.export_onnx(build(networks.Chain), tmp_path / "plain.onnx", image(2))
    path = tmp_path / "theirs" / "model.onnx"
    (path.parent / place).parent.mkdir(parents=True)
    onnx.save(onnx.load(plain), path, save_as_external_data=True, location=place, size_threshold=200)
    assert files.external_files(path) == [path.parent / place]
    assert files.file_bytes(path) == path.stat().st_size + (path.parent / place).stat().st_size > 0.9 * plain.stat().st_size
    files.copy_onnx(path, tmp_path / "copy" / "model.onnx")
    shutil.rmtree(path.parent)
    assert session(tmp_path / "copy" / "model.onnx").get_inputs()[0].shape[0] == "batch"


@pytest.mark.parametrize("place", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "C:\\secret.bin", "..\\secret.bin"])
def test_weights_outside_the_folder_are_not_read(place, tmp_path, capsys) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(10**5))
    model = build(networks.Chain)
    path = ck.export_onnx(model, folder / "f.onnx", image(2))
    proto = onnx.load(path)
    tensor = proto.graph.initializer[0]
    external_data_helper.set_external_data(tensor, place)
    tensor.ClearField("raw_data")
    path.write_bytes(proto.SerializeToString())
    for call in (ck.audit, ck.export.read_metadata, lambda p: ck.verify_onnx(p, model, [image(2)])):
        with pytest.raises(ExportError, match="outside the folder of the file; it is not read"):
            call(path)
    for command in ("verify", "audit", "bench"):
        assert main([command, str(path)]) == 2
        assert "outside the folder" in capsys.readouterr().err


def test_links_out_of_the_folder_and_missing_weights_are_refused(large, tmp_path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    path = ck.export_onnx(build(networks.Chain), folder / "f.onnx", image(2))
    data = folder / "f.onnx.data"
    data.rename(tmp_path / "elsewhere")
    with pytest.raises(ExportError, match=r"f\.onnx\.data, in which its weights lie, is not there"):
        ck.audit(path)
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExportError, match="a link out of the folder"):
        ck.audit(path)


def test_files_of_a_run_hold_its_metadata(large, tmp_path, capsys) -> None:
    task = images_task(ck, samples=64)
    result = ck.Recipe(ck.StaticQuant(samples=32)).run(build(networks.Chain), task, tmp_path / "run")
    about = ck.export.read_metadata(result.onnx)
    assert about["stage"]["name"] == "1-staticquant"
    assert about["stage"]["settings"]["samples"] == 32
    assert about["metric"] == result.rows[-1].metric
    assert about["verification"]["passed"] is True
    assert about["target"] == "X86"
    assert about["opset"] == ck.quant.X86.opset
    assert main(["audit", str(result.onnx)]) == 0
    text = capsys.readouterr().out
    assert "metric" in text
    assert main(["audit", "--json", str(result.onnx)]) == 0
    printed = json.loads(capsys.readouterr().out)[str(result.onnx)]["about"]
    assert printed["metric"] == about["metric"]
    assert printed["stage"]["settings"]["samples"] == 32


def test_files_of_other_libraries_have_no_metadata(tmp_path) -> None:
    path = ck.export_onnx(build(networks.Chain), tmp_path / "f.onnx", image(2), metadata={"compresskit": "not JSON"})
    assert "versions" not in ck.export.read_metadata(path)
    ck.export.annotate(path, versions={})
    ck.export.annotate(path, metric=0.5)
    assert ck.export.read_metadata(path) == {"producer": "compresskit", "opset": 20, "versions": {}, "metric": 0.5}


def test_a_path_that_is_not_utf_8_is_refused_and_others_are_read_in_any_locale(tmp_path) -> None:
    path = ck.export_onnx(nn.Linear(8, 4).eval(), tmp_path / "f.onnx", (torch.randn(2, 8),))
    for name, wanted in ((b"\xff.onnx", None), ("\N{LATIN SMALL LETTER E WITH ACUTE}.onnx".encode(), True)):
        # what Python makes of a name in an ASCII locale
        copy = Path(os.fsencode(path.parent).decode() + "/" + name.decode("ascii", "surrogateescape"))
        os.link(os.fsencode(path), os.fsencode(path.parent) + b"/" + name)
        if wanted is None:
            for use in (ck.audit, session, ck.export.verify_levels):
                with pytest.raises(ExportError, match=r"its path is not UTF-8; rename the file or its folder"):
                    use(copy)
        else:
            assert session(copy).get_inputs()[0].shape == ["batch", 8]


def test_an_error_of_the_runtime_is_one_line_with_what_it_says() -> None:
    text = "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got\n index: 1\n Please fix either the inputs/outputs or the model."
    assert runtime_message(ValueError(text)) == "Got index: 1"
    assert runtime_message(ValueError("a" * 1000 + "z")) == "a" * 200 + " ... " + "a" * 199 + "z"
    assert runtime_message(KeyError()) == "KeyError"


@pytest.mark.parametrize("copied", [False, True])
def test_a_graph_is_never_left_with_the_weights_of_another(copied, large, monkeypatch, tmp_path) -> None:
    """A process that is killed after the weights are in their place leaves no file, which is an honest failure."""
    (tmp_path / "new").mkdir()
    path = ck.export_onnx(build(networks.Chain), tmp_path / "f.onnx", image(2))
    new = ck.export_onnx(build(networks.Residual), tmp_path / "new" / "f.onnx", image(2))
    replace, replaced = Path.replace, []

    def killed_after_the_first(source, target):
        if replaced:
            raise KeyboardInterrupt
        replaced.append(Path(target).name)
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", killed_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        files.copy_onnx(new, path) if copied else ck.export_onnx(build(networks.Residual), path, image(2))
    assert replaced == ["f.onnx.data"]
    assert not path.exists()
    monkeypatch.undo()
    files.copy_onnx(new, path)
    assert path.read_bytes() == new.read_bytes()


def test_a_file_that_is_newer_than_the_runtime_says_what_to_do(tmp_path) -> None:
    graph = onnx.helper.make_graph([], "empty", [], [])
    newest = onnx.defs.onnx_opset_version() + 20
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", newest)], ir_version=9)
    (tmp_path / "f.onnx").write_bytes(model.SerializeToString())
    said = (
        rf"f\.onnx: ONNX Runtime cannot load it: it has opset {newest}, and the installed onnxruntime {ort.__version__} reads up"
        r' to \d+; export_onnx\(..., opset="lowest"\) writes what older ones read, or pip install --upgrade onnxruntime$'
    )
    with pytest.raises(ExportError, match=said):
        session(tmp_path / "f.onnx")
