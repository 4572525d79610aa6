"""Parts along a dimension that varies, and turns of it, are right at other sizes than the example's."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.graph.capture import capture
from compresskit.measure import session

SIZES = [(4, 12, 6), (1, 13, 6), (7, 15, 6), (1, 5, 6), (7, 14, 6)]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "code",
    [
        lambda y, n: torch.tensor_split(y, 3, dim=1),
        lambda y, n: y.tensor_split(4, -2),
        lambda y, n: torch.tensor_split(y.transpose(0, 1), sections=2),
        lambda y, n: (*torch.tensor_split(y, indices=[2, n - 2], dim=1), *y.tensor_split(4, 2)),
        lambda y, n: torch.hsplit(y[:, : n // 2 * 2], 2),
        lambda y, n: (y.chunk(3, 1)[1], y.chunk(3, 1)[2]),
        lambda y, n: y.unsafe_chunk(2, 1)[0],
        lambda y, n: y.split(-(-n // 2), 1)[0],
        lambda y, n: y.unsafe_split(n // 2 + 1, -2)[1],
        lambda y, n: y.split(4, 1)[0],
    ],
    ids="tensor_split negative rows fixed hsplit chunk unsafe_chunk split unsafe_split first".split(),
)
def test_parts(code, tmp_path: Path) -> None:
    check(code, tmp_path)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "code",
    [
        lambda y, n: torch.roll(y, n // 2, 1),
        lambda y, n: torch.roll(y, (-n - 3, 2), (1, -1)),
        lambda y, n: y.roll(n // 3),
        lambda y, n: torch.roll(y, 5, 1),
        lambda y, n: torch.fft.fftshift(y, dim=1),
        lambda y, n: torch.fft.fftshift(y),
        lambda y, n: torch.fft.ifftshift(y, dim=(1, 2)),
        lambda y, n: torch.fft.ifftshift(torch.fft.fft(y, dim=1), dim=1).real,
    ],
    ids="half two all number fftshift everywhere ifftshift complex".split(),
)
def test_turns(code, tmp_path: Path) -> None:
    check(code, tmp_path)


def check(code, tmp_path: Path) -> None:
    """The graph and the file of a model with this code give what it gives, at all sizes, without a warning."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return code(self.layer(x), x.shape[1])

    torch.manual_seed(0)
    model, inputs = Net().eval(), [torch.randn(sizes) for sizes in SIZES]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decides by the sizes")
        graph = capture(model, inputs[0], dynamic=(0, 1)).module
    run = session(ck.export_onnx(model, tmp_path / "f.onnx", inputs[0], dynamic=(0, 1)))
    for x in inputs:
        wanted = model(x)
        wanted = [wanted] if isinstance(wanted, torch.Tensor) else wanted
        given = graph(x)
        for got in ([given] if isinstance(given, torch.Tensor) else given, run.run(None, {"x": x.numpy()})):
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(torch.as_tensor(a), b, rtol=1e-4, atol=1e-5)
