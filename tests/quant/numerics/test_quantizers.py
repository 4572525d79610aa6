"""Quantizers of activations: constants are exact, nan is refused."""

from __future__ import annotations

import math

import pytest
import torch
from networks import image
from torch import nn

from compresskit.base.errors import DataError
from compresskit.quant import X86, Bits, prepare_qat, quantize_static
from compresskit.quant.numerics.observers import OBSERVERS, MinMax
from compresskit.quant.numerics.quantizers import ActivationQuantizer
from compresskit.quant.numerics.targets import TENSORRT

LEARNED = {"learned": True}


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


@pytest.mark.parametrize("settings", [{}, LEARNED, LEARNED | {"offsets": True}], ids=["plain", "scales", "offsets"])
def test_a_batch_without_rows_passes_and_moves_nothing(settings) -> None:
    """As through the float model: a head over regions of a picture that has none, or an expert that no sample reaches."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(16, 8)
    quantized = prepare_qat(model, [(x,)], bits=Bits(activations=4), **settings)
    for training in (True, False):
        quantized.train(training)
        state = {name: value.clone() for name, value in quantized.state_dict().items()}
        out = quantized(x[:0])
        assert out.shape == (0, 4)
        out.sum().backward()
        assert not any(p.grad.any() or p.grad.isnan().any() for p in quantized.parameters() if p.grad is not None)
        for name, value in quantized.state_dict().items():
            assert torch.equal(value, state[name]), name


def test_the_gradient_of_a_learned_scale_counts_the_values_of_a_sample() -> None:
    """1 / sqrt(values of a sample * largest integer), as LSQ has it, for a batch of any size; a sample may have no values."""
    quantizer = ActivationQuantizer(X86.activations, MinMax())
    quantizer.observing = True
    quantizer(300 * torch.rand(3, 5, 2))
    quantizer.freeze_range_(checked=True)
    quantizer.enabled, quantizer.observing = True, False
    quantizer.learn_()
    x = torch.full((1, 5, 2), 1e3)  # beyond the range, where the result is 255 scales
    for rows in (1, 4):
        quantizer.ratio.grad = None
        quantizer(x.expand(rows, 5, 2)).sum().backward()
        wanted = rows * 10 * 255 / math.sqrt(10 * 255) / quantizer.scale.item()
        assert quantizer.ratio.grad.item() == pytest.approx(wanted, rel=1e-5)
    assert quantizer(torch.ones(3, 0)).shape == (3, 0)
