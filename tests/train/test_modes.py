"""Modules that the user put in eval mode stay there while the rest is trained, in one training and in a recipe."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

import compresskit as ck
from compresskit.train.modes import given_modes
from compresskit.train.train import fit_

BATCHES = [(torch.randn(16, 8) + 5, torch.arange(16) % 4) for _ in range(2)]
TASK = ck.Task(train=BATCHES, val=BATCHES)
ONCE = ck.Train(epochs=1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)), nn.ReLU(), nn.Linear(6, 4))


def moved(model: nn.Sequential) -> tuple[bool, bool]:
    inner: Tensor = model[1][1].running_mean  # type: ignore[index, assignment]
    return bool(model[0].running_mean.any()), bool(inner.any())  # type: ignore[union-attr, operator]


def test_a_frozen_batchnorm_stays_frozen_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    model[0].eval()
    with caplog.at_level(logging.WARNING):
        fit_(model, TASK, ONCE)
    assert moved(model) == (False, True)
    assert "train: 0 (1 in all) stays in eval mode, as it was given; model.train() before it would train all" in caplog.text
    assert not model.training  # fit_ returns it in eval mode, and the next training knows all the same
    fit_(copy.deepcopy(model), TASK, ONCE)
    assert moved(fit_(model, TASK, ONCE)) == (False, True)
    assert moved(fit_(model.train(), TASK, ONCE)) == (True, True)


def test_a_model_wholly_in_eval_mode_is_trained(caplog: pytest.LogCaptureFixture) -> None:
    model = network().eval()
    model[3] = nn.Linear(6, 4)  # a new head, in train mode
    assert moved(fit_(model, TASK, ONCE)) == (True, True)
    assert not caplog.records


def test_a_part_in_train_mode_inside_one_in_eval_mode_is_trained() -> None:
    model = network()
    model[1].eval()
    model[1][1].train()  # type: ignore[index]
    assert given_modes(model) == {"1": False, "1.1": True}
    assert moved(fit_(model, TASK, ONCE)) == (True, True)
    assert given_modes(model) == {"1": False, "1.1": True}


def test_a_recipe_keeps_modes_through_its_stages(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    model[0].eval()
    recipe = ck.Recipe(ONCE, ck.Train(epochs=1, clip=1.0))
    assert moved(recipe.run(model, TASK, tmp_path / "run").model) == (False, True)
    assert [stage.action for stage in recipe.plan(model, TASK, tmp_path / "run").stages] == ["reuse", "reuse"]
    assert recipe.plan(network(), TASK, tmp_path / "run").stages[0].action == "run"
    pruned = ck.Prune(budget=ck.keep(channels=0.5), finetune=ONCE)(model, TASK)
    assert "fine-tune: 0 (1 in all) stays in eval mode" in caplog.text
    assert given_modes(pruned) == {"0": False}


class Merging(nn.Linear):
    """Its scale is merged for eval mode, and kept until it is told to train, as are the position biases of LeViT."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.merged: Tensor | None = None

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        self.merged = None if mode else self.merged
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.merged is None:
            weight = self.weight * self.scale
            self.merged = self.merged if self.training else weight.detach()
        else:
            weight = self.merged
        return nn.functional.linear(x, weight, self.bias)


def test_what_a_model_keeps_for_eval_mode_is_that_of_its_trained_weights() -> None:
    """Each epoch validates in eval mode; the training after it forgets what was kept there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), Merging())
    ck.Train(epochs=3, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))(model, TASK)
    x = BATCHES[0][0]
    assert torch.equal(model(x), copy.deepcopy(model).train().eval()(x))
