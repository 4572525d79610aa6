"""Gradient hooks of parameters: copies have them, captured copies do not, low-rank factors are not made of what has some."""

from __future__ import annotations

import torch
from torch import nn

import compresskit as ck
from compresskit.graph.rewrites.gradient_hooks import drop_gradient_hooks_, hooked_modules, hooked_parameters
from compresskit.graph.surgery import copy_model, frozen_copy, set_tensor_
from compresskit.prune.low_rank import LowRank


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    model[2].weight.register_hook(torch.zeros_like)
    return model


def gradients(model: nn.Module) -> list[bool]:
    """Whether each weight gets a gradient."""
    model(torch.ones(2, 4)).square().sum().backward()
    return [bool(model[i].weight.grad.any()) for i in (0, 2, 4)]


def test_a_copy_has_the_hooks_of_the_model() -> None:
    model = net()
    copied = copy_model(copy_model(model))
    assert list(hooked_parameters(copied)) == ["2.weight"]
    assert hooked_modules(copied) == {"2"}
    assert gradients(copied) == [True, False, True]
    assert model[2].weight.grad is None
    drop_gradient_hooks_(copied)
    copied.zero_grad()
    assert gradients(copied) == [True, True, True]


def test_a_tied_parameter_has_them_once() -> None:
    model = net()
    model[0] = nn.Linear(4, 16)
    model.add_module("again", model[2])
    calls = []
    model[2].bias.register_hook(lambda gradient: calls.append(1))
    copied = copy_model(model)
    copied[2](torch.ones(2, 16)).sum().backward()
    assert calls == [1]


def test_hooks_that_step_an_optimizer_of_the_model_are_no_part_of_copies(tmp_path, caplog) -> None:
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}  # as in torch's tutorial
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batches = [(torch.randn(8, 4), torch.arange(8) % 3)]
    task = ck.Task(train=batches, val=batches)
    trained = ck.Recipe(ck.Train(epochs=1, optimizer=torch.optim.SGD)).run(model, task, out=tmp_path / "run").model
    assert torch.equal(trained[2].weight, before["2.weight"])
    assert not torch.equal(trained[0].weight, before["0.weight"])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert caplog.text.count("copies of the model, as recipes and QAT train them, have not the hooks of") == 1
    ck.QAT(epochs=1)(model, task)


def test_frozen_and_resized_parameters_keep_them() -> None:
    model = net()
    model[2].weight.requires_grad_(False)
    assert list(hooked_parameters(frozen_copy(model))) == ["2.weight"]
    assert not copy_model(model)[2].weight.requires_grad
    set_tensor_(model, "2.weight", torch.ones(16, 16))
    assert not model[2].weight.requires_grad
    model[2].weight.requires_grad_(True)
    assert gradients(model) == [True, False, True]


def test_low_rank_leaves_a_layer_with_hooks_whole() -> None:
    batches = [(torch.randn(8, 4), torch.arange(8) % 3)]
    task = ck.Task(train=batches, val=batches)
    small = LowRank(budget=ck.keep(parameters=0.9), samples=8)(net(), task)
    assert type(small[2]) is nn.Linear
