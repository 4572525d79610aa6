"""Data with nan or infinite values: what learns from them refuses them, and leaves the quantized model as it was."""

from __future__ import annotations

import copy

import networks
import pytest
import torch
from networks import build, image
from torch import nn

from compresskit.base.errors import DataError
from compresskit.quant import adaround_, correct_bias_, imitate_float_, quantize_static, reconstruct_blocks_

LEARNERS = {
    "correct_bias_": lambda q, model, data: correct_bias_(q, data),
    "adaround_": lambda q, model, data: adaround_(q, data, steps=2),
    "reconstruct_blocks_": lambda q, model, data: reconstruct_blocks_(q, data, steps=2),
    "imitate_float_": lambda q, model, data: imitate_float_(q, model, data, steps=2),
}


@pytest.mark.matrix
@pytest.mark.parametrize(("value", "held"), [(float("nan"), "nan"), (float("inf"), "infinite values")])
@pytest.mark.parametrize("name", LEARNERS)
def test_a_batch_that_is_not_finite_is_named(name, value, held) -> None:
    model, data = build(networks.Chain), [image(8), image(8)]
    quantized = quantize_static(model, data)
    data[1][0][2, 1, 5, 5] = value
    before = copy.deepcopy(quantized.state_dict())
    with pytest.raises(DataError, match=rf"^{name}: the output of a\.0 is nan or infinite, since batch 2 holds {held}; clean"):
        LEARNERS[name](quantized, model, data)
    assert all(torch.equal(v, before[k]) for k, v in quantized.state_dict().items())


class Masked(nn.Module):
    """Attention with a mask that is added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, mask):
        x = self.first(x)
        return self.last(torch.softmax(x @ x.transpose(1, 2) + mask, -1) @ x)


@pytest.mark.parametrize("name", LEARNERS)
def test_a_mask_that_reaches_no_layer_is_taken(name) -> None:
    model, mask = Masked().eval(), torch.zeros(4, 1, 6)
    mask[:, :, 4:] = -torch.inf
    data = [(torch.randn(4, 6, 8), mask)]
    quantized = quantize_static(model, [(data[0][0], mask.clamp(min=-100))])
    LEARNERS[name](quantized, model, data)
    assert all(bool(v.isfinite().all()) for v in quantized.state_dict().values())
