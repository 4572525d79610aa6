"""Losses of derivatives, as of differential equations, gradient penalties and forces, train a rounded model, too."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import compresskit as ck
from compresskit.quant import prepare_qat

NETS = {
    "dense": (lambda: nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 1)), (256, 3)),
    "BatchNorm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten(),
            nn.Linear(128, 1),
        ),
        (64, 3, 8, 8),
    ),
}  # fmt: skip


def slope_gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Of the squared derivative by the input, the gradient of each parameter, by its name in the float model."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    return {name.removeprefix("body."): p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_the_gradient_of_a_derivative_is_that_of_the_float_model(net, learned) -> None:
    torch.manual_seed(0)
    make, shape = NETS[net]
    model, x = make(), torch.randn(shape)
    for _ in range(30):
        model(x)
    quantized = prepare_qat(copy.deepcopy(model), [x], learned=learned).train()
    got, wanted = slope_gradients(quantized, x), slope_gradients(model, x)
    for name in ("0.weight", "1.weight", "3.weight") if net == "BatchNorm" else ("0.weight", "0.bias", "2.weight", "4.weight"):
        assert torch.cosine_similarity(got[name].flatten(), wanted[name].flatten(), dim=0) > 0.99, name


def test_a_stage_trains_by_a_differential_equation() -> None:
    """y' = -y with y(0) = 1 on [0, 2], whose solution is exp(-x)."""
    torch.manual_seed(0)
    points = torch.rand(64, 1) * 2
    batches = [(part, part) for part in points.split(16)]

    def equation(model, batch):
        x = batch[0].clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return {"equation": (slope + y).square().mean(), "start": (model(torch.zeros(1, 1)) - 1).square().mean()}

    task = ck.Task(train=batches, val=batches, metric=lambda y, x: float((y - torch.exp(-x)).abs().mean()))
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = partial(torch.optim.Adam, lr=0.01)
    assert ck.evaluate(net, task) > 0.15
    quantized = ck.QAT(epochs=60, objective=equation, optimizer=optimizer, freeze=0)(net, task)
    assert ck.evaluate(quantized, task) < 0.03
