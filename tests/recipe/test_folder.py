"""The folder of a run: foreign, unwritable and damaged ones are refused."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import resource
import shutil

import networks
import pytest
import short_run
from networks import images_task

import compresskit as ck
from compresskit.base.errors import (
    CheckpointError,
    ExportError,
)
from compresskit.recipe import folder, locks


def test_foreign_and_unwritable_folders_are_refused(finished_run, tmp_path) -> None:
    out, task, _ = finished_run
    with pytest.raises(CheckpointError, match=r"belongs to another recipe \(Residual: 1-train, 2-prune, 3-qat\)"):
        ck.Recipe(ck.Train(epochs=1), ck.QAT(epochs=1)).run(networks.Residual(), task, out)
    with pytest.raises(CheckpointError, match="belongs to another recipe"):
        short_run.run(out, task, model=networks.Chain())
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty, and not the folder of a run"):
        short_run.run(tmp_path, task)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(CheckpointError, match="cannot be written"):
        short_run.run(tmp_path / "notes.txt" / "run", task)
    assert (out / "model.onnx").exists()


DAMAGES = list(itertools.product(["row.json", "structure.json", "model.safetensors"], ["truncated", "garbage", "gone"]))
DAMAGES.remove(("row.json", "gone"))  # a stage without row.json is one that was interrupted


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_damaged_files_of_a_finished_stage_are_refused(finished_run, tmp_path, name, damage) -> None:
    out, task, _ = finished_run
    shutil.copytree(out, tmp_path / "run")
    file = tmp_path / "run" / "3-qat" / name
    data = file.read_bytes()
    {"truncated": lambda: file.write_bytes(data[: len(data) // 2]), "garbage": lambda: file.write_bytes(b"\x00" * 99),
     "gone": file.unlink}[damage]()  # fmt: skip
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        short_run.run(tmp_path / "run", task)


def test_a_file_system_without_locks_is_not_another_process(monkeypatch, tmp_path) -> None:
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = r"the file system there has no locks that keep two processes apart \(No locks available\); choose another out="
    with pytest.raises(CheckpointError, match=said), folder.locked(tmp_path / "run"):
        pass
    with pytest.raises(CheckpointError, match=said), locks.exclusive(tmp_path / "lock"):  # went on without a lock
        pass
    with pytest.raises(CheckpointError, match=said):
        locks.is_locked(tmp_path / "lock")


def test_a_lock_needs_no_room_on_the_disk(tmp_path) -> None:
    """A run that begins where nothing can be written raises the error of the first file that it needs, which says so."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most[1]))
    try:
        with folder.locked(tmp_path / "run"), locks.exclusive(tmp_path / "other"):
            assert locks.is_locked(tmp_path / "run" / folder.LOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)


def test_a_run_stays_in_its_folder_where_the_working_directory_changes(monkeypatch, tmp_path) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    recipe = ck.Recipe(ck.Train(epochs=1, on_epoch=lambda report: monkeypatch.chdir(tmp_path / "elsewhere")))
    result = recipe.run(networks.Chain(), images_task(ck), "run")
    assert not list((tmp_path / "elsewhere").iterdir())
    assert result.onnx.exists()
    assert result.out == tmp_path / "run"
    assert (tmp_path / "run" / "recipe.json").exists()
    monkeypatch.chdir(tmp_path)
    assert "reuse" in str(recipe.plan(networks.Chain(), images_task(ck), "run"))


ALONE = ck.Recipe(ck.Train(epochs=1))


@pytest.mark.parametrize("begin", [ALONE.run, ALONE.plan])
def test_a_folder_that_cannot_be_is_refused_in_a_sentence(begin, monkeypatch, tmp_path) -> None:
    given = networks.Chain(), images_task(ck)
    with pytest.raises(CheckpointError, match=r"x: cannot be written \(File name too long\); choose another out="):
        begin(*given, tmp_path / ("x" * 256))
    with pytest.raises(ExportError, match="its path is not UTF-8; rename the file or its folder"):
        begin(*given, tmp_path / os.fsdecode(b"\xff"))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for out in ("run", tmp_path / "run"):
        with pytest.raises(CheckpointError, match=r"run: the working directory was deleted; change to another by os\.chdir"):
            begin(*given, out)
    assert not list(tmp_path.iterdir())


def test_a_link_to_nothing_is_called_one(tmp_path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "nothing")
    said = r"run: cannot be written, a link to .*nothing, which is not there; make that, or choose another out="
    with pytest.raises(CheckpointError, match=said):
        ALONE.run(networks.Chain(), images_task(ck), tmp_path / "run")
