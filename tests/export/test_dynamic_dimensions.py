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


class TwoSequences(nn.Module):
    """A decoder's queries over an encoder's keys, in small: two sequences of lengths of their own in one batch."""

    def __init__(self):
        super().__init__()
        self.table, self.key, self.query = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 50)

    def forward(self, src, tgt):
        key, query = self.key(self.table(src).relu()).relu(), self.query(self.table(tgt).relu()).relu()
        return self.head((query @ key.mT).softmax(-1) @ key)


class TextsAndPictures(nn.Module):
    """How much each text is like each picture, as CLIP says it: there may be more texts than pictures."""

    def __init__(self):
        super().__init__()
        self.table, self.conv = nn.Embedding(50, 32), nn.Conv2d(3, 32, 3, stride=2)
        self.text, self.picture = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, ids, pixels):
        return self.text(self.table(ids).mean(1)) @ self.picture(self.conv(pixels).relu().mean((2, 3))).mT


def sequences(rows: int, source: int, target: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 50, (rows, source)), torch.randint(0, 50, (rows, target))


def texts_and_pictures(texts: int, pictures: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 50, (texts, 7)), torch.randn(pictures, 3, 9, 9)


def dimensions(values) -> list[list[str | int]]:
    return [[*value.shape] for value in values]


@pytest.mark.matrix
@pytest.mark.parametrize("quantize", [None, ck.quant.quantize_dynamic, quantize_static], ids=["float", "dynamic", "static"])
@pytest.mark.parametrize(
    ("kind", "dynamic", "batches", "inputs", "output"),
    [
        (
            TwoSequences,
            (0, 1),
            [sequences(2, *lengths) for lengths in ((8, 6), (5, 4), (4, 6))],
            [["batch", "dim_1"], ["batch", "tgt_dim_1"]],
            ["batch", "tgt_dim_1", 50],
        ),
        (
            TextsAndPictures,
            (0,),
            [texts_and_pictures(*rows) for rows in ((3, 2), (2, 2), (4, 7))],
            [["batch", 7], ["pixels_batch", 3, 9, 9]],
            ["batch", "pixels_batch"],
        ),
    ],
    ids=["lengths", "rows"],
)
def test_sizes_of_their_own_have_names_of_their_own(quantize, kind, dynamic, batches, inputs, output, tmp_path) -> None:
    """ONNX Runtime plans its memory by names: files with one name for two sizes did not run at the example itself."""
    torch.manual_seed(0)
    model = kind().eval()
    if kind is TextsAndPictures:
        batches = [texts_and_pictures(*rows) for rows in ((3, 2), (2, 2), (4, 7), (1, 1))]  # after the seed
    written = quantize(model, batches if quantize is quantize_static else batches[:1], dynamic=dynamic) if quantize else model
    path = ck.export_onnx(written, tmp_path / "f.onnx", batches[0], dynamic=dynamic)
    assert dimensions(session(path).get_inputs()) == inputs
    assert dimensions(session(path).get_outputs()) == [output]
    assert ck.verify_onnx(path, written, batches).passed


class Computed(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice = nn.ConvTranspose1d(4, 4, 3, stride=2, padding=1)

    def forward(self, x, y):
        return self.twice(x), torch.cat([y, y], 2), torch.cat([x, x], 0)


def test_sizes_computed_of_others_are_written_with_their_names(tmp_path) -> None:
    path = ck.export_onnx(Computed(), tmp_path / "f.onnx", (torch.randn(2, 4, 8), torch.randn(2, 4, 6)), dynamic=(0, 2))
    assert dimensions(session(path).get_outputs()) == [
        ["batch", 4, "2*dim_2 - 1"],
        ["y_batch", 4, "2*y_dim_2"],
        ["2*batch", 4, "dim_2"],
    ]
    names = {"x": {0: "my rows", 2: "length"}, "y": {0: "my rows"}}
    path = ck.export_onnx(Computed(), tmp_path / "f.onnx", (torch.randn(2, 4, 8), torch.randn(2, 4, 6)), dynamic=names)
    assert dimensions(session(path).get_outputs()) == [
        ["my rows", 4, "2*length - 1"],
        ["my rows", 4, 12],
        ["2*(my rows)", 4, "length"],
    ]


def test_one_name_for_two_sizes_is_refused_before_any_work(tmp_path) -> None:
    model, example = TwoSequences().eval(), sequences(2, 8, 6)
    dynamic = {"src": {0: "batch", 1: "length"}, "tgt": {0: "batch", 1: "length"}}
    message = re.escape(
        "dynamic: 'length' names dimension 1 of input 'src' and dimension 1 of input 'tgt'; wanted one size for one name, got 8"
        " and 6 in the example: give each a name of its own"
    )
    for act in (
        lambda: ck.export_onnx(model, tmp_path / "f.onnx", example, dynamic=dynamic),
        lambda: ck.quant.quantize_dynamic(model, example, dynamic=dynamic),
    ):
        with pytest.raises(SettingError, match=message):
            act()
    dynamic["tgt"][1] = "other length"
    quantized = ck.quant.quantize_dynamic(model, example, dynamic=dynamic)
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", example)
    assert dimensions(session(path).get_inputs()) == [["batch", "length"], ["batch", "other length"]]
    assert ck.verify_onnx(path, quantized, [example, sequences(3, 4, 9)]).passed


class Positions(nn.Module):
    def forward(self, *values, scale=2.0, **unused):
        return values[0] * scale, values[1] - 1


def test_names_are_those_of_inputs_given_by_position(tmp_path) -> None:
    """A parameter that takes no position, behind those that do, stood for the first of them."""
    dynamic = {"values_0": {0: "rows"}, "values_1": {0: "others"}}
    path = ck.export_onnx(Positions(), tmp_path / "f.onnx", (torch.randn(3, 4), torch.randn(2, 5)), dynamic=dynamic)
    assert dimensions(session(path).get_inputs()) == [["rows", 4], ["others", 5]]
