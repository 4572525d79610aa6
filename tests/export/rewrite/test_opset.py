"""Files in the operators of older opsets compute the same, and what has no form in one is named with the lowest that has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

import compresskit as ck
from compresskit.base.errors import ExportError, SettingError
from compresskit.export.rewrite.opset import check_lowered, first_unknown, lower_opset_, lowest_opset
from compresskit.quant import BlockScheme, quantize_dynamic, quantize_static, quantize_weights
from compresskit.quant.numerics.targets import X86_NO_VNNI

NUMBERS = {
    "axes": np.array([-1], np.int64),
    "pads": np.array([1, 2], np.int64),
    "weight": np.linspace(0.5, 2, 7, dtype=np.float32),
    "bias": np.linspace(-1, 1, 7, dtype=np.float32),
    "shape": np.array([2, -1], np.int64),
    "two pads": np.array([1, 2, 3, 0], np.int64),
    "two axes": np.array([-1, 1], np.int64),
    "table": np.linspace(0.5, 2, 21, dtype=np.float32).reshape(3, 7),
    "no rows": np.array([0, 21], np.int64),
    "boxes": np.array([[0, 0, 2, 2]], np.float32),
    "rows": np.array([0], np.int64),
}
#: Operators in the form of opset 18: inputs, outputs, attributes. The input x is (2, 3, 7).
FORMS = {
    "Pad": (["x", "pads", "", "axes"], 1, {}),
    "Split": (["x"], 3, {"axis": 2, "num_outputs": 3}),
    "Shape": (["x"], 1, {"start": 1, "end": -1}),
    "ReduceMean": (["x", "axes"], 1, {"keepdims": 0}),
    "ReduceMax": (["x"], 1, {"keepdims": 1, "noop_with_empty_axes": 0}),
    "LayerNormalization": (["x", "weight", "bias"], 1, {"axis": 2, "epsilon": 1e-3}),
    "HardSwish": (["x"], 1, {}),
    "Mish": (["x"], 1, {}),
    "CastLike": (["x", "pads"], 1, {}),
    "Reshape": (["x", "shape"], 1, {"allowzero": 1}),
}


def file_of(operator: str, inputs: list[str], outputs: int, attributes: dict[str, object]) -> onnx.ModelProto:
    names = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(operator, inputs, names, **attributes)
    kind = TensorProto.INT64 if operator in ("Shape", "CastLike") else TensorProto.FLOAT
    stored = [onnx.numpy_helper.from_array(NUMBERS[name], name) for name in inputs if name in NUMBERS]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 3, 7))]
    made = [helper.make_tensor_value_info(name, kind, None) for name in names]
    graph = helper.make_graph([node], "g", given, made, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def run(proto: onnx.ModelProto) -> list[np.ndarray]:
    x = np.random.default_rng(0).normal(size=(2, 3, 7)).astype(np.float32)
    return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})


@pytest.mark.parametrize(
    ("operator", "form"),
    [
        *FORMS.items(),
        ("Pad", (["x", "two pads", "", "two axes"], 1, {})),
        ("LayerNormalization", (["x", "table"], 1, {"axis": -2})),
    ],
)
def test_an_operator_in_opset_13_computes_what_it_does_in_18(operator: str, form: tuple) -> None:
    proto = file_of(operator, *form)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    assert lowest_opset(model) == 13
    lower_opset_(model, 13)
    check_lowered(model)
    assert (model.graph.opset_imports[""], model.ir_version) == (13, 7)
    for got, wanted in zip(run(ir.to_proto(model)), run(proto), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("operator", "form"),
    [
        ("ReduceMax", (["x"], 1, {"noop_with_empty_axes": 1})),
        ("Reshape", (["x", "no rows"], 1, {"allowzero": 1})),
        ("RoiAlign", (["x", "boxes", "rows"], 1, {})),
    ],
)
def test_what_a_setting_changes_has_no_form_in_an_opset_without_it(operator: str, form: tuple) -> None:
    """Older operators reduce all dimensions, take the size of the input for one of 0, and place samples half a pixel beside."""
    model = ir.from_proto(file_of(operator, *form))
    assert first_unknown(model, 13).startswith(f"opset 13 has no {operator} as the file needs it")
    assert first_unknown(model, 18) == ""


def test_what_has_no_form_in_an_opset_is_named() -> None:
    proto = file_of("Trilu", ["x"], 1, {"upper": 0})
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    message = "opset 13 has no Trilu as the file needs it (float); the lowest that has it is 14"
    assert first_unknown(model, 13) == message
    assert lowest_opset(model) == 14
    with pytest.raises(ExportError, match="opset 13 has no Trilu"):
        lower_opset_(model, 13)
    empty = file_of("ReduceMean", ["x"], 1, {"noop_with_empty_axes": 1})  # which is the identity
    assert "noop_with_empty_axes); the lowest that has it is 18" in first_unknown(ir.from_proto(empty), 17)
    wrong = onnx.shape_inference.infer_shapes(file_of("Relu", ["x"], 1, {}))
    wrong.graph.node[0].attribute.append(helper.make_attribute("slope", 2))
    with pytest.raises(ExportError, match=r"in opset 18 the file is not valid \(.*slope.*\); take a newer one"):
        check_lowered(ir.from_proto(wrong))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.gelu(self.norm(nn.functional.hardswish(self.conv(x)).mean((2, 3)))))


def test_a_model_is_exported_in_the_opset_that_is_asked_for(tmp_path: Path) -> None:
    model, x = Block().eval(), torch.randn(4, 3, 8, 8)
    path = ck.export_onnx(model, tmp_path / "f.onnx", x, opset=13)
    assert onnx.load(path).opset_import[0].version == 13
    assert ck.verify_onnx(path, model, [x]).passed
    found = ck.audit(path)
    assert (found.opset, found.oldest_runtime) == (13, "1.7")
    assert "opset 13: onnxruntime 1.7 and newer can read it" in str(found)
    for wrong in (12, 26, "newest"):
        with pytest.raises(SettingError, match=rf'export_onnx\(opset=\.\.\.\): wanted 13\.\.25, "lowest" or None, got {wrong!r}'):
            ck.export_onnx(model, path, x, opset=wrong)
        with pytest.raises(SettingError, match=r"Recipe\(opset=\.\.\.\): wanted 13\.\.25"):
            ck.Recipe(ck.Train(epochs=1), opset=wrong)


@pytest.mark.parametrize("quantize", [quantize_static, quantize_dynamic])
def test_a_target_may_have_an_older_opset(quantize, tmp_path: Path) -> None:
    model, x = Block().eval(), torch.randn(4, 3, 8, 8)
    quantized = quantize(model, [x], target=replace(X86_NO_VNNI, opset=15))
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", x)
    assert onnx.load(path).opset_import[0].version == 15
    assert ck.verify_onnx(path, quantized, [x]).passed
    assert ck.audit(path).oldest_runtime == "1.10"


def test_blocks_of_weights_need_opset_21(tmp_path: Path) -> None:
    quantized = quantize_weights(nn.Linear(64, 8).eval(), torch.randn(2, 64), scheme=BlockScheme(bits=4, block_size=32))
    path, x = tmp_path / "q.onnx", torch.randn(2, 64)
    with pytest.raises(ExportError, match=r"q\.onnx: opset 20 has no DequantizeLinear .*; the lowest that has it is 21"):
        ck.export_onnx(quantized, path, x, opset=20)
    assert onnx.load(ck.export_onnx(quantized, path, x, opset="lowest")).opset_import[0].version == 21
    assert ck.audit(path).oldest_runtime == "1.19"


@pytest.mark.parametrize("opset", [24, 25])
def test_opsets_that_the_exporter_does_not_write_are_declared(opset, tmp_path) -> None:
    x = torch.randn(4, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(144, 5)).eval()
    path = ck.export_onnx(model, tmp_path / "m.onnx", (x,), opset=opset)
    file = onnx.load(path)
    onnx.checker.check_model(file, full_check=True)
    assert file.opset_import[0].version == opset
    ck.verify_onnx(path, model, [x, x[:1]])
