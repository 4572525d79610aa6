"""Dimensions that vary: captured, exported, and refused."""

from __future__ import annotations

import re

import networks
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError, SettingError
from compresskit.measure import numpy_inputs, session
from compresskit.quant import quantize_static


def test_files_accept_other_sizes_in_varying_dimensions(tmp_path) -> None:
    model = nn.Sequential(networks.conv(3, 16), networks.conv(16, 16, s=2), nn.Conv2d(16, 4, 1))
    model = networks.trained_like(model, image(16))
    for dynamic, names in (
        ((0, 2, 3), ["batch", 3, "dim_2", "dim_3"]),
        ({"input": {0: "images", 2: "height"}}, ["images", 3, "height", 16]),
        ((), [4, 3, 16, 16]),
    ):
        path = ck.export_onnx(model, tmp_path / "f.onnx", image(4), dynamic=dynamic)
        runtime = session(path)
        assert runtime.get_inputs()[0].shape == names
        tall = torch.randn(4, 3, 30, 16) if names[2] != 16 else torch.randn(4, 3, 16, 16)
        with torch.no_grad():
            wanted = model(tall)
        got = runtime.run(None, numpy_inputs(runtime, (tall,)))[0]
        torch.testing.assert_close(torch.from_numpy(got), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dims", [(0,), [0], {0}, {0: 1}, {0: torch.export.Dim("b")}, {0: None}], ids=repr)
def test_dimensions_of_an_input_without_their_names_are_refused_before_any_work(dims, tmp_path) -> None:
    """`torch.export` takes some of them."""
    model, x = nn.Linear(8, 8).eval(), (torch.randn(4, 8),)
    wanted = re.escape('or their names for each input, {"x": {0: "batch"}}, or () for none, got {\'input\': ')
    for act in (
        lambda **given: ck.export_onnx(model, tmp_path / "f.onnx", x, **given),
        lambda **given: quantize_static(model, [x], **given),
        lambda **given: ck.quant.quantize_weights(model, [x], **given),
    ):
        with pytest.raises(SettingError, match=wanted):
            act(dynamic={"input": dims})


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ((0, 4), "no input has a dimension 4"),
        ({"y": {0: "batch"}}, r"dynamic=\{'y': \.\.\.\}: the inputs are \['x'\]"),
        ({"x": {7: "depth"}}, r"input 'x' has dimensions 0\.\.3, got 7"),
    ],
)
def test_dimensions_that_inputs_do_not_have_are_refused(dynamic, message, tmp_path) -> None:
    with pytest.raises(SettingError, match=message):
        ck.export_onnx(build(networks.Chain), tmp_path / "f.onnx", image(2), dynamic=dynamic)
    with pytest.raises(SettingError, match=message):
        quantize_static(build(networks.Chain), [image(2)], dynamic=dynamic)


def test_a_varying_dimension_of_size_one_is_refused() -> None:
    model = nn.Conv2d(3, 4, (3, 1), padding=(1, 0)).eval()
    with pytest.raises(SettingError, match="dimension 3 of input 'input' is 1 in the example"):
        quantize_static(model, [(torch.randn(4, 3, 8, 1),)], dynamic=(0, 2, 3))


def test_code_that_depends_on_values_is_refused_with_its_line(tmp_path) -> None:
    class Selects(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            x = self.conv(x)
            if x.sum() > 0:
                return x
            return -x

    class Keeps(Selects):
        def forward(self, x):
            x = self.conv(x)
            kept = x[x.mean((1, 2, 3)) > 0]
            if len(kept) > 1:
                return kept[:1]
            return kept

    for kind, line in ((Selects, r"x\.sum\(\) > 0"), (Keeps, r"len\(kept\) > 1")):
        for call in (
            lambda kind=kind: ck.export_onnx(kind(), tmp_path / "f.onnx", image(2)),
            lambda kind=kind: quantize_static(kind(), [image(2)]),
        ):
            with pytest.raises(ModelError, match=rf"(?s)cannot be captured as a graph.*{line}.*inside='backbone'"):
                call()
    assert not list(tmp_path.iterdir())


class Extra(nn.Module):
    """Takes more than it names, as base classes of detectors do."""

    def forward(self, x, *more, scale=None, **unused):
        y = x * 2 + sum(more)
        return y if scale is None else y * scale


@pytest.mark.parametrize("names", [("x",), ("x", "scale")])
@pytest.mark.parametrize("more", [0, 1, 2])
def test_the_batch_varies_where_forward_takes_more_positions(names, more, tmp_path) -> None:
    def inputs(rows):
        if more:
            return tuple(torch.randn(rows, 4) for _ in range(1 + more))
        return {name: torch.randn(rows, 4) for name in names}

    path = ck.export_onnx(Extra(), tmp_path / "f.onnx", inputs(2))
    assert ck.verify_onnx(path, Extra(), [inputs(5), inputs(1)]).passed


def test_a_single_input_varies_where_forward_takes_more_positions(tmp_path) -> None:
    path = ck.export_onnx(Extra(), tmp_path / "f.onnx", torch.randn(2, 4))
    assert ck.verify_onnx(path, Extra(), [torch.randn(5, 4)]).passed


class Batch(nn.Module):
    """Takes a batch by name, as wrappers of a user's own do; its write and `std` are decomposed."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(16, 4), nn.Linear(4, 4)

    def forward(self, **batch):
        y = self.layer(batch["x"] + self.table.weight[None, : batch["x"].shape[1]])
        y[:, 0] = 0.5
        return y / y.std(2, keepdim=True)


@pytest.mark.skipif(torch.__version__ < "2.14", reason="torch 2.11's export names no dimensions of what is in **batch")
def test_a_length_varies_where_forward_takes_a_batch_by_name(tmp_path) -> None:
    model, x = Batch().eval(), torch.randn(4, 6, 4)
    other = {"x": torch.randn(3, 9, 4)}
    path = ck.export_onnx(model, tmp_path / "f.onnx", {"x": x}, dynamic=(0, 1))
    assert ck.verify_onnx(path, model, [{"x": x}, other]).passed
    quantized = quantize_static(model, [{"x": x}], dynamic=(0, 1))
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", {"x": x})
    assert ck.verify_onnx(path, quantized, [{"x": x}, other]).passed


class Windows(nn.Module):
    """Pads its steps to whole windows of 4, whose number it finds by the usual division that rounds up, and averages each."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        count = -(-x.shape[1] // 4)
        padded = nn.functional.pad(self.layer(x), (0, 0, 0, count * 4 - x.shape[1]))
        return padded.unflatten(1, (count, 4)).mean(2) * ((x.shape[1] - 20) // 3)


@pytest.mark.parametrize("kind", ["float", "static"])
def test_sizes_are_divided_towards_minus_infinity(kind, tmp_path) -> None:
    torch.manual_seed(0)
    model, example = Windows().eval(), torch.randn(4, 12, 6)
    written = quantize_static(model, [example], dynamic=(0, 1)) if kind == "static" else model
    run = session(ck.export_onnx(written, tmp_path / "f.onnx", example, dynamic=(0, 1)))
    for length in (5, 12, 13, 15, 23, 24):
        x = torch.randn(2, length, 6)
        (got,) = run.run(None, numpy_inputs(run, (x,)))
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(got), written(x))
