"""Folding BatchNorm, against numpy."""

from __future__ import annotations

import copy
from functools import partial

import networks
import numpy as np
import oracles
import pytest
import torch
from networks import build, image
from torch import Tensor, nn
from torch.nn import functional

import compresskit as ck
from compresskit.graph.capture import capture
from compresskit.graph.layers.fold_batchnorm import fold_batchnorm_
from compresskit.graph.normalize import aten
from compresskit.quant import quantize_static


def test_folded_weights_equal_numpys() -> None:
    model = build(networks.Chain)
    graph = capture(copy.deepcopy(model), image(2)).module
    assert fold_batchnorm_(graph) == 2
    assert not any(n.target is aten.batch_norm.default for n in graph.graph.nodes)
    conv, norm = model.a[0], model.a[1]
    weight, bias = oracles.fold(conv.weight, None, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
    np.testing.assert_allclose(graph.get_parameter("a.0.weight").detach(), weight, rtol=1e-6)
    np.testing.assert_allclose(graph.get_parameter("a.0.bias").detach(), bias, rtol=1e-5, atol=1e-6)
    x = image(8)
    torch.testing.assert_close(graph(*x), model(*x), atol=1e-5, rtol=1e-4)


def test_a_layer_that_is_called_twice_is_folded() -> None:
    model = build(networks.Twice)
    graph = capture(copy.deepcopy(model), image(2)).module
    fold_batchnorm_(graph)
    x = image(8)
    torch.testing.assert_close(graph(*x), model(*x), atol=1e-5, rtol=1e-4)


class SharedHead(nn.Module):
    """One convolution without bias at two levels, a BatchNorm for each, as in RetinaNet."""

    def __init__(self):
        super().__init__()
        self.c, self.b1, self.b2 = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.b1(self.c(x)) + self.b2(self.c(x.flip(3)))


class TokenNorm(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.l, self.b = nn.Linear(16, width), nn.BatchNorm1d(tokens)

    def forward(self, x):
        return self.b(self.l(x))


class NoStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.b = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)

    def forward(self, x):
        return self.b(self.c(x))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (SharedHead, (8, 3, 8, 8)),
        (partial(TokenNorm, 8, 8), (4, 8, 16)),
        (partial(TokenNorm, 6, 8), (4, 6, 16)),
        (NoStatistics, (8, 3, 8, 8)),
    ],
)
def test_folding_does_not_change_the_outputs(model, x) -> None:
    model = model()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -1, 1)
    model.train()
    for _ in range(5):
        model(torch.randn(x) + 1)
    graph = capture(copy.deepcopy(model.eval()), (torch.randn(x),)).module
    fold_batchnorm_(graph)
    y = torch.randn(x)
    torch.testing.assert_close(graph(y), model(y), atol=1e-5, rtol=1e-4)


class ComputedWeights(nn.Module):
    """BatchNorm with a positive weight and a bias that are computed, behind a convolution, and behind a ReLU."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Conv2d(3, 6, 3, bias=False), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)
        self.scale, self.shift, self.bias = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6)), bias

    def forward(self, x: Tensor) -> Tensor:
        if self.bias:
            return self.norm(functional.conv2d(x, self.a.weight, self.shift.exp()))
        mean, var = self.norm.running_mean, self.norm.running_var
        x = functional.batch_norm(self.a(x), mean, var, self.scale.exp(), self.shift.tanh())
        return self.b(functional.batch_norm(x.relu(), mean, var, self.scale.exp(), self.shift.tanh()))


@pytest.mark.parametrize("bias", [False, True])
def test_computed_weights_are_not_taken_for_none(bias, tmp_path) -> None:
    model, x = build(partial(ComputedWeights, bias)), (torch.randn(16, 3, 9, 9),)
    graph = capture(copy.deepcopy(model), x).module
    fold_batchnorm_(graph)
    with torch.no_grad():
        torch.testing.assert_close(graph(*x), model(*x), atol=1e-5, rtol=1e-4)
        assert oracles.sqnr(model(*x), quantize_static(model, [x])(*x)) > 25
    path = ck.export_onnx(model, tmp_path / "m.onnx", x)
    assert ck.verify_onnx(path, model, [x]).passed
