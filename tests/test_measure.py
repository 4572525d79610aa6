"""Measuring a model: parameters, MACs, the metric, latency."""

from __future__ import annotations

import networks
import pytest
import torch
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError


def test_macs_see_into_fused_kernels() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 10, 32)
    # q, k, v, out; two feed-forward layers; scores and their product with the values.
    want = 10 * (4 * 32 * 32 + 2 * 32 * 64) + 2 * 10 * 10 * 32
    assert ck.count_macs(layer, (x,)) == want
    assert ck.count_macs(nn.LSTM(8, 16, batch_first=True), (torch.randn(2, 5, 8),)) == 5 * 4 * 16 * (8 + 16)


def test_an_infinite_metric_is_refused() -> None:
    with pytest.raises(DataError, match="the metric is inf"):
        ck.evaluate(build(networks.Chain), images_task(ck, metric=lambda p, t: float("inf")))
