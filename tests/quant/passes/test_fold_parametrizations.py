"""Weights that are computed from parameters: weight norm, spectral norm, standardisation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from networks import image
from torch import nn
from torch.nn.utils import parametrizations

import compresskit as ck
from compresskit.graph.capture import capture
from compresskit.graph.masks import Masks, attach_masks_, masks_of
from compresskit.quant.passes.fold_parametrizations import fold_parametrizations_


class Standardised(nn.Conv2d):
    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight / weight.std((1, 2, 3), keepdim=True), self.bias, self.stride, self.padding)


class Computed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Conv2d(3, 16, 3, padding=1))
        self.b = parametrizations.spectral_norm(nn.Conv2d(16, 16, 3, padding=1, bias=False))
        self.norm = nn.BatchNorm2d(16)
        self.c = Standardised(16, 32, 3, padding=1)
        self.turned = nn.Parameter(torch.randn(32, 10))

    def forward(self, x):
        x = self.c(F.relu(self.norm(self.b(F.relu(self.a(x))))))
        return F.linear(F.relu(x).mean((2, 3)), self.turned.t())


class Conditioned(nn.Module):
    """Its weight depends on the input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)

    def forward(self, x):
        x = self.a(x).mean((2, 3))
        return F.linear(x, self.b.weight * x.mean()) + self.b.bias


def test_folding_keeps_the_outputs_to_the_bit() -> None:
    model, x = Computed().eval(), image(4)
    captured = capture(model, x)
    wanted = captured.module(*x)
    assert fold_parametrizations_(captured.module) == 4
    assert torch.equal(captured.module(*x), wanted)
    assert not [n for n in captured.module.graph.nodes if n.op == "get_attr" and "original" in str(n.target)]
    assert {"a.weight", "b.weight", "c.weight"} <= set(dict(captured.module.named_parameters()))


@pytest.mark.parametrize("trained", [[], ["original0", "original1"], ["original1"]], ids=["none", "all", "the direction"])
def test_what_is_computed_of_trained_parameters_is_trained(trained) -> None:
    model = Computed().eval()
    for name, p in model.a.parametrizations.weight.named_parameters():
        p.requires_grad_(name in trained)
    captured = capture(model, image(4))
    fold_parametrizations_(captured.module)
    assert captured.module.get_parameter("a.weight").requires_grad is bool(trained)


class Turned(nn.Module):
    """A matrix that is stored as (inputs, outputs)."""

    def __init__(self):
        super().__init__()
        self.first, self.turned = nn.Linear(8, 16), nn.Parameter(torch.randn(16, 10))

    def forward(self, x):
        return F.linear(F.relu(self.first(x)), self.turned.t())


def test_the_mask_of_a_turned_matrix_is_turned() -> None:
    model = Turned().eval()
    mask = torch.rand(16, 10) > 0.5
    with torch.no_grad():
        model.turned.mul_(mask)
    attach_masks_(model, Masks({"turned": mask}))
    found = masks_of(ck.quant.quantize_static(model, [(torch.randn(16, 8),)]))
    assert found is not None
    assert [torch.equal(each.t(), mask) for each in found.masks.values()] == [True]


def test_weights_that_depend_on_inputs_are_not_folded() -> None:
    captured = capture(Conditioned().eval(), image(4))
    assert fold_parametrizations_(captured.module) == 0


def test_layers_with_parametrizations_run_in_integers(tmp_path) -> None:
    model, x = Computed(), image(8)
    for _ in range(3):
        model(*x)
    quantized = ck.quant.quantize_static(model.eval(), [x])
    assert str(quantized.placement.coverage).startswith("4 of 4 layers in integers")
    assert "a.parametrizations.weight.original0" in model.state_dict()
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x)
    assert ck.verify_onnx(path, quantized, [x]).passed
    ck.save(quantized, tmp_path / "saved")
    again = ck.load(Computed(), tmp_path / "saved")
    assert torch.equal(again(*x), quantized(*x))
    trained = ck.quant.prepare_qat(model, [x])
    trained(*x).sum().backward()
    assert trained.body.get_parameter("a.weight").grad is not None
