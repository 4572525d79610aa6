"""Bits chosen under a budget: the best of all choices, from sensitivities that are measured."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from compresskit.base.errors import SettingError
from compresskit.quant import Bits, choose_bits, quantize_static
from compresskit.quant.numerics.quantizers import WeightQuantizer

WIDTHS = (2, 3, 4, 8)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    ).eval()  # fmt: skip


X = torch.randn(24, 3, 10, 10, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("weighting", ["weights", "macs"])
def test_the_choice_is_the_best_of_all_within_the_budget(weighting) -> None:
    plan = choose_bits(net(), [X], average=3.7, widths=WIDTHS, weighting=weighting)
    sizes = [getattr(layer, weighting) for layer in plan.layers]
    least = min(
        (sum(layer.noise[bits] for layer, bits in zip(plan.layers, choice, strict=True)), choice)
        for choice in itertools.product(WIDTHS, repeat=len(sizes))
        if sum(b * n for b, n in zip(choice, sizes, strict=True)) <= 3.7 * sum(sizes)
    )
    assert tuple(plan.bits[layer.layer].weights for layer in plan.layers) == least[1]
    assert plan.average <= 3.7
    assert [average for average, _ in plan.frontier] == sorted({average for average, _ in plan.frontier})
    assert all(a[1] <= b[1] for a, b in itertools.pairwise(plan.frontier)), "more bits lose less"


def test_sensitivities_are_the_errors_of_one_rounded_layer() -> None:
    model = net()
    plan = choose_bits(model, [X], average=8, widths=(3, 8), samples=24)
    layer = next(layer for layer in plan.layers if layer.layer == "2")
    rounded = net()
    weight = rounded[2].weight.data
    scale = weight.abs().amax((1, 2, 3), keepdim=True) / 3
    weight.copy_((weight / scale).round().clamp(-3, 3) * scale)
    with torch.no_grad():
        wanted, got = model(X), rounded(X)
    assert layer.noise[3] == pytest.approx(float((got - wanted).square().sum() / wanted.square().sum()), rel=1e-3)
    assert (layer.weights, layer.macs) == (16 * 8 * 9, 16 * 8 * 9 * 36)


def test_a_budget_in_bytes_counts_what_the_file_stores() -> None:
    plan = choose_bits(net(), [X], weight_bytes=700, widths=WIDTHS)
    bits = [(layer.weights, plan.bits[layer.layer].weights) for layer in plan.layers]
    assert plan.weight_bytes == sum(-(-count * width // 8) for count, width in bits) <= 700
    assert "bytes of weights" in str(plan)
    assert "frontier: 2.00 bits" in str(plan)


def test_the_plan_is_what_quantization_takes() -> None:
    plan = choose_bits(net(), [X], average=4)
    quantized = quantize_static(net(), [X], bits=plan.bits)
    widths = [q.scheme.bits for q in quantized.quantizers() if isinstance(q, WeightQuantizer)]
    assert widths == [bits.weights for bits in plan.bits.values()]
    assert plan.bits["0"] == Bits(weights=widths[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"wanted average= or weight_bytes=, one of them, got None and None"),
        ({"average": 1.5}, r"choose_bits\(average=...\): the least that these widths allow is 2, got 1.5"),
        ({"weight_bytes": 10}, r"choose_bits\(weight_bytes=...\): the least that these widths allow is \d+, got 10"),
        ({"average": 4, "widths": (1, 2)}, r"choose_bits\(widths=...\): wanted whole numbers of 2..8, got \(1, 2\)"),
        ({"average": 4, "weighting": "layers"}, r"choose_bits\(weighting=...\): wanted \"weights\" or \"macs\", got 'layers'"),
        ({"average": 4, "samples": 0}, r"choose_bits\(samples=...\): wanted a whole number >= 1, got 0"),
    ],
)
def test_bad_budgets_are_refused(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        choose_bits(net(), [X], **settings)
