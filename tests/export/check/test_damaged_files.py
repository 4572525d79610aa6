"""Damaged files that `verify_onnx` has to refuse, beside the right ones that have to pass: each passed once."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import compresskit as ck
from compresskit.export.check import executions, verify
from compresskit.quant import quantize_static


class Joined(nn.Module):
    """Boxes in pixels beside scores, in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.boxes, self.scores = nn.Sequential(nn.Linear(10, 48), nn.ReLU()), nn.Linear(48, 4), nn.Linear(48, 3)

    def forward(self, x):
        y = self.body(x)
        return torch.cat([self.boxes(y) * 100, self.scores(y).sigmoid()], 1)


def damaged(path, name, change):
    """The path of a copy of the file in which the values of one initializer are changed."""
    file = onnx.load(path)
    tensor = next(t for t in file.graph.initializer if t.name.startswith(name))
    values = change(numpy_helper.to_array(tensor).copy())
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(file, out := path.with_name("damaged.onnx"))
    return out


def joined():
    torch.manual_seed(0)
    return Joined().eval(), torch.randn(64, 10)


@pytest.mark.parametrize(("dtype", "copied"), [(torch.float16, True), (torch.float16, False), (torch.bfloat16, True)])
def test_scores_beside_boxes_in_half_precision(dtype, copied, tmp_path, monkeypatch) -> None:
    """Eight roundings of the whole range are more than a score is."""
    model, x = joined()
    model, x = model.to(dtype), x.to(dtype)
    path = ck.export_onnx(model, tmp_path / "f.onnx", (x,))
    bad = damaged(path, "scores.weight", lambda v: -v)
    if not copied:
        monkeypatch.setattr(verify, "COPIED", 0)
    for count in (64, 8, 1):
        assert ck.verify_onnx(path, model, [(x[:count],)]).passed
        found = ck.verify_onnx(bad, model, [(x[:count],)])
        assert not found.passed
        assert ("times as far from the unrounded model" if copied else "the largest error is") in found.reason


@pytest.mark.parametrize("count", [64, 31, 8, 4, 1])
def test_scores_beside_boxes_in_integers(count, tmp_path) -> None:
    """Fewer than 32 values of a score were not judged."""
    model, x = joined()
    quantized = quantize_static(model, [(x,)])
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", (x,))
    proof = ck.verify_onnx(path, quantized, [(x[:count],)])
    assert proof.passed, proof
    found = ck.verify_onnx(damaged(path, "weight_scores_weight.scale", lambda v: -v), quantized, [(x[:count],)])
    assert not found.passed
    assert "times as far from the unrounded model as the model itself" in found.reason
    assert found.samples == count


def test_a_half_model_that_casts_by_itself_has_no_unrounded_outputs(tmp_path) -> None:
    class Casts(Joined):
        def forward(self, x):
            return super().forward(x.half())

    model, x = Casts().half().eval(), torch.randn(64, 10)
    path = ck.export_onnx(model, tmp_path / "f.onnx", (x,))
    proof = ck.verify_onnx(path, model, [(x[:32],), (x[32:],)])
    assert proof.passed, proof
    assert proof.optimized.noise is None


class Small(nn.Module):
    """One small number, of which most units are off."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.body(x) * 1e-4


@pytest.mark.parametrize("quantized", [False, True])
def test_one_sample_is_joined_by_rows_of_its_values(quantized, tmp_path) -> None:
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(64, 10)
    off = int((x[0] @ model.body[0].weight.T + model.body[0].bias).argmin())
    model = quantize_static(model, [(x,)]) if quantized else model
    path = ck.export_onnx(model, tmp_path / "f.onnx", (x,))
    proof = ck.verify_onnx(path, model, [(x[:1],)])
    assert proof.passed, proof

    def without(values):
        values[np.arange(32) == off] *= -1
        return values

    bad = damaged(path, "weight_body_0_weight" if quantized else "body.0.weight", without)
    found = ck.verify_onnx(bad, model, [(x[:1],)])
    assert not found.passed
    assert found.reason.startswith("with rows that hold the values of the data in another order, as written: ")
    assert found.samples == 1
    assert found.optimized.agreement == proof.optimized.agreement
    assert found.optimized.largest < 1  # the record is of the data alone


class Rows(nn.Linear):
    """Writes down the rows that it sees. Its second argument indexes tables of three and of nine entries."""

    def __init__(self, width: int) -> None:
        super().__init__(6, width)
        self.tables = nn.ModuleList([nn.Embedding(3, width), nn.Embedding(9, width)])

    def forward(self, x, ids):
        y = super().forward(x) + self.tables[0](ids[:, 0]) + self.tables[1](ids[:, 1])
        return y.topk(2)[0] if self.out_features == 5 else y


@pytest.mark.parametrize(("width", "seconds", "made"), [(4, 10.0, 7), (4, 0.0, 1), (5, 10.0, 0)])
def test_rows_are_made_in_batches_like_the_datas_while_there_is_time(width, seconds, made, tmp_path, monkeypatch) -> None:
    """And not where an order of values decides the outputs; a model need not take them."""
    model, inputs, seen = Rows(width).eval(), (torch.randn(4, 6), torch.ones(4, 2, dtype=torch.long)), []
    path = ck.export_onnx(model, tmp_path / "f.onnx", inputs, dynamic=())
    monkeypatch.setattr(verify, "MADE_SECONDS", seconds)
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    assert ck.verify_onnx(path, model, [inputs]).passed
    assert seen == [4] * (2 + made)  # the data, zeros
    seen.clear()
    inputs[1][:, 1] = 7  # in another order, it is outside of the first table
    assert ck.verify_onnx(path, model, [inputs]).passed
    assert len(seen) <= 3 + (made > 0) * 6


def comparison(wanted, got, exact=None, **settings):
    found = executions.Comparison(
        most_of_floats=0.1, most_of_integers=16, **{"quantized": False, "weight_only": False, **settings}
    )
    unrounded = None if exact is None else [exact]
    found.add([wanted], {"as written": [wanted], "optimized": [got]}, unrounded=unrounded, samples=len(wanted))
    found.levels()
    return found.reason


def test_a_channel_whose_values_are_nearly_all_near_zero_is_judged_by_what_it_varies_by() -> None:
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(500, 2))
    exact[:, 1] **= 9  # nearly all near zero
    rounded = exact + [0.1, 0.001] * exact.std(0) * rng.normal(size=exact.shape)
    assert not comparison(rounded, rounded + 0.001 * exact.std(0) * rng.normal(size=exact.shape), exact, quantized=True)
    found = comparison(rounded, rounded * [1, 1.1], exact, quantized=True)
    assert "entry 1 of dimension 1 is" in found or "largest error" in found


def test_the_error_of_the_large_parts_says_what_the_small_ones_may_have() -> None:
    rng = np.random.default_rng(0)
    wanted = rng.normal(size=(64, 3)) * [1000, 1000, 0.1]
    noise = rng.normal(size=(64, 3))
    assert not comparison(wanted, wanted + 1e-4 * noise)
    assert "entry 2 of dimension 1: the largest error is" in comparison(wanted, wanted * [1, 1, 0.95])
    assert "entry 2 of dimension 1" in comparison(wanted, wanted + [1e-4, 1e-4, 1e-2] * noise)


def test_kernels_that_round_their_inputs_are_named() -> None:
    wanted = np.random.default_rng(0).normal(size=(500, 1))
    found = comparison(wanted, wanted[::-1], quantized=True, weight_only=True)
    assert "may round their inputs, where ones that do not are stored as storage=ck.quant.weight_only.MATMUL_NBITS" in found


@pytest.mark.parametrize("bias", [1.0, 20.0])
def test_small_outputs_in_half_precision_vary_by_little(bias, tmp_path) -> None:
    """They are rounded by their size, and one of them alone, at another size, does not vary at all."""
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(64, 10)
    nn.init.constant_(model.body[2].bias, bias)
    model.half()
    path = ck.export_onnx(model, tmp_path / "f.onnx", (x.half(),))
    proof = ck.verify_onnx(path, model, [(x.half(),)])
    assert proof.passed, proof
    assert not proof.other_sizes


class Thresholds(nn.Module):
    """Scores, and which of them are above zero: half precision may put one near it on either side."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        y = self.body(x)
        return y, (y > 0).to(y.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_that_are_made_refuse_no_half_file_with_a_threshold(dtype, tmp_path) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        model, x = Thresholds().eval().to(dtype), torch.randn(1, 10).to(dtype)
        proof = ck.verify_onnx(ck.export_onnx(model, tmp_path / "f.onnx", (x,)), model, [(x,)])
        assert "in another order" not in proof.reason
