"""Rewrites for all runtimes: the file computes the same values, in operators that runtimes have fast kernels for."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import compresskit as ck


class Clamped(nn.Module):
    """One value between several bounds, which are tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        for i, bound in enumerate((0.1, 0.3, 0.5)):
            self.register_buffer(f"low{i}", torch.tensor(-bound))
            self.register_buffer(f"high{i}", torch.tensor(bound))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return sum((i + 1) * torch.clamp(x, self.get_buffer(f"low{i}"), self.get_buffer(f"high{i}")) for i in range(3))


def test_each_clip_of_a_value_keeps_its_own_bounds(tmp_path: Path) -> None:
    model = Clamped().eval()
    path = ck.export_onnx(model, tmp_path / "m.onnx", torch.randn(4, 8))
    assert sum(node.op_type == "Clip" for node in onnx.load(path).graph.node) == 3
    assert ck.verify_onnx(path, model, [torch.randn(16, 8)]).passed


def test_windows_that_are_cut_at_the_border_are_averaged_in_float(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AvgPool2d(3, ceil_mode=True), nn.Conv2d(8, 8, 1)).eval()
    quantized = ck.quant.quantize_static(model, [torch.randn(16, 3, 8, 8)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", torch.randn(2, 3, 8, 8))
    assert ck.verify_onnx(path, quantized, [torch.randn(7, 3, 8, 8)]).passed


class Padded(nn.Module):
    """Pads a quantized value; most modes need no number, and get one."""

    def __init__(self, mode: str, number: float = 0.0) -> None:
        super().__init__()
        self.mode, self.number, self.first, self.last = mode, number, nn.Conv1d(3, 8, 3), nn.Conv1d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.pad(self.first(x), (2, 1), self.mode, self.number))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant"])
def test_a_number_that_padding_does_not_read_is_left_out(mode, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 20)
    quantized = ck.quant.quantize_static(Padded(mode).eval(), [(x,)])
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", (x,))
    assert ck.verify_onnx(path, quantized, [(x,), (x[:1],)]).passed


def test_a_number_that_is_not_zero_is_padded_with(tmp_path: Path) -> None:
    """The zero point does not stand for it."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 20)
    model = Padded("constant", 3.0).eval()
    quantized = ck.quant.quantize_static(model, [(x,)])
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", (x,))
    assert ck.verify_onnx(path, quantized, [(x,), (x[:1],)]).passed
    assert (quantized(x) - model(x)).norm() < 0.1 * model(x).norm()


@pytest.mark.parametrize("dynamic", [(0,), (0, 2, 3)], ids=str)
def test_a_mean_that_is_nearly_zero_runs(dynamic, tmp_path: Path) -> None:
    """Behind filters whose weights sum to zero: ONNX Runtime's integer kernel refuses scales that are so far apart."""
    torch.manual_seed(0)
    high_pass = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular", bias=False)
    with torch.no_grad():
        high_pass.weight -= high_pass.weight.mean((2, 3), keepdim=True)
    model = nn.Sequential(high_pass, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    x = torch.randn(16, 3, 12, 12)
    quantized = ck.quant.quantize_static(model, [x], dynamic=dynamic)
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", (x,))
    assert ck.verify_onnx(path, quantized, [x]).passed
    clips = [node for node in onnx.load(path).graph.node if node.op_type == "Clip"]
    assert len(clips) == 1


def test_other_means_stay_in_integers(tmp_path: Path) -> None:
    x = torch.randn(16, 3, 12, 12)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    path = ck.export_onnx(ck.quant.quantize_static(model, [x]), tmp_path / "m.onnx", (x,))
    assert not any(node.op_type == "Clip" for node in onnx.load(path).graph.node)
