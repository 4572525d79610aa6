"""A task a stage: `Recipe.run(tasks=...)`."""

from __future__ import annotations

import json

import networks
import pytest
import torch
from networks import build, images_task

import compresskit as ck
from compresskit.base.errors import SettingError

ONE = ck.Train(epochs=1, validate_every=0)


def recipe_and_tasks():
    """Pre-training to reconstruct other images' means, without labels; then training on the task."""
    main = images_task(ck, samples=32, classes=10)
    images = [torch.randn(8, 3, 16, 16) for _ in range(3)]
    own = ck.Task(train=[(x, x.mean((1, 2, 3))) for x in images], loss=lambda y, mean: (y.mean(1) - mean).square().mean())
    return ck.Recipe(ONE, ONE, export="last"), main, own


def same(a, b) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


def test_a_stage_trains_on_its_own_task_and_is_measured_on_that_of_the_run(tmp_path) -> None:
    recipe, main, own = recipe_and_tasks()
    model = build(networks.Chain)
    result = recipe.run(model, main, tmp_path / "run", tasks=(own, None))
    by_hand = build(networks.Chain)
    by_hand.load_state_dict(model.state_dict())
    for index, task in enumerate((own, main)):
        ck.base.randomness.seed_generators_(index, task.train)
        ONE(by_hand, task)
    assert same(by_hand, result.model)
    assert result.rows[1].metric == pytest.approx(ck.evaluate(by_hand, main), abs=0.04)  # of the ONNX file
    assert set(json.loads((tmp_path / "run" / "recipe.json").read_text())["tasks"]) == {"1"}


def test_a_finished_stage_is_reused_until_its_own_task_changes(tmp_path) -> None:
    recipe, main, own = recipe_and_tasks()
    model, out = build(networks.Chain), tmp_path / "run"
    recipe.run(model, main, out, tasks=(None, own))
    assert [stage.action for stage in recipe.plan(model, main, out, tasks=(None, own)).stages] == ["reuse", "reuse"]
    other = ck.Task(train=[(x + 1, y) for x, y in own.train], loss=own.loss)
    recipe.run(model, main, out, tasks=(None, other))
    assert json.loads((out / "report.json").read_text())["reused"] == ["1-train"]


def test_the_tasks_must_fit_the_stages(tmp_path) -> None:
    recipe, main, own = recipe_and_tasks()
    for tasks, got in (((own,), r"\['Task'\]"), (own, "one Task"), ((own, "words"), r"\['Task', 'str'\]")):
        with pytest.raises(
            SettingError, match=rf"Recipe.run\(tasks=...\): wanted a Task or None for each of the 2 stages, got {got}"
        ):
            recipe.run(build(networks.Chain), main, tmp_path / "run", tasks=tasks)
    with pytest.raises(SettingError, match=r"this stage needs Task\(train=...\)"):
        recipe.run(build(networks.Chain), main, tmp_path / "run", tasks=(None, ck.Task(val=main.val)))
    assert not (tmp_path / "run").exists()


def test_the_plan_says_that_the_task_of_a_stage_has_changed(tmp_path) -> None:
    recipe, main, own = recipe_and_tasks()
    model, out = build(networks.Chain), tmp_path / "run"
    recipe.run(model, main, out, tasks=(None, own))

    def second(tasks):
        first, planned = recipe.plan(model, main, out, tasks=tasks).stages
        assert first.action == "reuse"
        return planned.why

    other = ck.Task(train=[(x + 1, y) for x, y in own.train], loss=own.loss)
    assert second((None, other)) == "the task of stage 2 has changed: train"
    assert second(()) == "stage 2 had a task of its own, and has none now"
    (planned, _) = recipe.plan(model, main, out, tasks=(own, own)).stages
    assert planned.why == "stage 1 has a task of its own now, and had none"
    with pytest.raises(SettingError, match=r"Recipe.plan\(tasks=...\): wanted a Task or None"):
        recipe.plan(model, main, out, tasks=(own,))
