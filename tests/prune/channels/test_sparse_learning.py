"""Objectives that empty channels: group lasso and growing regularization."""

from __future__ import annotations

import copy
from functools import partial

import networks
import pytest
import torch
from networks import build, image, images_task
from torch.nn.functional import mse_loss

import compresskit as ck
from compresskit.base.errors import ModelError, SettingError
from compresskit.prune import greg, group_lasso, plan_channels

ADAM = partial(torch.optim.Adam, lr=3e-3)


def channel_norms(model):
    return torch.cat([model.a[0].weight.flatten(1), model.b[0].weight.movedim(1, 0).flatten(1)], 1).norm(dim=1)


def test_group_lasso_is_the_sum_of_norms() -> None:
    model, task = build(networks.Chain), images_task(ck, samples=32, classes=4)
    goal = group_lasso(strength=0.01).bind(model, task)
    losses = goal(model, next(iter(task.train)))
    rows = [
        torch.cat([model.a[0].weight.flatten(1), model.a[1].weight[:, None], model.b[0].weight.movedim(1, 0).flatten(1)], 1),
        torch.cat([model.b[0].weight.flatten(1), model.b[1].weight[:, None], model.head.weight.T], 1),
    ]
    wanted = 0.01 * sum(r.shape[1] ** 0.5 * r.norm(dim=1).sum() for r in rows)
    torch.testing.assert_close(losses["group_lasso"], wanted)
    assert set(losses) == {"loss", "group_lasso"}


def test_group_lasso_empties_channels() -> None:
    spread = {}
    for strength in (1e-6, 3e-3):
        torch.manual_seed(0)
        model, task = build(networks.Chain), images_task(ck, samples=128, classes=4)
        ck.Train(epochs=30, optimizer=ADAM, objective=group_lasso(strength=strength))(model, task)
        norms = channel_norms(model)
        spread[strength] = (norms < 0.2 * norms.max()).sum()
    assert spread[3e-3] > spread[1e-6]


def test_greg_empties_the_channels_of_the_plan() -> None:
    model, task = build(networks.Chain), images_task(ck, samples=128, classes=4)
    plan = plan_channels(model, image(2), budget=ck.remove(channels=0), ratios={"a.0": 0.5})
    gone = list(plan.remove["a.0.weight"][0])
    stay = [c for c in range(16) if c not in gone]
    ck.Train(epochs=30, optimizer=ADAM, objective=greg(plan, growth=2e-3))(model, task)
    norms = channel_norms(model)
    assert norms[gone].mean() < 0.3 * norms[stay].mean()


@pytest.mark.parametrize(
    "around",
    [group_lasso, partial(greg, plan_channels(build(networks.Chain), image(2), budget=ck.keep(macs=0.9), round_to=4))],
)
def test_the_objective_inside_hears_how_much_is_done(around) -> None:
    class Inside(ck.Objective):
        heard, closed = [], False

        def bind(self, model, task):
            return self

        def __call__(self, model, batch):
            return {"loss": model(batch[0]).square().mean()}

        def advance(self, done: float) -> None:
            self.heard.append(done)

        def close(self) -> None:
            Inside.closed = True

    model, task = build(networks.Chain), images_task(ck, samples=32, classes=4)
    ck.Train(epochs=2, optimizer=ADAM, objective=around(Inside()))(model, task)
    assert Inside.heard == sorted(Inside.heard)
    assert len(set(Inside.heard)) > 1
    assert Inside.closed


def test_bad_strengths() -> None:
    with pytest.raises(SettingError, match=r"group_lasso\(strength=...\): wanted a positive number, got 0"):
        group_lasso(strength=0)
    with pytest.raises(SettingError, match=r"greg\(growth=...\): wanted a positive number, got -1"):
        greg(plan_channels(build(networks.Chain), image(2), budget=ck.keep(macs=0.9), round_to=4), growth=-1)


def test_a_model_without_channels_is_refused_by_the_name_of_the_objective() -> None:
    with pytest.raises(ModelError, match="group_lasso: ReLU has no parameters"):
        group_lasso().bind(torch.nn.ReLU(), images_task(ck, samples=32, classes=4))


def test_a_recipe_asks_the_objective_inside_before_it_trains(tmp_path, monkeypatch) -> None:
    def train(*args):
        raise AssertionError

    monkeypatch.setattr(ck.Train, "__call__", train)
    x, y = torch.randn(8, 8), torch.rand(8, 1)
    task = ck.Task(train=[(x, y)], val=[(x, y)], loss=mse_loss, metric=mse_loss, higher_is_better=False)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).eval()
    goal = group_lasso(ck.imitate(copy.deepcopy(model)))
    with pytest.raises(ModelError, match="stage 1, Train: imitate"):
        ck.Recipe(ck.Train(epochs=1, objective=goal)).run(model, task, out=tmp_path / "run")
