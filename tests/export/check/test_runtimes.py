"""Files for another runtime than ONNX Runtime are run in it where it is installed; where it is not, the proof says so."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import networks
import numpy as np
import pytest
from networks import build, image

import compresskit as ck
from compresskit.base.errors import ExportError
from compresskit.measure import session
from compresskit.quant import OPENVINO, quantize_static
from compresskit.quant.numerics.targets import TENSORRT


def exported(target, folder):
    quantized = quantize_static(build(networks.Chain), [image(16)], target=target)
    return quantized, ck.export_onnx(quantized, folder / "q.onnx", image(2))


class Core:
    """OpenVINO's interface over ONNX Runtime, whose outputs are `off` too large."""

    off = 0.0

    def compile_model(self, path, device, settings):
        run = session(path)
        return lambda fed: dict(enumerate(value + self.off for value in run.run(None, fed)))


class Broken:
    def compile_model(self, path, device, settings):
        raise RuntimeError("Check failed\nno translation of Foo")


@pytest.mark.parametrize(("off", "passes"), [(0.0, True), (100.0, False)])
def test_openvino_runs_its_files(off, passes, tmp_path, monkeypatch) -> None:
    quantized, path = exported(OPENVINO, tmp_path)
    monkeypatch.setattr(Core, "off", np.float32(off))
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Core=Core, __version__="2026.4"))
    proof = ck.verify_onnx(path, quantized, [image(8)])
    assert proof.passed is passes
    assert "openvino 2026.4  same class" in str(proof)
    assert passes or proof.reason.startswith("in openvino: ")
    assert proof.to_json()["runtime"] == {"name": "openvino", "version": "2026.4", "note": ""}


def test_a_file_that_openvino_refuses_is_an_error(tmp_path, monkeypatch) -> None:
    quantized, path = exported(OPENVINO, tmp_path)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Core=Broken, __version__="2026.4"))
    with pytest.raises(ExportError, match=r"q\.onnx: OpenVINO 2026\.4 cannot load it: no translation of Foo"):
        ck.verify_onnx(path, quantized, [image(8)])


def test_a_runtime_that_is_missing_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    for target, note in (
        (OPENVINO, "openvino is not installed, the file was not run in it: pip install openvino"),
        (TENSORRT, "tensorrt is not run here: verify the file where it is deployed"),
    ):
        quantized, path = exported(replace(target, name="mine"), tmp_path)
        proof = ck.verify_onnx(path, quantized, [image(8)])
        assert proof.passed
        assert proof.runtime.note == note
        assert note in str(proof)
        assert proof.elsewhere is None
    quantized, path = exported(ck.quant.X86, tmp_path)
    assert ck.verify_onnx(path, quantized, [image(8)]).runtime is None
