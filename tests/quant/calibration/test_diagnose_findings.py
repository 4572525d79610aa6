"""Models that are broken on purpose are diagnosed by name."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from compresskit.quant import Bits, diagnose, equalize_, quantize_static


def net() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU())
    return nn.Sequential(
        first, second, nn.Conv2d(16, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    ).eval()


X = torch.randn(32, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def causes(model: nn.Module, x: torch.Tensor = X, **settings: object) -> dict[str, str]:
    found = diagnose(quantize_static(model, [x], **settings), [x])
    assert all(str(finding) in str(found) for finding in found.findings)
    json.dumps(found.to_json())
    return {finding.cause: finding.layer for finding in reversed(found.findings)}


def test_a_healthy_model_has_no_findings() -> None:
    assert causes(net()) == {}


def test_a_channel_scaled_100x_is_named_and_equalizing_mends_it() -> None:
    model = net()
    with torch.no_grad():  # the same function: what the depthwise layer reads larger, it divides
        model[0][0].weight[5] *= 100
        model[0][0].bias[5] *= 100
        model[1][0].weight[5] /= 100
    assert causes(model)["uneven channels"] == "0.1"
    finding = next(f for f in diagnose(quantize_static(model, [X]), [X]).findings if f.cause == "uneven channels")
    assert "(channel 5)" in finding.text
    equalize_(model, X)
    assert "uneven channels" not in causes(model)


def test_an_outlier_of_an_activation_is_named() -> None:
    x = X.clone()
    x[0, :, 0, 0] = 300.0
    assert causes(net(), x)["outliers"] == "input_1"


def test_dead_channels_are_counted() -> None:
    model = net()
    with torch.no_grad():
        model[0][0].weight[[2, 7]] = 0
        model[0][0].bias[[2, 7]] = -1
    finding = next(f for f in diagnose(quantize_static(model, [X]), [X]).findings if f.cause == "dead channels")
    assert finding.layer == "0.1"
    assert finding.text == "2 of 16 channels are always 0 (2, 7)"


@pytest.mark.parametrize(("bits", "cause"), [(Bits(weights=2), "weights"), (Bits(activations=3), "activations")])
def test_layers_with_too_few_bits_are_named(bits, cause) -> None:
    found = [f for f in diagnose(quantize_static(net(), [X], bits={"2": bits}), [X]).findings if f.cause == cause]
    assert [f.layer for f in found] == ["2"]
