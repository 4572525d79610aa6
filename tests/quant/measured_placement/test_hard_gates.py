"""A hard-swish stays float where its hard sigmoid on integers would leave the value that it gates too few steps."""

from __future__ import annotations

import copy

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import compresskit as ck
from compresskit.metrics import decibels
from compresskit.quant import prepare_qat, quantize_static


def hard_swishes(gamma: float) -> nn.Module:
    """Two hard-swishes behind BatchNorms of such weights, which are the standard deviation of their inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Hardswish(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Hardswish(), nn.Conv2d(16, 8, 3, bias=False),
    )  # fmt: skip
    for _ in range(40):
        model(torch.randn(16, 3, 12, 12))
    with torch.no_grad():
        for norm in (model[1], model[4]):
            norm.weight.fill_(gamma)
    return model.eval()


class SqueezeExcite(nn.Module):
    """Channels times a hard sigmoid of their means, of which nothing else reads what is before the hard sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last(x * nn.functional.hardsigmoid(self.gate(x.mean((2, 3), keepdim=True))))


class Heads(nn.Module):
    """A hard sigmoid of a small value, which gates another one, and a layer that reads the small value, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.last, self.beside = (nn.Conv2d(i, 8, 3) for i in (3, 3, 8, 8))
        nn.init.normal_(self.first.weight, std=0.01)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        small, other = self.first(x), self.other(x)
        return self.last(other * nn.functional.hardsigmoid(small)), self.beside(small)


def in_integers(quantized: nn.Module) -> list[str]:
    return [kind for kind in quantized.placement.integer.values() if kind in ("hardsigmoid", "mul")]


def executed(quantized: nn.Module, x: Tensor, folder) -> Tensor:
    session = onnxruntime.InferenceSession(ck.export_onnx(quantized, folder / "m.onnx", x))
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.parametrize("gamma", [0.3, 0.1])
def test_a_hard_swish_of_small_values_is_float(gamma, tmp_path) -> None:
    """-3 and 3 as integers left values of 0.1 a dozen steps; ONNX Runtime's own quantizer keeps the hard-swish float."""
    model, x = hard_swishes(gamma), torch.randn(32, 3, 12, 12)
    quantized = quantize_static(model, [x])
    assert not in_integers(quantized)
    floating = quantized.placement.floating
    assert set(floating) == {"hardsigmoid_default", "hardsigmoid_default_1", "mul_tensor", "mul_tensor_1"}
    assert "-3 and 3 as integers would leave conv2d" in floating["hardsigmoid_default"]
    wanted = model(x).detach()
    noise = (executed(quantized, x, tmp_path) - wanted).square().sum()
    assert decibels(float(wanted.square().sum()), float(noise)) > 27  # 22.8 and 10.5 in integers
    ck.verify_onnx(tmp_path / "m.onnx", quantized, [x])


def test_one_of_usual_values_is_in_integers() -> None:
    quantized = quantize_static(hard_swishes(1.0), [torch.randn(32, 3, 12, 12)])
    assert in_integers(quantized) == ["hardsigmoid", "mul"] * 2


def test_a_gate_that_alone_reads_its_input_is_in_integers() -> None:
    torch.manual_seed(0)
    quantized = quantize_static(SqueezeExcite().eval(), [torch.randn(16, 3, 12, 12)])
    assert in_integers(quantized) == ["hardsigmoid", "mul"]


def test_where_a_layer_reads_the_small_value_the_hard_sigmoid_alone_is_float() -> None:
    """What it gates has a scale of its own, so that the product stays in integers."""
    torch.manual_seed(0)
    quantized = quantize_static(Heads().eval(), [torch.randn(16, 3, 12, 12)])
    assert in_integers(quantized) == ["mul"]
    assert "would leave conv2d" in quantized.placement.floating["hardsigmoid"]


def test_all_batches_decide_and_not_the_example() -> None:
    """With the ranges of the example alone the values would seem small."""
    x = torch.randn(16, 3, 12, 12)
    quantized = quantize_static(hard_swishes(1.0), [0.01 * x, x])
    assert in_integers(quantized) == ["hardsigmoid", "mul"] * 2


def test_where_everything_has_to_be_in_integers_it_is() -> None:
    model, x = hard_swishes(0.1), torch.randn(8, 3, 12, 12)
    assert in_integers(quantize_static(model, [x], strict="all")) == ["hardsigmoid", "mul"] * 2
    assert not in_integers(quantize_static(model, [x], strict=True))


def test_training_starts_from_it() -> None:
    model, x = hard_swishes(0.1), torch.randn(8, 3, 12, 12)
    assert not in_integers(prepare_qat(copy.deepcopy(model), [x]))


def test_it_is_kept_when_the_model_is_saved(tmp_path) -> None:
    model, x = hard_swishes(0.1), torch.randn(8, 3, 12, 12)
    quantized = quantize_static(model, [x])
    ck.save(quantized, tmp_path / "saved")
    torch.testing.assert_close(ck.load(model, tmp_path / "saved")(x), quantized(x))
