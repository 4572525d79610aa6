"""The benchmark scripts run from end to end, on sizes that say nothing; compiling makes it minutes."""

from __future__ import annotations

import json
import os
import shutil

import checkout
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed_cpu", "mixed_gpu", "mixed_divergence", "sources"])
def test_smoke(name) -> None:
    done = checkout.python(checkout.ROOT / "benchmarks" / f"{name}.py", "--smoke")
    failed = [line for line in done.stdout.splitlines() if "failed:" in line]
    assert not failed
    assert "MASTER_FP16" in done.stdout or name in ("mixed_cpu", "sources")


@pytest.mark.slow
def test_latencies_are_predicted(tmp_path) -> None:
    checkout.python(checkout.ROOT / "benchmarks" / "latency_model.py", "--quick", "--out", tmp_path)
    (network,) = json.loads((tmp_path / "latency_model.json").read_text())["networks"].values()
    assert [row["precision"] for row in network["rows"]] == ["fp32", "int8", "fp32"]
    assert all(0.5 < row["predicted"] / row["milliseconds"] < 2 for row in network["rows"])


@pytest.mark.slow
@pytest.mark.skipif(
    "COMPRESSKIT_WEB" not in os.environ or shutil.which("chromium") is None,
    reason="chromium, and COMPRESSKIT_WEB with onnxruntime-web, are not here",
)
def test_four_runtimes_give_the_same_classes(tmp_path) -> None:
    pytest.importorskip("openvino", reason="pip install openvino")
    checkout.python(checkout.ROOT / "recipes" / "digits.py", "--epochs", 4, "--out", tmp_path / "digits")
    web = f"{os.environ['COMPRESSKIT_WEB']}/node_modules/onnxruntime-web/dist"
    script = checkout.ROOT / "benchmarks" / "across_runtimes.py"
    checkout.python(script, "--run", tmp_path / "digits", "--web", web, "--out", tmp_path)
    rows = json.loads((tmp_path / "across_runtimes.json").read_text())["rows"]
    assert [row["file"] for row in rows] == ["digits, 1-train", "digits, 4-qat"]
    for row in rows:
        assert [entry["differ"] for entry in row["runtimes"].values()] == [0, 0, 0, 0]
        assert row["images"] == 1000


def test_the_committed_files_have_the_same_classes_everywhere() -> None:
    rows = json.loads((checkout.ROOT / "benchmarks" / "across_runtimes.json").read_text())["rows"]
    for row in rows:
        elsewhere = {name: entry["differ"] for name, entry in row["runtimes"].items() if entry["differ"]}
        assert not elsewhere or row["file"] == "ResNet-20, int8"  # the docs say which target OpenVINO wants
