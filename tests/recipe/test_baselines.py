"""Baselines of a run: networks of the sizes that its stages made, trained as long from new weights and on labels alone."""

from __future__ import annotations

import networks
import pytest
import torch
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.export.files import DiskError
from compresskit.recipe.baselines import with_new_weights
from compresskit.recipe.half_precision import HalfPrecision
from compresskit.recipe.page.records import read_run

ONE = ck.Train(epochs=1, validate_every=0)


def test_a_run_reports_what_its_networks_would_be_without_a_teacher_and_without_pruning(tmp_path) -> None:
    task, model, steps = images_task(ck, samples=64, classes=4), build(networks.Residual), []
    recipe = ck.Recipe(
        ONE,
        ck.Distill(student=networks.Residual, epochs=2, validate_every=0),
        ck.Prune(budget=ck.keep(macs=0.5), round_to=4, samples=32, finetune=ck.Train(epochs=3, validate_every=0)),
        ck.StaticQuant(samples=32),
        baselines=True,
        export="last",
        on_step=lambda report: steps.append((report.stage, report.training, report.steps, *report.losses)),
    )
    result = recipe.run(model, task, tmp_path / "run")
    batches = task.length("train")
    rows = {row.stage: row for row in result.baselines}
    pruned = result.rows[2]
    assert list(rows) == ["2-distill, alone", "3-prune, alone", "3-prune, fp16", "3-prune, bf16"]
    assert (rows["3-prune, alone"].parameters, rows["3-prune, alone"].macs) == (pruned.parameters, pruned.macs)
    assert rows["3-prune, alone"].verified
    trained = {entry[2:] for entry in steps if entry[:2] == ("1-train", "train")}
    assert trained >= {(2 * batches, "loss")}
    assert steps[-1] == ("1-train", "train", 5 * batches, "loss")  # as long as student and fine-tuning, on the labels alone
    assert "3-prune, alone" in str(result)
    count = len(steps)
    again = recipe.run(model, task, tmp_path / "run")
    assert len(steps) == count
    assert [row.metric for row in again.baselines] == [row.metric for row in result.baselines]
    half = [rows["3-prune, fp16"], rows["3-prune, bf16"]]
    assert [row.verified for row in half] == [True, True]
    assert all(0.45 < row.bytes / rows["3-prune, alone"].bytes < 0.8 for row in half)
    assert all(row.latency_ms > 0 for row in half)
    written = read_run(tmp_path / "run")
    assert [row.stage for row in written.baselines] == list(rows)
    assert "3-prune, fp16" in (tmp_path / "run" / "report.html").read_text()
    assert "3-prune, fp16" in (tmp_path / "run" / "report.csv").read_text()


def test_a_baseline_of_an_earlier_network_makes_room_for_that_of_a_changed_stage(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("compresskit.recipe.recipe.HALF_DTYPES", {})
    task = images_task(ck, samples=32, classes=4)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    for kept in (0.8, 0.5):
        prune = ck.Prune(budget=ck.keep(macs=kept), round_to=1, criterion=ck.prune.criteria.l2, finetune=ONE)
        result = ck.Recipe(prune, baselines=True, export="last").run(model, task, tmp_path / "run")
        assert result.baselines[0].parameters == result.rows[1].parameters


def test_a_smaller_student_is_also_trained_alone(tmp_path) -> None:
    task = images_task(ck, samples=32, classes=4)
    small = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    recipe = ck.Recipe(ck.Distill(student=small, epochs=2, validate_every=0), baselines=True, export="last", seed=3)
    result = recipe.run(build(networks.Residual).eval(), task, tmp_path / "run")
    assert [row.stage for row in result.baselines] == ["1-distill, alone", "1-distill, fp16", "1-distill, bf16"]
    assert result.baselines[0].parameters == ck.count_parameters(small)
    assert ck.Recipe(ONE).run(build(networks.Residual), task, tmp_path / "plain").baselines == ()


def test_new_weights_are_those_that_torch_draws() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2), nn.LSTM(8, 8)).requires_grad_(False)
    torch.nn.init.constant_(model[0].weight, 5.0)
    model[1].running_mean.fill_(3.0)
    torch.manual_seed(1)
    new = with_new_weights(model)
    torch.manual_seed(1)
    assert torch.equal(new[0].weight, nn.Linear(8, 8).weight)
    assert new[1].running_mean.abs().max() == 0
    assert all(parameter.requires_grad for parameter in new.parameters())
    assert float(model[0].weight[0, 0].detach()) == 5.0


def test_half_precision_takes_and_returns_fp32() -> None:
    model, x = build(networks.Residual).eval(), torch.randn(4, 3, 16, 16)
    for dtype, close in ((torch.float16, 3e-3), (torch.bfloat16, 3e-2)):
        half = HalfPrecision(model, dtype)
        found, wanted = half(x), model(x)
        assert found.dtype is torch.float32
        assert 0 < (found - wanted).abs().max() < close * wanted.abs().max()
        assert {parameter.dtype for parameter in half.parameters()} == {dtype}
    assert next(model.parameters()).dtype is torch.float32


def test_a_network_that_half_precision_does_not_run_has_no_such_row(tmp_path, caplog) -> None:
    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 10)

        def forward(self, x):
            return torch.nn.functional.linear(x.mean((2, 3)), self.linear.weight.float(), self.linear.bias)

    result = ck.Recipe(ONE, baselines=True).run(Doubles(), images_task(ck, samples=32), tmp_path / "run")
    assert result.baselines == ()
    assert "no baseline in fp16" in caplog.text


def test_a_full_disk_is_no_network_that_half_precision_does_not_run(tmp_path, monkeypatch) -> None:
    def full(*given, **settings):
        raise DiskError("the disk is full")

    monkeypatch.setattr("compresskit.recipe.recipe.half_precision_row", full)
    with pytest.raises(ck.CheckpointError, match="the disk is full"):
        ck.Recipe(ONE, baselines=True).run(build(networks.Residual), images_task(ck, samples=32), tmp_path / "run")


class OwnScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.chain = build(networks.Chain)

    def forward(self, x):
        return self.chain(x) * self.scale


def test_what_has_no_baseline_is_refused_before_the_first_stage(tmp_path) -> None:
    task = images_task(ck, samples=32, classes=4)
    with pytest.raises(SettingError, match=r"Recipe\(baselines=...\): wanted True or False, got 1"):
        ck.Recipe(ONE, baselines=1)
    with pytest.raises(ModelError, match=r"the model \(OwnScale\) has parameters of its own and no reset_parameters\(\)"):
        ck.Recipe(ONE, baselines=True).run(OwnScale(), task, tmp_path / "run")
    bare = ck.Task(train=[(x,) for x, _ in task.train], val=task.val)
    own = (ck.Task(train=task.train, val=task.val),)
    with pytest.raises(DataError, match=r"Recipe\(baselines=True\): the training of baselines reads targets, which"):
        ck.Recipe(ONE, baselines=True).run(build(networks.Chain), bare, tmp_path / "run", tasks=own)
    assert not (tmp_path / "run").exists()
