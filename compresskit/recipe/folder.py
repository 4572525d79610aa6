"""The folder of a run: whose it is, and when a stage in it is the stage that is asked for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compresskit.base.distributed import rank
from compresskit.base.errors import CheckpointError
from compresskit.base.files import read_json, unwritable, write_json
from compresskit.base.fingerprint import describe, fingerprint
from compresskit.base.task import Task
from compresskit.base.version import __version__
from compresskit.graph.surgery import structure
from compresskit.train.snapshots import SNAPSHOTS

try:
    import fcntl
except ImportError:  # there is none on Windows, and so no lock
    fcntl = None  # type: ignore[assignment]


ROW, PROGRESS, LOCK = "row.json", "progress", ".lock"
_HELD: set[Any] = set()


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold a folder for this process; CheckpointError where another one has it. A process that is gone holds nothing.

    Of several that work together the first holds it for all.
    """
    if rank() != 0:
        yield
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK).open("a+")
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written ({error.strerror}); choose another out=") from None
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                owner = file.read(32).strip() or "unknown"
                raise CheckpointError(
                    f"{out}: in use by another process ({owner}); wait for it, end it, or choose another out="
                ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        _HELD.add(file)
        for part in out.glob(".*.part"):  # of a process that was killed while it wrote
            part.unlink(missing_ok=True)
        try:
            yield
        finally:
            _HELD.discard(file)


def _let_go() -> None:
    # A worker of a loader inherits the file, and with it the lock, which it would hold when its parent is dead.
    for file in _HELD:
        file.close()
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def finished(folder: Path, key: str, *, wanted: bool, snapshots: bool) -> dict[str, Any] | None:
    """The record of a stage that is done as it is asked for, after a look at its files.

    wanted, snapshots: whether an ONNX file and snapshots must be there. Raises CheckpointError where a file has changed.
    """
    there = (folder / ROW).exists() and (not wanted or (folder / "model.onnx").exists())
    if not there or (snapshots and not (folder / SNAPSHOTS).exists()):
        return None
    record = read_json(folder / ROW, "the row of a finished stage")
    if record.get("key") != key:
        return None
    whole(folder, record)
    return record


def make_room(folder: Path) -> None:
    """An empty folder but for checkpoints of the stage. What a changed stage replaces is kept until the new one is done."""
    old = _replaced(folder)
    try:
        if (folder / ROW).exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.is_dir() and path.name != PROGRESS:
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_file():
                path.unlink()
        for part in folder.glob(f"{PROGRESS}/.*.part"):
            part.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(unwritable(folder, error)) from error


def tidy(folder: Path) -> None:
    """Drop what a finished stage no longer needs: its checkpoints, and what it replaced."""
    for part in (folder / PROGRESS, _replaced(folder)):
        shutil.rmtree(part, ignore_errors=True)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of a stage but its row."""
    return {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != ROW}


def whole(folder: Path, record: dict[str, Any]) -> None:
    """Raise `CheckpointError` unless the files of a finished stage are those that it wrote."""
    files = record.get("files")
    if not isinstance(files, dict) or "row" not in record:
        raise CheckpointError(f"{folder / ROW}: not the row of a finished stage; delete {folder} to run it again")
    for name, digest in files.items():
        path = folder / Path(name).name
        if not path.is_file():
            raise CheckpointError(f"{path}: not there; delete {folder} to run that stage again")
        if _sha256(path) != digest:
            raise CheckpointError(f"{path}: has changed since the stage wrote it; delete {folder} to run that stage again")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stage_keys(model: nn.Module, task: Task, stages: list[Any], settings: dict[str, Any], *, trained: bool) -> list[str]:
    """A key for each stage: the recipe's settings, the stage's and those of all before it, the model's structure, the data
    (lengths, first validation batch), the loss and the metric, the versions of this library and of torch; and the model's
    weights, where the chain starts from trained ones.
    """
    lengths = [None if getattr(task, w) is None else task.length(w) for w in ("train", "val", "calibration")]
    data = [lengths, fingerprint(next(iter(task.batches("val")))), describe([task.loss, task.metric, task.predict])]
    weights = fingerprint(model) if trained else None
    known = [structure(model), settings, data, weights, versions()]
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    keys = []
    for record in stages:
        digest.update(json.dumps(record, sort_keys=True).encode())
        keys.append(digest.hexdigest()[:16])
    return keys


def shape_of(model: nn.Module) -> str:
    """A short hash of a model's structure."""
    return hashlib.sha256(json.dumps(structure(model), sort_keys=True).encode()).hexdigest()[:16]


def versions() -> list[str]:
    """Of what results depend on: a patch of torch is held to change none."""
    return [__version__, ".".join(torch.__version__.split(".")[:2])]


@dataclass(frozen=True)
class Ahead:
    """What a run would do for one stage: `does` is "reuse", "go on" or "run"."""

    name: str
    does: str
    why: str


@dataclass(frozen=True)
class RunPlan:
    """What a run would do, stage by stage; prints as a table."""

    stages: tuple[Ahead, ...]

    def __str__(self) -> str:
        width = max(len(stage.name) for stage in self.stages)
        return "\n".join(f"{stage.name:<{width}}  {stage.does:<6}  {stage.why}" for stage in self.stages)


def look_ahead(out: Path, steps: Sequence[tuple[str, str, bool, bool]], record: dict[str, Any]) -> RunPlan:
    """What would be done in a folder for (name, key, whether a file is wanted, whether snapshots are) of each stage.

    record: the recipe, as `claim` writes it. Nothing is written; raises CheckpointError where a file is damaged.
    """
    old = read_json(out / "recipe.json", "a recipe") if (out / "recipe.json").exists() else None
    found = []
    for name, key, wanted, snapshots in steps:
        folder = out / name
        mark = folder / PROGRESS / "stage.json"
        if finished(folder, key, wanted=wanted, snapshots=snapshots) is not None:
            found.append(Ahead(name, "reuse", "done, and nothing that it depends on has changed"))
        elif mark.exists() and read_json(mark, "which stage its checkpoints are of").get("key") == key:
            newest = max((folder / PROGRESS).glob("*.safetensors"), key=lambda path: path.stat().st_mtime, default=mark)
            found.append(Ahead(name, "go on", f"it was interrupted; from {PROGRESS}/{newest.name}"))
        elif old is None or not folder.exists():
            found.append(Ahead(name, "run", "not done yet"))
        else:
            found.append(Ahead(name, "run", _what_changed(old, record, name)))
    return RunPlan(tuple(found))


def _what_changed(old: dict[str, Any], new: dict[str, Any], name: str) -> str:
    if old.get("versions") != new["versions"]:
        return f"versions have changed: {old.get('versions')} then, {new['versions']} now"
    for i, (before, after) in enumerate(zip(old.get("stages", []), new["stages"], strict=False), 1):
        if before != after and i <= int(name.partition("-")[0]):
            fields = [key for key in after if before.get(key) != after[key]] if isinstance(before, dict) else []
            return f"stage {i} has changed" + (f": {', '.join(fields)}" if fields else "")
    for setting in ("seed", "dynamic"):
        if old.get(setting) != new[setting]:
            return f"{setting} has changed: {old.get(setting)} then, {new[setting]} now"
    return "interrupted, or the data, the loss, the metric or the weights it starts from have changed"


def claim(out: Path, model: nn.Module, names: list[str], record: dict[str, Any], *, trained: bool) -> None:
    """Make `out` this recipe's, or raise `CheckpointError` where it is somebody else's or cannot be written.

    Other initial weights of a chain that begins with training are only warned of: what is finished no longer depends on them.
    """
    record = record | {"model": type(model).__name__, "structure": shape_of(model), "weights": fingerprint(model)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / "recipe.json").exists() and any(not p.name.startswith(".") for p in out.iterdir()):
            raise CheckpointError(f"{out}: not empty, and not the folder of a run; choose another out=")
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written ({error.strerror}); choose another out=") from None
    if (out / "recipe.json").exists():
        old = read_json(out / "recipe.json", "a recipe")
        before = [f"{i}-{str(stage.get('kind', stage)).lower()}" for i, stage in enumerate(old.get("stages", []), 1)]
        shared = min(len(before), len(names))
        same = all(old.get(key) == record[key] for key in ("model", "structure"))
        if not same or before[:shared] != names[:shared]:
            raise CheckpointError(
                f"{out}: belongs to another recipe ({old.get('model')}: {', '.join(before)}), this one is {record['model']}:"
                f" {', '.join(names)}{'' if same else ' of another model'}; choose another out=, or delete the folder"
            )
        if not trained and old.get("weights") != record["weights"]:
            warnings.warn(
                f"{out}: the incoming weights are not those that this run started from; finished stages are kept. Seed before the"
                " model is made to silence this, or choose another out= to start afresh",
                stacklevel=3,
            )
            record["weights"] = old.get("weights")
        if old == json.loads(json.dumps(record)):
            return
    write_json(out / "recipe.json", record)
