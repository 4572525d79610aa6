"""Gradient hooks of a float model in its quantization-aware training."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.graph.quantized import float_names

X = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
BATCHES = [(x, torch.arange(16) % 4) for x in X.split(16)]
TASK = ck.Task(train=BATCHES, val=BATCHES)
INPUTS = [(x,) for x, _ in BATCHES]


def net(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), *more, nn.Linear(16, 4))


def rows(gradient: torch.Tensor) -> torch.Tensor:
    """Freezes the first rows."""
    gradient = gradient.clone()
    gradient[:3] = 0
    return gradient


def trained(whole: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters after some steps, by the user's names."""
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for x, y in BATCHES:
        optimizer.zero_grad()
        F.cross_entropy(whole(x), y).backward()
        optimizer.step()
    names = float_names(whole)
    return {names[name]: p.detach() for name, p in whole.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"learned": True}, {"inside": "backbone"}, {"inside": "head"}], ids=str)
def test_hooks_freeze_what_they_freeze_in_float(options, caplog) -> None:
    model = nn.Sequential()
    model.add_module("backbone", net()[:5])
    model.add_module("head", net()[-1])
    for name in ("backbone.0.weight", "backbone.3.weight", "head.weight"):
        model.get_parameter(name).register_hook(rows)
    model.get_parameter("backbone.1.weight").register_hook(torch.zeros_like)  # of a BatchNorm
    called = []
    model.get_parameter("head.bias").register_post_accumulate_grad_hook(lambda p: called.append(p.shape))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with caplog.at_level(logging.WARNING, "compresskit"):
        after = trained(ck.quant.prepare_qat(model, INPUTS, **options))
    assert "are not called" not in caplog.text
    for name in ("backbone.0.weight", "backbone.3.weight", "head.weight"):
        assert torch.equal(after[name][:3], before[name][:3]), name
        assert not torch.equal(after[name][3:], before[name][3:]), name
    assert torch.equal(after["backbone.1.weight"], before["backbone.1.weight"])
    assert not called  # it may hold an optimizer of the float model


@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("stage", [ck.Train, ck.QAT])
def test_the_stages_of_a_recipe_keep_them(stage, hooked: bool, tmp_path) -> None:
    model = net()
    if hooked:
        model[3].weight.register_hook(rows)
    frozen = model[3].weight[:3].detach().clone()
    report = ck.Recipe(stage(epochs=1, optimizer=torch.optim.SGD)).run(model, TASK, out=tmp_path / "run")
    names = float_names(report.model)
    after = {names[name]: p for name, p in report.model.named_parameters()}
    assert torch.equal(after["3.weight"][:3], frozen) == hooked


def test_layers_with_hooks_are_not_merged() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    plain = float_names(ck.quant.prepare_qat(model, INPUTS)).values()
    model[0].weight.register_hook(torch.zeros_like)
    before = model[0].weight.detach().clone()
    after = trained(ck.quant.prepare_qat(model, INPUTS))
    assert torch.equal(after["0.weight"], before)
    assert "1.weight" in after
    assert len(after) >= len({name for name in plain if name.endswith(("weight", "bias"))})


def test_hooks_that_are_lost_are_logged(caplog) -> None:
    class Stored(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))

        def forward(self, x):
            return x @ self.weight

    normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    model = net(Stored(), nn.ReLU(), normed, nn.ReLU(), nn.BatchNorm1d(16))
    for name in ("5.weight", "7.parametrizations.weight.original1", "9.weight"):  # stored transposed, computed, kept apart
        model.get_parameter(name).register_hook(torch.zeros_like)
    model[3].weight.register_hook(rows)
    model[3].register_full_backward_hook(lambda *_: None)
    with caplog.at_level(logging.WARNING, "compresskit"):
        ck.quant.prepare_qat(model, INPUTS)
    assert "prepare_qat: the gradient hooks of '5.weight', '7.parametrizations.weight.original1'" in caplog.text
    assert "prepare_qat: the backward hooks of '3' are not called" in caplog.text
    assert "'3.weight'" not in caplog.text
    assert "'9.weight'" not in caplog.text


def test_backward_hooks_of_float_parts_are_kept(caplog) -> None:
    model = nn.Sequential(net()[:5], net()[-1])
    called = []
    model[1].register_full_backward_hook(lambda *_: called.append(1))
    with caplog.at_level(logging.WARNING, "compresskit"):
        trained(ck.quant.prepare_qat(model, INPUTS, inside="0"))
    assert called
    assert "backward hooks" not in caplog.text
