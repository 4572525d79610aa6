"""Folding BatchNorm, against numpy."""

from __future__ import annotations

import copy

import networks
import numpy as np
import oracles
import torch
from networks import build, image

from compresskit.graph.capture import capture
from compresskit.graph.normalize import aten
from compresskit.quant.passes.fold_batchnorm import fold_batchnorm_


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
