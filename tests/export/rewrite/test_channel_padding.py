"""Channels padded to 16 for ONNX Runtime's integer kernels: another file, the same outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.export.check.bisect import first_layer_that_differs
from compresskit.measure import numpy_inputs, session


class Separable(nn.Module):
    """1x1, depthwise, 1x1, as in MobileNet."""

    def __init__(self, channels: int, outer: int = 16, kernel: int = 3, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, outer, 3, 2, 1)
        self.inner = nn.Sequential(
            nn.Conv2d(outer, channels, 1), nn.BatchNorm2d(channels), act(),
            nn.Conv2d(channels, channels, kernel, 1, kernel // 2, groups=channels), nn.BatchNorm2d(channels), act(),
            nn.Conv2d(channels, outer, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.stem(x).relu()).mean((2, 3))


class Gated(Separable):
    """With a squeeze-and-excitation gate before the last convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.squeeze, self.excite = nn.Conv2d(channels, 8, 1), nn.Conv2d(8, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner[:6](self.stem(x).relu())
        gate = nn.functional.hardsigmoid(self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()))
        return self.inner[6](x * gate).mean((2, 3))


class Residual(nn.Module):
    """x + depthwise(x), and x + conv(x), whose convolution reads and makes the same channels."""

    def __init__(self, channels: int, *, depthwise: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, channels, 3, 2, 1), nn.Conv2d(channels, 10, 1)
        self.conv = nn.Conv2d(channels, channels, 3, 1, 1, groups=channels if depthwise else 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        return self.head(x + self.conv(x)).mean((2, 3))


def stored(model: nn.Module, x: torch.Tensor, folder: Path, **how: Any) -> set[tuple[int, ...]]:
    """Shapes of the 4-dimensional weights in the file, which gives what the file without rewrites gives, one row or several."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 2)
    found = []
    for tuned in (False, True):
        quantized = ck.quant.quantize_static(model.eval(), [(x,)], target=replace(ck.quant.X86, tuned=tuned), **how)
        path = ck.export_onnx(quantized, folder / f"{tuned}.onnx", (x,))
        runtime = session(path)
        found.append([runtime.run(None, numpy_inputs(runtime, (part,)))[0] for part in (x, x[:1])])
    for plain, padded in zip(*found, strict=True):
        np.testing.assert_array_equal(plain, padded)
    assert ck.verify_onnx(path, quantized, [(x,)]).passed
    return {tuple(i.dims) for i in onnx.load(path).graph.initializer if len(i.dims) == 4}


X = torch.randn(3, 3, 48, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("channels", "padded", "act"),
    [
        (4, 16, nn.ReLU),
        (8, 16, nn.ReLU),
        (12, 16, nn.ReLU6),
        (20, 32, nn.ReLU),
        (24, 32, nn.Hardswish),
        (24, 32, nn.SiLU),
        (72, 80, nn.LeakyReLU),
    ],
)
def test_a_depthwise_layer_and_those_around_it_are_widened(channels, padded, act, tmp_path) -> None:
    torch.manual_seed(0)
    shapes = stored(Separable(channels, act=act), X, tmp_path)
    assert {(padded, 16, 1, 1), (padded, 1, 3, 3), (16, padded, 1, 1)} <= shapes


def test_hard_swishes_of_small_and_of_large_values_are_widened(tmp_path) -> None:
    """The small ones are an addition of an integer constant, the large ones read integers at which they bend."""
    additions = []
    for scale in (1, 40):
        torch.manual_seed(0)
        assert (32, 1, 3, 3) in stored(Separable(24, act=nn.Hardswish), scale * X, tmp_path)
        additions.append(sum(node.op_type == "Add" for node in onnx.load(tmp_path / "True.onnx").graph.node))
    assert additions[0] > additions[1]


def test_a_gate_is_widened_with_what_it_gates(tmp_path) -> None:
    torch.manual_seed(0)
    shapes = stored(Gated(24), X, tmp_path)
    assert {(32, 16, 1, 1), (32, 1, 3, 3), (8, 32, 1, 1), (32, 8, 1, 1), (16, 32, 1, 1)} <= shapes


def test_a_layer_with_a_computed_bias_stays(tmp_path) -> None:
    class Computed(Separable):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.inner[0]
            x = nn.functional.conv2d(self.stem(x).relu(), first.weight, first.bias * x.mean())
            return self.inner[1:](x).mean((2, 3))

    torch.manual_seed(0)
    assert {(24, 16, 1, 1), (24, 1, 3, 3)} <= stored(Computed(24), X, tmp_path)


@pytest.mark.parametrize(("channels", "depthwise"), [(24, True), (12, False), (8, False)])
def test_residual_sums_are_widened_as_a_whole(channels, depthwise, tmp_path) -> None:
    torch.manual_seed(0)
    shapes = stored(Residual(channels, depthwise=depthwise), X, tmp_path)
    wide = 32 if depthwise else 16
    assert {(wide, 1 if depthwise else wide, 3, 3), (10, wide, 1, 1)} <= shapes


def test_height_and_width_may_vary_and_weights_have_few_bits(tmp_path) -> None:
    torch.manual_seed(0)
    assert (32, 1, 3, 3) in stored(Separable(24), X, tmp_path, dynamic=(0, 2, 3))
    bits = {"": ck.quant.Bits(weights=8), "inner.0": ck.quant.Bits(weights=4), "inner.6": ck.quant.Bits(weights=4)}
    assert {(32, 16, 1, 1), (32, 1, 3, 3), (16, 32, 1, 1)} <= stored(Separable(24), X, tmp_path, bits=bits)


def test_weights_that_others_share_are_widened_for_one_alone(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Separable(24).stem, nn.ReLU(), *Separable(24).inner[:6], nn.Conv2d(24, 16, 1), nn.ReLU())
    again = nn.Conv2d(16, 24, 1)
    again.weight, again.bias = model[2].weight, model[2].bias
    shapes = stored(nn.Sequential(*model, again, nn.AdaptiveAvgPool2d(1), nn.Flatten()), X, tmp_path)
    assert {(32, 16, 1, 1), (24, 16, 1, 1)} <= shapes


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.ReLU(), nn.Conv2d(24, 24, 3, 1, 1, groups=24)),  # an output of the network
        nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.PixelShuffle(2), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 48, 1)),
        Separable(24, outer=1024),  # the others would cost more than it saves
        nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 128, 3)),
        nn.Sequential(nn.Conv2d(3, 12, 3, 8, 1), nn.ReLU(), nn.Conv2d(12, 20, 3), nn.ReLU(), nn.Conv2d(20, 20, 1)),  # tiny
    ],
)
def test_channels_that_are_seen_elsewhere_or_would_cost_more_stay(model, tmp_path) -> None:
    torch.manual_seed(0)
    shapes = stored(nn.Sequential(model, nn.Flatten()) if isinstance(model, nn.Sequential) else model, X, tmp_path)
    plain = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Conv2d)}
    assert {s for s in shapes if s[2:] != (3, 3) or s[1] != 4} == {s for s in plain if s[2:] != (3, 3) or s[1] not in (3, 4)}


def test_other_targets_keep_their_channels(tmp_path) -> None:
    torch.manual_seed(0)
    quantized = ck.quant.quantize_static(Separable(24).eval(), [(X,)], target=ck.quant.ARM)
    path = ck.export_onnx(quantized, tmp_path / "arm.onnx", (X,))
    assert (24, 1, 3, 3) in {tuple(i.dims) for i in onnx.load(path).graph.initializer}


def test_layers_keep_their_names(tmp_path) -> None:
    torch.manual_seed(0)
    model = Separable(24).eval()
    quantized = ck.quant.quantize_static(model, [(X,)])
    path = ck.export_onnx(quantized, tmp_path / "int8.onnx", (X,))
    plain = ck.export_onnx(model, tmp_path / "fp32.onnx", (X,))
    profile = ck.audit(path, profile=True, against=plain).profile
    assert profile is not None
    names = [layer.name.replace("_", ".") for layer in profile.layers]
    assert names[-4:] == ["stem", "inner.0", "inner.3", "inner.6"]
    assert all(layer.this is not None and layer.other is not None for layer in profile.layers[-4:])
    assert first_layer_that_differs(path, quantized, (X,)) is None
    with torch.no_grad():
        model.inner[6].weight.neg_()
    other = ck.quant.quantize_static(model, [(X,)])
    assert "inner.6" in str(first_layer_that_differs(path, other, (X,)))


@pytest.mark.parametrize("opset", [17, "lowest"])
def test_older_opsets_are_written_without_a_word(opset, tmp_path, caplog, capfd) -> None:
    torch.manual_seed(0)
    quantized = ck.quant.quantize_static(Separable(24).eval(), [(X,)])
    path = ck.export_onnx(quantized, tmp_path / "model.onnx", (X,), opset=opset)
    assert ck.verify_onnx(path, quantized, [(X,)]).passed
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert "not known" not in capfd.readouterr().err


def test_images_of_16_bits_are_not_padded(tmp_path) -> None:
    """ONNX Runtime has no kernel that pads them, and did not load the file."""
    torch.manual_seed(0)
    shapes = stored(Separable(24), X, tmp_path, bits=ck.quant.Bits(activations=16))
    assert (16, 3, 3, 3) in shapes
