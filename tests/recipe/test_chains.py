"""Chains: every order works end to end or is refused with the legal one; runs are kept, resumed and reported."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import sys
from dataclasses import replace
from functools import partial

import checkout
import networks
import pytest
import torch
from networks import image, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import (
    CheckpointError,
    DataError,
    ExportError,
    ModelError,
    SettingError,
    StageOrderError,
    TrainingError,
)
from compresskit.recipe import measure_stage as engine

ADAM = partial(torch.optim.Adam, lr=3e-3)
STAGES = {
    "train": ck.Train(epochs=1, optimizer=ADAM),
    "distill": ck.Distill(epochs=1, optimizer=ADAM, student=networks.Chain),
    "prune": ck.Prune(budget=ck.keep(macs=0.7), round_to=4),
    "qat": ck.QAT(epochs=1),
}
ORDERS = list(itertools.permutations(STAGES))


def legal(order):
    return order.index("prune") < order.index("qat")


@pytest.mark.parametrize("order", [o for o in ORDERS if not legal(o)], ids="-".join)
def test_illegal_orders_name_a_legal_one(order) -> None:
    with pytest.raises(
        StageOrderError, match=r"Prune, needs a float model, but stage \d, QAT, quantized the model; a legal"
    ) as e:
        ck.Recipe(*(STAGES[name] for name in order))
    kinds = {type(s).__name__: s for s in STAGES.values()}
    ck.Recipe(*(kinds[name] for name in str(e.value).rpartition("order is ")[2].split(", ")))  # the advice is right


@pytest.mark.parametrize("order", [o for o in ORDERS if legal(o)], ids="-".join)
def test_legal_orders_run(order, tmp_path) -> None:
    stages = [STAGES[name] for name in order]
    if order.index("distill") > order.index("qat"):
        stages[order.index("distill")] = ck.Distill(epochs=1)  # trains the quantized model itself
    task = images_task(ck, samples=64)
    result = ck.Recipe(*stages, export="last").run(networks.Chain(), task, tmp_path / "run")
    assert len(result.rows) == 4 + (order[0] in ("prune", "distill"))  # with the model that came trained
    assert result.rows[-1].verified
    assert result.onnx.exists()
    assert ck.audit(result.onnx).share == 1.0


def run(out, task, *, macs=0.7, epochs=1, model=None):
    recipe = ck.Recipe(
        ck.Train(epochs=2, optimizer=ADAM),
        ck.Prune(budget=ck.keep(macs=macs), round_to=4),
        ck.QAT(epochs=epochs, objective=ck.imitate()),
    )
    torch.manual_seed(0)
    return recipe.run(model or networks.Residual(), task, out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    torch.manual_seed(0)
    out, task = tmp_path_factory.mktemp("runs") / "first", images_task(ck, samples=64)
    return out, task, run(out, task)


def test_the_folder_and_the_table(finished) -> None:
    out, task, result = finished
    assert sorted(p.name for p in out.iterdir() if p.name != ".lock") == [
        "1-train",
        "2-prune",
        "3-qat",
        "model.onnx",
        "recipe.json",
        "report.json",
    ]
    assert {p.name for p in (out / "2-prune").iterdir()} == {
        "model.onnx", "model.safetensors", "row.json", "structure.json", "verify.json"
    }  # fmt: skip
    text = str(result)
    assert text.splitlines()[0].split() == [
        "stage",
        "metric",
        "params",
        "MACs",
        "file",
        "smaller",
        "latency",
        "faster",
        "verified",
    ]
    assert text.count(" yes") == 3
    rows = json.loads((out / "report.json").read_text())["rows"]
    assert [r["stage"] for r in rows] == ["1-train", "2-prune", "3-qat"]
    for row in rows:
        file = out / row["stage"] / "model.onnx"
        assert row["bytes"] == file.stat().st_size
        assert row["executed"]
    assert (out / "model.onnx").read_bytes() == (out / "3-qat" / "model.onnx").read_bytes()
    assert rows[2]["macs"] == ck.count_macs(result.model, task.example()) <= 0.7 * rows[0]["macs"]
    assert rows[2]["bytes"] < rows[0]["bytes"]


def test_a_finished_run_is_read_not_run_again(finished, monkeypatch) -> None:
    out, task, result = finished
    monkeypatch.setattr(ck.Train, "__call__", None)  # whoever trains again fails
    monkeypatch.setattr(ck.Prune, "__call__", None)
    monkeypatch.setattr(ck.QAT, "__call__", None)
    again = run(out, task)
    x = image(8)
    with torch.no_grad():
        assert torch.equal(again.model(*x), result.model(*x))
    assert [r.metric for r in again.rows] == [r.metric for r in result.rows]


def test_an_interrupted_run_ends_with_the_same_bits(finished, tmp_path) -> None:
    out, task, result = finished
    for lost in ("3-qat", "2-prune"):
        copy = tmp_path / lost
        shutil.copytree(out, copy)
        (copy / lost / "row.json").unlink()  # what a kill during that stage leaves
        (copy / "3-qat" / "row.json").unlink(missing_ok=True)
        again = run(copy, task)
        assert (copy / "model.onnx").read_bytes() == (out / "model.onnx").read_bytes()
        ours, theirs = again.model.state_dict(), result.model.state_dict()
        assert all(torch.equal(v, theirs[k]) for k, v in ours.items())


def test_a_changed_stage_runs_again_and_those_before_it_do_not(finished, tmp_path, monkeypatch) -> None:
    out, task, _ = finished
    shutil.copytree(out, tmp_path / "run")
    monkeypatch.setattr(ck.Train, "__call__", None)
    changed = run(tmp_path / "run", task, macs=0.9)
    assert changed.rows[1].macs > 0.7 * changed.rows[0].macs


def test_models_load_from_the_folder_of_a_stage(finished) -> None:
    out, task, result = finished
    x = image(8)
    loaded = [ck.load(networks.Residual(), out / name).eval() for name in ("1-train", "2-prune", "3-qat")]
    assert type(loaded[1]) is networks.Residual
    assert loaded[1].inner[0].out_channels < 16
    with torch.no_grad():
        assert torch.equal(loaded[2](*x), result.model(*x))


def test_loading_in_another_process(finished, tmp_path) -> None:
    out, _, result = finished
    torch.save(image(4), tmp_path / "x.pt")
    code = (
        "import sys, torch, networks, compresskit as ck; x = torch.load(sys.argv[1])\n"
        "with torch.no_grad(): torch.save(ck.load(networks.Residual(), sys.argv[2])(*x), sys.argv[3])"
    )
    checkout.python("-c", code, tmp_path / "x.pt", out / "3-qat", tmp_path / "y.pt")
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "y.pt"), result.model(*torch.load(tmp_path / "x.pt")))


def test_a_trained_model_is_the_first_row(tmp_path) -> None:
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


def test_a_file_that_disagrees_stops_the_run(tmp_path, monkeypatch) -> None:
    real = engine.export_onnx

    def broken(model, path, example, **kwargs):
        other = networks.build(networks.Residual)
        return real(other, path, example)

    monkeypatch.setattr(engine, "export_onnx", broken)
    with pytest.raises(ExportError, match=r"model\.rejected\.onnx: DISAGREES"):
        run(tmp_path / "run", images_task(ck, samples=64))
    assert (tmp_path / "run" / "1-train" / "model.rejected.onnx").exists()
    assert not (tmp_path / "run" / "1-train" / "row.json").exists()


def test_the_users_model_is_not_touched(tmp_path) -> None:
    model, task = networks.Residual(), images_task(ck, samples=64)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    run(tmp_path / "run", task, model=model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_foreign_and_unwritable_folders(finished, tmp_path) -> None:
    out, task, _ = finished
    with pytest.raises(CheckpointError, match=r"belongs to another recipe \(Residual: 1-train, 2-prune, 3-qat\)"):
        ck.Recipe(ck.Train(epochs=1), ck.QAT(epochs=1)).run(networks.Residual(), task, out)
    with pytest.raises(CheckpointError, match="belongs to another recipe"):
        run(out, task, model=networks.Chain())
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty, and not the folder of a run"):
        run(tmp_path, task)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(CheckpointError, match="cannot be written"):
        run(tmp_path / "notes.txt" / "run", task)
    assert (out / "model.onnx").exists()


def test_bad_recipes(tmp_path) -> None:
    with pytest.raises(SettingError, match="at least one stage"):
        ck.Recipe()
    with pytest.raises(SettingError, match="'each' or 'last', got 'never'"):
        ck.Recipe(ck.Train(epochs=1), export="never")
    with pytest.raises(SettingError, match="wanted stages such as"):
        ck.Recipe(3)
    task = images_task(ck, samples=64)
    quantized = ck.quant.quantize_static(networks.build(networks.Chain), [image(16)])
    with pytest.raises(ModelError, match="quantized already"):
        ck.Recipe(ck.Prune(budget=ck.keep(macs=0.5))).run(quantized, task, tmp_path / "run")
    with pytest.raises(ModelError, match="does not run on the example"):
        ck.Recipe(ck.Train(epochs=1)).run(nn.Linear(3, 4), task, tmp_path / "run")
    recipe = ck.Recipe(ck.Train(epochs=1))
    x, y = images_task(ck, samples=64).train[0]
    for which in ("train", "val"):
        bad = replace(task, **{which: [(x, y + 5)]})
        with pytest.raises(DataError, match=f"{'training' if which == 'train' else 'validation'} data: .*got 1"):
            recipe.run(networks.Residual(), bad, tmp_path / "run")

    class Branch(networks.Chain):
        def forward(self, x):
            return super().forward(x if float(x.detach().sum()) > 0 else -x)

    with pytest.raises(ModelError, match="(?s)Branch cannot be captured.*inside="):
        recipe.run(Branch(), task, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["row.json", "structure.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "gone"])
def test_damaged_files(finished, tmp_path, name, damage) -> None:
    out, task, _ = finished
    shutil.copytree(out, tmp_path / "run")
    file = tmp_path / "run" / "3-qat" / name
    if damage == "gone" and name == "row.json":
        pytest.skip("a stage without row.json is one that was interrupted")
    data = file.read_bytes()
    {"truncated": lambda: file.write_bytes(data[: len(data) // 2]), "garbage": lambda: file.write_bytes(b"\x00" * 99),
     "gone": file.unlink}[damage]()  # fmt: skip
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        run(tmp_path / "run", task)


def test_newer_formats_and_other_models(finished, tmp_path) -> None:
    out, _, _ = finished
    shutil.copytree(out / "2-prune", tmp_path / "stage")
    with pytest.raises(CheckpointError, match="made of another model"):
        ck.load(networks.Chain(), tmp_path / "stage")
    record = json.loads((tmp_path / "stage" / "structure.json").read_text())
    (tmp_path / "stage" / "structure.json").write_text(json.dumps(record | {"format": 99}))
    with pytest.raises(CheckpointError, match="written in format 99, this compresskit reads 1"):
        ck.load(networks.Residual(), tmp_path / "stage")
    shutil.rmtree(tmp_path / "stage")
    shutil.copytree(out / "3-qat", tmp_path / "stage")
    with pytest.raises(CheckpointError, match="made of another model|only in one"):
        ck.load(networks.Chain(), tmp_path / "stage")
    record = json.loads((tmp_path / "stage" / "structure.json").read_text())
    record["placement"]["integer"] = {}
    ck.base.files.write_json(tmp_path / "stage" / "structure.json", {k: v for k, v in record.items() if k != "sha256"})
    with pytest.raises(CheckpointError, match="captures the model as another graph"):
        ck.load(networks.Residual(), tmp_path / "stage")
    ck.base.files.write_json(tmp_path / "stage" / "structure.json", {"format": 1, "kind": "quantized"})
    with pytest.raises(CheckpointError, match="not the record of a quantized model"):
        ck.load(networks.Residual(), tmp_path / "stage")


def test_dict_batches_two_inputs_and_a_dict_of_outputs(tmp_path) -> None:
    y = torch.arange(64) % 4
    batch = {"image": torch.randn(64, 3, 16, 16) + y.view(-1, 1, 1, 1), "numbers": torch.randn(64, 8), "labels": y}
    batches = [{k: v[i : i + 32] for k, v in batch.items()} for i in (0, 32)]
    recipe = ck.Recipe(
        ck.Train(epochs=20, optimizer=ADAM),
        ck.Distill(epochs=1, student=networks.TwoInputs, optimizer=ADAM),
        ck.Prune(budget=ck.keep(macs=0.7), round_to=4, finetune=ck.Train(epochs=20, optimizer=ADAM, objective=ck.imitate())),
        ck.QAT(epochs=1, objective=ck.imitate()),
    )
    task = ck.Task(train=batches, val=batches)
    model = networks.TwoInputs()
    result = recipe.run(model, task, tmp_path / "run")
    assert all(row.verified for row in result.rows)
    assert result.rows[0].metric > 0.9
    assert result.rows[-1].metric > 0.5  # 40 steps from scratch, cut and rounded; chance is 0.25
    assert ck.audit(result.onnx).share == 1.0
    again = recipe.run(model, task, tmp_path / "run")
    assert [row.metric for row in again.rows] == [row.metric for row in result.rows]


def test_other_weights_are_told_and_other_data_runs_again(finished, tmp_path) -> None:
    out, task, result = finished
    shutil.copytree(out, tmp_path / "run")
    with pytest.warns(UserWarning, match="the incoming weights are not those that this run started from"):
        again = run(tmp_path / "run", task, model=networks.build(networks.Residual))
    assert [r.metric for r in again.rows] == [r.metric for r in result.rows]
    other = replace(task, metric=lambda p, t: 0.125)
    assert {r.metric for r in run(tmp_path / "run", other).rows} == {0.125}


def test_another_checkpoint_is_another_run(tmp_path) -> None:
    """A chain that starts from trained weights never hands back the model of other weights."""
    task, x = images_task(ck, samples=64), image(8)
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        results.append(ck.Recipe(ck.StaticQuant()).run(networks.build(networks.Chain), task, tmp_path / "run"))
    with torch.no_grad():
        assert not torch.allclose(results[0].model(*x), results[1].model(*x))


def test_what_a_run_would_do(tmp_path) -> None:
    task, model, out = images_task(ck, samples=64), networks.build(networks.Chain), tmp_path / "run"

    def recipe(epochs=1, **settings):
        return ck.Recipe(ck.Train(epochs=1), ck.Train(epochs=epochs), **settings)

    assert [stage.action for stage in recipe().plan(model, task, out).stages] == ["run", "run"]
    assert not out.exists()
    recipe().run(model, task, out)
    assert str(recipe().plan(model, task, out)) == (
        "1-train  reuse   done, and nothing that it depends on has changed\n"
        "2-train  reuse   done, and nothing that it depends on has changed"
    )
    plan = recipe(epochs=2).plan(model, task, out)
    assert [(stage.action, stage.why) for stage in plan.stages][1] == ("run", "stage 2 has changed: epochs")
    assert plan.stages[0].action == "reuse"
    for settings, why in (({"seed": 1}, "seed has changed: 0 then, 1 now"), ({"dynamic": (0, 2, 3)}, "dynamic has changed: ")):
        for stage in recipe(**settings).plan(model, task, out).stages:
            assert stage.action == "run"
            assert stage.why.startswith(why)


def test_a_changed_stage_that_fails_loses_nothing(finished, tmp_path) -> None:
    out, task, _ = finished
    shutil.copytree(out, tmp_path / "run")
    x, y = task.train[0]
    with pytest.raises(TrainingError):
        run(tmp_path / "run", replace(task, train=[(x, y), (x / 0, y)], metric=lambda p, t: 0.5))
    kept = tmp_path / "run" / ".1-train.replaced"
    assert (kept / "model.onnx").read_bytes() == (out / "1-train" / "model.onnx").read_bytes()


def test_long_work_shows_itself_on_a_terminal(tmp_path, monkeypatch, capsys) -> None:
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    recipe = ck.Recipe(
        ck.Train(epochs=1),
        ck.Prune(budget=ck.remove(channels=0.3), criterion=ck.prune.criteria.taylor),
        ck.StaticQuant(),
        export="last",
    )
    recipe.run(networks.build(networks.Chain), images_task(ck, samples=64), tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    recipe.run(networks.build(networks.Chain), images_task(ck, samples=64), tmp_path / "seen")
    bars = {line.partition(":")[0].strip(): line for line in re.split("[\r\n]", terminal.getvalue()) if "%|" in line}
    assert {"train", "score", "calibrate", "export", "verify", "evaluate"} <= set(bars), set(bars)
    assert all(re.search(r"\d/\d+ \[\d\d:\d\d<", line) for line in bars.values())  # how far, how long, how long yet


def test_a_student_or_a_loss_that_is_written_otherwise_runs_again(tmp_path) -> None:
    task, model, out = images_task(ck, samples=64), networks.build(networks.Chain), tmp_path / "run"

    def recipe(width):
        def make():  # the name stays, the network does not
            return nn.Sequential(nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

        return ck.Recipe(ck.Train(epochs=1), ck.Distill(epochs=1, student=make), export="last")

    def loss(factor):
        return lambda predictions, target: factor * nn.functional.cross_entropy(predictions, target)

    one, other = replace(task, loss=loss(1.0)), replace(task, loss=loss(2.0))
    recipe(8).run(model, one, out)
    does = [[stage.action for stage in recipe(width).plan(model, t, out).stages] for width, t in ((8, one), (6, one), (8, other))]
    assert does == [["reuse", "reuse"], ["reuse", "run"], ["run", "run"]]
    assert recipe(6).plan(model, one, out).stages[1].why == "stage 2 has changed: student"


def test_what_a_kill_left_is_tidied(finished, tmp_path) -> None:
    out, task, _ = finished
    shutil.copytree(out, tmp_path / "run")
    for left in ("2-prune/progress", ".2-prune.replaced"):
        (tmp_path / "run" / left).mkdir()
        (tmp_path / "run" / left / "1-end.safetensors").write_bytes(b"killed before it was deleted")
    run(tmp_path / "run", task)
    assert not list((tmp_path / "run").rglob("1-end.safetensors"))


def test_the_export_setting_is_no_part_of_a_stage(finished, tmp_path, monkeypatch) -> None:
    _, task, _ = finished
    recipe = ck.Recipe(ck.Train(epochs=1), ck.StaticQuant(), export="last")
    model = networks.Residual()
    recipe.run(model, task, tmp_path / "run")
    result = ck.Recipe(*recipe.stages).run(model, task, tmp_path / "run")
    assert all(row.verified for row in result.rows)


def test_tuples_and_functions_that_pick_predictions(tmp_path) -> None:
    class Pair(networks.Chain):
        def forward(self, x):
            y = super().forward(x)
            return {"features": y.mean(1), "classes": (y, y.square().mean())}

    task = images_task(ck, samples=64, predict=lambda o: o["classes"][0])
    result = ck.Recipe(ck.Train(epochs=1), ck.StaticQuant()).run(Pair(), task, tmp_path / "run")
    assert all(row.verified for row in result.rows)
