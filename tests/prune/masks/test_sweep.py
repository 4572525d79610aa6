"""The sweep of pruning: points against the stages run by hand, resuming, the picture, and what is refused."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import partial

import networks
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError, ModelError, SettingError
from compresskit.prune import rewind, sweep
from compresskit.train.snapshots import rewind_

ADAM = partial(torch.optim.Adam, lr=3e-3)
TRAIN = ck.Train(epochs=2, optimizer=ADAM)
TUNE = ck.Train(epochs=1, optimizer=partial(torch.optim.Adam, lr=1e-3))
ALL = ["none", "fine-tuning", "learning-rate rewinding", "weight rewinding"]


def loss_task():
    """The mean loss is the metric: unlike accuracy, it tells any two networks apart."""
    torch.manual_seed(0)
    return networks.images_task(ck, samples=64, metric=lambda p, t: nn.functional.cross_entropy(p, t).item())


def by_hand(method, stage, task, model, seed=0):
    """Train, prune and train again, without the sweep."""
    early: dict = {}
    own = replace(task, snapshots={0.33: early})
    torch.manual_seed(seed)
    dense = TRAIN(model, own)
    torch.manual_seed(seed)
    rest = rewind(to=0.33).rest(TRAIN)
    how = {"none": None, "fine-tuning": TUNE}.get(method, rest)
    if method == "weight rewinding" and isinstance(stage, ck.Sparsify):
        stage = replace(stage, finetune=TRAIN, rewind=rewind(to=0.33))
    elif method == "weight rewinding":
        stage = replace(stage, finetune=rest, rewind=rewind_(copy.deepcopy(dense), early))
    else:
        stage = replace(stage, finetune=how)
    return ck.evaluate(stage(dense, own), task)


def sparse(ratio):
    return ck.Sparsify(budget=ck.remove(weights=ratio))


def thin(ratio):
    return ck.Prune(budget=ck.remove(parameters=ratio), round_to=1)


@pytest.mark.parametrize("at", [sparse, thin])
def test_every_point_is_what_the_stage_alone_gives(at) -> None:
    task = loss_task()
    torch.manual_seed(1)
    state = networks.Residual().state_dict()

    def fresh():
        model = networks.Residual()
        model.load_state_dict(state)
        return model

    model = fresh()
    numbers = torch.get_rng_state()
    found = sweep(model, task, TRAIN, ratios=(0, 0.5), at=at, finetune=TUNE)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert found.methods == ALL
    points = {(p.method, p.ratio): p.metric for p in found.points}
    assert len(points) == 8
    assert len(set(points.values())) == 8
    for method in ALL:
        assert points[method, 0.5] == pytest.approx(by_hand(method, at(0.5), task, fresh()), rel=1e-4), method
    assert points["none", 0.0] == found.dense[0]


def test_a_sweep_goes_on_where_it_stopped(tmp_path, monkeypatch) -> None:
    task, model = loss_task(), networks.build(networks.Residual)
    settings = dict(ratios=(0.3, 0.5), methods=["none", "weight rewinding"], seeds=(0, 1))
    whole = sweep(model, task, TRAIN, **settings)
    calls = []
    original = ck.Sparsify.__call__

    def counted(self, *args):
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(ck.Sparsify, "__call__", counted)
    with pytest.raises(KeyboardInterrupt):
        sweep(model, task, TRAIN, out=tmp_path / "run", **settings)
    assert len(json.loads((tmp_path / "run" / "sweep.json").read_text())["points"]) == 2
    again = sweep(model, task, TRAIN, out=tmp_path / "run", **settings)
    assert again == whole
    assert len(calls) == 3 + 6
    calls += [None] * 9
    more = sweep(model, task, TRAIN, out=tmp_path / "run", **settings | dict(ratios=(0.3, 0.4, 0.5), seeds=(0,)))
    assert len(calls) == 18 + 2
    assert {p for p in whole.points if p.seed == 0} < set(more.points)
    other = replace(TRAIN, epochs=1)
    with pytest.raises(CheckpointError, match="it holds a sweep with other train; choose another out="):
        sweep(model, task, other, out=tmp_path / "run", **settings)


def test_a_trained_network_is_swept_as_it_is() -> None:
    task, model = loss_task(), networks.build(networks.Residual)
    TRAIN(model, task)
    found = sweep(model, task, TUNE, ratios=(0.5,), trained=True)
    assert found.methods == ["none", "learning-rate rewinding"]
    assert found.dense == {0: ck.evaluate(model, task)}
    with pytest.raises(SettingError, match="'weight rewinding' goes back to a point of a training that sweep makes itself"):
        sweep(model, task, TUNE, methods=["weight rewinding"], trained=True)


def test_the_table_and_the_picture() -> None:
    task, model = loss_task(), networks.build(networks.Residual)
    found = sweep(model, task, TRAIN, ratios=(0, 0.5, 0.98), methods=["none"], at=lambda r: ck.Prune(budget=ck.remove(macs=r)),
                  seeds=(0, 1))  # fmt: skip
    assert [ratio for ratio, _ in found.curve("none")] == [0.0, 0.5]
    text = str(found)
    assert "unpruned, mean of 2 seeds" in text
    assert "98.0%: " in text  # why it cannot be reached
    assert "can be reached" in text
    root = ET.fromstring(found.svg())
    names = [node.tag.rpartition("}")[2] for node in root.iter()]
    assert names.count("circle") == 2
    assert "none" in [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    mean = sum(p.metric for p in found.points if p.ratio == 0.5) / 2
    assert dict(found.curve("none"))[0.5] == mean
    with pytest.raises(ModelError, match="sweep: no fraction can be removed: "):
        sweep(model, task, TRAIN, ratios=(0.98,), methods=["none"], at=lambda r: ck.Prune(budget=ck.remove(macs=r)))


def test_bad_settings_are_refused_before_anything_is_trained() -> None:
    task, model = loss_task(), networks.build(networks.Residual)
    for settings, message in (
        (dict(ratios=(0.5, 1.0)), r"sweep\(ratios=...\): wanted different fractions in \[0, 1\), got \(0.5, 1.0\)"),
        (dict(ratios=(0.5, 0.5)), r"sweep\(ratios=...\): wanted different fractions"),
        (dict(methods=["rewind"]), r"sweep\(methods=...\): wanted some of 'none', 'fine-tuning', .*got \['rewind'\]"),
        (dict(methods=["fine-tuning"]), r"sweep\(methods=...\): 'fine-tuning' needs finetune=Train"),
        (dict(finetune=3), r"sweep\(finetune=...\): wanted Train\(...\), got int"),
        (dict(at=lambda ratio: ratio), r"sweep\(at=...\): wanted a function from the fraction to Sparsify\(...\) or Prune"),
        (dict(seeds=()), r"sweep\(seeds=...\): wanted at least one whole number"),
        (dict(rewind_to=1.0), r"rewind\(to=...\): wanted a share of the training"),
    ):
        with pytest.raises(SettingError, match=message):
            sweep(model, task, TRAIN, **settings)
    with pytest.raises(SettingError, match=r"sweep\(train=...\): wanted Train\(...\), got int"):
        sweep(model, task, 3)


def test_buffers_that_no_state_dict_has_and_frozen_parameters_count(tmp_path) -> None:
    task = loss_task()

    def swept(mean=0.0, frozen=False):
        torch.manual_seed(0)
        model = networks.build(networks.Chain)
        model.register_buffer("mean", torch.tensor(mean), persistent=False)
        next(model.parameters()).requires_grad_(not frozen)
        return sweep(model, task, TUNE, ratios=(0,), methods=["none"], out=tmp_path / "run")

    assert swept() == swept()
    for change in ({"mean": 0.5}, {"frozen": True}):
        with pytest.raises(CheckpointError, match="it holds a sweep with other model; choose another out="):
            swept(**change)
