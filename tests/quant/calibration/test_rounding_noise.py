"""The noise of each rounding at the outputs, estimated by backward passes, against the model run with that rounding alone."""

from __future__ import annotations

from dataclasses import replace

import networks
import pytest
import torch
from networks import build, image

from compresskit.base.task import call
from compresskit.quant import X86, quantize_static
from compresskit.quant.calibration.layer_outputs import integer_layers
from compresskit.quant.calibration.rounding_noise import rounding_noise
from compresskit.quant.effort.samples import float_leaves
from compresskit.quant.numerics.quantizers import Quantizer


@pytest.mark.parametrize("kind", [networks.Residual, networks.Depthwise, networks.Tokens])
def test_estimates_are_what_each_rounding_alone_adds(kind) -> None:
    x = image(16)
    quantized = quantize_static(build(kind), [x], target=replace(X86, weights=replace(X86.weights, bits=6)))
    noise = rounding_noise(quantized, x, probes=64)
    layers = {layer.node: layer for layer in integer_layers(quantized)}
    every = [module for module in quantized.modules() if isinstance(module, Quantizer)]
    quantized.enable_(False)
    with torch.no_grad():
        wanted = float_leaves(call(quantized, x))
    compared = 0
    for node, estimate in noise.items():
        one = layers[node].quantizer if node in layers else quantized.body.get_submodule(node.target)
        if estimate < 1e-7:
            continue
        if sum(n.target == node.target for n in noise if n.op == "call_module") > 1:
            continue  # shared by several values
        for module in every:
            module.enabled = module is one
        with torch.no_grad():
            got = float_leaves(call(quantized, x))
        alone = sum(float((a - b).square().sum() / a.square().sum()) for a, b in zip(wanted, got, strict=True))
        compared += 1
        assert estimate < 2 * alone, node.name
        if node not in layers or layers[node].bias is None:  # else the mean error is left out
            assert estimate > alone / 2, node.name
    assert len(noise) > len(layers) > 0
    assert compared > len(noise) / 2


def test_roundings_stay_switched_on_and_nothing_learns() -> None:
    x = image(16)
    quantized = quantize_static(build(networks.Residual), [x])
    with torch.no_grad():
        before = quantized(*x)
        first, second = (rounding_noise(quantized, x, probes=2) for _ in range(2))
        torch.testing.assert_close(quantized(*x), before, rtol=0, atol=0)
    assert first == second
    assert all(parameter.grad is None for parameter in quantized.parameters())
