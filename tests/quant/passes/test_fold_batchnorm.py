"""Folding BatchNorm into the layer before it does not change what the network computes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from compresskit.graph.capture import capture
from compresskit.quant.passes.fold_batchnorm import fold_batchnorm_


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
def test_folding_is_exact(model, x) -> None:
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
