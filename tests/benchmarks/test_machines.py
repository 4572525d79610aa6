"""One file on other machines: executed under emulation where qemu is installed, and the table of what was measured."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import checkout
import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import compresskit as ck

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
        assert cell["one by one"]["kernels"][0] == 0
        assert cell["one by one"]["roundings"][0] <= (10 if target == "OPENVINO" else 0)  # of additions that stay float
        assert cell["one by one"]["tie"] < 1e-3
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


def test_an_operator_that_computes_otherwise_is_told_from_a_value_near_a_tie(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(checkout.ROOT / "benchmarks"))
    import machines
    from machine_files import Cut

    cut = Cut(Path("wanted"), Path("file"), ("a", "b"), ("a", "b"), ("b",))
    a, b = np.array([1, 2, 3], np.uint8), np.array([4, 5], np.uint8)
    wanted = [a, b, np.array([0.875, 1.0], np.float32), np.array(0.25, np.float32)]  # b is rounded from 3.5 and 4 steps
    assert machines.one_by_one(cut, wanted, [a, b]) == {"kernels": [0, 3], "roundings": [0, 2], "tie": 0}
    found = machines.one_by_one(cut, wanted, [a + np.uint8(1), np.array([3, 5], np.uint8)])
    assert found == {"kernels": [3, 3], "roundings": [1, 2], "tie": 0}
    assert machines.difference(found) == "3 / 1, 0e+00"
    assert machines.one_by_one(cut, wanted, [a, np.array([4, 4], np.uint8)])["tie"] == 0.5
    assert machines.one_by_one(cut, wanted, "exit 1") == {"failed": "exit 1"}


class Attention(nn.Module):
    """Linear layers around a softmax, which stays float."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(torch.softmax(self.a(x), -1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_one_operator_rounds_otherwise_the_next_does_not_see(dynamic, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(checkout.ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(checkout.ROOT / "recipes"))
    import machine_files

    torch.manual_seed(0)
    x = torch.randn(5, 8)
    quantized = (ck.quant.quantize_dynamic if dynamic else ck.quant.quantize_static)(Attention().eval(), (x,))
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", (x,))
    _, watched, cut = machine_files.variants(path, dynamic)
    assert len(watched) == 2

    def run(file: Path, given: dict[str, np.ndarray]) -> list[np.ndarray]:
        session = onnxruntime.InferenceSession(file, machine_files.quiet(), providers=["CPUExecutionProvider"])
        return session.run(None, {session.get_inputs()[0].name: x.numpy()} | given)

    wanted = run(cut.wanted, {})
    given = {f"{name}.given": values for name, values in zip(cut.given, wanted, strict=False)}
    integers = [wanted[cut.given.index(name)] for name in cut.integers]
    assert all(np.array_equal(a, b) for a, b in zip(integers, run(cut.file, given), strict=True))
    assert (len(cut.integers), len(cut.rounded)) == (4 if dynamic else 2, 2)
    first = f"{cut.integers[0]}.given"
    differ = [not np.array_equal(a, b) for a, b in zip(integers, run(cut.file, given | {first: 255 - given[first]}), strict=True)]
    assert differ == [False, True] + [False] * (len(differ) - 2)
