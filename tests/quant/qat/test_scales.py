"""Scales and shifts by constants around a layer, in training: its weight stays in the units of the float model."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compresskit as ck
from compresskit.quant import prepare_qat
from compresskit.quant.numerics.targets import OPENVINO, X86
from compresskit.quant.passes.unfold_batchnorm import UnfoldedLayer
from compresskit.quant.qat.oscillations import latent_weights

PIXELS = (128 + 60 * torch.randn(64, 3, 8, 8, generator=torch.manual_seed(3))).clamp(0, 255).round()
LABELS = torch.arange(64) % 4


class Scaled(nn.Module):
    """A small classifier that changes its inputs and its logits itself."""

    def __init__(self, before: Callable[..., Tensor], after: Callable[..., Tensor], conv: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.conv, self.norm, self.fc = conv, norm, nn.Linear(16, 4)
        self.gain = nn.Parameter(torch.rand(4) / 10 + 0.01)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(self.before(x)))
        return self.after(self, self.fc(torch.relu(h).mean((2, 3))))


def scaled(
    before: Callable[..., Tensor] = lambda x: x / 255,
    after: Callable[..., Tensor] = lambda m, y: y,
    *,
    norm: bool = False,
    **settings: int,
) -> Scaled:
    """A classifier, in eval mode; its BatchNorm, if it has one, knows the pixels."""
    torch.manual_seed(1)
    conv = nn.Conv2d(3, settings.pop("channels", 16), 3, 2, **settings)
    model = Scaled(before, after, conv, nn.BatchNorm2d(16) if norm else nn.Identity())
    for _ in range(40 * norm):
        model.train()(PIXELS)
    return model.eval()


def gradients(model: nn.Module, x: Tensor = PIXELS) -> dict[str, Tensor]:
    """Gradient of each parameter that has one, by its name in the float model."""
    names = model.float_names() if isinstance(model, ck.quant.Quantized) else {}
    model.train()
    F.cross_entropy(model(x), LABELS).backward()
    return {names.get(name, name): p.grad for name, p in model.named_parameters() if p.grad is not None}


BEFORE = {
    "/ 255": lambda x: x / 255,
    "* (1 / 255)": lambda x: x * (1 / 255),
    "mean and std": lambda x: (x / 255 - 0.45) / 0.22,
    "* 255": lambda x: x / 255 / 255 * 255,
    "each channel": lambda x: x / torch.tensor([10.0, 255.0, 1000.0]).view(3, 1, 1),
}
AFTER = {
    "* 0.1": lambda m, y: y * 0.1,
    "/ 0.05": lambda m, y: y / 0.05,
    "a parameter": lambda m, y: 3 - y * m.gain * 2,
}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("before", "after", "padding"),
    [*((key, "* 0.1", 0) for key in BEFORE), *(("/ 255", key, 1) for key in AFTER), ("mean and std", "* 0.1", 1)],
)
def test_weights_and_their_gradients_are_those_of_the_float_model(before, after, padding, norm) -> None:
    model = scaled(BEFORE[before], AFTER[after], norm=norm, padding=padding)
    quantized = prepare_qat(model, [(PIXELS,)])
    own, names = dict(model.named_parameters()), quantized.float_names()
    for name, parameter in quantized.named_parameters():
        assert torch.equal(parameter, own[names[name]])
    quantized.enable_(False)
    quantized.observe_(False)
    wanted, got = gradients(copy.deepcopy(model)), gradients(quantized)
    wanted.pop("conv.bias" if norm else "", None)  # nothing but rounding errors
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", [(), (16, 1, 1), (1, 16, 1, 1)], ids=str)
def test_a_parameter_that_scales_keeps_its_shape(shape, norm) -> None:
    model = scaled(norm=norm)
    model.norm = nn.Sequential(model.norm, Gain(torch.rand(shape) + 0.5))
    quantized = prepare_qat(model, [(PIXELS,)])
    assert torch.equal(quantized.state_dict()["body.norm.1.gain"], model.norm[1].gain)
    quantized.enable_(False)
    quantized.observe_(False)
    wanted, got = gradients(copy.deepcopy(model)), gradients(quantized)
    torch.testing.assert_close(got["norm.1.gain"], wanted["norm.1.gain"], rtol=1e-3, atol=1e-5)
    quantized.enable_()
    before = quantized.eval()(PIXELS).detach()
    quantized.convert_()
    torch.testing.assert_close(quantized(PIXELS), before, rtol=0, atol=0.02 * float(before.abs().max()))


class Gain(nn.Module):
    """A parameter that multiplies each channel."""

    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(gain)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


@pytest.mark.parametrize("frozen", ["conv.weight", "conv.bias"])
def test_what_was_frozen_is_frozen_once_it_is_merged(frozen) -> None:
    model = scaled(BEFORE["mean and std"])
    model.get_parameter(frozen).requires_grad_(False)
    quantized = prepare_qat(model, [(PIXELS,)])
    names = {name for name, parameter in quantized.named_parameters() if not parameter.requires_grad}
    assert names == {f"body.{frozen}"}
    quantized.convert_()
    assert {name for name, parameter in quantized.named_parameters() if not parameter.requires_grad} == names


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.01),
}


def trained(model: nn.Module, x: Tensor, optimizer: str, **options: object) -> ck.quant.Quantized:
    """The quantized model after some steps of an own loop."""
    quantized = prepare_qat(model, [(x,)], **options)
    update = OPTIMIZERS[optimizer](quantized.parameters())
    for _ in range(15):
        update.zero_grad()
        F.cross_entropy(quantized(x), LABELS).backward()
        update.step()
    quantized.freeze_statistics_()
    return quantized.eval()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("norm", [False, True])
def test_it_trains_as_if_the_inputs_were_scaled_outside(optimizer, norm, tmp_path) -> None:
    model, plain = scaled(norm=norm), scaled(norm=norm)
    plain.before = nn.Identity()
    inside, outside = trained(model, PIXELS, optimizer), trained(plain, PIXELS / 255, optimizer)
    a, b = inside.state_dict(), outside.state_dict()
    for name in ("body.conv.weight", "body.fc.weight", "body.fc.bias"):
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0.05 * float(b[name].abs().max()))
    with torch.no_grad():
        before, wanted = inside(PIXELS), outside(PIXELS / 255)
    assert (before - wanted).norm() < 0.1 * wanted.norm()
    inside.convert_()
    assert not [m for m in inside.modules() if isinstance(m, UnfoldedLayer)]
    with torch.no_grad():
        after = inside(PIXELS)
    torch.testing.assert_close(after, before, rtol=0, atol=0.02 * float(before.abs().max()))
    path = ck.export_onnx(inside, tmp_path / "model.onnx", (PIXELS,))
    assert ck.verify_onnx(path, inside, [(PIXELS,)]).passed
    ck.save(inside, tmp_path / "saved")
    assert torch.equal(ck.load(model, tmp_path / "saved")(PIXELS), after)


def test_the_state_of_a_training_is_loaded_by_its_names() -> None:
    model = scaled(BEFORE["mean and std"], AFTER["a parameter"])
    quantized = trained(model, PIXELS, "sgd")
    other = prepare_qat(model, [(PIXELS,)]).eval()
    assert {"body.conv.weight", "body.conv.bias", "body.fc.weight", "body.gain"} <= set(other.state_dict())
    other.load_state_dict(quantized.state_dict())
    assert torch.equal(other(PIXELS), quantized(PIXELS))
    assert not torch.equal(quantized.state_dict()["body.gain"], model.gain)
    quantized.convert_()
    assert "body.gain" not in quantized.state_dict()  # of the weight of the layer, as in a file


def test_a_stage_keeps_the_accuracy_with_the_division_inside() -> None:
    torch.manual_seed(0)
    directions = torch.randn(4, 3, 1, 1)
    x = (128 + 60 * torch.randn(256, 3, 8, 8) + 25 * directions[torch.arange(256) % 4]).clamp(0, 255).round()
    y = torch.arange(256) % 4
    task = ck.Task(train=list(zip(x.split(64), y.split(64), strict=True)), val=[(x, y)])
    model = scaled()
    model = ck.Train(epochs=40, optimizer=partial(torch.optim.Adam, lr=1e-2))(model, task)
    quantized = ck.QAT(epochs=2)(model, task)
    with torch.no_grad():
        losses = [float(F.cross_entropy(m.eval()(x), y)) for m in (model, quantized)]
    assert losses[0] < 1.0
    assert losses[1] < losses[0] + 0.1


@pytest.mark.parametrize("norm", [False, True])
def test_learned_scales_start_from_the_weights_that_are_rounded(norm) -> None:
    quantized = trained(scaled(norm=norm, after=AFTER["a parameter"]), PIXELS, "sgd", learned=True)
    before = quantized(PIXELS).detach()
    quantized.convert_()
    torch.testing.assert_close(quantized(PIXELS), before, rtol=0, atol=0.02 * float(before.abs().max()))


@pytest.mark.parametrize("norm", [False, True])
def test_the_learned_scale_of_a_weight_trains_as_if_the_inputs_were_scaled_outside(norm) -> None:
    model, plain = scaled(norm=norm), scaled(norm=norm)
    plain.before = nn.Identity()
    inside = gradients(prepare_qat(model, [(PIXELS,)], learned=True))
    outside = gradients(prepare_qat(plain, [(PIXELS / 255,)], learned=True), PIXELS / 255)
    got, wanted = inside["conv.weight_scale"], outside["conv.weight_scale"]
    assert (got - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("norm", [False, True])
def test_latent_weights_are_those_that_are_rounded(norm) -> None:
    quantized = prepare_qat(scaled(BEFORE["each channel"], AFTER["a parameter"], norm=norm), [(PIXELS,)])
    rounded = dict(quantized.rounded_weights())
    for latent in latent_weights(quantized):
        torch.testing.assert_close(latent.rounded_value(), rounded[latent.quantizer])
        value = latent.rounded_value().detach() * 1.5
        with torch.no_grad():
            latent.write_(value, torch.ones_like(value, dtype=torch.bool))
        torch.testing.assert_close(latent.rounded_value(), value)


class Other(nn.Module):
    """A layer between a scale and a ReLU."""

    def __init__(self, layer: nn.Module, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.compute, self.last = layer, compute, nn.LazyConv2d(4, 1)
        self.gain = nn.Parameter(torch.rand(6, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.compute(self, x))).flatten(2).mean(2)


@pytest.mark.parametrize("target", [X86, OPENVINO], ids=["x86", "openvino"])
@pytest.mark.parametrize(
    ("layer", "compute"),
    [
        (nn.Conv2d(3, 6, 1, groups=3), lambda m, x: m.layer((x - 100) / torch.tensor([10.0, 99.0, 5.0]).view(3, 1, 1))),
        (nn.Conv2d(3, 6, 4, 4), lambda m, x: m.layer((x / 255 - 0.4) / 0.2) * m.gain),
        (nn.ConvTranspose2d(3, 6, 2, 2), lambda m, x: m.layer(x - x.mean()) / 255 * m.gain + 1),
        (nn.Linear(8, 6), lambda m, x: m.layer(x / 255 - 0.5).transpose(1, 3) * 2),
    ],
    ids=["groups", "patches", "transposed", "linear"],
)
def test_other_layers_keep_their_units(layer, compute, target) -> None:
    torch.manual_seed(0)
    model = Other(copy.deepcopy(layer), compute)
    model(PIXELS)
    quantized = prepare_qat(model.eval(), [(PIXELS,)], target=target)
    quantized.enable_(False)
    quantized.observe_(False)
    wanted, got = gradients(copy.deepcopy(model)), gradients(quantized)
    assert [m for m in quantized.modules() if isinstance(m, UnfoldedLayer)]
    for name in ("layer.weight", "layer.bias"):
        if got[name].numel() == wanted[name].numel():
            of_both = got[name].reshape(wanted[name].shape)
            torch.testing.assert_close(of_both, wanted[name], rtol=1e-3, atol=1e-4 * float(wanted[name].abs().max()))
    quantized.enable_()
    quantized.eval()
    before = quantized(PIXELS).detach()
    quantized.convert_()
    torch.testing.assert_close(quantized(PIXELS), before, rtol=0, atol=0.02 * float(before.abs().max()))
