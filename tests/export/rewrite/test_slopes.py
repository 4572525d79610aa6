"""PRelu in faster operators, and inside of the integer convolution before it: the same values."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.measure import numpy_inputs, session
from compresskit.quant import Bits, prepare_qat, quantize_static
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.numerics.targets import ARM, TARGETS, X86

SLOPES = {
    "gentle": [0.3, -0.5, 1.0, 0.0, 0.1, -1.2],
    "steep": [1.0, 2.5, 1.3, 4.0, 1.7, 1.1],
    "both": [0.3, -0.5, 1.0, 0.0, 2.5, 1.3],
}


@pytest.mark.parametrize(
    ("slopes", "operators"),
    [
        (torch.tensor([0.3]), {"LeakyRelu"}),
        (torch.tensor([0.3, -0.5, 1.0, 0.0]), {"Mul", "Max"}),
        (torch.tensor([0.3, -0.5, 1.5, 0.0]), {"Mul", "Relu", "Add"}),
        (torch.tensor([0.3, -0.5, 15.0, 0.0]), {"PRelu"}),
    ],
    ids=["one slope", "by channel", "above 1", "far above 1"],
)
def test_prelu_is_written_in_faster_operators(slopes: torch.Tensor, operators: set[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.PReLU(len(slopes))
    layer.weight.data.copy_(slopes)
    x = torch.randn(5, 4, 3, 3)
    path = ck.export_onnx(layer, tmp_path / "m.onnx", (x[:2],))
    assert {node.op_type for node in onnx.load(path).graph.node} == operators
    runtime = session(path)
    got, wanted = runtime.run(None, numpy_inputs(runtime, (x,)))[0], layer(x).detach().numpy()
    if "Add" in operators:
        np.testing.assert_allclose(got, wanted, rtol=5e-7)
    else:
        np.testing.assert_array_equal(got, wanted)


def test_prelu_after_a_convolution_keeps_the_blocked_layout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shared = nn.PReLU(16)
    shared.weight.data.uniform_(-0.5, 1.5)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), shared, nn.Conv2d(16, 16, 3), shared, nn.Conv2d(16, 8, 1)).eval()
    path = ck.export_onnx(model, tmp_path / "m.onnx", torch.randn(2, 8, 9, 9))
    assert ck.verify_onnx(path, model, [torch.randn(3, 8, 9, 9)]).passed
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert kinds["PRelu"] == kinds["Max"] == 0
    assert kinds["ReorderInput"] + kinds["ReorderOutput"] <= 2


class Bent(nn.Module):
    """Convolutions, each with a PReLU of its own behind it, and a maximum between them."""

    def __init__(self, slopes: list[float], conv: type[nn.Module] = nn.Conv2d, **settings: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = conv(3, 6, 3, **settings), conv(6, 6, 3), conv(6, 4, 1)
        self.bend, self.again = nn.PReLU(6), nn.PReLU(6)
        self.pool = (nn.MaxPool2d if conv is nn.Conv2d else nn.MaxPool1d)(2)
        with torch.no_grad():
            self.bend.weight.copy_(torch.tensor(slopes))
            self.again.weight.copy_(torch.tensor(slopes).flip(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(self.second(self.pool(self.bend(self.first(x))))))


class TwoReaders(nn.Module):
    """A PReLU of a value that is read again."""

    def __init__(self, bend: nn.Module) -> None:
        super().__init__()
        self.bend = bend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bend(x) + x


def operators(path: str | Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.matrix
@pytest.mark.parametrize("slopes", SLOPES.values(), ids=SLOPES)
@pytest.mark.parametrize("conv", [nn.Conv2d, nn.Conv1d])
def test_a_convolution_computes_the_slopes_behind_it(slopes, conv, tmp_path: Path) -> None:
    """Every integer that comes out is that of the simulation, whichever kernels run."""
    model = Bent(slopes, conv).eval()
    x = torch.randn(16, 3, *[18] * (2 if conv is nn.Conv2d else 1))
    quantized = quantize_static(model, [x])
    assert not quantized.placement.floating
    assert {point.node for point in quantized.placement.points} >= {"prelu", "prelu_1"}
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x[:1])
    counts = operators(path)
    assert counts["PRelu"] == counts["Mul"] == counts["LeakyRelu"] == 0
    assert (counts["Max"], counts["Min"]) == {"gentle": (2, 0), "steep": (0, 2), "both": (2, 2)}[
        next(name for name, some in SLOPES.items() if some is slopes)
    ]
    assert ck.audit(path).integer_fraction == 1
    with torch.no_grad():
        wanted = quantized(x[:7]).numpy()
    for optimize in (False, True):
        runtime = session(path, optimize=optimize)
        np.testing.assert_allclose(runtime.run(None, numpy_inputs(runtime, (x[:7],)))[0], wanted, rtol=1e-5, atol=1e-6)


def test_it_rounds_once_and_loses_less() -> None:
    """What is far below zero before a small slope takes most of the range there, and little behind it."""
    model, x = Bent([0.02] * 6).eval(), torch.randn(64, 3, 18, 18)
    with torch.no_grad():
        model.second.bias -= 4 * model.second.weight.abs().sum((1, 2, 3)) / 50
        model.second.weight *= 4
    apart = replace(X86, operators={**X86.operators, "conv": replace(X86.operators["conv"], slopes=0)})
    with torch.no_grad():
        once, twice = ((quantize_static(model, [x], target=t)(x) - model(x)).square().sum() for t in (X86, apart))
    assert once < 0.8 * twice


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("why", ["groups", "shared value", "target", "untuned", "skipped", "one slope"])
def test_where_the_slopes_stay_behind_the_convolution(why, tmp_path: Path) -> None:
    model, target, skip = Bent(SLOPES["gentle"], **({"groups": 3} if why == "groups" else {})).eval(), X86, ()
    if why == "one slope":
        model.bend = nn.PReLU().eval()
    if why == "shared value":
        model.pool = nn.Identity()
        model.again = TwoReaders(model.again)
    target = {"target": ARM, "untuned": replace(X86, tuned=False)}.get(why, X86)
    skip = ("bend",) if why == "skipped" else ()
    x = torch.randn(16, 3, 18, 18)
    quantized = quantize_static(model, [x], target=target, skip=skip)
    names = {point.node for point in quantized.placement.points}
    assert ("conv2d_1" if why == "shared value" else "conv2d") in names
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x[:1])
    assert ck.verify_onnx(path, quantized, [x[:5]]).passed


@pytest.mark.parametrize("slopes", SLOPES.values(), ids=SLOPES)
def test_without_biases(slopes, tmp_path: Path) -> None:
    model = Bent(slopes, bias=False).eval()
    model.second.bias = None
    x = torch.randn(16, 3, 18, 18)
    quantized = quantize_static(model, [x])
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x[:1])
    assert ck.audit(path).integer_fraction == 1
    assert ck.verify_onnx(path, quantized, [x[:5]]).passed


def test_a_channel_of_tiny_weights_keeps_its_bias(tmp_path: Path) -> None:
    """The constant that no value exceeds does not depend on the scale of the channel, whose bias a training made larger."""
    model = Bent(SLOPES["both"]).eval()
    with torch.no_grad():
        model.first.weight[0] *= 1e-9
        model.first.bias[0], model.first.bias[1] = 3.0, 8.0
    x = torch.randn(16, 3, 18, 18)
    quantized = quantize_static(model, [x])
    with torch.no_grad():
        next(p for name, p in quantized.named_parameters() if name.endswith("first.bias"))[0] *= 1.9
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x[:1])
    assert ck.verify_onnx(path, quantized, [x[:5]]).passed


def test_slopes_that_a_training_moved_are_exported(tmp_path: Path) -> None:
    model, x = Bent(SLOPES["gentle"]), torch.randn(16, 3, 18, 18)
    quantized = prepare_qat(model, [x])
    optimizer = torch.optim.SGD(quantized.parameters(), 0.05)
    for _ in range(3):
        quantized(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        next(p for name, p in quantized.named_parameters() if "bend" in name)[0] = 1.7
    quantized.eval()
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x[:1])
    assert operators(path)["Min"] == 1
    assert ck.verify_onnx(path, quantized, [x[:5]]).passed


@pytest.mark.parametrize("bits", [Bits(weights=4), Bits(weights=2), Bits(activations=16), Bits(activations=4)], ids=str)
def test_other_widths_are_exported(bits, tmp_path: Path) -> None:
    model, x = Bent(SLOPES["both"]).eval(), torch.randn(16, 3, 18, 18)
    quantized = quantize_static(model, [x], bits=bits)
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x[:1])
    assert ck.verify_onnx(path, quantized, [x[:5]]).passed


def test_a_saved_model_is_loaded_as_it_was(tmp_path: Path) -> None:
    model, x = Bent(SLOPES["both"]).eval(), torch.randn(16, 3, 18, 18)
    quantized = quantize_static(model, [x])
    ck.save(quantized, tmp_path / "saved")
    again = ck.load(Bent(SLOPES["gentle"]).eval(), tmp_path / "saved")
    assert torch.equal(again(x), quantized(x))


class Siamese(nn.Module):
    """One convolution at two places, with one PReLU behind both or with two."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1)
        self.bends = nn.ModuleList([nn.PReLU(6, init=0.3), nn.PReLU(6, init=0.7)][: 1 + second])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.last(self.bends[0](self.conv(x))), self.last(self.bends[-1](self.conv(-x)))


@pytest.mark.parametrize("second", [False, True])
def test_a_convolution_at_two_places(second, tmp_path: Path) -> None:
    model, x = Siamese(second).eval(), torch.randn(16, 3, 18, 18)
    quantized = quantize_static(model, [x])
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x[:1])
    assert ck.verify_onnx(path, quantized, [x[:5]]).passed
    wide = [tensor for tensor in onnx.load(path).graph.initializer if list(tensor.dims)[:1] == [12] and len(tensor.dims) == 4]
    assert len(wide) == 1 + second, "equal weights are stored once"


class Computed(nn.Module):
    """Slopes that are no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1)
        self.slopes = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.prelu(self.conv(x), self.slopes.abs()))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_computed_slopes_on_every_target(target) -> None:
    x = torch.randn(16, 3, 18, 18)
    quantized = quantize_static(Computed().eval(), [x], target=target)
    assert torch.isfinite(quantized(x)).all()


def test_weights_without_opposites_keep_their_slopes(tmp_path: Path) -> None:
    """Of a target of the user; ours leave -128 out."""
    model, x = Bent(SLOPES["gentle"]).eval(), torch.randn(16, 3, 18, 18)
    full = Scheme(signed=True, symmetric=True, per_channel=True, narrow=False)
    quantized = quantize_static(model, [x], target=replace(X86, name="mine", weights=full, saturates=False))
    with torch.no_grad():
        for rounding, _ in quantized.rounded_weights():
            rounding.scale_factor.fill_(0.5)  # what is below -64 steps becomes -128
        wanted = quantized(x[:7]).numpy()
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x[:1])
    runtime = session(path, optimize=False)
    np.testing.assert_allclose(runtime.run(None, numpy_inputs(runtime, (x[:7],)))[0], wanted, rtol=1e-5, atol=1e-6)
