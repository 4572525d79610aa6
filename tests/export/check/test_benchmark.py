"""Timing files in the runtimes that are installed."""

from __future__ import annotations

import logging
import sys
import time
from types import SimpleNamespace

import networks
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ExportError, SettingError
from compresskit.export import benchmark


class Core:
    """OpenVINO's interface, which takes 2 ms; it cannot load files that are called q."""

    settings: dict = {}  # noqa: RUF012 - what the last file was compiled with

    def compile_model(self, path, device, settings):
        if path.endswith("q.onnx"):
            raise RuntimeError("Check failed\nno translation of QLinearFoo")
        Core.settings = settings

        def infer(feed, share_inputs, share_outputs):
            assert {name: value.shape[0] for name, value in feed.items()} == {"x": 3}
            time.sleep(0.002)

        return SimpleNamespace(create_infer_request=lambda: SimpleNamespace(infer=infer))


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Core=Core, __version__="2026.4"))
    path = ck.export_onnx(build(networks.Chain), tmp_path / "f.onnx", image(2))
    (tmp_path / "q.onnx").write_bytes(path.read_bytes())
    return [path, tmp_path / "q.onnx"]


def test_files_are_timed_in_openvino_too_where_it_is_installed(files, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        timings = benchmark(files, batch=3, threads=2, seconds=0.05)
    assert [(t.runtime, t.path) for t in timings] == [
        ("onnxruntime", str(files[0])),
        ("onnxruntime", str(files[1])),
        ("openvino", str(files[0])),
    ]
    assert timings[2].milliseconds >= 2
    assert timings[2].ratio == timings[2].milliseconds / timings[0].milliseconds
    assert f"{files[1]}: OpenVINO 2026.4 cannot load it: no translation of QLinearFoo" in caplog.text
    assert Core.settings["INFERENCE_NUM_THREADS"] == 2
    assert Core.settings["INFERENCE_PRECISION_HINT"] == "f32"


def test_a_runtime_that_is_named_must_run_the_files(files, monkeypatch) -> None:
    assert [t.runtime for t in benchmark(files[:1], batch=3, seconds=0.02, runtimes=["openvino"])] == ["openvino"]
    assert [t.runtime for t in benchmark(files[:1], seconds=0.02, runtimes=["onnxruntime"])] == ["onnxruntime"]
    with pytest.raises(ExportError, match=r"q\.onnx: OpenVINO 2026\.4 cannot load it"):
        benchmark(files, batch=3, seconds=0.02, runtimes=["openvino"])
    with pytest.raises(SettingError, match=r"wanted runtimes among \('onnxruntime', 'openvino'\), got 'openvino'"):
        benchmark(files, runtimes="openvino")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ExportError, match=r"bench: openvino is not installed; pip install openvino"):
        benchmark(files, runtimes=["openvino"])
    assert {t.runtime for t in benchmark(files, seconds=0.02)} == {"onnxruntime"}


def test_files_with_other_inputs_are_named(tmp_path) -> None:
    class Sum(nn.Module):
        def forward(self, x, y):
            return x + y

    class Double(nn.Module):
        def forward(self, z):
            return z + z

    x = torch.randn(2, 8)
    two, one, other = (
        ck.export_onnx(model.eval(), tmp_path / f"{name}.onnx", inputs)
        for name, model, inputs in (("two", Sum(), (x, x)), ("one", nn.Linear(8, 4), (x,)), ("other", Double(), (x,)))
    )
    with pytest.raises(DataError, match=r"one\.onnx: the file wants inputs \['input'\], got 2 tensors"):
        benchmark([two, one], seconds=0.02, runtimes=["onnxruntime"])
    timings = benchmark([one, other], seconds=0.02, runtimes=["onnxruntime"])  # random inputs go in order
    assert [t.path for t in timings] == [str(one), str(other)]
    with pytest.raises(DataError, match=r"other\.onnx: the file wants inputs \['z'\], got \['input'\]"):
        benchmark([one, other], {"input": x}, seconds=0.02, runtimes=["onnxruntime"])


def test_the_batch_that_was_timed_is_said(tmp_path) -> None:
    model, x = nn.Linear(8, 4).eval(), torch.randn(2, 8)
    fixed, free = ck.export_onnx(model, tmp_path / "2.onnx", (x,), dynamic=()), ck.export_onnx(model, tmp_path / "n.onnx", (x,))
    quick = {"seconds": 0.02, "runtimes": ["onnxruntime"]}
    assert [t.batch for t in benchmark([free, fixed], **quick)] == [2, 2]
    assert [t.batch for t in benchmark([free], **quick)] == [1]
    assert [t.batch for t in benchmark([free], (torch.randn(5, 8),), **quick)] == [5]
    with pytest.raises(
        SettingError, match=r"2\.onnx takes input \(2, 8\) and no other batch, got batch=4; say batch=2, or leave it out"
    ):
        benchmark([free, fixed], batch=4, **quick)
    with pytest.raises(SettingError, match=r"bench: wanted inputs for batch=4, got input \(2, 8\); leave out one of the two"):
        benchmark([free], (x,), batch=4, **quick)
    with pytest.raises(DataError, match=r"bench: the inputs have no rows, got input \(0, 8\); give at least one"):
        benchmark([free], (x[:0],), **quick)


def test_a_table_with_rows_of_its_own_is_no_batch(tmp_path) -> None:
    class Chosen(nn.Module):
        def forward(self, table, x):
            return x @ table

    path = ck.export_onnx(Chosen(), tmp_path / "f.onnx", (torch.randn(5, 3), torch.randn(2, 5)), dynamic={"x": {0: "rows"}})
    assert [t.batch for t in benchmark([path], batch=4, seconds=0.02, runtimes=["onnxruntime"])] == [4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seconds": float("nan")}, "bench: wanted threads >= 1 and seconds > 0, got 1 and nan"),
        ({"seconds": float("inf")}, "bench: wanted threads >= 1 and seconds > 0, got 1 and inf"),
        ({"threads": "2"}, "bench: wanted threads >= 1 and seconds > 0, got '2' and 1.0"),
        ({"batch": 1.5}, "random inputs: wanted batch >= 1 and size >= 1, whole numbers, got 1.5 and 64"),
    ],
)
def test_settings_of_another_kind_are_refused(tmp_path, settings, message) -> None:
    path = ck.export_onnx(nn.Linear(8, 4), tmp_path / "f.onnx", torch.randn(2, 8))
    with pytest.raises(SettingError, match=message):
        benchmark([path], **settings)
