"""Equalized, bias-corrected, adaptively rounded: each against its own definition."""

from __future__ import annotations

import copy
from dataclasses import replace

import networks
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.quant import X86, adaround_, correct_bias_, diagnose, equalize_, quantize_static
from compresskit.quant.numerics.quantizers import WeightQuantizer


def bits(count: int):
    return replace(X86, name=f"W{count}", weights=replace(X86.weights, bits=count))


def db(wanted: torch.Tensor, got: torch.Tensor) -> float:
    return float(10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()))


class Uneven(nn.Module):
    """Channels of very different size, in a chain with BatchNorm, a bias, pooling and a depthwise layer."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.b, self.depth = nn.Conv2d(8, 12, 3), nn.Conv2d(12, 24, 3, groups=12)
        self.c = nn.Conv2d(24, 6, 1)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.a(x))), 2)
        return self.c(torch.relu(self.depth(torch.relu(self.b(x)))))


def uneven() -> nn.Module:
    model = build(Uneven)
    with torch.no_grad():
        model.norm.weight.mul_(torch.logspace(-1.5, 1.5, 8))
        model.b.weight.mul_(torch.logspace(1, -1, 12).view(-1, 1, 1, 1))
    return model


def test_equalizing_changes_no_output_and_evens_the_ranges() -> None:
    model, x = uneven(), image(8)
    before = copy.deepcopy(model)
    assert equalize_(model, image(2)) == 3
    with torch.no_grad():
        torch.testing.assert_close(model(*x), before(*x), rtol=1e-3, atol=1e-4)
    factor = (model.norm.weight.abs() / torch.sqrt(model.norm.running_var + model.norm.eps)).view(-1, 1, 1, 1)
    rows = ((model.a.weight * factor).abs().flatten(1).amax(1), model.b.weight.abs().flatten(1).amax(1))
    columns = (model.b.weight.abs().amax((0, 2, 3)), model.depth.weight.abs().view(12, -1).amax(1))
    for row, column in zip(rows, columns, strict=True):
        torch.testing.assert_close(row, column, rtol=0.02, atol=0)  # both are sqrt(r1 r2), the paper's fixed point


def test_equalizing_helps_where_a_weight_has_one_scale() -> None:
    plain = uneven()
    even = copy.deepcopy(plain)
    equalize_(even, image(2))
    target = replace(X86, name="ONE", weights=replace(X86.weights, per_channel=False))
    x, calibration = image(32), [image(32)]
    with torch.no_grad():
        wanted = plain(*x)
        gained = db(wanted, quantize_static(even, calibration, target=target)(*x)) - db(
            wanted, quantize_static(plain, calibration, target=target)(*x)
        )
    assert gained > 1  # dB; activations, which have one scale anyway, hold back the rest


def test_what_cannot_be_equalized() -> None:
    assert equalize_(build(networks.Twice), image(2)) == 0  # a shared layer has two readers' wishes
    with pytest.raises(ModelError, match="quantized already"):
        equalize_(quantize_static(build(networks.Chain), [image(4)]), image(2))


def test_biases_make_up_for_the_mean() -> None:
    """After correction each channel of every layer has the float model's mean on the batches it was corrected with."""
    model, batches = build(networks.Residual), [image(32), image(32)]
    quantized = quantize_static(model, batches, target=bits(3))
    x = image(64)
    with torch.no_grad():
        wanted, before = model(*x), quantized(*x)
    assert correct_bias_(quantized, batches) == 5
    joined = tuple(torch.cat(values) for values in zip(*batches, strict=True))
    with torch.no_grad():
        mean, step = (quantized(*joined) - model(*joined)).mean(0), quantized.quantizers()[0].scale
        assert mean.abs().max() < 1e-3 + 1e-2 * step
        after = quantized(*x)
    assert (after - wanted).mean(0).abs().mean() < 0.5 * (before - wanted).mean(0).abs().mean()
    assert db(wanted, after) > db(wanted, before)


def test_adaptive_rounding() -> None:
    """Every weight is one of its two neighbours on the grid, and the layers' outputs are closer than rounded to nearest."""
    model, batches = build(networks.Residual), [image(64)]
    target = bits(3)
    nearest, quantized = (quantize_static(model, batches, target=target) for _ in range(2))
    before = {n: p.detach().clone() for n, p in quantized.body.named_parameters()}
    assert adaround_(quantized, batches, steps=300) == 5
    moved = 0
    for name, quantizer in quantized.body.quantizers.named_children():
        if isinstance(quantizer, WeightQuantizer):
            leaf = name.removeprefix("weight_").replace("_weight", "").replace("_0", ".0") + ".weight"
            weight, old = quantized.body.get_parameter(leaf), before[leaf]
            scale = quantizer.qparams(weight)[0].view(-1, *[1] * (weight.ndim - 1))
            assert torch.equal(quantizer(weight), weight)  # it lies on the grid
            inside = old.abs() < scale * 3
            assert ((weight - old).abs()[inside] <= (scale * 1.0001).expand_as(old)[inside]).all()
            moved += int(((weight - old).abs() > 0.5001 * scale)[inside].sum())
    assert moved > 20  # some were rounded to the farther neighbour
    x = image(64)
    with torch.no_grad():
        wanted = model(*x)
        assert db(wanted, quantized(*x)) > db(wanted, nearest(*x)) + 2
    assert diagnose(quantized, [x], model=model).sqnr > diagnose(nearest, [x], model=model).sqnr


def test_adaptive_rounding_survives_export_and_load(tmp_path) -> None:
    quantized = quantize_static(build(networks.Chain), [image(16)], target=bits(4))
    adaround_(quantized, [image(16)], steps=20)
    x = image(16)
    assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2)), quantized, [x]).passed
    ck.save(quantized, tmp_path)
    with torch.no_grad():
        assert torch.equal(ck.load(networks.Chain(), tmp_path)(*x), quantized(*x))


def test_bad_input() -> None:
    quantized = quantize_static(build(networks.Chain), [image(4)])
    for function in (correct_bias_, adaround_):
        with pytest.raises(DataError, match=f"{function.__name__}: no calibration batch"):
            function(quantized, [])
    for settings in ({"steps": 0}, {"batch_size": 0}, {"rate": 0.0}):
        with pytest.raises(SettingError, match=next(iter(settings))):
            adaround_(quantized, [image(4)], **settings)
