"""Label-free training of a quantized model towards the outputs of its float model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from compresskit.base.budget import remove
from compresskit.base.errors import DataError, SettingError
from compresskit.graph.masks import masks_of
from compresskit.prune import plan_mask
from compresskit.quant import Bits, imitate_float_, quantize_static


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    return nn.Sequential(*layers).eval()


X = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
UNSEEN = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))


def error(model: nn.Module, quantized: nn.Module) -> float:
    with torch.no_grad():
        return float((model(UNSEEN) - quantized(UNSEEN)).square().mean() / model(UNSEEN).square().mean())


@pytest.mark.parametrize("bits", [2, 3])
def test_outputs_on_other_inputs_come_closer(bits) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    quantized = quantize_static(model, [X], bits=Bits(weights=bits))
    start = error(model, quantized)
    imitate_float_(quantized, model, list(X.split(32)), steps=150, batch_size=32)
    assert error(model, quantized) < 0.6 * start
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "the float model stays"
    assert not any(isinstance(q.scale, nn.Parameter) for q in quantized.activation_quantizers())
    assert len(quantized.rounded_weights()[0][0].integers(quantized.rounded_weights()[0][1]).unique()) <= 2**bits


def test_the_same_seed_gives_the_same_model() -> None:
    model, found = net(), []
    for seed in (0, 0, 1):
        quantized = quantize_static(model, [X], bits=Bits(weights=3))
        imitate_float_(quantized, model, [X], steps=5, batch_size=16, seed=seed)
        found.append(quantized(UNSEEN))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_masked_weights_stay_zero() -> None:
    model = net()
    plan_mask(model, remove(weights=0.5)).apply_(model)
    quantized = quantize_static(model, [X], bits=Bits(weights=4))
    assert masks_of(quantized.body) is not None
    zeros = [weight == 0 for _, weight in quantized.rounded_weights()]
    imitate_float_(quantized, model, [X], steps=5)
    for zero, (_, weight) in zip(zeros, quantized.rounded_weights(), strict=True):
        assert (weight[zero] == 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, r"imitate_float_\(steps=...\): wanted a whole number >= 1, got 0"),
        ({"batch_size": 0}, r"imitate_float_\(batch_size=...\): wanted a whole number >= 1, got 0"),
        ({"weight_rate": 0}, r"imitate_float_\(weight_rate=...\): wanted a positive number, got 0"),
        ({"scale_rate": -1.0}, r"imitate_float_\(scale_rate=...\): wanted a positive number, got -1.0"),
    ],
)
def test_bad_settings_are_refused(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        imitate_float_(quantize_static(net(), [X]), net(), [X], **settings)
    with pytest.raises(DataError, match="imitate_float_: no calibration batch"):
        imitate_float_(quantize_static(net(), [X]), net(), [])
