"""The report of a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError
from compresskit.recipe.recipe import Result
from compresskit.recipe.report import StageReport, read_stage_report, remarks


def test_a_run_writes_its_folder_and_prints_a_table(finished_run) -> None:
    out, task, result = finished_run
    assert sorted(p.name for p in out.iterdir() if p.name != ".lock") == [
        "1-train",
        "2-prune",
        "3-qat",
        "model.onnx",
        "recipe.json",
        "report.csv",
        "report.html",
        "report.json",
    ]
    assert {p.name for p in (out / "2-prune").iterdir()} == {
        "details.json", "model.onnx", "model.safetensors", "row.json", "structure.json", "verify.json"
    }  # fmt: skip
    text = str(result)
    assert text.splitlines()[0].split() == [
        "stage",
        "metric",
        "params",
        "MACs",
        "file",
        "smaller",
        "latency",
        "faster",
        "verified",
    ]
    assert text.count(" yes") == 3
    rows = json.loads((out / "report.json").read_text())["rows"]
    assert [r["stage"] for r in rows] == ["1-train", "2-prune", "3-qat"]
    for row in rows:
        file = out / row["stage"] / "model.onnx"
        assert row["bytes"] == file.stat().st_size
        assert row["executed"]
    assert (out / "model.onnx").read_bytes() == (out / "3-qat" / "model.onnx").read_bytes()
    assert rows[2]["macs"] == ck.count_macs(result.model, task.example()) <= 0.7 * rows[0]["macs"]
    assert rows[2]["bytes"] < rows[0]["bytes"]


def test_a_row_of_before_there_were_no_notes_is_read() -> None:
    row = StageReport(stage="1-train", metric=1.0, parameters=1, nonzero=1, macs=1, seconds=0.0)
    assert read_stage_report(asdict(row) | {"note": ""}, Path("row.json")) == row
    with pytest.raises(CheckpointError, match=r"row.json: not a row of a report \(.*'other'"):
        read_stage_report(asdict(row) | {"other": ""}, Path("row.json"))


def test_a_last_file_that_is_not_the_smallest_is_remarked_upon() -> None:
    def row(stage, size):
        return StageReport(stage=stage, metric=1.0, parameters=1, nonzero=1, macs=1, seconds=0.0, bytes=size)

    rows = [row("1-train", 5332), row("2-prune", None), row("3-qat", 8725)]
    assert remarks(rows) == [
        "The file of 3-qat (8,725 bytes) is larger than that of 1-train (5,332 bytes): what its rounding or masks"
        " add to the graph is more than they save in a model of this size."
    ]
    assert remarks(rows)[0] in str(Result(model=nn.Identity(), onnx=None, rows=tuple(rows), out=Path("run")))
    assert remarks(rows[:2]) == remarks(rows[::-1]) == remarks([row("1-train", None)]) == []


def test_a_last_file_that_is_slower_is_remarked_upon() -> None:
    def row(stage: str, milliseconds: float | None) -> StageReport:
        return StageReport(stage=stage, metric=1.0, parameters=1, nonzero=1, macs=1, seconds=0.0, latency_ms=milliseconds)

    slower = [row("1-train", 1.1), row("2-prune", 0.8), row("3-quant", 1.0)]
    (remark,) = remarks(slower)
    assert remark.startswith("The file of 3-quant (1.000 ms) is slower than that of 2-prune (0.800 ms) on this machine")
    assert remark in str(Result(model=nn.Identity(), onnx=None, rows=tuple(slower), out=Path("run")))
    within_noise = [row("1-train", 1.0), row("2-quant", 1.09)]
    assert remarks(within_noise) == remarks(slower[:2]) == remarks([row("1-train", None)]) == []
