"""Values that are the same throughout the calibration data: exact, and named where the data may be to blame."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.quant import quantize_static
from compresskit.quant.calibration.constant_values import constant_values
from compresskit.quant.numerics.targets import X86_NO_VNNI


class Gated(nn.Module):
    """A gate of 0.5 everywhere, ones joined to an activation, and a branch that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
        self.branch, self.head = nn.Conv2d(8, 8, 1), nn.Conv2d(16, 4, 1)
        for layer in (self.gate, self.branch):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))
        x = x + self.branch(x)
        return self.head(torch.cat([x, torch.ones(x.shape[0], 8, 6, 6)], 1))


def test_constants_of_the_model_are_quantized_without_a_word(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = Gated().eval(), torch.randn(4, 3, 6, 6)
    quantized = quantize_static(model, [x], target=X86_NO_VNNI)
    assert quantized.placement.coverage.layers == (4, 4)
    assert ((quantized(x) - model(x)).norm() / model(x).norm()).item() < 0.02
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", x)
    assert ck.verify_onnx(path, quantized, [x]).passed
    assert ck.audit(path).macs_integer == quantized.placement.coverage.macs[0]


def dead() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    nn.init.constant_(model[2].bias, -100.0)
    return model


def test_a_layer_that_the_data_does_not_reach_is_named() -> None:
    x = torch.randn(4, 3, 6, 6)
    with pytest.warns(UserWarning, match=r"quantize_static: .* throughout the calibration data: 'relu_1' is 0\. .* in skip="):
        quantized = quantize_static(dead(), [x])
    assert constant_values(quantized) == {"relu_1": 0.0}


def test_a_named_value_is_not_rounded() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placement = quantize_static(dead(), [torch.randn(4, 3, 6, 6)], skip=("relu_1",)).placement
    assert "relu_1" not in {point.node for point in placement.points}
    assert placement.floating == {"relu_1": "skipped by the user", "conv2d_2": "it reads relu_1, which the user skipped"}
