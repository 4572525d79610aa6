"""Sums and sequences of convolutions as one convolution, in float64, on random sizes."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from compresskit.graph.layers.geometry import Geometry, composed, consecutive, parallel, placed, pointwise

CONV = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}


def run(x: Tensor, weight: Tensor, bias: Tensor | None, size: Geometry) -> Tensor:
    if not size.kernel:
        return torch.nn.functional.linear(x, weight, bias)
    return CONV[len(size.kernel)](x, weight, bias, size.stride, size.padding, size.dilation, size.groups)


def numbers(spatial: int, low: int, high: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(low, high)] * spatial)


@st.composite
def geometries(draw, spatial: int, inputs: int, outputs: int, *, padded: bool = True) -> Geometry:
    return Geometry(
        outputs=outputs,
        inputs=inputs,
        kernel=draw(numbers(spatial, 1, 3)),
        stride=draw(numbers(spatial, 1, 3)),
        padding=draw(numbers(spatial, 0, 3)) if padded else (0,) * spatial,
        dilation=draw(numbers(spatial, 1, 3)),
        groups=draw(st.sampled_from([g for g in (1, 2, 4) if inputs % g == 0 and outputs % g == 0])),
    )


def weights(size: Geometry) -> tuple[Tensor, Tensor]:
    return torch.randn(size.shape, dtype=torch.float64), torch.randn(size.outputs, dtype=torch.float64)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_two_in_a_row_are_one(data) -> None:
    spatial = data.draw(st.integers(1, 3))
    first = data.draw(geometries(spatial, 4, 8))
    second = data.draw(geometries(spatial, 8, 4, padded=data.draw(st.booleans())))
    biased = data.draw(st.booleans())
    whole = consecutive(first, second, biased=biased)
    assume(whole is not None)
    (w1, b1), (w2, b2) = weights(first), weights(second)
    x = torch.randn(2, 4, *data.draw(numbers(spatial, 25, 28)), dtype=torch.float64)
    after = run(x, w1, b1 if biased else None, first)
    wanted = run(after, w2, b2, second)
    bias = b2 + (
        run(b1.view(1, -1, *[1] * spatial).expand(1, -1, *after.shape[2:]), w2, None, second)[0].flatten(1)[:, 0] if biased else 0
    )
    torch.testing.assert_close(run(x, composed(w1, w2, first, second), bias, whole), wanted, atol=1e-10, rtol=1e-10)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_branches_of_a_sum_are_one(data) -> None:
    spatial = data.draw(st.integers(1, 3))
    first = data.draw(geometries(spatial, 4, 8))
    parts = [first]
    for _ in range(data.draw(st.integers(1, 3))):
        kernel, dilation = data.draw(numbers(spatial, 1, 5)), data.draw(numbers(spatial, 1, 3))
        balance = [2 * p - r for p, r in zip(first.padding, first.reach, strict=True)]
        twice = [b + d * (k - 1) for b, d, k in zip(balance, dilation, kernel, strict=True)]
        assume(all(n >= 0 and n % 2 == 0 for n in twice))
        parts.append(
            Geometry(
                outputs=8, inputs=4, kernel=kernel, stride=first.stride, padding=tuple(n // 2 for n in twice),
                dilation=dilation, groups=data.draw(st.sampled_from([1, 2, 4])),
            )
        )  # fmt: skip
    whole = parallel(parts)
    assert whole is not None
    stored = [weights(part) for part in parts]
    x = torch.randn(2, 4, *data.draw(numbers(spatial, 25, 28)), dtype=torch.float64)
    wanted = sum(run(x, *pair, part) for pair, part in zip(stored, parts, strict=True))
    weight = sum(placed(w, part, whole) for (w, _), part in zip(stored, parts, strict=True))
    bias = sum(b for _, b in stored)
    torch.testing.assert_close(run(x, weight, bias, whole), wanted, atol=1e-10, rtol=1e-10)


def test_what_is_no_single_convolution() -> None:
    three = Geometry(outputs=4, inputs=4, kernel=(3,), stride=(1,), padding=(1,), dilation=(1,), groups=1)
    one = pointwise(4, 1)
    assert parallel([three, one]) == three  # the scale of a channel is one of the nine taps
    assert consecutive(three, three, biased=False) is None  # the second pads what the first would have computed there
    assert consecutive(one, three, biased=True) is None  # where its bias would be
    assert consecutive(one, three, biased=False) == three
    far = Geometry(outputs=4, inputs=4, kernel=(3,), stride=(1,), padding=(0,), dilation=(1,), groups=1)
    assert parallel([three, far]) is None  # its result is smaller
    other = Geometry(outputs=4, inputs=4, kernel=(3,), stride=(2,), padding=(1,), dilation=(1,), groups=1)
    assert parallel([three, other]) is None


def test_linear_layers_are_convolutions_without_dimensions() -> None:
    first = Geometry(outputs=6, inputs=5, kernel=(), stride=(), padding=(), dilation=(), groups=1)
    second = Geometry(outputs=3, inputs=6, kernel=(), stride=(), padding=(), dilation=(), groups=1)
    a, b = torch.randn(6, 5, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(composed(a, b, first, second), b @ a)
    assert torch.equal(placed(a, first, first), a)
