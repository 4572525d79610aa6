"""Rewrites for all runtimes: PReLU in operators that runtimes have fast kernels for, with the same values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.measure import numpy_inputs, session


@pytest.mark.parametrize(
    ("slopes", "operators"),
    [
        (torch.tensor([0.3]), {"LeakyRelu"}),
        (torch.tensor([0.3, -0.5, 1.0, 0.0]), {"Mul", "Max"}),
        (torch.tensor([0.3, -0.5, 1.5, 0.0]), {"PRelu"}),
    ],
    ids=["one slope", "by channel", "above 1"],
)
def test_prelu_is_written_in_faster_operators(slopes: torch.Tensor, operators: set[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.PReLU(len(slopes))
    layer.weight.data.copy_(slopes)
    x = torch.randn(5, 4, 3, 3)
    path = ck.export_onnx(layer, tmp_path / "m.onnx", (x[:2],))
    assert {node.op_type for node in onnx.load(path).graph.node} == operators
    runtime = session(path)
    np.testing.assert_array_equal(runtime.run(None, numpy_inputs(runtime, (x,)))[0], layer(x).detach().numpy())
