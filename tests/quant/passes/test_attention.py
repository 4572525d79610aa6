"""Shifts move through attention only where nothing but its v reads them: rows of weights sum to one, other operators' do not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compresskit.quant import smooth_


class Attention(nn.Module):
    """Tokens (N, T, 8) to (N, T, 4). v and qkv have biases that are worth a shift."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.q, self.k, self.v, self.qkv = (nn.Linear(8, n) for n in (16, 16, 16, 48))
        self.out, self.other, self.wide, self.sink = (
            nn.Linear(16, 4),
            nn.Linear(16, 4),
            nn.Linear(48, 4),
            nn.Parameter(torch.ones(1)),
        )
        with torch.no_grad():
            self.v.bias.normal_(std=3)
            self.qkv.bias.normal_(std=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def of(value: Any, function: Callable[..., Any]) -> Any:
    return function(*value) if isinstance(value, tuple) else function(value)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 8)).transpose(1, 2)


attend = F.scaled_dot_product_attention


def weights(n: Attention, x: Tensor) -> Tensor:
    return (n.q(x) @ n.k(x).transpose(-1, -2)).softmax(-1)


def with_sink(n: Attention, x: Tensor) -> Tensor:
    scores = n.q(x) @ n.k(x).transpose(-1, -2)
    return torch.cat([scores, scores[..., :1] * 0 + n.sink], -1).softmax(-1)[..., :-1]


READ_ELSEWHERE: dict[str, Callable[[Attention, Tensor], Any]] = {
    "q, k and v in one": lambda n, x: of(n.v(x), lambda h: n.out(attend(h, h, h))),
    "q and v in one": lambda n, x: of(n.v(x), lambda h: n.out(attend(h, n.k(x), h))),
    "v beside": lambda n, x: of(n.v(x), lambda v: n.out(attend(n.q(x), n.k(x), v)) + n.other(v.relu())),
    "v beside, as heads": lambda n, x: of(
        n.v(x),
        lambda h: n.out(attend(heads(n.q(x)), heads(n.k(x)), heads(h)).transpose(1, 2).flatten(2)) + n.other(h.relu()),
    ),
    "whole beside": lambda n, x: of(
        n.qkv(x), lambda h: n.out(attend(h[..., :16], h[..., 16:32], h[..., 32:])) + n.wide(h.relu())
    ),
    "slices that overlap": lambda n, x: of(n.qkv(x), lambda h: n.out(attend(h[..., :16], h[..., 16:32], h[..., 20:36]))),
    "softmax along rows": lambda n, x: n.out(weights(n, x).transpose(-1, -2) @ n.v(x)),
    "softmax along columns": lambda n, x: n.out((n.q(x) @ n.k(x).transpose(-1, -2)).softmax(-2) @ n.v(x)),
    "tokens that are parts of channels": lambda n, x: n.qkv(attend(*(p(x).reshape(-1, 10, 8) for p in (n.q, n.k, n.v)))),
    "a part of the weights": lambda n, x: n.out(with_sink(n, x) @ n.v(x)),
}
SHIFTED: dict[str, Callable[[Attention, Tensor], Any]] = {
    "three layers": lambda n, x: n.out(attend(n.q(x), n.k(x), n.v(x))),
    "by hand": lambda n, x: n.out(weights(n, x) @ n.v(x)),
    "slices": lambda n, x: of(n.qkv(x), lambda h: n.out(attend(h[..., :16], h[..., 16:32], h[..., 32:]))),
    "chunks, as heads": lambda n, x: of(
        n.qkv(x).chunk(3, -1), lambda q, k, v: n.out(attend(heads(q), heads(k), heads(v)).transpose(1, 2).flatten(2))
    ),
    "q and k in one": lambda n, x: of(n.q(x), lambda h: n.out(attend(h, h, n.v(x)))),
}


def smoothed(function: Callable[..., Any]) -> int:
    """How many values smoothing changes; the model must compute the same."""
    torch.manual_seed(0)
    model, x = Attention(function).eval().double(), torch.randn(16, 5, 8, dtype=torch.float64)
    before = copy.deepcopy(model)
    changed = smooth_(model, [(x,)])
    with torch.no_grad():
        torch.testing.assert_close(model(x), before(x), atol=1e-9, rtol=1e-9)
    return changed


@pytest.mark.parametrize("case", READ_ELSEWHERE)
def test_a_v_that_is_read_elsewhere_is_not_shifted(case) -> None:
    assert smoothed(READ_ELSEWHERE[case]) == 0


@pytest.mark.parametrize("case", SHIFTED)
def test_a_v_that_attention_alone_reads_is_shifted(case) -> None:
    assert smoothed(SHIFTED[case]) == 1
