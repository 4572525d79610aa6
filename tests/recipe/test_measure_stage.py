"""Exporting, verifying and measuring the model of a stage."""

from __future__ import annotations

import networks
import pytest
import short_run
from networks import images_task

import compresskit as ck
from compresskit.base.errors import (
    ExportError,
)
from compresskit.recipe import measure_stage


def test_a_file_that_disagrees_with_its_model_stops_the_run(tmp_path, monkeypatch) -> None:
    real = measure_stage.export_onnx

    def broken(model, path, example, **kwargs):
        other = networks.build(networks.Residual)
        return real(other, path, example)

    monkeypatch.setattr(measure_stage, "export_onnx", broken)
    with pytest.raises(ExportError, match=r"model\.rejected\.onnx: DISAGREES"):
        short_run.run(tmp_path / "run", images_task(ck, samples=64))
    assert (tmp_path / "run" / "1-train" / "model.rejected.onnx").exists()
    assert not (tmp_path / "run" / "1-train" / "row.json").exists()
