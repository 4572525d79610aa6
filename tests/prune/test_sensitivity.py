"""Sensitivity of channels: measured curves, and the ranking and ratios that follow from them."""

from __future__ import annotations

import copy
import json

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit import count_macs
from compresskit.base.errors import CheckpointError, SettingError
from compresskit.prune import apply_, channel_sensitivity, plan_channels
from compresskit.prune.sensitivity import ChannelSensitivity


def trained():
    model, task = build(networks.Residual), images_task(ck, samples=128, classes=4)
    ck.Train(epochs=12, optimizer=lambda p: torch.optim.Adam(p, lr=3e-3))(model, task)
    return model, task


def test_sensitivity_is_what_cutting_one_group_costs() -> None:
    model, task = trained()
    before = copy.deepcopy(model.state_dict())
    curves = channel_sensitivity(model, task, ratios=(0.25, 0.75), round_to=4, samples=128)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert curves.dense == ck.evaluate(model, task)
    plan = plan_channels(model, image(2), budget=ck.remove(channels=0), ratios={"inner.0": 0.75}, round_to=4)
    cut_by_hand = apply_(copy.deepcopy(model), plan)
    ck.prune.reestimate_batchnorm_(cut_by_hand, (batch[:1] for batch in task.train))
    ratio, metric = curves.points["inner.0"][-1]
    assert ratio == 0.75
    assert metric == pytest.approx(ck.evaluate(cut_by_hand, task), abs=0.05)  # the last bits of statistics over a shuffled loader
    assert ChannelSensitivity.from_json(json.loads(json.dumps(curves.to_json()))) == curves
    assert "inner.0: 25% ->" in str(curves)
    refit = channel_sensitivity(model, task, ratios=(0.25, 0.75), round_to=4, samples=128, reconstruct=True)
    assert refit.points != curves.points


def regression(sign: int, **settings):
    """A network with 24 useless channels of 32 in its second layer, and a task whose metric is `sign` times the RMSE."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    model[4].weight.data[:, 8:] = 0
    x = torch.randn(400, 10)
    batches = list(zip(x.split(100), model(x).detach().split(100), strict=True))
    error = lambda p, t: sign * F.mse_loss(p, t).sqrt().item()  # noqa: E731
    return model, ck.Task(train=batches, val=batches, loss=F.mse_loss, metric=error, **settings), (x[:4],)


def test_an_error_as_the_metric_gives_the_ratios_of_its_negative() -> None:
    ratios = []
    for sign, higher in ((-1, None), (1, False)):
        model, task, example = regression(sign, higher_is_better=higher)
        curves = channel_sensitivity(model, task)
        assert ChannelSensitivity.from_json(json.loads(json.dumps(curves.to_json()))) == curves
        ratios.append(curves.ratios(model, example, ck.keep(macs=0.5)))
    assert ratios[0] == ratios[1]
    assert ratios[0]["2"] >= 0.5 > ratios[0]["0"], "the useless channels go"


def test_a_metric_that_grows_with_damage_has_to_say_its_direction() -> None:
    model, task, _ = regression(1)
    with pytest.raises(SettingError, match=r"the metric grows from 0 to .* set Task\(higher_is_better=False\)"):
        channel_sensitivity(model, task)


def test_allocation_spares_what_the_metric_needs() -> None:
    model = build(networks.Concat)
    plan = plan_channels(model, image(2), budget=ck.keep(macs=0.9), round_to=4)
    others = {line.layer: ((0.25, 0.88), (0.75, 0.8)) for line in plan.lines}
    flat, steep = {**others, "a.0": ((0.75, 0.9),)}, {**others, "a.0": ((0.25, 0.5), (0.75, 0.1))}
    ratios = {}
    for name, points in (("flat", flat), ("steep", steep)):
        curves = ChannelSensitivity(dense=0.9, points=points)
        ratios[name] = curves.ratios(model, image(2), budget=ck.keep(macs=0.7), round_to=4)
        small = apply_(
            copy.deepcopy(model), plan_channels(model, image(2), budget=ck.keep(macs=0.7), round_to=4, ratios=ratios[name])
        )
        assert count_macs(small, image(2)) <= 0.7 * count_macs(model, image(2))
    assert ratios["steep"]["a.0"] == 0
    assert ratios["flat"]["a.0"] >= 0.5
    assert plan_channels(model, image(2), budget=ck.keep(macs=0.7), round_to=4, ranking=curves.ranking()).remove


def test_drops_are_read_off_a_curve_that_never_rises() -> None:
    curves = ChannelSensitivity(dense=0.9, points={"a": ((0.25, 0.8), (0.5, 0.85), (0.75, 0.5))})
    assert curves.drop("a", 0.125) == pytest.approx(0.05)
    assert curves.drop("a", 0.5) == pytest.approx(0.1)
    assert curves.drop("a", 0.625) == pytest.approx(0.25)
    assert curves.drop("a", 0.875) == pytest.approx(0.55)


def test_bad_curves() -> None:
    model, task = build(networks.Chain), images_task(ck, samples=32, classes=4)
    with pytest.raises(SettingError, match=r"wanted different fractions in \(0, 1\), got \(0.5, 0.5\)"):
        channel_sensitivity(model, task, ratios=(0.5, 0.5))
    with pytest.raises(CheckpointError, match="not sensitivity curves"):
        ChannelSensitivity.from_json({"dense": 1})
