"""Files of half precision models."""

from __future__ import annotations

import subprocess
import sys

import networks
import onnx
import pytest
import torch
from networks import build, image
from torch import Tensor, nn

import compresskit as ck
from compresskit.base.errors import ExportError


def test_bf16_and_fp16_models_are_stored_and_verified_in_their_dtype(tmp_path) -> None:
    wide = ck.export_onnx(build(networks.Residual), tmp_path / "f.onnx", image(2))
    for dtype, onnx_type in ((torch.float16, onnx.TensorProto.FLOAT16), (torch.bfloat16, onnx.TensorProto.BFLOAT16)):
        model = build(networks.Residual).to(dtype)
        x = (torch.randn(32, 3, 16, 16).to(dtype),)
        path = ck.export_onnx(model, tmp_path / "h.onnx", x)
        proof = ck.verify_onnx(path, model, [x])
        assert proof.passed, proof
        stored = [t.data_type for t in onnx.load(path).graph.initializer if len(t.dims) >= 2]
        assert stored == [onnx_type] * len(stored)
        assert len(stored) == 5
        assert path.stat().st_size < 0.75 * wide.stat().st_size
        with torch.no_grad():
            model.head.weight += 0.3
        assert not ck.verify_onnx(path, model, [x]).passed
    with pytest.raises(ExportError):
        ck.verify_onnx(tmp_path / "none.onnx", model, [x])


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


def test_precisions_without_a_kernel_are_refused_before_a_file_is_written(tmp_path) -> None:
    path, x = tmp_path / "m.onnx", torch.randn(2, 3, 8, 8)
    double = nn.Sequential(nn.Conv2d(3, 4, 3)).double().eval()
    wanted = (
        r"Sequential: wanted fp32 weights, but 0\.weight is torch\.float64, and ONNX Runtime has no Conv in DOUBLE; export model"
    )
    with pytest.raises(ExportError, match=wanted):
        ck.export_onnx(double, path, x.double())
    with pytest.raises(ExportError, match=r"Halved: wanted fp32 in forward, .* has no Gemm in BFLOAT16; take the cast"):
        ck.export_onnx(Halved(4, 4).eval(), path, torch.randn(2, 4))
    assert not path.exists()
    linear, y = nn.Linear(4, 4).double().eval(), torch.randn(2, 4).double()  # for which there are kernels
    assert ck.verify_onnx(ck.export_onnx(linear, path, y), linear, [y]).passed


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words, self.layer, self.out = nn.Embedding(40, 16), kind(16, 24, batch_first=True), nn.Linear(24, 5)

    def forward(self, ids):
        return self.out(self.layer(self.words(ids))[0])


class Turned(nn.Module):
    """A product of what has its first dimension moved, cast behind that or not at all."""

    def __init__(self, order: tuple[int, ...], cast: bool) -> None:
        super().__init__()
        self.order, self.cast, self.out = order, cast, nn.Linear(6, 5)

    def forward(self, x):
        y = x.permute(self.order)
        return self.out(y.to(self.out.weight.dtype) if self.cast else y)


INTEGERS = torch.arange(6 * 6 * 6).reshape(6, 6, 6) % 7
TURNED = {
    "LSTM": (Recurrent(nn.LSTM).half(), torch.randint(40, (4, 12))),
    "GRU": (Recurrent(nn.GRU).half(), torch.randint(40, (4, 12))),
    "fp16": (Turned((1, 0, 2), cast=False).half(), torch.randn(7, 4, 6).half()),
    "last": (Turned((1, 2, 0), cast=False).half(), torch.randn(6, 7, 4).half()),
    "rank 4": (Turned((1, 2, 0, 3), cast=False).half(), torch.randn(2, 7, 4, 6).half()),
    "uint8": (Turned((1, 0, 2), cast=True), INTEGERS.to(torch.uint8)),
    "int64": (Turned((1, 0, 2), cast=True), INTEGERS),
    "to fp32": (Turned((1, 0, 2), cast=True), torch.randn(7, 4, 6).half()),
}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", TURNED)
def test_products_of_transposed_values_load(name, tmp_path) -> None:
    """ONNX Runtime 1.32 ended the process, so that they are loaded in another one first."""
    model, x = TURNED[name][0].eval(), TURNED[name][1]
    path = ck.export_onnx(model, tmp_path / "f.onnx", (x,), dynamic=(1, 2) if name == "last" else (0, 1))
    load = "import sys, onnxruntime as o; o.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])"
    assert subprocess.run([sys.executable, "-c", load, path], check=False).returncode == 0
    assert ck.verify_onnx(path, model, [(x,)]).passed
