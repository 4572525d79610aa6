"""Refitting and criteria read what the weights of a layer are multiplied with, whatever the forward of its class does."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from networks import image
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.prune import apply_, criteria, plan_channels, plan_mask, reconstruct_
from compresskit.prune.channels.own_forwards import has_own_forward
from compresskit.prune.channels.reconstruct import input_statistics


class Coordinates(nn.Conv2d):
    """Puts the coordinates beside its input (CoordConv, 1807.03247)."""

    def __init__(self, inputs, outputs, kernel):
        super().__init__(inputs + 2, outputs, kernel, padding=1)

    def forward(self, x):
        n, _, h, w = x.shape
        rows, columns = torch.linspace(-1, 1, h).view(1, 1, h, 1), torch.linspace(-1, 1, w).view(1, 1, 1, w)
        return super().forward(torch.cat([x, rows.expand(n, 1, h, w), columns.expand(n, 1, h, w)], 1))


class Padding(nn.Conv2d):
    """Pads as TensorFlow does, so that a map of one position stays one."""

    def forward(self, x):
        return F.conv2d(F.pad(x, [1, 1, 1, 1]), self.weight, bias=self.bias)


class Rectified(nn.Conv2d):
    """Returns something else than its convolution does."""

    def forward(self, x):
        return super().forward(x).relu()


class Standardized(nn.Conv2d):
    """Multiplies standardized weights (1903.10520)."""

    def forward(self, x):
        w = self.weight.to(x.dtype)
        w = (w - w.mean((1, 2, 3), keepdim=True)) / w.var((1, 2, 3), keepdim=True).add(1e-5).sqrt()
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


class Scaled(nn.Conv2d):
    """Multiplies the weights it stores, and adds another bias."""

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias / 4, self.stride, self.padding)


class Central(nn.Conv2d):
    """Takes the sum of its weights times the input off (central differences, 2003.04092)."""

    def forward(self, x):
        return super().forward(x) - F.conv2d(x, self.weight.sum((2, 3), keepdim=True))


def network(kind, size=4):
    torch.manual_seed(0)
    layer = Padding(16, 16, 3) if kind is Padding else kind(16, 16, 3) if kind is Coordinates else kind(16, 16, 3, padding=1)
    stem = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(size)
    model = nn.Sequential(*stem, layer, nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    return model.eval()


def inputs(seed, count=64):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(count, 8, generator=g) @ torch.randn(8, 768, generator=torch.Generator().manual_seed(9))).view(
        -1, 3, 16, 16
    )


@pytest.mark.parametrize("kind", [Coordinates, Padding, Rectified])
@torch.no_grad()
def test_the_rows_are_those_that_the_operator_reads(kind) -> None:
    model, x = network(kind), inputs(1, 2)
    layer, found, read = (
        model[3],
        input_statistics(model, ["3.weight"], [(x,)], norms=True, for_each_input=1)["3.weight"],
        model[:3](x),
    )
    out = layer(read)
    if kind is Rectified:
        out = F.conv2d(read, layer.weight, layer.bias, padding=1)
    assert found.rows == 2 * 16
    assert not found.computed
    assert found.norm == (None if kind is Rectified else "4")
    mean = layer.weight.flatten(1).double() @ (found.total / found.rows) + layer.bias
    torch.testing.assert_close(mean, out.double().mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "size"), [(Coordinates, 4), (Padding, 1), (Padding, 4), (Rectified, 4)])
@torch.no_grad()
def test_refitting_helps_where_the_weights_are_multiplied_as_they_are(kind, size) -> None:
    model, x = network(kind, size), inputs(2)
    plan = plan_channels(model, image(2), ck.remove(channels=0), ratios={"0": 0.5}, round_to=1)
    small = apply_(copy.deepcopy(model), plan)
    before = (small(x) - model(x)).square().mean()
    assert reconstruct_(small, model, plan, [inputs(1)]).keys() == {"3"}
    assert (small(x) - model(x)).square().mean() < 0.8 * before


@pytest.mark.parametrize("kind", [Standardized, Scaled, Central])
def test_weights_that_a_forward_computes_are_not_replaced(kind, caplog) -> None:
    model = network(kind)
    plan = plan_channels(model, image(2), ck.remove(channels=0), ratios={"0": 0.5}, round_to=1)
    small = apply_(copy.deepcopy(model), plan)
    before = copy.deepcopy(small.state_dict())
    with caplog.at_level(logging.WARNING):
        assert reconstruct_(small, model, plan, [inputs(1)]) == {}
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())
    assert f"the forward of {kind.__name__} does more with weights than multiply them: 3.weight" in caplog.text
    found = input_statistics(model, ["3.weight"], [(inputs(1),)])["3.weight"]
    assert found.rows  # what is rounded in the graph still needs to know what the layer reads
    assert found.computed


def test_layers_of_torch_have_no_forward_of_their_own() -> None:
    plain = [nn.Linear(2, 2), nn.Conv1d(2, 2, 1), nn.Conv3d(2, 2, 1), nn.MultiheadAttention(4, 2).out_proj]
    plain.append(nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 1)))
    assert not any(map(has_own_forward, plain))

    class Other(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight / 2, bias)

    assert has_own_forward(Other(2, 2, 1))


def test_activations_of_a_layer_that_adds_channels_are_those_of_another_layer() -> None:
    model, x = network(Coordinates), inputs(1, 16)
    task = ck.Task(train=[(x, torch.arange(16) % 4)], val=[])
    settings = {"criterion": criteria.optimal_brain_surgeon, "task": task, "samples": 16, "round_to": 1}
    plan = plan_channels(model, image(2), ck.keep(macs=0.6), **settings)
    assert plan.remove["3.weight"][1]
    with pytest.raises(ModelError, match=r"^3.weight: the inputs of a Coordinates cannot be seen"):
        plan_mask(model, ck.remove(weights=0.5), criterion=criteria.wanda, task=task)
