"""Convolutions of patches become linear layers where only float operators read them: the residual stream is not rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from networks import image
from torch import nn

import compresskit as ck
from compresskit.prune import masks_of, plan_mask
from compresskit.quant import quantize_static


class Mixer(nn.Module):
    """ConvNeXt in small: patches, a depthwise convolution, a layer norm, two linear layers, a sum; then coarser patches."""

    def __init__(self, *, dense: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, stride=4, bias=False)
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Conv2d(16, 16, 3, padding=1, groups=1 if dense else 16)
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)
        self.down = nn.Conv2d(16, 24, 2, stride=2)
        self.head = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.norm(self.mix(x).permute(0, 2, 3, 1))
        x = x + self.narrow(nn.functional.gelu(self.wide(y))).permute(0, 3, 1, 2)
        x = self.down(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return self.head(nn.functional.layer_norm(x.mean((2, 3)), (24,)))


@pytest.fixture
def model() -> Mixer:
    torch.manual_seed(0)
    return Mixer().eval()


def test_convolutions_of_patches_become_linear_layers(model: Mixer, tmp_path: Path) -> None:
    quantized = quantize_static(model, [image(16)], smooth=False)  # which would leave the head, 0.3 % of the MACs, in float
    kinds = [quantized.placement.layers[node] for node, kind in quantized.placement.integer.items() if kind == "linear"]
    assert kinds == ["stem", "wide", "narrow", "down", "head"]
    rounded = {point.node for point in quantized.placement.points}
    assert not any("add" in node for node in rounded - {quantized.placement.points[0].node})
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    assert ck.verify_onnx(path, quantized, [image(8)]).passed
    assert ck.audit(path).integer_fraction == 1.0


def test_without_rounding_it_computes_what_the_model_does(model: Mixer) -> None:
    quantized = quantize_static(model, [image(16)])
    quantized.enable_(False)
    x = image(5)
    torch.testing.assert_close(quantized(*x), model(*x), atol=1e-5, rtol=1e-4)


def test_a_convolution_whose_result_is_quantized_stays_one() -> None:
    quantized = quantize_static(Mixer(dense=True).eval(), [image(16)])
    kinds = {quantized.placement.layers[node]: kind for node, kind in quantized.placement.integer.items()}
    assert kinds["stem"] == "conv"
    assert kinds["mix"] == "conv"


class BothWays(nn.Conv2d):
    """One convolution at two places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + super().forward(x.flip(3))


@pytest.mark.parametrize("how", ["a rest", "groups", "two places"])
def test_other_patches_stay_convolutions(how: str) -> None:
    torch.manual_seed(0)
    model, x = Mixer(), torch.randn(16, 3, *[18 if how == "a rest" else 16] * 2)
    if how == "groups":
        model.down = nn.Conv2d(16, 24, 2, stride=2, groups=2)
    if how == "two places":
        model.stem = BothWays(3, 16, 4, stride=4)
    model.eval()
    quantized = quantize_static(model, [x])
    linear = {quantized.placement.layers[node] for node, kind in quantized.placement.integer.items() if kind == "linear"}
    assert ("down" if how == "groups" else "stem") not in linear
    quantized.enable_(False)
    torch.testing.assert_close(quantized(x[:5]), model(x[:5]), atol=1e-5, rtol=1e-4)


def test_a_norm_whose_factor_is_computed_keeps_it() -> None:
    """It is no depthwise convolution with stored weights."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.log, self.conv = nn.BatchNorm2d(3), nn.Parameter(torch.randn(3)), nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = self.norm
            x = nn.functional.batch_norm(x, n.running_mean, n.running_var, self.log.exp(), n.bias)
            return self.conv(x.relu())

    model = Scaled().eval()
    quantized, x = quantize_static(model, [image(16)]), image(5)
    quantized.enable_(False)
    torch.testing.assert_close(quantized(*x), model(*x), atol=1e-5, rtol=1e-4)


def test_masks_are_reshaped_with_the_weight(model: Mixer) -> None:
    plan_mask(model, ck.remove(weights=0.5)).apply_(model)
    masks = masks_of(quantize_static(model, [image(16)]))
    assert masks is not None
    assert {name: mask.ndim for name, mask in masks.masks.items() if "stem" in name} == {"body.stem.weight": 2}


def test_a_rewritten_model_is_saved_and_loaded(model: Mixer, tmp_path: Path) -> None:
    quantized, x = quantize_static(model, [image(16)]), image(4)
    ck.save(quantized, tmp_path)
    assert torch.equal(ck.load(Mixer(), tmp_path)(*x), quantized(*x))
