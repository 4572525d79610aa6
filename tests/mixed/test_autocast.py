"""Autocast policies: which functions run in half, and which in fp32."""

from __future__ import annotations

import pytest
import torch
from mixed_runs import USER_WARNINGS
from torch import nn
from torch.nn import functional as F

from compresskit.mixed import (
    AMP_BF16,
    FP32,
    prepare,
)

pytestmark = USER_WARNINGS


class Look(nn.Module):
    """Runs one function on fp32 and half inputs and notes what dtype comes out."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.eye(4)), function

    def forward(self, x):
        y = self.function(x, self.weight)
        self.seen = y.dtype
        return y.float().sum() + self.weight.sum()


HALF = {
    "matmul": lambda x, w: x @ w,
    "linear": F.linear,
    "conv": lambda x, w: F.conv1d(x[None], w[:, :, None]),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
}
#: On a CPU torch's list of what must be fp32 is shorter than on CUDA: losses, and functions that lose digits beyond repair.
SINGLE = {
    "mse": lambda x, w: F.mse_loss((x @ w), torch.zeros(4, 4)),
    "cross entropy": lambda x, w: F.cross_entropy(x @ w, torch.arange(4)),
    "cdist": lambda x, w: torch.cdist((x @ w), (x @ w)),
    "smooth l1": lambda x, w: F.smooth_l1_loss(x @ w, torch.zeros(4, 4)),
}
PROMOTED = {
    "cat": lambda x, w: torch.cat([x @ w, x]),
    "stack": lambda x, w: torch.stack([x @ w, x]),
    "addcmul": lambda x, w: torch.addcmul(x, x @ w, x),
}


@pytest.mark.parametrize(
    ("function", "wanted"),
    [pytest.param(f, torch.bfloat16, id=n) for n, f in HALF.items()]
    + [pytest.param(f, torch.float32, id=n) for n, f in (SINGLE | PROMOTED).items()],
)
def test_products_run_in_half_and_losses_in_fp32(function, wanted) -> None:
    model = Look(function)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), AMP_BF16)
    out = run(torch.randn(4, 4))
    assert model.seen == wanted
    assert out.dtype == torch.float32
    run.backward(out)
    assert model.weight.grad.dtype == torch.float32
    prepare(other := Look(function), torch.optim.SGD(other.parameters(), lr=0.1), FP32)(torch.randn(4, 4))
    assert other.seen == torch.float32


def test_the_autocast_cache_does_not_outlive_a_call() -> None:
    """A weight cast under no_grad and kept would leave the next forward without a gradient (pytorch#112583)."""
    model = nn.Linear(4, 4)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), AMP_BF16)
    with torch.no_grad():
        run(torch.ones(2, 4))
    run.backward(run(torch.ones(2, 4)).sum())
    assert model.weight.grad is not None
