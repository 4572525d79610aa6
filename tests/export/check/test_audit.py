"""Auditing which operators of a file run in integers."""

from __future__ import annotations

import onnx
import pytest
import torch
from networks import image
from onnx import helper
from torch import nn

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.export.check.oldest_runtime import oldest_runtime
from compresskit.export.check.profile.optimized_graph import inferred_graph, value_types
from compresskit.export.rewrite.common import DATA_MOVEMENT
from compresskit.measure import count_macs


def test_data_movement_runs_on_integers(tmp_path) -> None:
    """Slicing, reshaping, concatenating and max pooling between integer operators handle uint8."""

    class Mover(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(16, 8, 1)

        def forward(self, x):
            x = torch.relu(self.a(x))
            x = torch.cat([nn.functional.max_pool2d(x, 2), x[:, :, ::2, ::2]], 1)
            n, c, h, w = x.shape
            x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
            return self.b(nn.functional.pad(x, (1, 1, 1, 1)))

    quantized = ck.quant.quantize_static(Mover().eval(), [image(16)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    audit = ck.audit(path)
    kinds = set(audit.operators) & DATA_MOVEMENT
    assert {"MaxPool", "Concat", "Transpose", "Slice"} <= kinds
    assert all(audit.operators[k][0] == audit.operators[k][1] for k in kinds), audit
    assert ck.verify_onnx(path, quantized, [image(16)]).passed


class _OneBatch:
    """What onnxruntime's quantizer reads its calibration data from."""

    def __init__(self, values):
        self.batches = iter([{"input": values}])

    def get_next(self):
        return next(self.batches, None)


@pytest.mark.parametrize(("activations", "fraction"), [("QInt8", 1.0), ("QUInt8", 1.0), ("QInt16", 0.0)])
def test_macs_of_files_of_the_runtimes_own_quantizer_are_counted(activations, fraction, tmp_path) -> None:
    """The runtime gives some values of such files names of its own."""
    from onnxruntime.quantization import QuantType, quantize_static

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(512, 10)).eval()
    x = torch.randn(4, 3, 12, 12)
    source, path = ck.export_onnx(model, tmp_path / "f.onnx", (x,)), tmp_path / "q.onnx"
    quantize_static(str(source), str(path), _OneBatch(x.numpy()), activation_type=QuantType[activations])
    audit = ck.audit(path)
    assert audit.macs == ck.audit(source).macs == count_macs(model, (x,))
    assert audit.integer_fraction == fraction
    assert len(audit.floating) == (0 if fraction else 3)


def test_macs_are_counted_where_the_batch_is_not_in_front(tmp_path) -> None:
    class SequenceFirst(nn.Linear):
        def forward(self, x):
            return super().forward(x.transpose(0, 1))

    x = torch.randn(4, 7, 64)
    quantized = ck.quant.quantize_static(SequenceFirst(64, 64).eval(), [(x,)])
    audit = ck.audit(ck.export_onnx(quantized, tmp_path / "q.onnx", (x,)))
    assert (audit.macs_integer, audit.macs) == quantized.placement.coverage.macs == (7 * 64 * 64, 7 * 64 * 64)


def test_macs_of_transposed_convolutions_and_half_precision_are_counted(tmp_path) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 4, stride=2)).eval(), torch.randn(2, 3, 8, 8)
    assert ck.audit(ck.export_onnx(model, tmp_path / "t.onnx", (x,))).macs == count_macs(model, (x,))
    half = ck.audit(
        ck.export_onnx(nn.Sequential(nn.Linear(8, 8)).half().eval(), tmp_path / "h.onnx", (torch.randn(2, 5, 8).half(),))
    )
    assert (half.macs, len(half.floating)) == (5 * 8 * 8, 1)  # its weight stands behind Cast


def test_layers_of_both_branches_are_counted(tmp_path) -> None:
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            return torch.cond(x.sum() > 0, self.a, self.b, (x,))

    audit = ck.audit(ck.export_onnx(Either().eval(), tmp_path / "f.onnx", (torch.randn(4, 8),)))
    assert (audit.macs, len(audit.floating)) == (8 * 4 + 8 * 4, 2)


def test_clamps_between_integer_operators_run_in_integers(tmp_path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardswish(), nn.Conv2d(8, 8, 1)).eval()
    audit = ck.audit(ck.export_onnx(ck.quant.quantize_static(model, [image(16)]), tmp_path / "q.onnx", image(2)))
    done, every = audit.operators["Clip"]
    assert done == every > 0, audit


@pytest.mark.parametrize("profile", [False, True])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": -1}, r"audit\(size=...\): wanted a whole number >= 1, got -1"),
        ({"size": 0}, "wanted a whole number >= 1, got 0"),
        ({"size": 12.5}, "wanted a whole number >= 1, got 12.5"),
        ({"batch": 1.5}, r"audit\(batch=...\): wanted a whole number >= 1, got 1.5"),
        ({"threads": 0}, "wanted threads >= 1 and seconds > 0, got 0 and 1.0"),
        ({"threads": "2"}, "wanted threads >= 1 and seconds > 0, got '2' and 1.0"),
        ({"seconds": float("nan")}, "wanted threads >= 1 and seconds > 0, got 1 and nan"),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_is_counted(tmp_path, settings, message, profile) -> None:
    with pytest.raises(SettingError, match=message):
        ck.audit(tmp_path / "missing.onnx", profile=profile, **settings)


def one_operator(kind: str, dtype: str, *, domain: str = "", opset: int = 21, **attributes: int) -> onnx.ModelProto:
    """A file with one operator, whose first input has a type, and a Cast's output, too."""
    given = helper.make_tensor_value_info("x", getattr(onnx.TensorProto, dtype), [1, 4, 4, 4])
    made = helper.make_tensor_value_info("y", getattr(onnx.TensorProto, dtype), None)
    graph = helper.make_graph([helper.make_node(kind, ["x"], ["y"], domain=domain, **attributes)], "g", [given], [made])
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=7 if opset == 13 else 9 if opset < 21 else 10)


@pytest.mark.parametrize(
    ("kind", "dtype", "settings", "release"),
    [
        ("DepthToSpace", "FLOAT", {"blocksize": 2, "opset": 13}, "1.7"),
        ("DepthToSpace", "UINT8", {"blocksize": 2, "opset": 13}, "1.21"),
        ("DepthToSpace", "INT8", {"blocksize": 2}, "1.28"),
        ("SpaceToDepth", "UINT8", {"blocksize": 2}, "1.28"),
        ("Cast", "INT4", {"to": onnx.TensorProto.INT8}, "1.23"),
        ("Cast", "FLOAT", {"to": onnx.TensorProto.FLOAT}, "1.18"),
        ("Identity", "FLOAT", {"opset": 19}, "1.16"),
        ("QuantizeLinear", "FLOAT", {"opset": 23}, "1.24"),
        ("MatMulNBits", "FLOAT", {"domain": "com.microsoft", "bits": 4}, "1.18"),
        ("MatMulNBits", "FLOAT", {"domain": "com.microsoft", "bits": 8}, "1.22"),
        ("MatMulNBits", "FLOAT", {"domain": "com.microsoft", "bits": 2}, "1.24"),
        ("GatherBlockQuantized", "UINT8", {"domain": "com.microsoft", "bits": 2}, "1.24"),
    ],
)
def test_the_oldest_runtime_has_the_kernels_for_the_types_of_a_file(kind, dtype, settings, release) -> None:
    proto = one_operator(kind, dtype, **settings)
    assert oldest_runtime(proto, value_types(inferred_graph(proto))) == release


def test_the_oldest_runtime_of_integer_files(tmp_path) -> None:
    up = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.ConvTranspose2d(16, 8, 2, 2), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    path = ck.export_onnx(ck.quant.quantize_static(up, [image(4)]), tmp_path / "up.onnx", image(2))
    assert ck.audit(path).oldest_runtime == "1.21"  # its transposed convolution ends in a DepthToSpace of uint8
    narrow = ck.quant.quantize_static(up[:2], [image(4)], bits=ck.quant.Bits(weights=4))
    path = ck.export_onnx(narrow, tmp_path / "narrow.onnx", image(2))
    assert ck.audit(path).oldest_runtime == "1.23"  # its weights are int4, behind a Cast
