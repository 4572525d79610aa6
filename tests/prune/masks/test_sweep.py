"""The sweep of pruning: points against the stages run by hand, resuming, the picture, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import partial
from pathlib import Path

import networks
import numpy as np
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError, ModelError, SettingError
from compresskit.base.files import read_json, write_json, write_tensors
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
        (dict(seeds=0), r"sweep\(seeds=...\): wanted at least one whole number, such as \(0, 1\), got 0"),
        (dict(seeds="01"), r"sweep\(seeds=...\): wanted at least one whole number, such as \(0, 1\), got '01'"),
        (dict(seeds=(0.5,)), r"sweep\(seeds=...\): wanted at least one whole number, such as \(0, 1\), got \(0.5,\)"),
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


def test_a_sweep_of_tied_weights_goes_on(tmp_path) -> None:
    task, model = loss_task(), networks.build(networks.Tied)
    settings = dict(ratios=(0.3, 0.5), methods=["none", "weight rewinding"])
    sweep(model, task, TUNE, out=tmp_path / "run", **settings | dict(ratios=(0.3,)))
    assert sweep(model, task, TUNE, out=tmp_path / "run", **settings) == sweep(model, task, TUNE, **settings)


def test_stored_weights_of_another_model_are_refused(tmp_path) -> None:
    task, model = loss_task(), networks.build(networks.Chain)
    sweep(model, task, TUNE, ratios=(0,), methods=["none"], out=tmp_path)
    write_tensors(tmp_path / "dense-0.safetensors", networks.Residual().state_dict())
    with pytest.raises(CheckpointError, match=r"dense-0.safetensors: the weights are of another model \(.*; delete the folder"):
        sweep(model, task, TUNE, ratios=(0, 0.5), methods=["none"], out=tmp_path)


def test_points_imitate_the_reference_that_is_given() -> None:
    task = replace(loss_task(), reference=networks.build(networks.Residual).eval())
    how, at = replace(TUNE, objective=ck.imitate()), sparse(0.5)
    model = networks.build(networks.Chain)
    found = sweep(model, task, TUNE, ratios=(0.5,), methods=["fine-tuning"], finetune=how)
    torch.manual_seed(0)
    dense = TUNE(copy.deepcopy(model), task)
    torch.manual_seed(0)
    assert found.points[0].metric == ck.evaluate(replace(at, finetune=how)(dense, task), task)


def test_every_part_of_the_task_counts(tmp_path) -> None:
    task, model = loss_task(), networks.build(networks.Chain)
    task = replace(task, reference=networks.build(networks.Residual).eval(), higher_is_better=False)
    settings = dict(ratios=(0,), methods=["none"], out=tmp_path)
    found = sweep(model, task, TUNE, **settings)
    assert sweep(model, replace(task), TUNE, **settings) == found
    other = networks.build(networks.Residual).eval()
    with torch.no_grad():
        other.get_parameter("head.bias").add_(1)
    for change in (
        dict(reference=other),
        dict(calibration=[(x * 3 + 5, y) for x, y in task.train]),
        dict(higher_is_better=True),
        dict(train=task.train[:1]),
        dict(val=task.val[:1]),
    ):
        (name,) = change
        with pytest.raises(CheckpointError, match=rf"it holds a sweep with other Task\({name}=...\); choose another out="):
            sweep(model, replace(task, **change), TUNE, **settings)


def test_what_a_running_metric_has_counted_makes_no_other_task(tmp_path) -> None:
    class Counted:
        def __init__(self):
            self.reset()

        def reset(self):
            self.right = self.all = 0

        def update(self, predictions, target):
            self.right += int((predictions.argmax(1) == target).sum())
            self.all += len(target)

        def compute(self):
            return self.right / self.all

    task, model = replace(loss_task(), metric=Counted()), networks.build(networks.Chain)
    settings = dict(ratios=(0,), methods=["none"], out=tmp_path)
    assert sweep(model, task, TUNE, **settings) == sweep(model, task, TUNE, **settings)


def test_folders_of_earlier_versions_are_refused(tmp_path) -> None:
    task, model = loss_task(), networks.build(networks.Chain)
    sweep(model, task, TUNE, ratios=(0,), methods=["none"], out=tmp_path)
    record = read_json(tmp_path / "sweep.json", "a sweep")
    del record["key"]["Task(reference=...)"]
    write_json(tmp_path / "sweep.json", record)
    with pytest.raises(CheckpointError, match="it holds a sweep of another version of compresskit, .*; choose another out="):
        sweep(model, task, TUNE, ratios=(0,), methods=["none"], out=tmp_path)


def test_the_folder_is_where_it_was_named(tmp_path, monkeypatch) -> None:
    class Wandering(list):
        def __iter__(self):
            os.chdir(tmp_path / "elsewhere")
            return super().__iter__()

    (tmp_path / "elsewhere").mkdir()
    task, model = loss_task(), networks.build(networks.Chain)
    task = replace(task, train=Wandering(task.train))
    monkeypatch.chdir(tmp_path)
    sweep(model, task, TUNE, ratios=(0,), methods=["none"], out="run")
    assert Path.cwd() == tmp_path / "elsewhere"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"sweep.json", "dense-0.safetensors", "early-0.safetensors"}
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_cannot_be_measured_or_kept_is_refused_before_anything_is_trained(tmp_path, monkeypatch) -> None:
    def train(*args):
        raise AssertionError

    task, model = loss_task(), networks.build(networks.Chain)
    monkeypatch.setattr(ck.Train, "__call__", train)
    with pytest.raises(SettingError, match=r"Task\(val=...\), which was not given"):
        sweep(model, replace(task, val=None), TUNE, ratios=(0,), methods=["none"])
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: cannot be written .*choose another out="):
        sweep(model, task, TUNE, ratios=(0,), methods=["none"], out=tmp_path / "file")


def test_seeds_fractions_and_methods_may_be_arrays_and_generators(tmp_path) -> None:
    """A generator, read twice, gave a sweep without points."""
    task, model = loss_task(), networks.build(networks.Chain)
    wanted = sweep(model, task, TUNE, ratios=(0, 0.5), methods=["none"], seeds=(0, 1), out=tmp_path)
    assert len(wanted.points) == 4
    for seeds, ratios in ((np.arange(2), np.array([0, 0.5])), (iter((0, 1)), iter((0, 0.5)))):
        assert sweep(model, task, TUNE, ratios=ratios, methods=iter(["none"]), seeds=seeds, out=tmp_path) == wanted
    found = sweep(model, task, TUNE, ratios=(0,), methods=["none"], seeds=np.array([2]), out=tmp_path)
    assert sweep(model, task, TUNE, ratios=(0,), methods=["none"], seeds=(2,), out=tmp_path) == found


def test_a_folder_in_which_no_file_can_be_made_is_refused_before_anything_is_trained(tmp_path, monkeypatch) -> None:
    def refuse(*args, **settings):
        raise PermissionError(13, "Permission denied")

    task, model = loss_task(), networks.build(networks.Chain)
    found = sweep(model, task, TUNE, ratios=(0,), methods=["none"], out=tmp_path)
    monkeypatch.setattr(ck.Train, "__call__", refuse)
    if Path("/proc").is_dir():
        with pytest.raises(CheckpointError, match="/proc: cannot be written .*choose another out="):
            sweep(model, task, TUNE, ratios=(0,), methods=["none"], out="/proc")
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be written \(Permission denied\); .*choose another out="):
        sweep(model, task, TUNE, ratios=(0, 0.5), methods=["none"], out=tmp_path)
    assert sweep(model, task, TUNE, ratios=(0,), methods=["none"], out=tmp_path) == found  # nothing is to be written
