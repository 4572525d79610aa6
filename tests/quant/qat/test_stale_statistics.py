"""Quantization-aware training of networks whose BatchNorm statistics do not belong to their weights."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from compresskit.quant import prepare_qat
from compresskit.quant.passes.unfold_batchnorm import conv_bn_layers


def deep() -> nn.Module:
    """Twelve layers, each of which makes values three times smaller until BatchNorm has seen them."""
    torch.manual_seed(0)
    layers = [part for _ in range(12) for part in (nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def gradient(model: nn.Module, x: torch.Tensor) -> float:
    model(x).square().mean().backward()
    return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())


@pytest.mark.parametrize("learned", [False, True])
def test_a_network_that_was_never_trained_starts_from_a_batch(learned: bool) -> None:
    x, model = torch.randn(8, 8, 6, 6), deep()
    with pytest.warns(UserWarning, match=r"prepare_qat: the running statistics of BatchNorm do not belong to the weights"):
        quantized = prepare_qat(model, [x], learned=learned)
    assert gradient(quantized, x) < 10 * gradient(model.train(), x)
    norm = conv_bn_layers(quantized.body)[-1]
    assert 1e-3 < norm.running_var.mean() < 0.9
    assert norm.momentum == pytest.approx(0.1)


def test_statistics_of_a_trained_network_are_kept_to_the_bit() -> None:
    x, model = torch.randn(8, 8, 6, 6), deep()
    for _ in range(40):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized = prepare_qat(model, [x])
    norm = conv_bn_layers(quantized.body)[-1]
    assert torch.equal(norm.running_var, model[34].running_var)
    assert torch.equal(norm.running_mean, model[34].running_mean)
    assert all(q.enabled for q in quantized.quantizers())
