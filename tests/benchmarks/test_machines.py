"""One file on other machines: executed under emulation where qemu is installed, and the table of what was measured."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import checkout
import pytest

DATA = Path(os.environ.get("COMPRESSKIT_DATA", "data"))
CHECKPOINTS, CIFAR = DATA / "cifar10_resnet", DATA / "cifar10"


@pytest.mark.slow
@pytest.mark.skipif(not CHECKPOINTS.is_dir() or not CIFAR.is_dir(), reason="no CIFAR-10")
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="no qemu-user")
def test_an_emulated_cpu_computes_the_same_integers(tmp_path) -> None:
    """Of ResNet-20: with weights for X86 all integers, with weights that may overflow not even all classes."""
    script = checkout.ROOT / "benchmarks" / "machines.py"
    given = {
        "data": CIFAR,
        "checkpoints": CHECKPOINTS,
        "folder": tmp_path,
        "out": tmp_path / "m.json",
        "samples": 200,
        "emulated": 50,
    }
    settings = [part for name, value in given.items() for part in (f"--{name}", value)]
    done = checkout.python(script, *settings, "--emulator", "qemu-x86_64", "--cpus", "Haswell-v4", "--networks", "resnet20")
    assert "left out: WASM: no --web (node, and npm: onnxruntime-web)" in done.stdout
    rows = json.loads((tmp_path / "m.json").read_text())["rows"]
    for target in ("X86", "ARM", "OPENVINO"):
        cell = rows[f"resnet20, {target}"]["cells"]["Haswell-v4, emulated"]
        assert (cell["integers"], cell["classes"]) == (1, 1)
    unguarded = rows["resnet20, X86, saturates=False"]
    assert unguarded["cells"]["Haswell-v4, emulated"]["integers"] < 0.9
    assert "overflow int16" in unguarded["simulated"]["avx2"]


def test_a_runtime_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(checkout.ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["machines.py", "--data", "a", "--checkpoints", "b", "--folder", "c"])
    import machines

    found, missing = machines.machines(machines.arguments())
    assert [machine.name for machine in found] == ["this CPU"]
    assert [text.split(":")[0] for text in missing] == ["older CPUs", "WASM", "older releases", "OpenVINO", "aarch64"]
    assert "npm: onnxruntime-web" in missing[1]
    assert "pip: openvino" in missing[3]


def test_a_share_is_100_percent_only_where_all_are_equal(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(checkout.ROOT / "benchmarks"))
    import machines

    assert [machines.percent(f) for f in (1, 1 - 1e-9, 0.99995, 0.944, None)] == ["100", "99.9999", "99.995", "94.4", "-"]
