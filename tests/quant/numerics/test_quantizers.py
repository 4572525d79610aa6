"""Quantizers refuse activations without a range."""

from __future__ import annotations

import math

import pytest
from networks import image
from torch import nn

from compresskit.base.errors import DataError
from compresskit.quant import quantize_static


class Constant(nn.Module):
    """One layer that is always the same, or nan where asked."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.dead, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        nn.init.zeros_(self.dead.weight)
        nn.init.constant_(self.dead.bias, factor)

    def forward(self, x):
        return self.head(self.dead(self.first(x)))


@pytest.mark.parametrize(("factor", "message"), [(2.0, "dead: every one of its values is 2"), (math.nan, "dead: .* nan or inf")])
def test_constant_and_nan_activations_name_the_layer(factor, message) -> None:
    with pytest.raises(DataError, match=message):
        quantize_static(Constant(factor).eval(), [image(4)])
