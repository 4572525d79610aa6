"""Sizes that inputs may have and no calibration data had, at which rounding leaves little of the outputs."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.measure import session
from compresskit.quant import quantize_static


class Coordinates(nn.Module):
    """A convolution that reads where each position is, as in CoordConv."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(18, 16, 3, 1, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        y = F.relu(self.a(x))
        rows, columns = torch.meshgrid(torch.arange(y.shape[2]) / 8.0, torch.arange(y.shape[3]) / 8.0, indexing="ij")
        grid = torch.stack([columns, rows])[None].expand(y.shape[0], -1, -1, -1)
        return self.c(F.relu(self.b(torch.cat([y, grid], 1))))


class Noisy(Coordinates):
    def forward(self, x):
        return super().forward(x) * torch.rand(())


def coordinates(kind: type[nn.Module] = Coordinates) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def images(*sizes: int) -> list[torch.Tensor]:
    return [torch.randn(4, 3, size, size) for size in sizes]


LOSS = r"at inputs of shape \[\(1, 3, 64, 64\)\], .* leaves 1\d\.\d dB of the output; at the one size .* [34]\d\.\d dB: calibrate"
VALUE = r"'(expand|cat)' has 0 to 7\.88 there, and its range is 0 to 3\.8\d; a name in skip="


@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_values_that_grow_with_the_size_are_warned_of(effort) -> None:
    with pytest.warns(UserWarning, match=rf"^quantize_static.*: {LOSS} .*; {VALUE}") as caught:
        quantize_static(coordinates(), images(32, 32, 32, 32), dynamic=(0, 2, 3), effort=effort)
    assert caught[-1].filename == __file__


def test_a_part_is_watched_inside_of_its_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), coordinates()).eval()
    named = {"x": {0: "batch", 2: "height", 3: "width"}}
    with pytest.warns(UserWarning, match=LOSS):
        quantize_static(model, images(32, 32), inside="1", dynamic=named)


@pytest.mark.parametrize(
    ("kind", "sizes", "dynamic"),
    [(Coordinates, (32, 64), (0, 2, 3)), (Coordinates, (32, 32), (0,)), (Noisy, (32, 32), (0, 2, 3))],
    ids=["both sizes", "one size", "random"],
)
def test_sizes_that_were_seen_or_are_not_allowed_are_not_warned_of(kind, sizes, dynamic) -> None:
    with warnings.catch_warnings(action="error"):
        quantize_static(coordinates(kind), images(*sizes), dynamic=dynamic)


def test_the_remedy_of_the_warning_helps(tmp_path) -> None:
    model, one, both = coordinates(), images(32, 32), images(32, 64, 32, 64)
    with pytest.warns(UserWarning, match=LOSS):
        poor = quantize_static(model, one, dynamic=(0, 2, 3))
    for quantized, least, most in ((poor, 0, 16), (quantize_static(model, both, dynamic=(0, 2, 3)), 30, 60)):
        run = session(ck.export_onnx(quantized, tmp_path / "f.onnx", one[0]))
        for rows in (1, 7):
            x = torch.randn(rows, 3, 64, 64)
            noise = torch.from_numpy(run.run(None, {"x": x.numpy()})[0]) - model(x)
            assert least < 10 * torch.log10(model(x).square().sum() / noise.square().sum()) < most
    path = ck.export_onnx(poor, tmp_path / "f.onnx", one[0])
    remark = r"at inputs of shape \(2, 3, 64, 64\) rounding leaves 1\d\.\d dB of the output, and [34]\d\.\d dB at the data's"
    with pytest.warns(UserWarning, match=remark):
        assert re.match(remark, ck.verify_onnx(path, poor, one).other_sizes)


def test_sizes_that_the_graph_alone_does_not_take_are_no_fault_of_the_data(tmp_path) -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, 2, 1)

        def forward(self, x):
            y = self.conv(x)
            return y + torch.ones(int(y.shape[3])).view(1, 1, 1, -1)

    model, x = Halved().eval(), torch.randn(4, 3, 16, 16)
    with pytest.warns(UserWarning, match=r"right only where .* == 8"):
        quantized = quantize_static(model, [x], dynamic=(0, 2, 3))
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", x)
    wanted = (
        r"not run on inputs of shape \[\(2, 3, 24, 24\)\]: .*; its graph is that of the first .* a first batch of larger ones"
    )
    with pytest.raises(ModelError, match=wanted):
        ck.verify_onnx(path, quantized, [x, torch.randn(2, 3, 24, 24)])
