"""Exporting, verifying and measuring the model of a stage."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.fixture
def samples_compared(monkeypatch) -> list[int]:
    """How many samples each call of `verify_onnx` compared."""
    found: list[int] = []
    real = measure_stage.verify_onnx

    def counted(*args, **kwargs):
        verification = real(*args, **kwargs)
        found.append(verification.samples)
        return verification

    monkeypatch.setattr(measure_stage, "verify_onnx", counted)
    return found


def test_a_file_may_be_compared_on_a_few_samples_and_is_measured_on_all(tmp_path, samples_compared) -> None:
    task, model = images_task(ck, samples=64), networks.build(networks.Residual)
    wanted = sum(len(task.inputs(batch)[0]) for batch in task.batches("val"))
    (tmp_path / "all").mkdir()
    (tmp_path / "few").mkdir()
    whole = measure_stage.measure_stage(model, task, tmp_path / "all", settings={}, seconds=0, export=True)
    brief = measure_stage.measure_stage(model, task, tmp_path / "few", settings={}, seconds=0, export=True, compared=5)
    assert samples_compared == [wanted, 5]
    assert (brief.metric, brief.macs, brief.verified) == (whole.metric, whole.macs, True)
    assert [(tmp_path / name / "details.json").exists() for name in ("all", "few")] == [True, False]
    assert (tmp_path / "few" / "verify.json").exists()


def test_a_file_that_disagrees_on_a_few_samples_is_compared_on_all(tmp_path, monkeypatch, samples_compared) -> None:
    """A few samples may be those that are rounded to the other side; only all of them reject a file."""
    counted = measure_stage.verify_onnx

    def strict(*args, **kwargs):
        verification = counted(*args, **kwargs)
        return replace(verification, reason="few") if verification.samples == 5 else verification

    monkeypatch.setattr(measure_stage, "verify_onnx", strict)
    task, model = images_task(ck, samples=64), networks.build(networks.Residual)
    report = measure_stage.measure_stage(model, task, tmp_path, settings={}, seconds=0, export=True, compared=5)
    assert report.verified
    assert samples_compared[0] == 5
    assert len(samples_compared) == 2 < samples_compared[1]
