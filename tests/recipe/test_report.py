"""The report of a run."""

from __future__ import annotations

import json

import compresskit as ck


def test_a_run_writes_its_folder_and_prints_a_table(finished_run) -> None:
    out, task, result = finished_run
    assert sorted(p.name for p in out.iterdir() if p.name != ".lock") == [
        "1-train",
        "2-prune",
        "3-qat",
        "model.onnx",
        "recipe.json",
        "report.json",
    ]
    assert {p.name for p in (out / "2-prune").iterdir()} == {
        "model.onnx", "model.safetensors", "row.json", "structure.json", "verify.json"
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
