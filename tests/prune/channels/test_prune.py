"""The stage Prune: steps, schedules, rewinding, sparse learning, settings."""

from __future__ import annotations

import copy
from functools import partial

import networks
import pytest
import torch
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError, SettingError
from compresskit.prune import Prune, plan_channels, replayed, schedules
from compresskit.prune.criteria import l2
from compresskit.prune.rankings import uniform

ADAM = partial(torch.optim.Adam, lr=3e-3)


def stage(**settings):
    return Prune(**{"budget": ck.keep(macs=0.5), "round_to": 4, "samples": 128, **settings})


def trained():
    torch.manual_seed(0)
    model, task = build(networks.Residual), images_task(ck, samples=128, classes=4)
    early = copy.deepcopy(model)
    return ck.Train(epochs=12, optimizer=ADAM)(model, task), task, early


def test_steps_end_where_one_step_ends() -> None:
    model, task, _ = trained()
    before = ck.count_macs(model, image(2))
    between = ck.Train(epochs=1, optimizer=ADAM)
    seen = []

    def schedule(done, *, end):
        seen.append(done)
        return end * done

    small = stage(steps=3, between=between, schedule=schedules.Function(schedule))(copy.deepcopy(model), task)
    assert 0.4 <= ck.count_macs(small, image(2)) / before <= 0.5
    assert seen == pytest.approx([1 / 3, 2 / 3])  # what is left after the last step is the budget
    one = stage()(copy.deepcopy(model), task)
    assert ck.count_macs(one, image(2)) / before <= 0.5
    small = stage(budget=ck.keep(parameters=0.5), steps=2)(copy.deepcopy(model), task)
    assert 0.4 <= ck.count_parameters(small) / ck.count_parameters(model) <= 0.5


@pytest.mark.parametrize(
    "schedule",
    [schedules.Function(lambda done, *, end: 1 - done), schedules.Function(lambda done, *, end: 0.0), schedules.Constant()],
)
def test_no_schedule_removes_more_than_the_budget(schedule) -> None:
    model, task = build(networks.Residual), images_task(ck, samples=32, classes=4)
    small = stage(budget=ck.keep(macs=0.6), steps=3, schedule=schedule, samples=32)(copy.deepcopy(model), task)
    one = stage(budget=ck.keep(macs=0.6), samples=32)(copy.deepcopy(model), task)
    assert ck.count_macs(small, image(2)) == ck.count_macs(one, image(2))


def test_rewinding_puts_earlier_weights_into_the_chosen_channels() -> None:
    model, task, early = trained()
    plan = plan_channels(model, image(2), budget=ck.keep(macs=0.5), round_to=4)
    small = replayed(early, plan)
    kept = plan.keep("inner.0.weight")
    rows = kept.get(0, torch.arange(16))
    columns = kept.get(1, torch.arange(16))
    torch.testing.assert_close(small.inner[0].weight, early.inner[0].weight[rows][:, columns])
    assert ck.count_macs(small, image(2)) == plan.macs
    with pytest.raises(ModelError):
        replayed(build(networks.Chain), plan)
    tuned = stage(rewind=early, finetune=ck.Train(epochs=25, optimizer=ADAM))(copy.deepcopy(model), task)
    assert ck.evaluate(tuned, task) > 0.8
    assert ck.count_macs(tuned, image(2)) <= 0.5 * ck.count_macs(model, image(2))


def test_learning_sparsely_comes_before_the_cut() -> None:
    model, task, _ = trained()
    learn = ck.Train(epochs=2, optimizer=ADAM)
    plain, sparse = (stage(learn=how, criterion=l2)(copy.deepcopy(model), task) for how in (None, learn))
    assert not torch.equal(next(plain.parameters()), next(sparse.parameters()))


def test_stage_settings_matter() -> None:
    model, task, _ = trained()
    base = stage()(copy.deepcopy(model), task).state_dict()
    for change in (
        {"reconstruct": False},
        {"ranking": uniform},
        {"minimum": 12, "budget": ck.keep(macs=0.8)},
        {"ratios": {"inner.0": 0}},
    ):
        other = stage(**change)(copy.deepcopy(model), task).state_dict()
        assert any(
            a.shape != b.shape or not torch.allclose(a, b, atol=1e-3) for a, b in zip(base.values(), other.values(), strict=True)
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, r"Prune\(steps=...\): wanted a whole number >= 1, got 0"),
        ({"steps": 2, "ratios": {"a": 0.5}}, "more than one step wants a budget of macs"),
        ({"steps": 2, "budget": ck.keep(latency=0.5)}, "more than one step wants a budget of macs"),
        ({"between": ck.Train(epochs=1)}, "nothing between the cuts of one step"),
        (
            {"rewind": ck.prune.rewind(to=0.33)},
            r"wanted an earlier checkpoint of the same network, a module, got Rewind\(to=0\.33\)",
        ),
        ({"rewind": nn.Linear(1, 1)}, "rewound weights must be trained again; set finetune"),
    ],
)
def test_bad_stages(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        stage(**settings)
