"""What a search leaves for people: the recipe as a script, and the table."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch

import compresskit as ck

QUICK = {"trials": 2, "finalists": 1, "seconds": 0.02}
pytestmark = pytest.mark.usefixtures("by_formula")


def test_the_written_recipe_says_how_it_is_called(model, task, tmp_path, monkeypatch) -> None:
    found = ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "s", **QUICK)
    monkeypatch.setattr("sys.argv", [str(found.code)])
    with pytest.raises(SystemExit, match=r"python recipe.py FILE.py"):
        runpy.run_path(str(found.code), run_name="__main__")


def test_the_written_recipe_runs_a_file_that_imports_one_beside_it(model, task, tmp_path, monkeypatch, capsys) -> None:
    found = ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "s", **QUICK)
    torch.save((model, task.train), tmp_path / "trained.pt")
    (tmp_path / "beside_it.py").write_text(
        "import torch, compresskit as ck\n"
        f"model, batches = torch.load({str(tmp_path / 'trained.pt')!r}, weights_only=False)\n"
        "task = ck.Task(train=batches, val=batches)\n"
    )
    (tmp_path / "mine.py").write_text("from beside_it import model, task\n")
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "s").rename(tmp_path / "moved")
    code = tmp_path / "moved" / found.code.name
    monkeypatch.setattr("sys.argv", [str(code), str(tmp_path / "mine.py")])
    runpy.run_path(str(code), run_name="__main__")
    assert "0-start" in capsys.readouterr().out
    assert (tmp_path / "moved" / "again" / "model.onnx").exists()
    assert not (tmp_path / "s").exists()
    assert sys.modules.pop("beside_it").__file__ == str(tmp_path / "beside_it.py")


@pytest.mark.parametrize(("train", "shown"), [(None, {""}), (ck.Train(epochs=1), {"0", "1"})], ids=["not trained", "trained"])
def test_the_table_says_what_was_trained_of_a_training_alone(train, shown, model, task, tmp_path) -> None:
    found = ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "s", train=train, **QUICK)
    head, _, *rows = str(found).splitlines()[1:]
    end = head.index("trained") + len("trained")
    (chosen,) = (row for row in rows if row.startswith(">"))
    assert chosen[end - len("trained") : end].strip() in shown
