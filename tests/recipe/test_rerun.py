"""What a recipe says before it runs, and what a finished or a foreign folder keeps."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError, ModelError, SettingError, StageOrderError
from compresskit.export.files import read_metadata

BATCHES = [(torch.randn(16, 8), torch.arange(16) % 4)] * 2
TASK = ck.Task(train=BATCHES, val=BATCHES)
PRUNE = ck.Prune(budget=ck.keep(macs=0.5))


@dataclass(frozen=True, kw_only=True)
class Nothing(ck.Stage):
    """Forgets to return its model."""

    def __call__(self, model, task):
        return None


def test_a_stage_that_returns_no_module_is_named(tmp_path) -> None:
    with pytest.raises(ModelError, match="Nothing returned NoneType, wanted a module"):
        ck.Recipe(Nothing(), export="last").run(nn.Linear(8, 4).eval(), TASK, tmp_path / "run")


def test_a_new_student_is_a_float_model_again() -> None:
    ck.Recipe(ck.StaticQuant(), ck.Distill(student=lambda: nn.Linear(8, 4), epochs=1), PRUNE)
    with pytest.raises(StageOrderError, match="stage 3, Prune, needs a float model"):
        ck.Recipe(ck.StaticQuant(), ck.Distill(epochs=1), PRUNE)


@pytest.mark.parametrize("stages", [(ck.QAT(epochs=1), ck.QAT(epochs=1)), (ck.DynamicQuant(), ck.StaticQuant())])
def test_two_quantizers_have_no_legal_order(stages) -> None:
    with pytest.raises(StageOrderError, match="no order of these stages is legal, leave one of them out"):
        ck.Recipe(*stages)


def test_the_order_in_a_refusal_is_legal() -> None:
    stages = {"QAT": ck.QAT(epochs=1), "Prune": PRUNE, "Sparsify": ck.Sparsify(budget=ck.remove(weights=0.5))}
    with pytest.raises(StageOrderError, match="a legal order is ") as error:
        ck.Recipe(stages["QAT"], stages["Sparsify"], stages["Prune"])
    ck.Recipe(*(stages[name] for name in str(error.value).rpartition("order is ")[2].split(", ")))


def test_reading_a_finished_run_keeps_its_latencies(tmp_path, monkeypatch) -> None:
    model, recipe = nn.Linear(8, 4), ck.Recipe(ck.Train(epochs=1))
    times = iter([[1.5], [2.5]])
    monkeypatch.setattr("compresskit.recipe.engine.latency", lambda files, inputs: next(times))

    def latency():
        return json.loads(recipe.run(model, TASK, tmp_path / "run").report.read_text())["rows"][0]["latency_ms"]

    assert [latency(), latency()] == [1.5, 1.5]
    (tmp_path / "run" / "report.json").unlink()
    assert latency() == 2.5


def test_the_latency_of_an_earlier_file_of_the_same_name_is_not_believed(tmp_path, monkeypatch) -> None:
    """A run ended after the last stage and before its report, beside which lies that of the run before it."""
    model, times = nn.Linear(8, 4), iter([[1.5], [2.5]])
    monkeypatch.setattr("compresskit.recipe.engine.latency", lambda files, inputs: next(times))
    monkeypatch.setattr("compresskit.recipe.engine.layer_times", lambda file, inputs: {})
    first, second = (ck.Train(epochs=1, optimizer=partial(torch.optim.SGD, lr=rate)) for rate in (0.0, 1e-20))

    def end(row):
        raise KeyboardInterrupt

    ck.Recipe(first).run(model, TASK, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):  # its row may be the same, but for the time that it took
        ck.Recipe(second, on_stage=end).run(model, TASK, tmp_path / "run")
    for _ in range(2):  # measured once, and then read
        result = ck.Recipe(second).run(model, TASK, tmp_path / "run")
        assert [row.latency_ms for row in result.rows] == [2.5]
        assert [row["latency_ms"] for row in json.loads(result.report.read_text())["rows"]] == [2.5]


def test_an_infinite_setting_is_recorded(tmp_path) -> None:
    rprop = partial(torch.optim.Rprop, step_sizes=(1e-6, math.inf))
    recipe = ck.Recipe(ck.Train(epochs=1, optimizer=rprop))
    model = nn.Linear(8, 4)
    result = recipe.run(model, TASK, tmp_path / "run")
    (stage,) = json.loads((tmp_path / "run" / "recipe.json").read_text())["stages"]
    assert stage["optimizer"]["step_sizes"] == [1e-06, "float inf"]
    assert recipe.plan(model, TASK, tmp_path / "run").stages[0].action == "reuse"
    assert read_metadata(result.out / "1-train" / "model.onnx")["stage"]["settings"] == stage


def test_nothing_is_left_in_a_foreign_folder(tmp_path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="not empty, and not the folder of a run"):
        ck.Recipe(ck.Train(epochs=1)).run(nn.Linear(8, 4), TASK, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_soft_targets_of_a_regression_are_refused_before_anything_runs(tmp_path) -> None:
    batches = [(torch.randn(16, 8), torch.randn(16, 1))] * 2
    task = ck.Task(train=batches, val=batches, loss=F.mse_loss, metric=lambda p, y: -F.mse_loss(p, y).item())
    stages = ck.Train(epochs=1), ck.Distill(student=lambda: nn.Linear(8, 1), epochs=1)
    remedy = r"pass Distill\(loss=compresskit.distill.losses.match_predictions\)"
    with pytest.raises(ModelError, match=rf"Distill\(\): Linear gives one channel, .*; {remedy}"):
        ck.Recipe(*stages).run(nn.Linear(8, 1), task, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def read_only(monkeypatch):
    """Opens no file for writing and makes none, as on a medium that can only be read."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    plain = Path.open

    def guarded(path, mode="r", *rest, **settings):
        return refuse() if set(mode) & set("wax+") else plain(path, mode, *rest, **settings)

    def switch():
        monkeypatch.setattr(Path, "open", guarded)
        monkeypatch.setattr(Path, "rename", refuse)

    return switch


def test_a_finished_run_is_read_where_nothing_can_be_written(tmp_path, read_only) -> None:
    torch.manual_seed(0)
    model, out = nn.Linear(8, 4), tmp_path / "run"
    first = ck.Recipe(ck.Train(epochs=1)).run(model, TASK, out)
    read_only()
    again = ck.Recipe(ck.Train(epochs=1)).run(model, TASK, out)
    assert again.rows == first.rows
    assert torch.equal(again.model.weight, first.model.weight)
    with pytest.raises(CheckpointError, match=r"cannot be written \(Read-only file system\)"):
        ck.Recipe(ck.Train(epochs=2)).run(model, TASK, out)
    with pytest.raises(CheckpointError, match=r"cannot be written \(Read-only file system\); choose another out="):
        ck.Recipe(ck.Train(epochs=1)).run(model, TASK, tmp_path / "new")


def test_the_result_keeps_its_settings_to_itself_where_asked(tmp_path) -> None:
    model, out = nn.Linear(8, 4), tmp_path / "run"
    told = ck.Recipe(ck.Train(epochs=1), seed=3).run(model, TASK, out).onnx.read_bytes()
    assert ck.export.read_metadata(out / "model.onnx")["stage"]["settings"]["epochs"] == 1
    quiet = ck.Recipe(ck.Train(epochs=1), seed=3, metadata=False)
    assert quiet.plan(model, TASK, out).stages[0].action == "reuse"
    record = ck.export.read_metadata(quiet.run(model, TASK, out).onnx)
    assert record["model"] == "Linear"
    assert record.keys().isdisjoint({"stage", "metric", "verification"})
    assert b"epochs" not in (out / "model.onnx").read_bytes()
    ck.Recipe(ck.Train(epochs=1), seed=3).run(model, TASK, out)
    assert (out / "model.onnx").read_bytes() == told
    with pytest.raises(SettingError, match=r"Recipe\(metadata=...\): wanted True or False, got 'no'"):
        ck.Recipe(ck.Train(epochs=1), metadata="no")


class Counting:
    """A loss that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, predictions, target):
        self.calls += 1
        return F.cross_entropy(predictions, target)


def test_a_plan_reuses_what_a_run_does_where_a_loss_or_the_data_remember(tmp_path) -> None:
    """Both describe what was given, before the check of a run calls it."""

    def task() -> ck.Task:
        loss, kept = Counting(), []
        data = torch.utils.data.DataLoader(BATCHES, batch_size=None, collate_fn=lambda batch: kept.append(0) or batch)
        return ck.Task(train=data, val=BATCHES, loss=loss)

    recipe = ck.Recipe(ck.Train(epochs=1), export="last")
    recipe.run(nn.Linear(8, 4), task(), tmp_path / "run")
    plan = recipe.plan(nn.Linear(8, 4), task(), tmp_path / "run")
    assert [(stage.action, stage.why) for stage in plan.stages] == [("reuse", "done, from other new weights")]
