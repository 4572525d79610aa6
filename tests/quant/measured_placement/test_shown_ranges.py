"""Ranges of the values of a graph: measured once for all that place operators by them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import compresskit as ck
from compresskit.quant.measured_placement import shown_ranges


class Pairs(nn.Module):
    """One encoder with hard-swishes on two inputs, whose results are joined with positions in pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Hardswish(), nn.Conv2d(8, 8, 3, padding=1), nn.Hardswish())
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        boxes = self.head(torch.cat([self.encoder(x), self.encoder(y)], 1))
        return torch.cat([boxes[:, :2].sigmoid(), 600 * boxes[:, 2:]], 1)


def test_one_pass_shows_the_ranges_for_all_that_read_them(monkeypatch) -> None:
    torch.manual_seed(0)
    passes = []
    measured = shown_ranges._measured_ranges
    monkeypatch.setattr(shown_ranges, "_measured_ranges", lambda *args: passes.append(args) or measured(*args))
    quantized = ck.quant.quantize_static(Pairs().eval(), [(torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8))])
    assert len(passes) == 1
    reasons = " ".join(quantized.placement.floating.values())
    assert "one scale for all would leave" in reasons
    assert any(point.saturates for point in quantized.placement.points)
