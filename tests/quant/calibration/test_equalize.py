"""Equalization changes no output, and evens out the ranges of neighbouring layers."""

from __future__ import annotations

import copy
from dataclasses import replace

import networks
import oracles
import pytest
import torch
from networks import build, image
from torch import nn

from compresskit.base.errors import ModelError
from compresskit.quant import X86, equalize_, quantize_static


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
        gained = oracles.sqnr(wanted, quantize_static(even, calibration, target=target)(*x)) - oracles.sqnr(
            wanted, quantize_static(plain, calibration, target=target)(*x)
        )
    assert gained > 1  # dB; activations, which have one scale anyway, hold back the rest


def test_shared_layers_and_quantized_models_are_not_equalized() -> None:
    assert equalize_(build(networks.Twice), image(2)) == 0  # a shared layer has two readers' wishes
    with pytest.raises(ModelError, match="quantized already"):
        equalize_(quantize_static(build(networks.Chain), [image(4)]), image(2))
