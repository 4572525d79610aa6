"""Indices of int32 run in ONNX Runtime, and give what the model gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.measure import session


class Indexed(nn.Module):
    def __init__(self, code) -> None:
        super().__init__()
        self.layer, self.code = nn.Linear(6, 6), code
        self.register_buffer("i", torch.tensor([0, 2, 1, -1], dtype=torch.int32))
        self.register_buffer("wide", torch.tensor([0, 2, 1, 5]))

    def forward(self, x, k):
        return self.code(self, self.layer(x), k)


def _written(m, y, k):
    y = y.clone()
    y[:, m.i] = 0.0
    y[:, k] = y[:, :2] * 2
    return y


@pytest.mark.parametrize(
    "code",
    [
        lambda m, y, k: y[:, m.i],
        lambda m, y, k: y[k],
        lambda m, y, k: y.unsqueeze(-1)[:, m.i, 0],
        lambda m, y, k: y[:, None].expand(-1, 6, -1)[:, m.i, m.wide],
        lambda m, y, k: y.sum() + m.layer.weight[m.i.view(2, 2)],
        _written,
        lambda m, y, k: y.index_put((k[:, None], m.i), y[:2, :4], accumulate=True),
        lambda m, y, k: y.index_add(1, m.i[:3], y[:, :3]),
    ],
    ids=["buffer", "input", "beside a number", "mixed", "stored table", "written", "accumulated", "added"],
)
def test_indices_that_are_no_int64(code, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, k = Indexed(code).eval(), torch.tensor([1, 0], dtype=torch.int32)
    dynamic = {"x": {0: "batch"}}
    run = session(ck.export_onnx(model, tmp_path / "f.onnx", (torch.randn(4, 6), k), dynamic=dynamic))
    for rows in (2, 7):
        x = torch.randn(rows, 6)
        fed = {"x": x.numpy(), "k": k.numpy()}
        (got,) = run.run(None, {put.name: fed[put.name] for put in run.get_inputs()})
        torch.testing.assert_close(torch.from_numpy(got), model(x, k), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("center", [True, False])
def test_inverse_short_time_transforms_run(center: bool, tmp_path: Path) -> None:
    class Inverse(nn.Module):
        def forward(self, x):
            return torch.istft(torch.view_as_complex(x), 8, 4, window=torch.ones(8), center=center)

    torch.manual_seed(0)
    model = Inverse().eval()
    run = session(ck.export_onnx(model, tmp_path / "f.onnx", torch.randn(2, 5, 6, 2)))
    for rows in (1, 7):
        x = torch.randn(rows, 5, 6, 2)
        torch.testing.assert_close(torch.from_numpy(run.run(None, {"x": x.numpy()})[0]), model(x), rtol=1e-4, atol=1e-5)
