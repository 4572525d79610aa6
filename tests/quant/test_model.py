"""The quantized model: its inputs, calibration, observers."""

from __future__ import annotations

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.measure import numpy_inputs, session
from compresskit.quant import prepare_qat, quantize_static


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
