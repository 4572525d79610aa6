"""What is read of a run that is finished, unfinished or damaged."""

from __future__ import annotations

import json
import shutil

import pytest

from compresskit.base.errors import CheckpointError
from compresskit.base.files import read_json, write_json
from compresskit.recipe.page.records import read_run
from compresskit.recipe.page.render import page_of_runs


@pytest.fixture
def copied(finished_run, tmp_path):
    return shutil.copytree(finished_run[0], tmp_path / "run")


def test_an_unfinished_run_shows_its_finished_stages(copied) -> None:
    for name in ("report.json", "3-qat/row.json"):
        (copied / name).unlink()
    run = read_run(copied)
    assert [row.stage for row in run.rows] == ["1-train", "2-prune"]
    assert run.stages == ["1-train", "2-prune", "3-qat"]
    assert [sentence.removeprefix(f"{copied}/") for sentence in run.missing] == [
        "report.json: not there; the report of a run was expected",
        "3-qat: not finished",
    ]
    assert len(run.history["1-train"][0]["epochs"]) == 2
    page = page_of_runs([run])
    assert "3-qat (not finished)" in page
    assert "<li>3-qat: not finished</li>" in page
    (copied / "3-qat" / "progress").mkdir()
    (copied / "3-qat" / "progress" / "1-12.safetensors").touch()
    assert read_run(copied).missing[1] == (
        "3-qat: interrupted; its last checkpoint is progress/1-12.safetensors. Run the same command again to go on"
    )


def test_a_stage_whose_input_is_gone_is_not_shown(copied) -> None:
    for name in ("report.json", "2-prune/row.json"):
        (copied / name).unlink()
    run = read_run(copied)
    assert [row.stage for row in run.rows] == ["1-train"]
    assert run.missing[1:] == ["2-prune: not finished", "3-qat: its result is older than 2-prune, and is not shown"]


def test_a_stage_that_the_recipe_has_no_longer_is_not_shown(copied) -> None:
    (copied / "report.json").unlink()
    recipe = read_json(copied / "recipe.json", "a recipe")
    write_json(copied / "recipe.json", recipe | {"stages": recipe["stages"][:2]})
    run = read_run(copied)
    assert [row.stage for row in run.rows] == run.stages == ["1-train", "2-prune"]
    assert run.missing == [f"{copied}/report.json: not there; the report of a run was expected"]


def test_a_report_that_is_older_than_a_stage_is_not_believed(copied) -> None:
    path = copied / "2-prune" / "row.json"
    record = read_json(path, "a row")
    record["row"]["metric"] = 0.125
    write_json(path, record)
    run = read_run(copied)
    assert run.missing == [f"{copied}/report.json: of an earlier run, 2-prune has changed since; what follows is newer"]
    assert [row.metric for row in run.rows][1] == 0.125
    assert run.rows[1].latency_ms is None
    for stage in ("1-train", "2-prune", "3-qat"):
        shutil.rmtree(copied / stage)
    assert read_run(copied).missing == []  # the report alone was kept


def test_damage_is_named_and_the_rest_is_shown(copied) -> None:
    for name in ("report.json", "recipe.json"):
        text = (copied / name).read_text()
        (copied / name).write_text(text.replace("0", "1", 1) if name == "recipe.json" else text[:100])
    (copied / "3-qat" / "row.json").write_text("{}")
    run = read_run(copied)
    assert [row.stage for row in run.rows] == ["1-train", "2-prune"]
    said = "\n".join(run.missing)
    assert "recipe.json: has changed since it was written; the recipe of a run was expected" in said
    assert "report.json: damaged, the report of a run was expected" in said
    assert "3-qat/row.json: has no digest" in said
    assert "No stage is finished" not in page_of_runs([run])


def test_a_report_of_an_earlier_version_is_read(copied) -> None:
    record = read_json(copied / "report.json", "a report")
    write_json(copied / "report.json", {key: record[key] for key in ("format", "rows", "stages", "torch")})
    for details in copied.glob("*/details.json"):
        details.unlink()
    run = read_run(copied)
    assert (len(run.rows), run.history, run.environment, run.higher_is_better) == (3, {}, {}, None)
    assert run.missing == []
    assert page_of_runs([run]).count("<svg viewBox") == 2
    write_json(copied / "report.json", {"rows": [1, {"stage": "x"}], "history": 3, "metric": [], "environment": 1, "reused": 2})
    assert [row.stage for row in read_run(copied).rows] == []
    assert "report.json: not a row of a report" in read_run(copied).missing[0]


def test_what_is_no_run_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text(json.dumps({}))
    for path, message in (
        (tmp_path / "nothere", "no such file: .*nothere; wanted the folder of a run"),
        (tmp_path / "file", "file: a file; wanted the folder of a run"),
        (tmp_path, "report.json: not there, nor is recipe.json; wanted the folder of a run"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_run(path)


def test_the_folder_of_a_search_is_refused_with_the_runs_in_it(tmp_path) -> None:
    for name in "abcd":
        (tmp_path / "trained" / name).mkdir(parents=True)
        write_json(tmp_path / "trained" / name / "recipe.json", {})
    named = ", ".join(str(tmp_path / "trained" / name) for name in "abc")
    with pytest.raises(CheckpointError, match=f"wanted the folder of a run, such as {named} and 1 more$"):
        read_run(tmp_path)
    with pytest.raises(CheckpointError, match=f"wanted the folder of a run, such as {named} and 1 more$"):
        read_run(tmp_path / "trained")
