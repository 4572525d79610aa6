"""The stage Prune: steps, schedules, rewinding, sparse learning, settings."""

from __future__ import annotations

import copy
import math
import signal
from dataclasses import replace
from functools import partial

import networks
import pytest
import torch
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import Interrupted, ModelError, SettingError, StageOrderError
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


def test_rewinding_to_a_point_of_the_training_restarts_its_weights_and_its_schedule() -> None:
    task = replace(images_task(ck, samples=96, classes=4), snapshots={0.5: {}})
    model = ck.Train(epochs=4, optimizer=ADAM)(build(networks.Residual), task)
    plan = plan_channels(model, image(2), budget=ck.keep(macs=0.5), round_to=4)
    rates = []

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    how = ck.Train(epochs=1, optimizer=partial(Slow, lr=1e-12), schedule=ck.lr.Cosine())
    small = stage(rewind=ck.prune.rewind(to=0.5), finetune=how)(model, task)
    kept = plan.keep("inner.0.weight")  # chosen at the end of the training
    rows, columns = kept.get(0, torch.arange(16)), kept.get(1, torch.arange(16))
    torch.testing.assert_close(small.inner[0].weight.detach(), task.snapshots[0.5]["inner.0.weight"][rows][:, columns])
    assert rates[0] == pytest.approx(0.5e-12)  # half of a cosine is left
    assert rates == sorted(rates, reverse=True)
    with pytest.raises(SettingError, match=r"rewind\(to=0.5\): no weights were kept there; in a Recipe put it directly after"):
        stage(rewind=ck.prune.rewind(to=0.5), finetune=how)(build(networks.Residual), replace(task, snapshots=None))
    with pytest.raises(StageOrderError, match=r"stage 1, Prune, rewinds to 0.5 of a training, so it must come right after one"):
        ck.Recipe(stage(rewind=ck.prune.rewind(to=0.5), finetune=how))


def test_a_chain_that_rewinds_channels_is_resumed_with_the_same_bits(tmp_path) -> None:
    task = images_task(ck, samples=64, classes=4)
    train = ck.Train(epochs=2, optimizer=ADAM, validate_every=0)

    def run(out, stop_at=None):
        def stop(report):
            if report.training == "fine-tune" and report.step == stop_at:
                signal.raise_signal(signal.SIGTERM)

        prune = stage(rewind=ck.prune.rewind(to=0.5), finetune=train, samples=32)
        recipe = ck.Recipe(train, prune, export="last", on_step=stop, save=ck.Every(steps=1))
        torch.manual_seed(0)
        return recipe.run(build(networks.Residual), task, out).model.state_dict()

    whole = run(tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(tmp_path / "halves", stop_at=3)
    resumed = run(tmp_path / "halves")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


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
            {"rewind": 0.33, "finetune": ck.Train(epochs=1)},
            r"Prune\(rewind=...\): wanted .*rewind",
        ),
        ({"rewind": nn.Linear(1, 1)}, "rewound weights must be trained again; set finetune"),
    ],
)
def test_bad_stages(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        stage(**settings)


class Gated(nn.Module):
    """Tables and products of values: nothing that counts as multiply-accumulates."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.scale = nn.Embedding(50, 16), nn.Embedding(50, 16), nn.Parameter(torch.ones(16))

    def forward(self, user, item):
        return (self.user(user) * self.item(item) * self.scale).sum(-1)


def test_a_budget_of_macs_is_refused_where_there_are_none() -> None:
    pairs = [(*torch.randint(0, 50, (2, 16)), torch.randn(16))]
    task = ck.Task(train=pairs, val=pairs, loss=nn.functional.mse_loss, metric=nn.functional.mse_loss)
    wanted = r"Prune\(budget=...\): wanted 50.0% of the MACs of Gated, which has none .* such as ck.keep\(parameters=0.5\)"
    with pytest.raises(ModelError, match=wanted):
        stage()(Gated(), task)
    small = stage(budget=ck.keep(parameters=0.5))(Gated(), task)
    assert ck.count_parameters(small) <= 0.5 * ck.count_parameters(Gated())
    assert small.user.embedding_dim == small.item.embedding_dim == 8


def test_steps_of_a_budget_of_channels_end_at_the_budget() -> None:
    """A step that removes more than its share leaves less for the next one."""
    model, task, plans = build(networks.Residual), images_task(ck, samples=32, classes=4), []

    class Noted(Prune):
        def _fresh_plan(self, *args):
            plans.append(super()._fresh_plan(*args))
            return plans[-1]

    Noted(budget=ck.keep(channels=0.5), steps=3, samples=32, reconstruct=False)(model, task)
    assert len(plans) == 3
    reached = math.prod(sum(line.keep for line in plan.lines) / sum(line.size for line in plan.lines) for plan in plans)
    assert 0.48 < reached <= 0.5
