"""Capturing a model as a graph."""

from __future__ import annotations

import torch
from torch import nn

from compresskit.graph.capture import capture


def test_any_number_of_inputs() -> None:
    class Many(nn.Module):
        def forward(self, *args):
            return sum(args)

    graph = capture(Many(), (torch.randn(2, 3), torch.randn(2, 3))).module
    x = torch.randn(5, 3), torch.randn(5, 3)
    torch.testing.assert_close(graph(*x), x[0] + x[1])
