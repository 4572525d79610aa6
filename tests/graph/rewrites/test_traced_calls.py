"""Calls that torch cannot trace where sizes vary are traced as others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.measure import session


@pytest.mark.parametrize(
    "code",
    [
        lambda y: torch.take_along_dim(y, y.argsort(1), 1),
        lambda y: y.take_along_dim(y[:1].argsort(-1), dim=-1),
        lambda y: torch.take_along_dim(y[:1], y.argsort(-2), dim=-2),
        lambda y: torch.take_along_dim(y, y.argmax()[None, None]),
    ],
    ids=["same sizes", "broadcast indices", "broadcast values", "flat"],
)
def test_values_taken_along_a_dimension(code, tmp_path: Path) -> None:
    class Taken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return code(self.layer(x))

    torch.manual_seed(0)
    model, inputs = Taken().eval(), [torch.randn(size) for size in ((3, 4, 6), (5, 7, 6), (1, 2, 6))]
    run = session(ck.export_onnx(model, tmp_path / "f.onnx", inputs[0], dynamic=(0, 1)))
    for x in inputs:
        (got,) = run.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), model(x), rtol=1e-4, atol=1e-5)
