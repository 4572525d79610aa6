"""Affine maths against torch's own kernel and against numpy."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compresskit.base.errors import SettingError
from compresskit.export.ops.quantize import dequantize_linear, quantize_linear
from compresskit.quant import Scheme
from compresskit.quant.numerics.scheme import affine, fake_quantize, to_integers

SCHEMES = [
    Scheme(),
    Scheme(signed=True),
    Scheme(signed=True, symmetric=True),
    Scheme(bits=4),
    Scheme(bits=7, signed=True, symmetric=True),
    Scheme(bits=2, signed=True, symmetric=True),
]


ranges = st.tuples(st.floats(-1e3, 1e3, width=32), st.floats(-1e3, 1e3, width=32)).map(sorted)


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@given(bounds=ranges, seed=st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_values_in_range_are_off_by_at_most_half_a_step(scheme, bounds, seed) -> None:
    low, high = (torch.tensor(b) for b in bounds)
    scale, zero_point = affine(low, high, scheme)
    assert torch.isfinite(scale)
    assert scale > 0
    assert scheme.low <= int(zero_point) <= scheme.high
    x = torch.empty(200).uniform_(float(low), float(high) + 1e-3, generator=torch.Generator().manual_seed(seed))
    y = fake_quantize(x, scale, zero_point, scheme)
    ends = [(v - int(zero_point)) * float(scale) for v in (scheme.low, scheme.high)]
    inside = (x >= ends[0]) & (x <= ends[1])
    assert ((x - y).abs()[inside] <= scale * 0.5001).all()
    torch.testing.assert_close(fake_quantize(y, scale, zero_point, scheme), y)  # twice is once
    assert fake_quantize(torch.zeros(1), scale, zero_point, scheme).item() == 0  # zero is exact


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_integers_equal_numpys(scheme) -> None:
    x = torch.randn(4, 300)
    scale, zero_point = affine(x.amin(1), x.amax(1), scheme)
    got = to_integers(x, scale, zero_point, scheme)
    want = oracles.quantize(x, scale[:, None], zero_point[:, None], scheme.low, scheme.high)
    assert got.dtype == scheme.dtype
    assert (got.numpy() == want).mean() > 0.999  # a value on the edge of two steps may fall to either
    back = (got.float() - zero_point[:, None]) * scale[:, None]
    torch.testing.assert_close(back, fake_quantize(x, scale, zero_point, scheme))


def test_an_empty_range_has_scale_one() -> None:
    scale, zero_point = affine(torch.tensor([0.0, 1e-40]), torch.tensor([0.0, 1e-40]), Scheme())
    assert scale.tolist() == [1.0, 1.0]
    assert zero_point.tolist() == [0, 0]


def test_exported_operators_equal_the_simulation() -> None:
    x = torch.randn(1000) * 2
    scale, zero_point = affine(x.min(), x.max(), Scheme())
    q = quantize_linear(x, scale, zero_point.to(torch.uint8))
    assert q.dtype == torch.uint8
    back = dequantize_linear(q, scale, zero_point.to(torch.uint8), 0)
    assert ((back - fake_quantize(x, scale, zero_point, Scheme())).abs() > 1e-6).sum() <= 1


def test_gradient_passes_inside_the_range() -> None:
    x = torch.tensor([-9.0, -0.5, 0.3, 9.0], requires_grad=True)
    scale, zero_point = affine(torch.tensor(-1.0), torch.tensor(1.0), Scheme())
    fake_quantize(x, scale, zero_point, Scheme()).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("settings", [{"bits": 0}, {"bits": 1, "signed": True}, {"bits": 17}, {"symmetric": True}])
def test_other_widths_and_symmetric_unsigned_are_refused(settings) -> None:
    with pytest.raises(SettingError, match=r"Scheme\("):
        Scheme(**settings)


def test_the_oracle_rounds_half_to_even() -> None:
    assert np.array_equal(oracles.quantize([0.5, 1.5, 2.5, -9], 1.0, 3, 0, 7), [3, 5, 5, 0])


@pytest.mark.parametrize("learned", [False, True])
def test_images_in_channels_last_get_the_same_gradients_in_their_format(learned) -> None:
    """Also where the gradient arrives in the other format, as behind a mean over positions."""
    torch.manual_seed(0)
    images, found = torch.randn(2, 3, 4, 5), []
    for layout in (torch.contiguous_format, torch.channels_last):
        x = images.contiguous(memory_format=layout).requires_grad_()
        scale = torch.tensor(0.02, requires_grad=learned)
        y = fake_quantize(x, scale, torch.tensor(0), Scheme())
        grads = torch.autograd.grad(y, [x, scale] if learned else [x], torch.linspace(0.1, 1, 120).view(2, 3, 4, 5))
        assert grads[0].is_contiguous(memory_format=layout)
        found.append(grads)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
