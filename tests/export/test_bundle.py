"""A file with what is needed to run it elsewhere."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import SettingError


@dataclass
class Finished:
    onnx: Path | None


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval(), torch.randn(4, 3, 4)
    path = ck.export_onnx(model, tmp_path_factory.mktemp("bundle") / "net.onnx", (x,))
    return path, x, model(x).detach()


def python(*arguments):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False, cwd="/")


def test_the_script_runs_where_compresskit_is_not_known(exported, tmp_path) -> None:
    path, x, wanted = exported
    names = ["cat", 'do"g', "Kätzchen"]
    script = ck.export.bundle(Finished(path), tmp_path / "to", labels=names, example=(x,))
    text = script.read_text()
    assert len(text.splitlines()) <= 25
    imported = {a.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for a in node.names}
    assert imported == {"json", "sys", "numpy", "onnxruntime"}
    done = python("-I", script)
    assert done.returncode == 0, done.stderr
    assert repr([names[i] for i in wanted.argmax(1)]) in done.stdout
    stored = dict(np.load(tmp_path / "to" / "example.npz"))
    (output,) = (name for name in stored if name.startswith("expected "))
    np.testing.assert_allclose(stored[output], wanted.numpy(), atol=1e-5)
    np.savez(tmp_path / "wrong.npz", **stored | {output: stored[output] + 1})
    done = python("-I", script, tmp_path / "wrong.npz")
    assert done.returncode == 1
    assert "is not what was expected" in done.stderr


def test_a_bundle_is_replaced_by_the_next(exported, tmp_path) -> None:
    path, x, _ = exported
    ck.export.bundle(path, tmp_path, labels=["a", "b", "c"], example=x)
    assert json.loads((tmp_path / "labels.json").read_text()) == ["a", "b", "c"]
    ck.export.bundle(tmp_path / "net.onnx", tmp_path, example=x[:1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["example.npz", "infer.py", "net.onnx"]
    assert (tmp_path / "net.onnx").read_bytes() == path.read_bytes()


def test_inputs_may_be_called_like_arguments_of_savez(tmp_path) -> None:
    class Named(nn.Module):
        def forward(self, file, allow_pickle):
            return file + allow_pickle

    x = torch.randn(2, 3)
    path = ck.export_onnx(Named().eval(), tmp_path / "named.onnx", {"file": x, "allow_pickle": 2 * x})
    ck.export.bundle(path, tmp_path / "to", example={"file": x, "allow_pickle": 2 * x})
    stored = dict(np.load(tmp_path / "to" / "example.npz"))
    assert {"file", "allow_pickle"} <= stored.keys()
    np.testing.assert_array_equal(stored["file"], x.numpy())


def test_what_cannot_be_bundled_is_refused(exported, tmp_path) -> None:
    path, x, _ = exported
    with pytest.raises(SettingError, match=r"wanted a name for each class of the output \(4, 3\), got 2"):
        ck.export.bundle(path, tmp_path / "no", labels=["a", "b"], example=x)
    with pytest.raises(SettingError, match="the result has no ONNX file; pass the path of one"):
        ck.export.bundle(Finished(None), tmp_path / "no", example=x)
    with pytest.raises(ck.ExportError, match="no such file: .*gone.onnx"):
        ck.export.bundle(tmp_path / "gone.onnx", tmp_path / "no", example=x)
    with pytest.raises(ck.DataError, match=r"the file wants inputs \['input'\], got 2 tensors"):
        ck.export.bundle(path, tmp_path / "no", example=(x, x))
    assert not (tmp_path / "no").exists()
