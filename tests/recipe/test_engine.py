"""The engine: finished stages are read, interrupted and changed ones run again, whatever the model and the data are."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from typing import ClassVar

import networks
import pytest
import short_run
import torch
from networks import image, images_task
from terminal import show_terminal
from torch import nn

import compresskit as ck
from compresskit.base.errors import (
    ModelError,
    TrainingError,
)
from compresskit.graph.masks import detach_masks_


def test_finished_stages_are_read_not_run_again(finished_run, monkeypatch) -> None:
    out, task, result = finished_run
    monkeypatch.setattr(ck.Train, "__call__", None)  # whoever trains again fails
    monkeypatch.setattr(ck.Prune, "__call__", None)
    monkeypatch.setattr(ck.QAT, "__call__", None)
    again = short_run.run(out, task)
    x = image(8)
    with torch.no_grad():
        assert torch.equal(again.model(*x), result.model(*x))
    assert [r.metric for r in again.rows] == [r.metric for r in result.rows]


def test_an_interrupted_run_ends_with_the_same_bits(finished_run, tmp_path) -> None:
    out, task, result = finished_run
    for lost in ("3-qat", "2-prune"):
        copy = tmp_path / lost
        shutil.copytree(out, copy)
        (copy / lost / "row.json").unlink()  # what a kill during that stage leaves
        (copy / "3-qat" / "row.json").unlink(missing_ok=True)
        again = short_run.run(copy, task)
        assert (copy / "model.onnx").read_bytes() == (out / "model.onnx").read_bytes()
        ours, theirs = again.model.state_dict(), result.model.state_dict()
        assert all(torch.equal(v, theirs[k]) for k, v in ours.items())


def test_a_changed_stage_runs_again_and_those_before_it_do_not(finished_run, tmp_path, monkeypatch) -> None:
    out, task, _ = finished_run
    shutil.copytree(out, tmp_path / "run")
    monkeypatch.setattr(ck.Train, "__call__", None)
    changed = short_run.run(tmp_path / "run", task, macs=0.9)
    assert changed.rows[1].macs > 0.7 * changed.rows[0].macs


def test_an_incoming_trained_model_is_the_first_row(tmp_path) -> None:
    task = images_task(ck, samples=64)
    result = ck.Recipe(ck.StaticQuant()).run(networks.build(networks.Chain), task, tmp_path / "run")
    assert [r.stage for r in result.rows] == ["0-start", "1-staticquant"]
    assert result.rows[0].bytes > result.rows[1].bytes


def test_the_teacher_is_the_first_trained_model(tmp_path) -> None:
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = networks.Chain()

        def forward(self, x):
            return self.net(x)

    class Look(ck.Train):
        def __call__(self, model, task):
            seen.append(task.reference)
            return model

    task = images_task(ck, samples=64)
    ck.Recipe(ck.Train(epochs=1), Look(epochs=1), Look(epochs=2), export="last").run(Spy(), task, tmp_path / "run")
    assert isinstance(seen[0], Spy)
    assert seen[0] is seen[1]
    assert not any(p.requires_grad for p in seen[0].parameters())


def test_the_incoming_model_is_not_changed(tmp_path) -> None:
    model, task = networks.Residual(), images_task(ck, samples=64)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    short_run.run(tmp_path / "run", task, model=model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_dict_batches_two_inputs_and_a_dict_of_outputs(tmp_path) -> None:
    y = torch.arange(64) % 4
    batch = {"image": torch.randn(64, 3, 16, 16) + y.view(-1, 1, 1, 1), "numbers": torch.randn(64, 8), "labels": y}
    batches = [{k: v[i : i + 32] for k, v in batch.items()} for i in (0, 32)]
    recipe = ck.Recipe(
        ck.Train(epochs=20, optimizer=short_run.ADAM),
        ck.Distill(epochs=1, student=networks.TwoInputs, optimizer=short_run.ADAM),
        ck.Prune(
            budget=ck.keep(macs=0.7), round_to=4, finetune=ck.Train(epochs=20, optimizer=short_run.ADAM, objective=ck.imitate())
        ),
        ck.QAT(epochs=1, objective=ck.imitate()),
    )
    task = ck.Task(train=batches, val=batches)
    model = networks.TwoInputs()
    result = recipe.run(model, task, tmp_path / "run")
    assert all(row.verified for row in result.rows)
    assert result.rows[0].metric > 0.9
    assert result.rows[-1].metric > 0.5  # 40 steps from scratch, cut and rounded; chance is 0.25
    assert ck.audit(result.onnx).integer_fraction == 1.0
    again = recipe.run(model, task, tmp_path / "run")
    assert [row.metric for row in again.rows] == [row.metric for row in result.rows]


def test_other_weights_give_a_warning_and_another_metric_runs_again(finished_run, tmp_path) -> None:
    out, task, result = finished_run
    shutil.copytree(out, tmp_path / "run")
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="the incoming weights are not those that this run started from"):
        again = short_run.run(tmp_path / "run", task, model=networks.Residual())
    assert [r.metric for r in again.rows] == [r.metric for r in result.rows]
    other = replace(task, metric=lambda p, t: 0.125)
    assert {r.metric for r in short_run.run(tmp_path / "run", other).rows} == {0.125}


def test_a_recipe_on_other_trained_weights_runs_again(tmp_path) -> None:
    """A chain that starts from trained weights never hands back the model of other weights."""
    task, x = images_task(ck, samples=64), image(8)
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        results.append(ck.Recipe(ck.StaticQuant()).run(networks.build(networks.Chain), task, tmp_path / "run"))
    with torch.no_grad():
        assert not torch.allclose(results[0].model(*x), results[1].model(*x))


def test_a_changed_stage_that_fails_loses_nothing(finished_run, tmp_path) -> None:
    out, task, _ = finished_run
    shutil.copytree(out, tmp_path / "run")
    x, y = task.train[0]
    with pytest.raises(TrainingError):
        short_run.run(tmp_path / "run", replace(task, train=[(x, y), (x / 0, y)], metric=lambda p, t: 0.5))
    kept = tmp_path / "run" / ".1-train.replaced"
    assert (kept / "model.onnx").read_bytes() == (out / "1-train" / "model.onnx").read_bytes()


def test_progress_bars_show_on_a_terminal_only(tmp_path, monkeypatch, capsys) -> None:
    recipe = ck.Recipe(
        ck.Train(epochs=1),
        ck.Prune(budget=ck.remove(channels=0.3), criterion=ck.prune.criteria.taylor),
        ck.StaticQuant(),
        export="last",
    )
    recipe.run(networks.build(networks.Chain), images_task(ck, samples=64), tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    terminal = show_terminal(monkeypatch)
    recipe.run(networks.build(networks.Chain), images_task(ck, samples=64), tmp_path / "seen")
    bars = terminal.bars
    assert {"train", "score", "calibrate", "export", "verify", "evaluate"} <= set(bars), set(bars)
    assert all(re.search(r"\d/\d+ \[\d\d:\d\d<", line) for line in bars.values())  # how far, how long, how long yet


def test_leftovers_of_a_killed_run_are_deleted(finished_run, tmp_path) -> None:
    out, task, _ = finished_run
    shutil.copytree(out, tmp_path / "run")
    for left in ("2-prune/progress", ".2-prune.replaced"):
        (tmp_path / "run" / left).mkdir()
        (tmp_path / "run" / left / "1-end.safetensors").write_bytes(b"killed before it was deleted")
    short_run.run(tmp_path / "run", task)
    assert not list((tmp_path / "run").rglob("1-end.safetensors"))


def test_stages_are_reused_under_another_export_setting(finished_run, tmp_path, monkeypatch) -> None:
    _, task, _ = finished_run
    recipe = ck.Recipe(ck.Train(epochs=1), ck.StaticQuant(), export="last")
    model = networks.Residual()
    recipe.run(model, task, tmp_path / "run")
    result = ck.Recipe(*recipe.stages).run(model, task, tmp_path / "run")
    assert all(row.verified for row in result.rows)


def test_predictions_inside_nested_outputs(tmp_path) -> None:
    class Pair(networks.Chain):
        def forward(self, x):
            y = super().forward(x)
            return {"features": y.mean(1), "classes": (y, y.square().mean())}

    task = images_task(ck, samples=64, predict=lambda o: o["classes"][0])
    result = ck.Recipe(ck.Train(epochs=1), ck.StaticQuant()).run(Pair(), task, tmp_path / "run")
    assert all(row.verified for row in result.rows)


@dataclass(frozen=True, kw_only=True)
class Halve(ck.Stage):
    """Halve every weight of a trained model."""

    needs: ClassVar[frozenset[str]] = frozenset({"float"})

    def __call__(self, model, task):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        return model


def test_a_stage_of_the_user_runs_and_resumes(tmp_path) -> None:
    task, model = images_task(ck, samples=64), networks.build(networks.Chain)
    recipe = ck.Recipe(Halve(), export="last")
    result = recipe.run(model, task, tmp_path / "run")
    assert [row.stage for row in result.rows] == ["0-start", "1-halve"]
    assert torch.equal(result.model.head.weight, 0.5 * model.head.weight)
    assert [stage.action for stage in recipe.plan(model, task, tmp_path / "run").stages] == ["reuse", "reuse"]


def test_a_stage_that_loses_the_masks_is_refused(tmp_path) -> None:
    class Lose(Halve):
        def __call__(self, model, task):
            detach_masks_(model)
            return model

    recipe = ck.Recipe(ck.Sparsify(budget=ck.remove(weights=0.5)), Lose(), export="last")
    with pytest.raises(ModelError, match=r"Lose lost the masks of its model \(\d+ weights at zero\)"):
        recipe.run(networks.build(networks.Chain), images_task(ck, samples=64), tmp_path / "run")
