"""Transforms of real numbers over a length that varies run in ONNX Runtime at every length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fft import irfft, irfft2, irfftn, rfft, rfft2, rfftn

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.measure import session


class Filter(nn.Module):
    def __init__(self, code) -> None:
        super().__init__()
        self.layer, self.code = nn.Linear(6, 6), code

    def forward(self, x):
        return self.code(self.layer(x))


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "code",
    [
        lambda y: irfft(rfft(y, dim=1) * 2, n=y.shape[1], dim=1),
        lambda y: irfft(rfft(y, dim=-2) * 2, dim=-2, norm="ortho"),
        lambda y: irfft(rfft(y, dim=1)[:, :3], n=y.shape[1], dim=1, norm="forward"),
        lambda y: irfft(torch.complex(y, y * 3), n=y.shape[1], dim=1),
        lambda y: irfft(torch.complex(y, y.flip(1)), n=9, dim=1),
        lambda y: irfft(torch.complex(y, y.flip(1)), n=3, dim=1),
        lambda y: irfft(y, n=y.shape[1] * 3 + 1, dim=1),
        lambda y: irfft2(rfft2(y, dim=(2, 1)) * 2, s=(6, y.shape[1]), dim=(2, 1)),
        lambda y: irfftn(rfftn(y, dim=(2, 1), norm="ortho") * 2, dim=(2, 1), norm="ortho"),
        lambda y: irfft2(rfft2(y.transpose(1, 2)) * 2),
    ],
    ids=["length", "even", "short", "any numbers", "fixed", "cut", "padded", "two", "many", "last two"],
)
def test_inverses_of_a_length_that_varies(code, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Filter(code).eval(), [torch.randn(size) for size in ((3, 8, 6), (2, 7, 6), (1, 5, 6), (4, 12, 6))]
    run = session(ck.export_onnx(model, tmp_path / "f.onnx", inputs[0], dynamic=(0, 1)))
    for x in inputs:
        (got,) = run.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), model(x), rtol=1e-4, atol=1e-4)


def test_hermitian_transforms_of_a_length_that_varies_are_refused_with_their_line(tmp_path: Path) -> None:
    model, x = Filter(lambda y: torch.fft.hfft(torch.complex(y, y), dim=1)).eval(), torch.randn(3, 8, 6)
    with pytest.raises(ModelError, match=r"fft_hfft\.default over a dimension that varies \(at .*test_fourier\.py:.*irfft of"):
        ck.export_onnx(model, tmp_path / "f.onnx", x, dynamic=(0, 1))
