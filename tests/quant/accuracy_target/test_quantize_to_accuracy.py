"""Each matrix in the fastest precision that keeps the outputs accurate enough: the exported file reaches the target."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.measure import numpy_inputs, session
from compresskit.quant import quantize_to_accuracy
from compresskit.quant.accuracy_target import quantize_to_accuracy as module
from compresskit.quant.accuracy_target.mixed_model import FLOAT, INT8, PRECISIONS, MatrixPrecision, build_mixed
from compresskit.quant.accuracy_target.quantize_to_accuracy import _PrecisionSearch
from compresskit.quant.numerics.targets import X86
from compresskit.quant.passes.prepare_graph import prepare_graph


class Words(nn.Module):
    """Ids (N, T) to (N, 4), with a few loud channels, which one range for all of an activation serves badly."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.up, self.down = nn.Embedding(50, 64), nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
        self.head = nn.Linear(64, 4)
        with torch.no_grad():
            self.norm.weight[::16] = 20.0

    def forward(self, ids):
        x = self.words(ids)
        return self.head((x + self.down(F.gelu(self.up(self.norm(x))))).mean(1))


def ids(n: int = 2, length: int = 16):
    return (torch.randint(0, 50, (n, length)),)


@pytest.fixture
def timed(monkeypatch):
    """Inject latencies: products this small take microseconds, so which precision is fastest would be luck."""

    def inject(slowest_first=PRECISIONS, *, measure_files=False) -> None:
        def time_products(search, seconds) -> None:
            search.ms = {(name, p): 1 / (1 + i) for name in search.products for i, p in enumerate(slowest_first)}

        monkeypatch.setattr(_PrecisionSearch, "time_products", time_products)
        if not measure_files:
            monkeypatch.setattr(module, "latency", lambda paths, inputs, *, seconds: [1.0] * len(paths))

    return inject


def test_each_precision_of_each_shape_is_timed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).eval()
    example = (torch.randn(2, 8),)
    captured, _, _ = prepare_graph(model, example, replace(X86, operators={}))
    search = _PrecisionSearch(captured, [example], X86, ())
    search.time_products(0.002)
    assert set(search.ms) == {(name, precision) for name in ("linear", "linear_1") for precision in PRECISIONS}
    assert all(0 < ms < 100 for ms in search.ms.values())
    assert all(search.ms["linear", p] == search.ms["linear_1", p] for p in PRECISIONS)  # one shape is timed once


def test_a_model_that_is_fastest_in_float_is_refused(timed) -> None:
    timed(PRECISIONS[::-1])
    with pytest.raises(ModelError, match="Words: float is the fastest form of its products here"):
        quantize_to_accuracy(Words().eval(), [ids()], sqnr=20)


def test_a_target_that_nothing_reaches_is_refused(timed) -> None:
    timed()
    with pytest.raises(ModelError, match=r"Words: nothing that is rounded reaches 200\.0 dB"):
        quantize_to_accuracy(Words().eval(), [ids()], sqnr=200)


@pytest.mark.parametrize("wanted", [{"sqnr": 18.0}, {"cosine": 0.9999}], ids=str)
def test_the_file_reaches_the_target(wanted, timed, tmp_path) -> None:
    timed(measure_files="sqnr" in wanted)
    model, data = Words().eval(), [ids() for _ in range(4)]
    mixed, report = quantize_to_accuracy(model, data, **wanted, dynamic=(0, 1))
    sqnr = wanted.get("sqnr", 36.99)
    assert abs(report.wanted_sqnr - sqnr) < 0.01
    path = ck.export_onnx(mixed, tmp_path / "m.onnx", data[0])
    runtime = session(path)
    got = np.concatenate([runtime.run(None, numpy_inputs(runtime, x))[0] for x in data]).astype(np.float64)
    with torch.no_grad():
        exact = torch.cat([model(*x) for x in data]).double().numpy()
    assert oracles.sqnr(exact, got) >= sqnr
    assert abs(oracles.sqnr(exact, got) - report.sqnr) < 1e-3
    assert "cosine" not in wanted or report.cosine >= 0.9999
    assert ck.verify_onnx(path, mixed, [ids(3, 9)]).passed
    assert {choice.name for choice in report.matrices} == {"up.weight", "down.weight", "head.weight"}
    assert "dB (wanted" in str(report)
    assert 0 < report.ms < 100
    ck.save(mixed, tmp_path / "kept")
    again = ck.load(Words(), tmp_path / "kept")
    with torch.no_grad():
        torch.testing.assert_close(again(*data[0]), mixed.eval()(*data[0]), atol=0, rtol=0)


def test_precisions_are_exported_side_by_side(tmp_path) -> None:
    model, x = Words().eval(), ids(4)
    precisions = dict(zip(("linear", "linear_1", "linear_2"), (PRECISIONS[2], INT8, FLOAT), strict=True))
    mixed = build_mixed(model, x, X86, precisions)
    path = ck.export_onnx(mixed, tmp_path / "m.onnx", x)
    kinds = ck.audit(path).operators
    assert "MatMulNBits" in str(kinds) or kinds["MatMul"][0] >= 1
    assert ck.verify_onnx(path, mixed, [ids(8)]).passed


def test_the_search_removes_the_most_noise_for_its_time() -> None:
    a, b = MatrixPrecision(int8=True), MatrixPrecision()
    known = SimpleNamespace(
        products={"one": None, "two": None},
        ms={("one", a): 1.0, ("one", b): 2.0, ("two", a): 1.0, ("two", b): 5.0},
        noise={("one", a): 0.3, ("one", b): 0.0, ("two", a): 0.4, ("two", b): 0.0},
    )
    assert _PrecisionSearch.choose(known, 1.0) == {"one": a, "two": a}
    assert _PrecisionSearch.choose(known, 0.5) == {"one": b, "two": a}  # 0.3 for 1 ms, against 0.4 for 4
    assert _PrecisionSearch.choose(known, 0.1) == {"one": b, "two": b}


def test_bad_targets_and_models_are_refused() -> None:
    model = Words().eval()
    for wanted, message in (({}, "one of the two"), ({"sqnr": -1.0}, "decibels > 0"), ({"cosine": 1.0}, r"\(0, 1\)")):
        with pytest.raises(SettingError, match=message):
            quantize_to_accuracy(model, [ids()], **wanted)
    with pytest.raises(DataError, match="no calibration batch"):
        quantize_to_accuracy(model, [], sqnr=20)
    with pytest.raises(ModelError, match="no product by a stored matrix"):
        quantize_to_accuracy(nn.LayerNorm(8), [(torch.randn(2, 8),)], sqnr=20)


def test_the_float_model_is_written_once_and_each_round_once(timed, monkeypatch) -> None:
    timed()
    written = []
    export = module.export_onnx
    monkeypatch.setattr(module, "export_onnx", lambda model, path, *rest: written.append(path.name) or export(model, path, *rest))
    quantize_to_accuracy(Words().eval(), [ids()], sqnr=30)
    assert written.count("float.onnx") == 1
    assert written[-1] == "float.onnx"  # after the last round, the only one whose file is timed
    assert 1 <= written.count("mixed.onnx") <= module.MAX_SEARCHES


class Spectrogram(nn.Module):
    """Two LSTM layers, of which the first reads features of very different size, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(6, 16, 2, bias=False), nn.Linear(16, 256, bias=False)
        with torch.no_grad():
            self.layer.weight_ih_l0.mul_(torch.tensor([1e-3, *[1e3] * 5]))

    def forward(self, x):
        return self.head(self.layer(x)[0])


def test_only_the_layers_of_an_lstm_that_cost_too_much_stay_float(tmp_path, monkeypatch) -> None:
    def int8_is_fastest(search, seconds):
        search.ms = {(name, p): 1.0 if p == INT8 else 2.0 for name in search.products for p in PRECISIONS}

    monkeypatch.setattr(_PrecisionSearch, "time_products", int8_is_fastest)
    torch.manual_seed(0)
    model, batches = Spectrogram().eval(), [torch.randn(5, 4, 6) * torch.tensor([100.0, *[1e-3] * 5]) for _ in range(2)]
    quantized, report = quantize_to_accuracy(model, batches, sqnr=15, dynamic=(0, 1), seconds=0.02)
    assert report.sqnr >= 15
    assert [n for n in quantized.placement.floating if n.endswith((".0", ".1"))] == ["recurrent.0"]
    ck.save(quantized, tmp_path / "saved")
    assert torch.equal(ck.load(Spectrogram().eval(), tmp_path / "saved")(batches[0]), quantized(batches[0]))
