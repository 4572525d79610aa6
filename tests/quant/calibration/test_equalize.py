"""Equalization changes no output, and evens out the ranges of neighbouring layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import networks
import oracles
import pytest
import torch
from networks import build, image
from torch import Tensor, nn

from compresskit.base.errors import ModelError
from compresskit.quant import X86, equalize_, quantize_static


class Uneven(nn.Module):
    """Channels of very different size, in a chain with BatchNorm, a bias, pooling and a depthwise layer."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.b, self.depth = nn.Conv2d(8, 12, 3), nn.Conv2d(12, 24, 3, groups=12)
        self.c = nn.Conv2d(24, 6, 1)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.a(x))), 2)
        return self.c(torch.relu(self.depth(torch.relu(self.b(x)))))


def uneven() -> nn.Module:
    model = build(Uneven)
    with torch.no_grad():
        model.norm.weight.mul_(torch.logspace(-1.5, 1.5, 8))
        model.b.weight.mul_(torch.logspace(1, -1, 12).view(-1, 1, 1, 1))
    return model


def test_equalizing_changes_no_output_and_evens_the_ranges() -> None:
    model, x = uneven(), image(8)
    before = copy.deepcopy(model)
    assert equalize_(model, image(2)) == 3
    with torch.no_grad():
        torch.testing.assert_close(model(*x), before(*x), rtol=1e-3, atol=1e-4)
    factor = (model.norm.weight.abs() / torch.sqrt(model.norm.running_var + model.norm.eps)).view(-1, 1, 1, 1)
    rows = ((model.a.weight * factor).abs().flatten(1).amax(1), model.b.weight.abs().flatten(1).amax(1))
    columns = (model.b.weight.abs().amax((0, 2, 3)), model.depth.weight.abs().view(12, -1).amax(1))
    for row, column in zip(rows, columns, strict=True):
        torch.testing.assert_close(row, column, rtol=0.02, atol=0)  # both are sqrt(r1 r2), the paper's fixed point


def test_equalizing_helps_where_a_weight_has_one_scale() -> None:
    plain = uneven()
    even = copy.deepcopy(plain)
    equalize_(even, image(2))
    target = replace(X86, name="ONE", weights=replace(X86.weights, per_channel=False))
    x, calibration = image(32), [image(32)]
    with torch.no_grad():
        wanted = plain(*x)
        gained = oracles.sqnr(wanted, quantize_static(even, calibration, target=target)(*x)) - oracles.sqnr(
            wanted, quantize_static(plain, calibration, target=target)(*x)
        )
    assert gained > 1  # dB; activations, which have one scale anyway, hold back the rest


def test_shared_layers_and_quantized_models_are_not_equalized() -> None:
    assert equalize_(build(networks.Twice), image(2)) == 0  # a shared layer has two readers' wishes
    with pytest.raises(ModelError, match="quantized already"):
        equalize_(quantize_static(build(networks.Chain), [image(4)]), image(2))


def uneven_layers(**layers: nn.Module) -> nn.ModuleDict:
    """Layers whose output channels differ in size."""
    torch.manual_seed(0)
    for layer in layers.values():
        with torch.no_grad():
            layer.weight.mul_(torch.logspace(-1.5, 1.5, len(layer.weight)).view(-1, *[1] * (layer.weight.ndim - 1)))
    return nn.ModuleDict(layers)


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, layers: nn.ModuleDict, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.between = layers, between

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["b"](self.between(self.layers["a"](x)))


def linears() -> nn.ModuleDict:
    return uneven_layers(a=nn.Linear(8, 16), b=nn.Linear(16, 4))


BETWEEN = {
    "square": (linears, lambda h: torch.relu(h) * torch.relu(h), (64, 8)),
    "pooled channels": (linears, lambda h: nn.functional.max_pool2d(h, 3, 1, 1), (4, 7, 8)),
    "pooled channels of a sequence": (
        lambda: uneven_layers(a=nn.Conv1d(3, 16, 3), b=nn.Conv1d(16, 4, 3)),
        lambda h: nn.functional.max_pool2d(h, 3, 1, 1),
        (4, 3, 9),
    ),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_what_mixes_channels_is_not_equalized(case) -> None:
    layers, between, size = BETWEEN[case]
    model, x = Between(layers(), between).eval().double(), torch.randn(size, dtype=torch.float64)
    before = copy.deepcopy(model)
    assert equalize_(model, (x,)) == 0
    assert torch.equal(model(x), before(x))


class SharedParts(nn.Module):
    """Two pairs of layers that share a BatchNorm, or a bias."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(*sizes, 1) for sizes in ((3, 8), (8, 4), (3, 8), (8, 4)))
        self.norm = nn.BatchNorm2d(8) if what == "norm" else nn.Identity()
        if what == "bias":
            self.c.bias = self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(self.a(x)))) + self.d(torch.relu(self.norm(self.c(x))))


@pytest.mark.parametrize("what", ["norm", "bias"])
def test_layers_that_share_a_norm_or_a_bias_are_not_equalized(what) -> None:
    model, x = build(lambda: SharedParts(what)).double(), torch.randn(4, 3, 6, 6, dtype=torch.float64)
    before = copy.deepcopy(model)
    assert equalize_(model, (x,)) == 0
    assert torch.equal(model(x), before(x))


def test_a_norm_over_tokens_is_not_equalized() -> None:
    norm = nn.BatchNorm1d(16)
    nn.init.uniform_(norm.weight, 0.1, 3)
    model, x = Between(linears(), norm).eval().double(), torch.randn(4, 16, 8, dtype=torch.float64)
    before = copy.deepcopy(model)
    assert equalize_(model, (x,)) == 0
    assert torch.equal(model(x), before(x))


def test_a_grouped_layer_is_not_equalized() -> None:
    """Its filters read a part of the channels each; depthwise ones alone have one for each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 8, 1, groups=4)).eval()
    x, before = torch.randn(4, 3, 6, 6), copy.deepcopy(model)
    assert equalize_(model, (x,)) == 0
    assert torch.equal(model(x), before(x))


def test_negative_scales_of_a_norm_count_by_their_size_and_unread_channels_stay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.logspace(-1.5, 1.5, 8) * torch.tensor([1.0, -1.0]).repeat(4))
        model[3].weight[:, 7] = 0
    before = copy.deepcopy(model)
    assert equalize_(model, (torch.randn(4, 3, 6, 6),)) == 1
    factor = model[1].weight.abs() / torch.sqrt(model[1].running_var + model[1].eps)
    rows = (model[0].weight * factor.view(-1, 1, 1, 1)).abs().flatten(1).amax(1)
    torch.testing.assert_close(rows[:7], model[3].weight.abs().amax((0, 2, 3))[:7], rtol=0.02, atol=0)
    assert model[1].weight[7] == before[1].weight[7]
