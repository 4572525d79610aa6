"""Operators that torch's ONNX exporter has no translation for are written as others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.measure import session


class Composed(nn.Module):
    def __init__(self, code) -> None:
        super().__init__()
        self.layer, self.code = nn.Linear(6, 6), code

    def forward(self, x):
        return self.code(self.layer(x), x)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "code",
    [
        lambda y, x: F.rrelu(y, 0.1, 0.4) + F.rrelu(y),
        lambda y, x: y + F.rrelu_(y, 0.1, 0.4),
        lambda y, x: torch.cdist(y, x * 2),
        lambda y, x: torch.cdist(y, x[:, :3], p=1),
        lambda y, x: torch.cdist(y, y[:1], p=torch.inf) + torch.cdist(y, y[:1], p=3.0),
        lambda y, x: torch.cdist(torch.cat([y, x], 2), torch.cat([x, y], 2)),
        lambda y, x: torch.cdist(torch.cat([y, x], 2).transpose(1, 2), torch.cat([x, y], 2).transpose(1, 2)),
        lambda y, x: y.cumprod(1),
        lambda y, x: y.round().cumprod(-1),
        lambda y, x: (3 * y).round().cumprod(1),
        lambda y, x: y.median(1),
        lambda y, x: y.median(-1, keepdim=True),
        lambda y, x: y.median() + y[0, 0].median(),
        lambda y, x: y.kthvalue(2, 1),
        lambda y, x: y.kthvalue(6, keepdim=True)[0],
        lambda y, x: torch.isin(y.argmax(-1), torch.tensor([[1, 3]])),
        lambda y, x: torch.isin(y.argmax(-1), x.argmin(-1), invert=True),
        lambda y, x: torch.searchsorted(torch.linspace(-2, 2, 9).round(), y.round()),
        lambda y, x: torch.searchsorted(y.sort(1).values.mT.contiguous(), x.mT.contiguous(), right=True, out_int32=True),
        lambda y, x: torch.searchsorted(x.round().sort(-1).values, x.round().flip(-1), side="right"),
    ],
    ids=[
        "rrelu", "rrelu in place", "cdist", "cdist 1", "cdist of a broadcast", "cdist by products", "cdist of other lengths",
        "cumprod", "cumprod of a fixed size", "cumprod of zeros", "median", "median of a fixed size", "median of all", "kthvalue",
        "largest", "isin", "isin inverted", "searchsorted", "searchsorted of rows", "searchsorted right",
    ],
)  # fmt: skip
def test_operators_without_a_translation(code, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Composed(code).eval(), [torch.randn(size) for size in ((3, 8, 6), (2, 7, 6), (1, 5, 6), (4, 40, 6))]
    run = session(ck.export_onnx(model, tmp_path / "f.onnx", inputs[0], dynamic=(0, 1)))
    for x in inputs:
        wanted = model(x)
        found = run.run(None, {"x": x.numpy()})
        for got, value in zip(found, wanted if isinstance(wanted, tuple) else [wanted], strict=True):
            torch.testing.assert_close(torch.from_numpy(got), value, rtol=1e-4, atol=1e-4)


def test_rrelu_is_a_layer_of_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv1d(3, 8, 3), nn.RReLU(inplace=True), nn.Conv1d(8, 4, 3)).eval(), torch.randn(4, 3, 16)
    quantized = ck.quant.quantize_static(model, [x])
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", x)
    assert ck.verify_onnx(path, quantized, [torch.randn(7, 3, 16)]).passed
