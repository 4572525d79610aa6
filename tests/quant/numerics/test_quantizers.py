"""Quantizers of activations: constants are exact, nan is refused."""

from __future__ import annotations

import math

import pytest
import torch
from networks import image
from torch import nn

from compresskit.base.errors import DataError
from compresskit.quant import X86, quantize_static
from compresskit.quant.numerics.observers import OBSERVERS, MinMax
from compresskit.quant.numerics.quantizers import ActivationQuantizer
from compresskit.quant.numerics.targets import TENSORRT


class Constant(nn.Module):
    """One layer that is always the same, or nan where asked."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.dead, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        nn.init.zeros_(self.dead.weight)
        nn.init.constant_(self.dead.bias, factor)

    def forward(self, x):
        return self.head(self.dead(self.first(x)))


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("value", [0.0, 2.0, -0.3, 1e-20])
@pytest.mark.parametrize("scheme", [X86.activations, TENSORRT.activations], ids=["asymmetric", "symmetric"])
def test_a_constant_is_exactly_representable(observer, value, scheme) -> None:
    quantizer = ActivationQuantizer(scheme, observer())
    quantizer.observing = True
    x = torch.full((2, 5), value)
    quantizer(x)
    quantizer.freeze_range_(checked=True)
    quantizer.enabled, quantizer.observing = True, False
    torch.testing.assert_close(quantizer(x), x, rtol=1e-6, atol=0.0)


def test_the_scale_of_zeros_leaves_room_for_the_bias_behind_them() -> None:
    quantizer = ActivationQuantizer(X86.activations, MinMax())
    quantizer.observing = True
    quantizer(torch.zeros(3))
    quantizer.freeze_range_(checked=True)
    assert quantizer.scale.item() == pytest.approx(1 / 255)
    assert quantizer.zero_point.item() == 0


def test_nan_activations_name_the_layer() -> None:
    with pytest.raises(DataError, match=r"dead: .* nan or inf"):
        quantize_static(Constant(math.inf).eval(), [image(4)])
