"""Running a file at sizes that its data has not, where it names dimensions that vary."""

from __future__ import annotations

import warnings

import networks
import onnx
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.export.check.other_sizes import _other_sizes, resized_inputs, sizes_by_name
from compresskit.quant import quantize_dynamic, quantize_static


class Spread(nn.Module):
    """A variance of which the exporter keeps what `correction` is for the example."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x, unused=None):
        return self.linear(x).var(1, correction=x.shape[1] // 4)


class Strict(nn.Module):
    """Takes multiples of 4 alone, and no more than its table has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 4), nn.Parameter(torch.randn(20, 8))

    def forward(self, x):
        x = self.linear(x + self.table[: x.shape[1]])
        return x.view(x.shape[0], x.shape[1] // 4, 16)


@pytest.mark.parametrize("named", [False, True])
def test_a_number_that_the_exporter_keeps_is_warned_of(named, tmp_path) -> None:
    model, x = Spread().eval(), torch.randn(4, 20, 8)
    inputs = {"x": x, "unused": None} if named else (x,)
    path = ck.export_onnx(model, tmp_path / "f.onnx", inputs, dynamic={"x": {0: "batch", 1: "length"}})
    with pytest.warns(UserWarning, match=r"f.onnx names dimensions .* \(1, 10, 8\) the file gives something else") as caught:
        proof = ck.verify_onnx(path, model, [inputs])
    assert caught[0].filename == __file__
    assert proof.passed
    assert "(1, 10, 8)" in proof.other_sizes
    assert f"but {proof.other_sizes}" in str(proof)
    assert proof.to_json()["other_sizes"] == proof.other_sizes
    with warnings.catch_warnings(action="error"):  # of a size that the file is fixed to, nothing is claimed
        fixed = ck.verify_onnx(ck.export_onnx(model, tmp_path / "g.onnx", inputs, dynamic=(0,)), model, [inputs])
    assert fixed.passed
    assert not fixed.other_sizes


def test_a_file_that_runs_at_the_size_of_its_example_alone_is_warned_of(tmp_path) -> None:
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(48, 5)).eval(), torch.randn(4, 3, 4, 4)
    file = onnx.load(ck.export_onnx(model, tmp_path / "f.onnx", (x,), dynamic=()))
    file.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    del file.graph.output[0].type.tensor_type.shape.dim[:]
    for node in file.graph.node:
        if node.op_type in {"Flatten", "Reshape"}:
            node.op_type, node.input[1:] = "Reshape", ["rows"]
            del node.attribute[:]
    file.graph.initializer.append(onnx.helper.make_tensor("rows", onnx.TensorProto.INT64, [2], [4, 48]))
    onnx.save(file, tmp_path / "g.onnx")
    with pytest.warns(UserWarning, match=r"\(2, 3, 4, 4\) the file does not run where its model does: .*Reshape"):
        proof = ck.verify_onnx(tmp_path / "g.onnx", model, [(x,)])
    assert proof.passed
    assert "does not run" in proof.other_sizes


@pytest.mark.matrix
@pytest.mark.parametrize("quantize", [None, quantize_static, quantize_dynamic])
@pytest.mark.parametrize("network", [networks.Residual, networks.Chain])
def test_files_that_are_right_at_every_size_are_not_warned_of(network, quantize, tmp_path) -> None:
    model, example = build(network), image(8)
    if quantize:
        model = quantize(model, [example], dynamic=(0, 2, 3))
    path = ck.export_onnx(model, tmp_path / "f.onnx", example, dynamic=None if quantize else (0, 2, 3))
    proof = ck.verify_onnx(path, model, [example])
    assert proof.passed, proof
    assert not proof.other_sizes, proof


def test_rows_that_the_file_is_fixed_to_stay(tmp_path) -> None:
    model, x = nn.LSTM(6, 4, batch_first=True).eval(), torch.randn(5, 8, 6)
    path = ck.export_onnx(model, tmp_path / "f.onnx", (x,), dynamic={"input": {1: "length"}})
    proof = ck.verify_onnx(path, model, [(x,)])
    assert proof.passed, proof
    assert not proof.other_sizes


def test_sizes_that_the_model_does_not_take_are_left_out(tmp_path) -> None:
    model, x = Strict().eval(), torch.randn(2, 16, 8)
    path = ck.export_onnx(model, tmp_path / "f.onnx", (x,), dynamic=(0, 1))
    proof = ck.verify_onnx(path, model, [(x,)])
    assert proof.passed, proof
    assert not proof.other_sizes, proof


def test_all_dimensions_of_a_name_change_together() -> None:
    inputs = {"x": torch.arange(12.0).view(2, 6), "mask": torch.ones(6, 6), "scale": torch.ones(1), "rest": 3}
    names = {"x": ["batch", "length"], "mask": ["length", "length"], "scale": [1]}
    found = [resized_inputs(inputs, names, sizes) for sizes in _other_sizes(*sizes_by_name(inputs, names))]
    assert [[tuple(value.shape) for value in list(each.values())[:3]] for each in found] == [
        [(1, 3), (3, 3), (1,)], [(3, 7), (7, 7), (1,)], [(2, 12), (12, 12), (1,)],
    ]  # fmt: skip
    assert found[1]["x"][2].tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert all(each["rest"] == 3 for each in found)


def test_of_a_dimension_of_no_entries_no_other_size_is_made(tmp_path) -> None:
    class Joined(nn.Module):
        def forward(self, x, past):
            return torch.cat([past, x], 1).sum(1)

    x, past = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    path = ck.export_onnx(model := Joined(), tmp_path / "f.onnx", (x, past), dynamic=(0, 1))
    proof = ck.verify_onnx(path, model, [(x, past[:, :0])])
    assert proof.passed, proof
    assert not proof.other_sizes
