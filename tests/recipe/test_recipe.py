"""The recipe: orders of stages, settings, and the plan of a run."""

from __future__ import annotations

import itertools
from dataclasses import replace

import networks
import pytest
import short_run
import torch
from matrix import cover
from networks import image, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import (
    DataError,
    ModelError,
    SettingError,
    StageOrderError,
)


def test_the_best_row_within_a_drop_that_is_no_number_is_refused(finished_run) -> None:
    result = replace(finished_run[2], higher_is_better=True)
    for drop in ("0.01", "1pt", True, float("nan")):
        with pytest.raises(SettingError, match=rf"^Result.best\(drop=...\): wanted a number in the unit .*, got {drop!r}$"):
            result.best(drop=drop)
    assert result.best(drop=torch.tensor(1.0)) == result.best(drop=1)


STAGES = {
    "train": ck.Train(epochs=1, optimizer=short_run.ADAM),
    "distill": ck.Distill(epochs=1, optimizer=short_run.ADAM, student=networks.Chain),
    "prune": ck.Prune(budget=ck.keep(macs=0.7), round_to=4),
    "qat": ck.QAT(epochs=1),
}


ORDERS = list(itertools.permutations(STAGES))


def legal(order):
    quantized, pruned = order.index("qat"), order.index("prune")
    return pruned < quantized or quantized < order.index("distill") < pruned  # a new student is a float model again


@pytest.mark.parametrize("order", [o for o in ORDERS if not legal(o)], ids="-".join)
def test_illegal_orders_name_a_legal_one(order) -> None:
    with pytest.raises(
        StageOrderError, match=r"Prune, needs a float model, but stage \d, QAT, quantized the model; a legal"
    ) as e:
        ck.Recipe(*(STAGES[name] for name in order))
    kinds = {type(s).__name__: s for s in STAGES.values()}
    ck.Recipe(*(kinds[name] for name in str(e.value).rpartition("order is ")[2].split(", ")))  # the advice is right


LEGAL = [order for order in ORDERS if legal(order)]
#: So many of them that each stage begins, ends and follows each that it ever does; the others are slow.
IN_THE_GATE = set(cover([dict(itertools.pairwise(("begin", *order, "end"))) for order in LEGAL]))


@pytest.mark.parametrize(
    "order",
    [pytest.param(o, marks=[] if number in IN_THE_GATE else [pytest.mark.slow]) for number, o in enumerate(LEGAL)],
    ids="-".join,
)
def test_legal_orders_run(order, tmp_path) -> None:
    stages = [STAGES[name] for name in order]
    if order.index("distill") > order.index("qat") > order.index("prune"):
        stages[order.index("distill")] = ck.Distill(epochs=1)  # trains the quantized model itself
    task = images_task(ck, samples=64)
    result = ck.Recipe(*stages, export="last").run(networks.Chain(), task, tmp_path / "run")
    assert len(result.rows) == 4 + (order[0] != "train")  # with the model that came trained
    assert result.rows[-1].verified
    assert result.onnx.exists()
    assert order.index("prune") > order.index("qat") or ck.audit(result.onnx).integer_fraction == 1.0


def test_bad_settings_models_and_data_are_refused_before_the_run(tmp_path) -> None:
    with pytest.raises(SettingError, match="at least one stage"):
        ck.Recipe()
    with pytest.raises(SettingError, match="'each' or 'last', got 'never'"):
        ck.Recipe(ck.Train(epochs=1), export="never")
    with pytest.raises(SettingError, match="wanted stages such as"):
        ck.Recipe(3)
    with pytest.raises(SettingError, match=r"got function; a stage of your own is a dataclass derived from compresskit\.Stage"):
        ck.Recipe(lambda model, task: model)
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


def test_the_plan_says_what_a_run_would_do_and_why(tmp_path) -> None:
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


def test_changed_code_of_a_student_or_a_loss_runs_again(tmp_path) -> None:
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


def test_a_recipe_writes_its_files_in_the_opset_that_is_asked_for(tmp_path) -> None:
    task = images_task(ck, samples=64)
    recipe = ck.Recipe(ck.Train(epochs=1, optimizer=short_run.ADAM), opset=14)
    result = recipe.run(networks.Chain(), task, tmp_path / "run")
    assert ck.audit(result.onnx).opset == 14
    assert result.rows[-1].verified
    other = ck.Recipe(ck.Train(epochs=1, optimizer=short_run.ADAM), opset="lowest").plan(networks.Chain(), task, tmp_path / "run")
    assert "opset has changed: 14 then, lowest now" in str(other)


def test_another_default_device_changes_nothing(tmp_path) -> None:
    """A generator of the CPU draws on the CPU, wherever torch makes tensors of which no one says where."""
    task, recipe = images_task(ck, samples=32), ck.Recipe(ck.Train(epochs=1))
    torch.manual_seed(0)
    model = networks.Chain()
    wanted = recipe.run(model, task, tmp_path / "wanted")
    torch.set_default_device("meta")
    try:
        found = recipe.run(model, task, tmp_path / "found")
    finally:
        torch.set_default_device(None)
    assert found.rows[0].metric == wanted.rows[0].metric
    assert all(torch.equal(value, wanted.model.state_dict()[name]) for name, value in found.model.state_dict().items())
