"""Factors of low rank against NumPy's SVD and plain least squares; exact at full rank, for every kind of layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from compresskit.prune.channels.reconstruct import input_statistics
from compresskit.prune.low_rank import factored, spectrum
from compresskit.prune.low_rank.factorize import tucker_lost

LAYERS = {
    "wide": (lambda: nn.Linear(20, 12), (5, 20)),
    "tall, no bias": (lambda: nn.Linear(12, 20, bias=False), (64, 7, 12)),
    "1x1": (lambda: nn.Conv2d(8, 12, 1, 2, 1), (2, 8, 9, 9)),
    "3x3": (lambda: nn.Conv2d(8, 12, 3, 2, 1, dilation=2), (4, 8, 9, 9)),
    "3x1, circular": (lambda: nn.Conv2d(8, 6, (3, 1), padding=(1, 0), padding_mode="circular", bias=False), (4, 8, 9, 9)),
    "same": (lambda: nn.Conv2d(4, 4, 3, padding="same"), (4, 4, 9, 9)),
}


def full_rank(layer):
    outputs, inputs, *kernel = layer.weight.shape
    return (inputs, outputs) if np.prod(kernel) > 1 else (min(inputs, outputs),)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("on_data", [True, False])
def test_full_rank_is_exact_and_less_loses_what_is_said(kind, on_data) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    layer, x = make(), torch.randn(shape) + 0.5
    statistics = input_statistics(nn.Sequential(layer), ["0.weight"], [(x,)])["0.weight"] if on_data else None
    directions = spectrum(layer, statistics)
    whole = factored(layer, full_rank(layer), directions)
    torch.testing.assert_close(whole(x), layer(x), rtol=1e-4, atol=1e-5)
    assert directions.lost(full_rank(layer)) == pytest.approx(0, abs=1e-9)
    ranks = tuple(max(1, rank // 2) for rank in full_rank(layer))
    small = factored(layer, ranks, directions)
    assert 0 < directions.lost(ranks) < 1
    assert small.record()["ranks"] == list(ranks)
    assert small(x).shape == layer(x).shape
    assert (small(x) - layer(x)).norm() > 1e-3 or on_data


def test_without_data_it_is_the_truncated_svd() -> None:
    layer = nn.Linear(20, 12)
    small = factored(layer, (5,), spectrum(layer, None))
    u, s, v = np.linalg.svd(layer.weight.detach().double().numpy(), full_matrices=False)
    torch.testing.assert_close(
        (small[1].weight @ small[0].weight).double(), torch.from_numpy(u[:, :5] * s[:5] @ v[:5]), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(small[1].bias, layer.bias)
    assert spectrum(layer, None).lost((5,)) == pytest.approx((s[5:] ** 2).sum() / (s**2).sum())


def test_on_data_outputs_are_nearer_than_those_of_the_svd() -> None:
    """Inputs with a few main directions; the outputs' own SVD is the best that any rank can do."""
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 24), torch.randn(500, 6) @ torch.randn(6, 32) + 0.1 * torch.randn(500, 32) + 2
    statistics = input_statistics(nn.Sequential(layer), ["0.weight"], [(x,)])["0.weight"]
    with torch.no_grad():
        y = layer(x)
        best = torch.linalg.svdvals(y - y.mean(0))[4:].square().sum()
        error = {
            on_data: float((factored(layer, (4,), spectrum(layer, s))(x) - y).square().sum())
            for on_data, s in ((1, statistics), (0, None))
        }
    assert error[1] == pytest.approx(float(best), rel=0.01)
    assert error[1] < 0.5 * error[0]


@pytest.mark.parametrize(("weight", "bias"), [(False, True), (True, False)])
def test_what_was_frozen_of_a_layer_is_frozen_of_its_factors(weight, bias) -> None:
    layer = nn.Linear(20, 12)
    layer.weight.requires_grad_(weight)
    layer.bias.requires_grad_(bias)
    first, last = factored(layer, (5,), spectrum(layer, None))
    assert first.weight.requires_grad == last.weight.requires_grad == weight
    assert last.bias.requires_grad == bias


def test_what_both_ranks_lose_is_a_bound() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 12, 3)
    directions = spectrum(layer, None)
    for ranks in ((2, 12), (4, 12), (8, 3), (2, 2)):
        assert 1e-3 < tucker_lost(layer, ranks, directions) <= directions.lost(ranks) + 1e-9
