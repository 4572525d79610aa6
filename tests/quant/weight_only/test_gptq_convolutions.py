"""GPTQ of convolutions: it sees the patches that each group multiplies, and outputs come closer than those of the nearest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.graph.capture import capture
from compresskit.graph.layers.stored import CONVS
from compresskit.quant import BlockScheme, quantize_weights
from compresskit.quant.calibration.activation_statistics import patch_moments
from compresskit.quant.weight_only import gptq

torch.manual_seed(0)
KINDS = {
    "strided": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0)), (4, 9, 8)),
    "grouped and dilated": (nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2), (4, 8, 8)),
    "depthwise": (nn.Conv2d(4, 8, 3, padding=1, groups=4), (4, 6, 6)),
    "one dimension": (nn.Conv1d(4, 6, 5, stride=2, padding=2), (4, 20)),
    "three dimensions": (nn.Conv3d(2, 4, 2), (2, 4, 4, 4)),
}


def correlated(shape: tuple[int, ...], n: int = 12) -> torch.Tensor:
    """Inputs whose channels and neighbours go together, so that rounding errors can be made up for."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, *shape[1:], generator=made) + 0.3 * torch.randn(n, *shape, generator=made)
    return x + x.roll(1, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_those_of_the_patches(kind) -> None:
    conv, shape = KINDS[kind]
    x = correlated(shape, 4)
    body = capture(nn.Sequential(conv).eval(), (x,)).module
    (node,) = [n for n in body.graph.nodes if n.target in CONVS]
    moments = patch_moments(body, [(x[:1],), (x[1:],)], node)
    weight = conv.weight.detach().double()
    with torch.no_grad():
        outputs = nn.Sequential(conv)(x).double() - conv.bias.view(-1, *[1] * (x.ndim - 2)).double()
    power = outputs.square().mean([0, *range(2, x.ndim)])  # w' E[p p'] w for each output channel
    rows = weight.flatten(1).unflatten(0, (conv.groups, -1))
    torch.testing.assert_close(torch.einsum("goi,gij,goj->go", rows, moments, rows).flatten(), power, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_come_closer(kind) -> None:
    conv, shape = KINDS[kind]
    model, x, rows = nn.Sequential(conv).eval(), correlated(shape), BlockScheme(bits=3, block_size=None)
    errors = []
    for settings in ({}, {"rounding": gptq}):
        quantized = quantize_weights(model, [(x[:6],), (x[6:],)], convolutions=rows, **settings)
        with torch.no_grad():
            errors.append((quantized(x) - model(x)).square().mean().item())
    assert errors[1] < 0.97 * errors[0]


def test_pruned_weights_stay_zero() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 4, 3))
    ck.prune.plan_mask(model, ck.remove(weights=0.5)).apply_(model)
    zero = [model[i].weight == 0 for i in (0, 2)]
    quantized = quantize_weights(
        model.eval(), correlated((4, 8, 8)), convolutions=BlockScheme(bits=4, block_size=None), rounding=gptq
    )
    found = [p for p in quantized.body.parameters() if p.ndim == 4]
    assert all(bool((w[mask] == 0).all()) for w, mask in zip(found, zero, strict=True))
