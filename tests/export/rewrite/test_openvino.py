"""Files for OpenVINO: what it cannot read or computes otherwise is not in them, and its outputs are those of the model."""

from __future__ import annotations

from collections import Counter

import networks
import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.quant import OPENVINO, X86, Bits, quantize_static, quantize_weights
from compresskit.quant.weight_only import Palette


class Pooled(nn.Module):
    """Positions of a sequence joined into one row, or one position, before a layer of integers."""

    def __init__(self, join, last: nn.Module) -> None:
        super().__init__()
        self.first, self.join, self.last = nn.Conv1d(6, 32, 3), join, last

    def forward(self, x):
        return self.last(self.join(torch.tanh(self.first(x))))


def kinds(path) -> Counter:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def check_in_openvino(path, quantized, x: torch.Tensor, *, integers: tuple[str, ...] = ()) -> None:
    """OpenVINO, where it is installed, gives what the model gives, and runs layers of the types `integers` in integers."""
    openvino = pytest.importorskip("openvino", reason="pip install openvino")
    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    wanted = quantized(x).detach().numpy()
    assert np.abs(compiled([x.numpy()])[0] - wanted).max() <= 1e-5 * np.abs(wanted).max()
    run = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
    formats = [node["runtimePrecision"].astype(str) for node in run if node["layerType"].astype(str) in integers]
    assert set(formats) == ({"u8"} if integers else set())


ROWS, POSITIONS = (lambda: nn.Linear(32, 5)), (lambda: nn.Conv1d(32, 5, 1))
JOINS = {
    "largest": (lambda y: y.amax(2), ROWS),
    "smallest": (lambda y: y.amin(2), ROWS),
    "values": (lambda y: y.max(-1).values, ROWS),
    "kept": (lambda y: y.amax(2, keepdim=True), POSITIONS),
    "gelu": (lambda y: F.gelu(y.amax(2)), ROWS),
    "moved": (lambda y: y.amax(2, keepdim=True).mT.flatten(1), ROWS),
    "two": (lambda y: y.unflatten(2, (3, 6)).amax(3).amax(2), ROWS),
}


@pytest.mark.parametrize("name", JOINS)
def test_a_largest_value_is_rounded_outside_its_kernel(name, tmp_path) -> None:
    """OpenVINO compares values that are cut to the integers of the result, where the rounding is inside."""
    join, last = JOINS[name]
    torch.manual_seed(0)
    model, x = Pooled(join, last()).eval(), torch.randn(9, 6, 20)
    quantized = quantize_static(model, x, target=OPENVINO)
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x)
    file = onnx.load(path)
    extremes = [node for node in file.graph.node if node.op_type in ("ReduceMax", "ReduceMin")]
    readers = [n.op_type for node in extremes for n in file.graph.node if node.output[0] in n.input]
    assert extremes
    assert set(readers) <= {"Squeeze", "Unsqueeze"}
    assert len(readers) == len(extremes)
    assert ck.verify_onnx(path, quantized, [x, x[:4]]).passed
    assert ck.audit(path).operators.get("Gemm", (1, 1)) == (1, 1)  # in integers in ONNX Runtime, too
    check_in_openvino(path, quantized, x)


def test_files_for_onnxruntime_keep_the_rounding_right_behind(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = Pooled(*(make if i == 0 else make() for i, make in enumerate(JOINS["largest"]))).eval(), torch.randn(9, 6, 20)
    path = ck.export_onnx(quantize_static(model, x, target=X86), tmp_path / "m.onnx", x)
    file = onnx.load(path)
    (largest,) = (node for node in file.graph.node if node.op_type == "ReduceMax")
    assert [n.op_type for n in file.graph.node if largest.output[0] in n.input] == ["QuantizeLinear"]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("opset", [13, None])
def test_a_largest_value_of_all_and_older_opsets(keeps, opset, tmp_path) -> None:
    """Of all dimensions, which the file does not name."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(7, 16), nn.Linear(16, 3)

        def forward(self, x):
            y = self.first(x).tanh()
            largest = y.amax(keepdim=True) if keeps else y.amax()
            return self.last(y - largest)

    torch.manual_seed(0)
    x = torch.randn(4, 7)
    quantized = quantize_static(Shifted().eval(), x, target=OPENVINO, dynamic=())
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x, opset=opset)
    assert kinds(path)["Unsqueeze" if keeps else "Squeeze"] == kinds(path)["ReduceMax"] == 1
    assert ck.verify_onnx(path, quantized, [x]).passed
    check_in_openvino(path, quantized, x)


@pytest.mark.parametrize(
    ("bits", "opset", "written"),
    [(2, None, 21), (2, 25, 25), (3, None, 21), (4, 18, 18), (5, None, 20)],
)
def test_weights_of_few_bits(bits, opset, written, tmp_path) -> None:
    """OpenVINO knows no int2, shifts in float, and computes no operator on bits when it loads a file."""
    quantized = quantize_static(build(networks.WideChain), [image(16)], bits=Bits(weights=bits), target=OPENVINO)
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", image(2), opset=opset)
    file = onnx.load(path)
    assert file.opset_import[0].version == written
    assert onnx.TensorProto.INT2 not in {tensor.data_type for tensor in file.graph.initializer}
    assert not {"BitShift", "BitwiseAnd"} & set(kinds(path))
    assert kinds(path)["GreaterOrEqual"] == 1
    assert ck.verify_onnx(path, quantized, [image(9)]).passed
    check_in_openvino(path, quantized, *image(9), integers=("Convolution", "FullyConnected"))


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6])
def test_palettes_of_few_bits(bits, tmp_path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(33, 190), nn.ReLU(), nn.Linear(190, 70)).eval(), torch.randn(9, 33)
    quantized = quantize_weights(model, x, scheme=Palette(bits=bits))
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x)
    assert kinds(path)["GreaterOrEqual"] == 1
    check_in_openvino(path, quantized, x)
