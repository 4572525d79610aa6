"""The quantized model: its inputs, calibration, observers."""

from __future__ import annotations

import copy
import io

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.measure import numpy_inputs, session
from compresskit.quant import prepare_qat, quantize_dynamic, quantize_static, quantize_weights


def test_ranges_follow_activations_until_observers_are_off() -> None:
    quantized = prepare_qat(build(networks.Chain), [image(16)])
    first = quantized.activation_quantizers()[0]
    before = first.scale.clone()
    for _ in range(5):
        quantized(torch.randn(8, 3, 16, 16) * 10)
    moved = first.scale.clone()
    assert moved > before * 1.2
    quantized.observe_(False)
    quantized(torch.randn(8, 3, 16, 16) * 100)
    assert torch.equal(first.scale, moved)


def test_models_with_several_inputs_and_outputs(tmp_path) -> None:
    model = networks.TwoInputs().eval()
    for example in (
        (torch.randn(4, 3, 16, 16), torch.randn(4, 8)),
        {"numbers": torch.randn(4, 8), "image": torch.randn(4, 3, 16, 16)},
    ):
        quantized = quantize_static(model, [example])
        path = ck.export_onnx(quantized, tmp_path / "q.onnx", example)
        runtime = session(path)
        assert {i.name for i in runtime.get_inputs()} == {"image", "numbers"}
        assert [o.name for o in runtime.get_outputs()] == ["logits", "features"]
        assert runtime.get_inputs()[0].shape[0] == "batch"
        assert ck.verify_onnx(path, quantized, [example]).passed
        big = {"image": torch.randn(9, 3, 16, 16), "numbers": torch.randn(9, 8)}
        assert runtime.run(None, numpy_inputs(runtime, big))[0].shape == (9, 10)


def test_inputs_of_another_shape_are_refused() -> None:
    quantized = quantize_static(build(networks.Chain), [image(16)])
    with pytest.raises(ModelError, match=r"wanted inputs \[\('N', 3, 16, 16\)\], got \[\(2, 3, 8, 8\)\]"):
        quantized(torch.randn(2, 3, 8, 8))


def test_calibration_in_parts_of_batches_finds_the_same_ranges(monkeypatch) -> None:
    from compresskit.quant import model as quantized_model
    from compresskit.quant.numerics.observers import MovingAverage

    model, x = build(networks.Residual), image(30)
    whole = quantize_static(model, [x]).state_dict()
    seen = []
    monkeypatch.setattr(quantized_model, "call_checked", lambda m, inputs, where: seen.append(len(inputs[0])) or m(*inputs))
    monkeypatch.setattr(quantized_model, "CALIBRATION_BYTES", 4 * 16 * 16 * 16 * 4)  # four rows of the largest activation
    for name, value in quantize_static(model, [x]).state_dict().items():
        torch.testing.assert_close(value, whole[name], msg=name)
    assert seen == [4] * 7 + [2]
    seen.clear()
    quantize_static(model, [x], observer=MovingAverage)
    assert seen == [30]


def test_other_dimensions_than_the_batch_may_vary(tmp_path) -> None:
    model = networks.trained_like(nn.Sequential(networks.conv(3, 16), nn.Conv2d(16, 4, 1)), image(16))
    quantized = quantize_static(model, [image(16)], dynamic=(0, 2, 3))
    assert quantized(torch.randn(2, 3, 20, 28)).shape == (2, 4, 20, 28)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    assert ck.verify_onnx(path, quantized, [(torch.randn(8, 3, 20, 28),), image(4)]).passed
    with pytest.raises(ModelError, match=r"wanted inputs \[\('N', 3, 'any', 'any'\)\], got \[\(2, 4, 20, 28\)\]"):
        quantized(torch.randn(2, 4, 20, 28))
    fixed = quantize_static(build(networks.Shuffle), [image(16)])
    with pytest.raises(ModelError, match="cannot be captured as a graph"):
        ck.export_onnx(fixed, tmp_path / "n.onnx", image(2), dynamic=(0, 2, 3))


class Pair(nn.Module):
    """Two images, run as one batch and told apart again, as RAFT does."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(32, 8, 3)

    def forward(self, one, two):
        parts = F.relu(self.stem(torch.cat([one, two]))).chunk(2)
        return self.head(torch.cat(parts, 1))


def test_a_model_that_cuts_its_batch_in_two(tmp_path) -> None:
    model, batches = Pair().eval(), [tuple(torch.randn(rows, 3, 12, 12) for _ in range(2)) for rows in (2, 5)]
    path = ck.export_onnx(model, tmp_path / "float.onnx", batches[0])
    assert ck.verify_onnx(path, model, batches).passed
    quantized = quantize_static(model, batches)
    path = ck.export_onnx(quantized, tmp_path / "int8.onnx", batches[0])
    assert ck.verify_onnx(path, quantized, batches).passed
    assert ck.audit(path).integer_fraction == 1.0


def dead_filters() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        model[0].weight[:2], model[0].bias[:2] = 1e-9, 0.0
    return model


@pytest.mark.parametrize("how", ["trained", "converted", "static"])
def test_biases_that_grow_beyond_int32_get_room(how, tmp_path) -> None:
    """Filters that died under weight decay have tiny scales, in steps of which a trained bias is larger than int32 holds."""
    x = torch.randn(64, 8)
    quantized = quantize_static(dead_filters(), [x]) if how == "static" else prepare_qat(dead_filters(), [x])
    with torch.no_grad():
        dict(quantized.named_parameters())["body.0.bias"][:2] = 0.4
    if how == "converted":
        quantized.convert_()
    quantized.eval()
    quantized.observe_(False)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", (x,))
    (stored,) = (torch.from_numpy(session(path).run(None, {"input": x.numpy()})[0]),)
    torch.testing.assert_close(stored, quantized(x).detach(), atol=0.02, rtol=0)
    again = ck.load(dead_filters(), saved(quantized, tmp_path / "saved"))
    torch.testing.assert_close(again(x), quantized(x), atol=0.02, rtol=0)


def saved(model: nn.Module, folder):
    ck.save(model, folder)
    return folder


@pytest.mark.parametrize("inside", [False, True])
def test_saving_a_whole_model_is_refused_where_it_is_written(inside) -> None:
    quantized = quantize_static(dead_filters(), [torch.randn(16, 8)])
    with pytest.raises(ModelError, match=r"Sequential: torch.save of a whole model.*; take ck.save\(model, folder\)"):
        torch.save(nn.Sequential(quantized) if inside else quantized, io.BytesIO())


def test_copies_are_models_of_their_own() -> None:
    quantized, x = quantize_static(dead_filters(), [torch.randn(16, 8)]), torch.randn(4, 8)
    deep, shallow = copy.deepcopy(quantized), copy.copy(quantized)
    assert deep.body is not quantized.body
    assert shallow.body is quantized.body
    assert type(deep) is type(shallow) is type(quantized)
    assert torch.equal(deep(x), quantized(x))
    assert torch.equal(shallow(x), quantized(x))


@pytest.mark.parametrize("make", [quantize_static, quantize_dynamic, quantize_weights])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_weights_than_fp32_are_not_exported(make, dtype, tmp_path) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    x = torch.randn(16, 32)
    quantized = make(model, [x])
    scales = [v.clone() for q in quantized.quantizers() for v in q.buffers()]
    other = quantized.to(dtype)
    kept = [v for q in other.quantizers() for v in q.buffers()]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(scales, kept, strict=True))
    with pytest.raises(ModelError, match=f"wanted fp32 weights to export, but 0.weight is {dtype}; export model.float"):
        ck.export_onnx(other, tmp_path / "q.onnx", (x.to(dtype),))


def test_a_bf16_model_is_written_in_fp32(tmp_path) -> None:
    x = torch.randn(16, 8).bfloat16()
    quantized = quantize_static(dead_filters(), [x.float()]).bfloat16()
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", (x,))
    got = torch.from_numpy(session(path).run(None, {"input": x.float().numpy()})[0])
    torch.testing.assert_close(got, quantized(x).float().detach(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_later_batches_without_rows_are_left_out(effort) -> None:
    x = torch.randn(32, 8)
    quantized, wanted = (quantize_static(dead_filters(), batches, effort=effort, choose="rules") for batches in ([x, x[:0]], [x]))
    assert torch.equal(quantized(x), wanted(x))


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_float_activations_leave_the_weights_rounded(kind) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).eval(), torch.randn(16, 32)
    quantized = quantize_static(model, [x]) if kind == "static" else quantize_dynamic(model, x)
    before = quantized(x)
    with quantized.float_activations():
        got = quantized(x)
    assert not torch.equal(got, before)
    assert torch.equal(quantized(x), before)
    with torch.no_grad():
        for layer, (rounding, weight) in zip((model[0], model[2]), quantized.rounded_weights(), strict=True):
            layer.weight.copy_(rounding(weight))
    torch.testing.assert_close(got, model(x), atol=1e-4 if kind == "static" else 1e-6, rtol=1e-4)  # biases are on a grid


def test_float_activations_of_an_lstm_leave_its_matrices_rounded() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 12, num_layers=2).eval(), torch.randn(5, 4, 8)
    quantized = quantize_dynamic(model, x)
    before = quantized(x)[0]
    with quantized.float_activations():
        got = quantized(x)[0]
    assert not torch.equal(got, before)
    assert torch.equal(quantized(x)[0], before)
    (rounding,) = quantized.quantizers()
    with torch.no_grad():
        for weight in (w for w in model.parameters() if w.ndim == 2):
            weight.copy_(rounding.matrix(weight))
    torch.testing.assert_close(got, model(x)[0])
