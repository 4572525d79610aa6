"""A hard sigmoid is an addition where, as integers of its input, it would leave the value that it gates too few steps."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import compresskit as ck
from compresskit.metrics import decibels
from compresskit.quant import ARM, OPENVINO, X86, Bits, Scheme, observers, prepare_qat, quantize_static
from compresskit.quant.measured_placement import hard_gates
from compresskit.quant.numerics.targets import TENSORRT


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


class Twice(nn.Module):
    """Two hard-swishes of small values on two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = hard_swishes(0.1)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(a), self.encoder(b)


class Read(nn.Module):
    """A small value and its hard sigmoid, each read by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.beside = (nn.Conv2d(i, 8, 3) for i in (3, 8, 8))
        nn.init.normal_(self.first.weight, std=0.01)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        small = self.first(x)
        return self.gate(nn.functional.hardsigmoid(small)), self.beside(small)


ALL_INTEGERS = ["hardsigmoid", "mul"] * 2


def in_integers(quantized: nn.Module) -> list[str]:
    return [kind for kind in quantized.placement.integer.values() if kind in ("hardsigmoid", "mul")]


def additions(quantized: nn.Module) -> list[str]:
    """The hard sigmoids that their own rounding clips."""
    return [point.node for point in quantized.placement.points if point.saturates]


def ratios(quantized: nn.Module) -> list[float]:
    """1 / scale of the roundings of these."""
    return [1 / float(q.effective_scale()) for q in quantized.activation_quantizers() if q.is_fixed and q.anchor is None]


def executed(quantized: nn.Module, x: Tensor, folder) -> Tensor:
    session = onnxruntime.InferenceSession(ck.export_onnx(quantized, folder / "m.onnx", x))
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.parametrize("gamma", [0.3, 0.1])
def test_a_hard_swish_of_small_values_keeps_its_steps(gamma, tmp_path, monkeypatch) -> None:
    """-3 and 3 as integers left values of 0.1 a dozen steps; ONNX Runtime's own quantizer keeps the hard-swish float."""
    model, x = hard_swishes(gamma), torch.randn(32, 3, 12, 12)
    quantized = quantize_static(model, [x])
    assert in_integers(quantized) == ALL_INTEGERS
    assert additions(quantized) == ["hardsigmoid_default", "hardsigmoid_default_1"]
    assert not quantized.placement.floating
    assert not any(point.anchor for point in quantized.placement.points)
    assert "-3 and 3 as integers would leave conv2d" in quantized.origin.floating["hardsigmoid_default"]
    wanted = model(x).detach()

    def left(of: nn.Module) -> float:
        noise = (executed(of, x, tmp_path) - wanted).square().sum()
        return decibels(float(wanted.square().sum()), float(noise))

    assert left(quantized) > 27
    assert ck.verify_onnx(tmp_path / "m.onnx", quantized, [x, x[:7], x[:1]], machines="all").passed
    monkeypatch.setattr(hard_gates, "MOST_WIDENED", float("inf"))
    anchored = quantize_static(model, [x])
    assert any(point.anchor for point in anchored.placement.points)
    assert left(anchored) < left(quantized) - 9


def test_nothing_of_it_runs_in_float(tmp_path) -> None:
    model, x = hard_swishes(0.1), torch.randn(8, 3, 12, 12)
    path, options = ck.export_onnx(quantize_static(model, [x]), tmp_path / "m.onnx", x), onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    run = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert run["QLinearAdd"] == run["QLinearMul"] == 2
    assert not run.keys() & {"Add", "Mul", "HardSigmoid", "Clip"}
    audit = ck.audit(path)
    assert all(done == every for done, every in audit.operators.values()), audit


TARGETS = {
    "X86": X86,
    "ARM": ARM,
    "OPENVINO": OPENVINO,
    "known": replace(X86, name="known", known_ranges=True),
    "int8": replace(X86, name="int8", activations=Scheme(signed=True)),
}


@pytest.mark.matrix
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("target", TARGETS)
def test_it_is_clipped_in_the_file_as_in_the_simulation(target, bits, tmp_path, monkeypatch) -> None:
    """Values far beyond 3, which are left to the other form else; and values beyond those that calibration showed."""
    monkeypatch.setattr(hard_gates, "MOST_WIDENED", 0.01)
    model, x = hard_swishes(5.0), torch.randn(16, 3, 12, 12)
    quantized = quantize_static(model, [x], target=TARGETS[target], bits={"": Bits(activations=bits)})
    assert len(additions(quantized)) == 2
    assert ratios(quantized) == pytest.approx([2**bits - 0.5] * 2, rel=6e-4)  # 1 is the largest integer, 1/2 no tie
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x)
    proof = ck.verify_onnx(path, quantized, [x, 3 * x[:7], x[:1]])
    assert proof.passed, proof
    assert proof.plain.largest < 0.01


@pytest.mark.parametrize("bits", [{"": Bits(shortcuts=16)}, {"3": Bits(activations=16)}, {"3": Bits(activations=4)}])
def test_other_bits_of_some_values(bits, tmp_path) -> None:
    model, x = hard_swishes(0.1), torch.randn(16, 3, 12, 12)
    quantized = quantize_static(model, [x], bits=bits)
    assert len(additions(quantized)) == 2
    assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "m.onnx", x), quantized, [x]).passed


def test_with_16_bits_it_is_float() -> None:
    """No kernel adds integers of 16 bits."""
    quantized = quantize_static(hard_swishes(0.1), [torch.randn(16, 3, 12, 12)], bits={"": Bits(activations=16)})
    assert not in_integers(quantized)
    assert set(quantized.placement.floating) == {"hardsigmoid_default", "hardsigmoid_default_1", "mul_tensor", "mul_tensor_1"}


def test_with_zero_points_of_0_it_is_float() -> None:
    """The smallest integer does not stand for 0 there."""
    symmetric = replace(X86, name="symmetric", activations=Scheme(signed=True, symmetric=True, narrow=False))
    quantized = quantize_static(hard_swishes(0.1), [torch.randn(16, 3, 12, 12)], target=symmetric)
    assert not in_integers(quantized)
    assert not in_integers(quantize_static(hard_swishes(0.1), [torch.randn(16, 3, 12, 12)], target=TENSORRT))


def test_where_a_layer_reads_the_hard_sigmoid_it_is_float() -> None:
    torch.manual_seed(0)
    quantized = quantize_static(Read().eval(), [torch.randn(16, 3, 12, 12)])
    assert not in_integers(quantized)
    assert "would leave conv2d" in quantized.placement.floating["hardsigmoid"]


def test_one_of_usual_values_reads_the_integers_of_its_input() -> None:
    quantized = quantize_static(hard_swishes(1.0), [torch.randn(32, 3, 12, 12)])
    assert in_integers(quantized) == ALL_INTEGERS
    assert not additions(quantized)


def test_a_gate_that_alone_reads_its_input_does_so() -> None:
    torch.manual_seed(0)
    quantized = quantize_static(SqueezeExcite().eval(), [torch.randn(16, 3, 12, 12)])
    assert in_integers(quantized) == ["hardsigmoid", "mul"]
    assert not additions(quantized)


def test_where_a_layer_reads_the_small_value_it_is_an_addition(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = Heads().eval(), torch.randn(16, 3, 12, 12)
    quantized = quantize_static(model, [x])
    assert in_integers(quantized) == ["hardsigmoid", "mul"]
    assert additions(quantized) == ["hardsigmoid"]
    assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "m.onnx", x), quantized, [x]).passed


def test_two_calls_share_its_rounding(tmp_path) -> None:
    model, x = Twice().eval(), torch.randn(8, 3, 12, 12)
    quantized = quantize_static(model, [(x, 1.01 * x)])
    assert len(additions(quantized)) == 4
    assert ratios(quantized) == pytest.approx([255.5] * 2, rel=6e-4)
    assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "m.onnx", (x, x)), quantized, [(x, x)]).passed


def test_all_batches_decide_and_not_the_example() -> None:
    """With the ranges of the example alone the values would seem small."""
    x = torch.randn(16, 3, 12, 12)
    assert not additions(quantize_static(hard_swishes(1.0), [0.01 * x, x]))


@pytest.mark.parametrize("strict", [True, "all"])
def test_where_everything_has_to_be_in_integers_it_is(strict) -> None:
    quantized = quantize_static(hard_swishes(0.1), [torch.randn(8, 3, 12, 12)], strict=strict)
    assert in_integers(quantized) == ALL_INTEGERS
    assert len(additions(quantized)) == 2


def test_where_everything_has_to_be_and_the_addition_cannot_the_other_form_is_taken() -> None:
    quantized = quantize_static(hard_swishes(0.1), [torch.randn(8, 3, 12, 12)], strict="all", bits={"": Bits(activations=16)})
    assert in_integers(quantized) == ALL_INTEGERS
    assert not additions(quantized)


@pytest.mark.parametrize("settings", [{}, {"learned": True}, {"learned": True, "offsets": True}])
def test_training_leaves_its_range(settings, tmp_path) -> None:
    """The input grows past 3 in training, where the clipping counts."""
    model, x = hard_swishes(0.1), torch.randn(8, 3, 12, 12)
    trained = prepare_qat(copy.deepcopy(model), [x], **settings)
    assert len(additions(trained)) == 2
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "weight" in name and parameter.ndim == 1:  # of a BatchNorm
                parameter.fill_(30.0)
    optimizer = torch.optim.SGD(trained.train().parameters(), lr=0.1)
    for _ in range(8):
        optimizer.zero_grad()
        (trained(x) - 20 * torch.randn(8, 8, 10, 10)).square().mean().backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 20.0)
        optimizer.step()
    trained.eval().convert_()
    inputs = [q for q in trained.activation_quantizers() if q.label in ("0", "3")]
    assert settings or all(float(q.scale) * 255 > 6 for q in inputs)
    assert len(inputs) == 2
    assert ratios(trained) == pytest.approx([255.5] * 2, rel=6e-4)
    assert ck.verify_onnx(ck.export_onnx(trained, tmp_path / "m.onnx", x), trained, [x, 5 * x]).passed


def test_another_observer_leaves_its_range() -> None:
    quantized = quantize_static(hard_swishes(0.1), [torch.randn(8, 3, 12, 12)], observer=observers.HistogramMSE)
    assert ratios(quantized) == pytest.approx([255.5] * 2, rel=6e-4)
    quantized.observe_(True, observers.MovingAverage)
    quantized.train()(torch.randn(8, 3, 12, 12))
    assert ratios(quantized) == pytest.approx([255.5] * 2, rel=6e-4)


def test_it_is_kept_when_the_model_is_saved(tmp_path) -> None:
    model, x = hard_swishes(0.1), torch.randn(8, 3, 12, 12)
    quantized = quantize_static(model, [x])
    ck.save(quantized, tmp_path / "saved")
    loaded = ck.load(model, tmp_path / "saved")
    assert additions(loaded) == additions(quantized)
    torch.testing.assert_close(loaded(x), quantized(x))
