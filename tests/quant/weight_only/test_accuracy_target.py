"""Each matrix in the fastest form that keeps the outputs good enough: what is promised holds for the file."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.measure import numpy_inputs, session
from compresskit.quant import meet_floor
from compresskit.quant.numerics.targets import X86
from compresskit.quant.passes.prepare_graph import prepare_graph
from compresskit.quant.weight_only.accuracy_target import _Work
from compresskit.quant.weight_only.per_matrix import FLOAT, FORMS, INT8, MatrixForm, build_mixed


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


def decibels(wanted, got) -> float:
    return float(10 * np.log10((wanted**2).sum() / ((wanted - got) ** 2).sum()))


@pytest.fixture
def timed(monkeypatch):
    """Products this small take microseconds, so which form is fastest is luck: here the test says it."""

    def say(order=FORMS) -> None:
        def time_forms(work, seconds) -> None:
            work.ms = {(name, form): 1 / (1 + i) for name in work.products for i, form in enumerate(order)}

        monkeypatch.setattr(_Work, "time_forms", time_forms)

    return say


def test_each_form_of_each_product_is_timed() -> None:
    captured, _, _ = prepare_graph(Words().eval(), ids(), replace(X86, operators={}), (), (0,))
    work = _Work(captured, [ids()], X86, ())
    work.time_forms(0.01)
    assert set(work.ms) == {(name, form) for name in ("linear", "linear_1", "linear_2") for form in FORMS}
    assert all(0 < ms < 100 for ms in work.ms.values())


def test_float_is_fastest(timed) -> None:
    timed(FORMS[::-1])
    with pytest.raises(ModelError, match="Words: float is the fastest form of its products here"):
        meet_floor(Words().eval(), [ids()], floor=20)


def test_nothing_meets_the_floor(timed) -> None:
    timed()
    with pytest.raises(ModelError, match=r"Words: nothing that is rounded meets 200\.0 dB"):
        meet_floor(Words().eval(), [ids()], floor=200)


@pytest.mark.parametrize("wish", [{"floor": 18.0}, {"cosine": 0.9999}], ids=str)
def test_the_file_meets_the_floor(wish, timed, tmp_path) -> None:
    timed()
    model, data = Words().eval(), [ids() for _ in range(4)]
    mixed, met = meet_floor(model, data, **wish, dynamic=(0, 1), seconds=0.02)
    floor = wish.get("floor", 36.99)
    assert abs(met.floor - floor) < 0.01
    path = ck.export_onnx(mixed, tmp_path / "m.onnx", data[0])
    runtime = session(path)
    got = np.concatenate([runtime.run(None, numpy_inputs(runtime, x))[0] for x in data]).astype(np.float64)
    with torch.no_grad():
        wanted = torch.cat([model(*x) for x in data]).double().numpy()
    assert decibels(wanted, got) >= floor
    assert abs(decibels(wanted, got) - met.reached) < 1e-3
    assert "cosine" not in wish or met.cosine >= 0.9999
    assert ck.verify_onnx(path, mixed, [ids(3, 9)]).passed
    assert {row.name for row in met.rows} == {"up.weight", "down.weight", "head.weight"}
    assert "dB (floor" in str(met)
    ck.save(mixed, tmp_path / "kept")
    again = ck.load(Words(), tmp_path / "kept")
    with torch.no_grad():
        torch.testing.assert_close(again(*data[0]), mixed.eval()(*data[0]), atol=0, rtol=0)


def test_forms_live_side_by_side(tmp_path) -> None:
    model, x = Words().eval(), ids(4)
    forms = dict(zip(("linear", "linear_1", "linear_2"), (FORMS[2], INT8, FLOAT), strict=True))
    mixed = build_mixed(model, x, X86, forms)
    path = ck.export_onnx(mixed, tmp_path / "m.onnx", x)
    kinds = ck.audit(path).operators
    assert "MatMulNBits" in str(kinds) or kinds["MatMul"][0] >= 1
    assert ck.verify_onnx(path, mixed, [ids(8)]).passed


def test_the_choice_takes_the_most_noise_for_its_time() -> None:
    a, b = MatrixForm(dynamic=True), MatrixForm()
    known = SimpleNamespace(
        products={"one": None, "two": None},
        ms={("one", a): 1.0, ("one", b): 2.0, ("two", a): 1.0, ("two", b): 5.0},
        noise={("one", a): 0.3, ("one", b): 0.0, ("two", a): 0.4, ("two", b): 0.0},
    )
    assert _Work.choose(known, 1.0) == {"one": a, "two": a}
    assert _Work.choose(known, 0.5) == {"one": b, "two": a}  # 0.3 for 1 ms, against 0.4 for 4
    assert _Work.choose(known, 0.1) == {"one": b, "two": b}


def test_bad_input() -> None:
    model = Words().eval()
    for wish, said in (({}, "one of the two"), ({"floor": -1.0}, "decibels > 0"), ({"cosine": 1.0}, r"\(0, 1\)")):
        with pytest.raises(SettingError, match=said):
            meet_floor(model, [ids()], **wish)
    with pytest.raises(DataError, match="no calibration batch"):
        meet_floor(model, [], floor=20)
    with pytest.raises(ModelError, match="no product by a stored matrix"):
        meet_floor(nn.LayerNorm(8), [(torch.randn(2, 8),)], floor=20)
