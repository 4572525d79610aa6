"""Calls that torch cannot trace where sizes vary are traced as others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.graph.capture import capture
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


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid behavior has changed for unit-size grids")
@pytest.mark.parametrize("align_corners", [True, False])
def test_grids_of_images_whose_sizes_vary(align_corners: bool, tmp_path: Path) -> None:
    class Transformer(nn.Module):
        def forward(self, x, theta):
            grid = F.affine_grid(theta, x.shape, align_corners=align_corners)
            return F.grid_sample(x, grid, align_corners=align_corners)

    def inputs(*sizes: int):
        return torch.randn(sizes[0], 2, *sizes[1:]), torch.eye(2, 3) + 0.1 * torch.randn(sizes[0], 2, 3)

    torch.manual_seed(0)
    model, dynamic = Transformer().eval(), {"x": {0: "batch", 2: "height", 3: "width"}, "theta": {0: "batch"}}
    run = session(ck.export_onnx(model, tmp_path / "f.onnx", inputs(3, 12, 10), dynamic=dynamic))
    for sizes in ((3, 12, 10), (1, 9, 15), (7, 5, 1)):
        x, theta = inputs(*sizes)
        (got,) = run.run(None, {"x": x.numpy(), "theta": theta.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), model(x, theta), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid behavior has changed for unit-size grids")
@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("sizes", [(4, 3), (1, 5), (3, 1, 4)])
def test_grids_are_those_of_torch(align_corners: bool, sizes: tuple[int, ...]) -> None:
    """Over one dimension that varies, and three that do."""

    class Grid(nn.Module):
        def forward(self, x, theta):
            return F.affine_grid(theta, x.shape, align_corners=align_corners)

    def inputs(*sizes: int):
        return torch.randn(2, 1, *sizes), torch.randn(2, len(sizes), len(sizes) + 1)

    example = inputs(*(size + 2 for size in sizes))
    dynamic = {"x": {0: "batch", **{d: f"size_{d}" for d in range(2, len(sizes) + 2)}}, "theta": {0: "batch"}}
    module = capture(Grid(), example, dynamic=dynamic).module
    given = inputs(*sizes)
    torch.testing.assert_close(module(*given), Grid()(*given))


class GlobalNorm(nn.Module):
    """Asteroid's global layer norm."""

    def forward(self, x):
        dims = torch.arange(1, x.ndim).tolist()
        mean = x.mean(dim=dims, keepdim=True)
        first = torch.arange(1).item()
        return (x - mean) / (first + ((x - mean) ** 2).mean(dim=dims, keepdim=True)).sqrt()


def test_numbers_of_a_range_are_numbers(tmp_path: Path) -> None:
    model = GlobalNorm().eval()
    path = ck.export_onnx(model, tmp_path / "f.onnx", torch.randn(3, 4, 5), dynamic=(0, 2))
    assert ck.verify_onnx(path, model, [torch.randn(7, 4, 9), torch.randn(1, 4, 5)]).passed


def test_a_range_that_is_written_is_no_range() -> None:
    class Written(nn.Module):
        def forward(self, x):
            dims = torch.arange(1, 3)
            dims[0] = 2
            return x.mean(dim=dims[:1].tolist()) + x.mean(dim=dims.tolist()[0])

    with pytest.raises(ModelError, match=r"test_traced_calls\.py"):
        capture(Written(), torch.randn(3, 4, 5))


@pytest.mark.matrix
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    "line",
    [
        lambda y, n: torch.linspace(-1, 1, n),
        lambda y, n: torch.linspace(start=0.5, end=n - 0.5, steps=n, device=y.device, dtype=y.dtype),
        lambda y, n: torch.linspace(torch.tensor(3.0), y.detach().sum() * 0, n),
        lambda y, n: torch.linspace(0, 10, n, dtype=torch.int64) + torch.linspace(2, 7, n, dtype=torch.float64),
        lambda y, n: torch.linspace(0, 1, 3).sum() + y[0, 0, 0] * 0,
    ],
    ids="numbers sizes tensors dtypes fixed".split(),
)
def test_lines_of_as_many_steps_as_a_size_that_varies(line, stride: int, tmp_path: Path) -> None:
    """As in soft-argmax and grids of coordinates, also where the size is a quotient."""

    class Expectation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, stride, 1)

        def forward(self, x):
            y = self.conv(x).sum(2, keepdim=True)
            return line(y, y.shape[-1]), (y.softmax(-1) * line(y, y.shape[-1])).sum(-1)

    torch.manual_seed(0)
    model = Expectation().eval()
    run = session(ck.export_onnx(model, tmp_path / "f.onnx", torch.randn(3, 3, 16, 16), dynamic=(0, 2, 3)))
    for shape in ((3, 3, 16, 16), (1, 3, 8, 33), (7, 3, 5, 4), (2, 3, 4, 1)):
        x = torch.randn(shape)
        for got, wanted in zip(run.run(None, {"x": x.numpy()}), model(x), strict=True):
            torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-6, atol=1e-6)
