"""Quantization-aware training of networks whose BatchNorm statistics do not belong to their weights."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
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


class InForward(nn.Module):
    """A BatchNorm whose function the model itself calls, with buffers and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)
        self.weight, self.bias = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.randn(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.rand(8) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.batch_norm(self.conv(x), self.mean, self.var, self.weight, self.bias, self.training)
        return self.head(F.relu(y).mean((2, 3)))


def test_a_norm_that_the_model_itself_calls_is_trained() -> None:
    torch.manual_seed(0)
    model, x = InForward(), torch.randn(16, 3, 8, 8)
    for _ in range(40):
        model(x)
    quantized = prepare_qat(model.eval(), [x])
    quantized(x).square().sum().backward()
    assert len(conv_bn_layers(quantized.body)) == 1
    quantized.eval()
    quantized.convert_()
    with torch.no_grad():
        torch.testing.assert_close(quantized(x), model(x), rtol=0, atol=0.05)
