"""Deformable convolutions of torchvision are ONNX's."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import ExportError
from compresskit.measure import session
from compresskit.quant import quantize_static

ops = pytest.importorskip("torchvision.ops")


class Deformed(nn.Module):
    """Where it reads is computed by another convolution, and how much of it, too."""

    def __init__(self, modulated: bool, groups: int = 1, offset_groups: int = 1, **settings: int) -> None:
        super().__init__()
        self.modulated, self.count = modulated, 18 * offset_groups
        self.where = nn.Conv2d(4, 27 * offset_groups, 3, **settings)
        self.layer = ops.DeformConv2d(4, 6, 3, groups=groups, bias=not modulated, **settings)

    def forward(self, x):
        where = self.where(x)
        mask = where[:, self.count :].sigmoid() if self.modulated else None
        return self.layer(x, 2 * where[:, : self.count], mask)


@pytest.mark.matrix
@pytest.mark.parametrize("opset", [None, "lowest"])
@pytest.mark.parametrize(
    "model",
    [
        Deformed(True, padding=1),
        Deformed(False, stride=2, padding=1),
        Deformed(True, 2, 2, stride=(2, 1), padding=(2, 1), dilation=(2, 1)),
    ],
    ids=["modulated", "strided", "groups"],
)
def test_deformable_convolutions_at_several_sizes(model, opset, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = ck.export_onnx(model.eval(), tmp_path / "f.onnx", torch.randn(3, 4, 9, 9), dynamic=(0, 2, 3), opset=opset)
    assert onnx.load(path).opset_import[0].version == (20 if opset is None else 19)
    run = session(path)
    for shape in ((3, 4, 9, 9), (1, 4, 12, 7), (7, 4, 5, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(torch.from_numpy(run.run(None, {"x": x.numpy()})[0]), model(x), rtol=1e-4, atol=1e-4)


def test_deformable_convolutions_stay_float_among_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Deformed(True, padding=1)).eval(), torch.randn(8, 3, 12, 12)
    quantized = quantize_static(model, [x])
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", x)
    assert ck.verify_onnx(path, quantized, [x[:1], x[1:]]).passed
    assert ck.audit(path).operators["Conv"] == (2, 2)


def test_a_runtime_that_has_none_is_named_with_the_line(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("compresskit.export.ops.deformable._has_kernel", lambda: False)
    with pytest.raises(
        ExportError, match=r"ONNX Runtime [\d.]+ has no kernel for DeformConv.*: install a newer one.* \(at .*:\d+: "
    ):
        ck.export_onnx(Deformed(True, padding=1).eval(), tmp_path / "f.onnx", torch.randn(3, 4, 9, 9))
