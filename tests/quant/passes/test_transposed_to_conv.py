"""Transposed convolutions run in integers as convolutions: the same values, parameters, masks, files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from networks import image
from torch import nn

import compresskit as ck
from compresskit.prune import masks_of, plan_mask
from compresskit.quant import quantize_static


class Decoder(nn.Module):
    """A convolution, a transposed one with BatchNorm, and one that reads its result."""

    def __init__(self, up: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.up = up or nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1)
        self.norm, self.last = nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.up(self.first(x).relu())).relu())


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    model = Decoder().eval()
    nn.init.normal_(model.norm.running_mean, std=0.2)
    nn.init.uniform_(model.norm.running_var, 0.5, 2)
    return model


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "up",
    [
        nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1, bias=False),
        nn.ConvTranspose2d(8, 6, 2, stride=2),
        nn.ConvTranspose2d(8, 6, (3, 2), stride=(2, 1)),
        nn.ConvTranspose2d(8, 6, 3, stride=3, dilation=2, groups=2, output_padding=2),
    ],
    ids=["doubles", "no overlap", "one dimension", "dilated, in groups"],
)
def test_all_of_a_decoder_runs_in_integers(up: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder(up).eval()
    quantized = quantize_static(model, [image(8)], dynamic=(0, 2, 3))
    assert quantized.placement.coverage.macs[0] == quantized.placement.coverage.macs[1]
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    assert ck.audit(path).integer_fraction == 1.0
    other = (torch.randn(3, 3, 20, 14),)
    assert ck.verify_onnx(path, quantized, [other]).plain.within_one == 1.0
    quantized.enable_(False)
    torch.testing.assert_close(quantized(*other), model(*other), atol=1e-5, rtol=1e-4)


def test_depth_to_space_runs_on_integers(tmp_path: Path, model: Decoder) -> None:
    found = ck.audit(ck.export_onnx(quantize_static(model, [image(8)]), tmp_path / "q.onnx", image(2)))
    assert found.operators["DepthToSpace"] == (1, 1)


def test_layers_of_few_input_channels_stay_float() -> None:
    class Bilinear(nn.Sequential):
        """A convolution, and a depthwise transposed one that enlarges."""

    model = Bilinear(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1, groups=8)).eval()
    reasons = quantize_static(model, [image(8)]).placement.coverage.reasons
    assert reasons == {"1": "X86 runs no conv_transpose in integers"}


def test_a_weight_used_twice_stays_one(tmp_path: Path) -> None:
    class Twice(Decoder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).relu()
            return self.last(self.up(x) + self.up(x.flip(2)))

    quantized = quantize_static(Twice().eval(), [image(8)])
    assert sum("up" in name for name, _ in quantized.named_parameters()) == 2
    assert quantized.placement.coverage.layers == (4, 4)


class Reused(nn.Module):
    """The weight of a transposed convolution at two places."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.up, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.Conv2d(6, 4, 3)
        self.other, self.how = nn.Parameter(torch.randn(6)), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, up = self.first(x).relu(), nn.functional.conv_transpose2d
        if self.how == "in the encoder too":
            return self.last(self.up(nn.functional.conv2d(self.up(x).relu(), self.up.weight, stride=2, padding=1)))
        settings = {"padding": 4, "dilation": 3} if self.how == "other settings" else {"padding": 1}
        bias = {"another bias": self.other, "no bias": None}.get(self.how, self.up.bias)
        return self.last((self.up(x) + up(x, self.up.weight, bias, 2, **settings)).relu())


@pytest.mark.parametrize("how", ["in the encoder too", "another bias", "no bias", "other settings"])
def test_a_weight_that_is_read_in_another_way_too_keeps_its_form(how: str) -> None:
    torch.manual_seed(0)
    model, x = Reused(how).eval(), image(5)
    quantized = quantize_static(model, [image(8)])
    quantized.enable_(False)
    torch.testing.assert_close(quantized(*x), model(*x), atol=1e-5, rtol=1e-4)


def test_what_is_frozen_stays_frozen(model: Decoder) -> None:
    model.up.weight.requires_grad_(False)
    prepared = ck.quant.prepare_qat(model, [image(8)])
    assert {name: p.requires_grad for name, p in prepared.named_parameters() if "up." in name and name.endswith("weight")} == {
        "body.up.weight": False
    }


def test_masks_follow_the_weight(model: Decoder) -> None:
    plan_mask(model, ck.remove(weights=0.5)).apply_(model)
    before = masks_of(model)
    quantized = quantize_static(model, [image(8)])
    masks = masks_of(quantized)
    assert before is not None
    assert masks is not None
    mask, weight = masks.masks["body.up.weight"], quantized.get_parameter("body.up.weight")
    assert mask.shape == weight.shape
    assert int(mask.sum()) == int(before.masks["up.weight"].sum())  # taps that no position reads are masked, too
    assert bool((weight[~mask] == 0).all())


def test_it_is_saved_and_loaded(model: Decoder, tmp_path: Path) -> None:
    quantized, x = quantize_static(model, [image(8)]), image(4)
    ck.save(quantized, tmp_path)
    assert torch.equal(ck.load(Decoder(), tmp_path)(*x), quantized(*x))


def test_it_trains_quantized(model: Decoder) -> None:
    x = image(8)
    batches = [(x[0], torch.zeros(8, 4, 30, 30))]
    task = ck.Task(train=batches, val=batches, loss=nn.functional.mse_loss, metric=nn.functional.mse_loss)
    before = task.loss(model(*x), batches[0][1]).item()
    trained = ck.QAT(epochs=3, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))(model, task)
    assert task.loss(trained(*x), batches[0][1]).item() < before
