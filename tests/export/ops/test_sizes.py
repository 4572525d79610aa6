"""Numbers that code computes of sizes are what Python computes, at sizes that the example has not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import ExportError
from compresskit.measure import session


class Sized(nn.Module):
    def __init__(self, code) -> None:
        super().__init__()
        self.layer, self.code = nn.Linear(2, 2), code

    def forward(self, x):
        return self.layer(x) * 0 + self.code(x.shape[1])


@pytest.mark.parametrize(
    "code",
    [
        lambda n: math.sqrt(n),
        lambda n: round(n * 0.4),
        lambda n: round(n / 2),
        lambda n: n >> 1,
        lambda n: (-n >> 2) + (n << 2),
        lambda n: 1 << (n // 5),
        lambda n: (n & 3) + (n | 4),
        lambda n: divmod(n, 3)[0] * 10 + divmod(n, 3)[1],
        lambda n: sum(divmod(100, n)),
    ],
    ids="sqrt round halves shift shifts power bits divmod divided".split(),
)
def test_numbers_of_sizes(code, tmp_path: Path) -> None:
    check(code, (12, 5, 13, 15, 14), tmp_path)


@pytest.mark.parametrize(
    "code",
    [
        lambda n: math.ceil(n * 0.3),
        lambda n: math.floor(0.35 * n),
        lambda n: round(n * 0.14),
        lambda n: math.trunc(n * 0.29),
        lambda n: math.ceil((n + 1) * 0.3 - 0.1 * n),
        lambda n: math.floor(-(n * 0.3)),
        lambda n: round(math.sqrt(n) / 0.1),
        lambda n: math.ceil(n / 3) + math.ceil(100 / n),
    ],
    ids="ceil floor round trunc sums negative root quotient".split(),
)
def test_numbers_are_rounded_as_in_double_precision(code, tmp_path: Path) -> None:
    """In single precision, 50 * 0.3 is a little more than 15."""
    check(code, (12, 50, 75, 90, 100, 150, 180, 225), tmp_path)


def check(code, lengths: tuple[int, ...], tmp_path: Path) -> None:
    model = Sized(code).eval()
    run = session(ck.export_onnx(model, tmp_path / "f.onnx", torch.randn(4, lengths[0], 2), dynamic=(0, 1)))
    for rows in (1, 7):
        for length in lengths:
            x = torch.randn(rows, length, 2)
            (got,) = run.run(None, {"x": x.numpy()})
            torch.testing.assert_close(torch.from_numpy(got), model(x), rtol=1e-6, atol=1e-6)


def test_rounding_to_digits_is_refused_with_its_line(tmp_path: Path) -> None:
    model = Sized(lambda n: round(n * 0.37, 1)).eval()
    with pytest.raises(ExportError, match=r"exporter failed: round\(\) to digits, of a number .* \(at .*test_sizes\.py:\d+: "):
        ck.export_onnx(model, tmp_path / "f.onnx", torch.randn(4, 12, 2), dynamic=(0, 1))
