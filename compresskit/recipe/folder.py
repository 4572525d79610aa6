"""The folder of a run: which process and which recipe it belongs to, and which of its stages are finished.

Every stage has a key, a hash of everything its result depends on. A stage is finished if its row.json, which is written last, has
the key that the recipe asks for, and if its files still have the digests that are written there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from compresskit.base.distributed import rank
from compresskit.base.errors import CheckpointError
from compresskit.base.files import read_json, unwritable, write_json
from compresskit.base.fingerprint import array_digest, fingerprint
from compresskit.base.stage import Stage
from compresskit.base.task import Task
from compresskit.graph.masks import MASK_PREFIX
from compresskit.measure import runtime_path
from compresskit.recipe.dependencies import shows_training, structure_hash
from compresskit.recipe.locks import lock_open_file
from compresskit.train.snapshots import SNAPSHOTS

ROW, PROGRESS, LOCK = "row.json", "progress", ".lock"
START = "0-start"  # the stage that measures the incoming model
READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})  # errors of a place that may only be read


@dataclass(frozen=True, kw_only=True)
class RunStep:
    """One folder of a run.

    Attributes:
        name: of the folder, such as `2-prune`.
        key: hash of everything the result depends on.
        stage: that runs; None for the incoming model, which is only measured.
        export: whether an ONNX file is written.
        snapshot: fraction of the stage's training at which its weights are kept for the next stage; None for none.
        unknown: what the result depends on and cannot be described, so that the stage always runs again.
        task: the stage's own; None for that of the run.
    """

    name: str
    key: str
    stage: Stage | None
    export: bool
    snapshot: float | None = None
    unknown: tuple[str, ...] = ()
    task: Task | None = None


def folder_of_run(out: str | Path) -> Path:
    """The absolute path of the folder of a run, whatever a callback or the data do to the working directory.

    Raises CheckpointError where there can be no such folder, and where the working directory was deleted, in which torch traces
    no model; ExportError where ONNX Runtime could not read files in it.
    """
    try:
        folder = Path(os.getcwd(), out)
    except FileNotFoundError:
        raise CheckpointError(f"{out}: the working directory was deleted; change to another by os.chdir(...)") from None
    try:
        folder.is_dir()  # raises for a name that is too long
    except OSError as error:
        raise CheckpointError(unwritable(folder, error)) from None
    runtime_path(folder)
    return folder


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock a folder for this process; CheckpointError where another process has it. The lock ends with the process.

    A run in a place that can only be read is not written to; what would write is refused later. In a distributed run, rank 0
    holds the lock for all.
    """
    if rank() != 0:
        yield
        return
    check_not_foreign(out)
    file = _open_lock(out)
    if file is None:
        yield
        return
    with file, lock_open_file(file, wait=False) as taken:
        if not taken:
            file.seek(0)
            owner = file.read(32).strip() or "unknown"
            raise CheckpointError(f"{out}: in use by another process ({owner}); wait for it, end it, or choose another out=")
        if file.writable():
            with suppress(OSError):  # of a full disk: it is for a message alone. What is not buffered is not written at the end
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), f"{os.getpid()}\n".encode())
        for part in out.glob(".*.part"):  # of a process that was killed while it wrote
            with suppress(OSError):  # where the folder can only be read
                part.unlink(missing_ok=True)
        yield


def _open_lock(out: Path) -> Any:
    """The lock file of a folder, opened; for reading, or None, where a run that may be finished can only be read."""
    lock = out / LOCK
    try:
        out.mkdir(parents=True, exist_ok=True)
        return lock.open("a+")
    except OSError as error:
        if error.errno not in READ_ONLY or not (out / "report.json").exists():
            raise CheckpointError(unwritable(out, error)) from None
    try:
        return lock.open()
    except OSError:
        return None


def read_finished_stage(folder: Path, step: RunStep) -> dict[str, Any] | None:
    """The contents of row.json if the stage is finished, after its files were compared with their digests; else None.

    Raises CheckpointError where a file has changed.
    """
    wanted = [ROW] + ["model.onnx"] * step.export + [SNAPSHOTS] * (step.snapshot is not None)
    if not all((folder / name).exists() for name in wanted):
        return None
    record = read_json(folder / ROW, "the row of a finished stage")
    if record.get("key") != step.key:
        return None
    check_files(folder, record)
    return record


def clear_stage_folder(folder: Path) -> None:
    """Make the folder, or empty it but for checkpoints. The result of a changed stage is kept until the new one is finished."""
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


def clear_other_network(out: Path, model: nn.Module) -> None:
    """Empty the folder of a baseline that is of another network: that of a stage whose settings were others then."""
    if not (out / "recipe.json").exists():
        return
    with locked(out):
        old = read_json(out / "recipe.json", "a recipe")
        if (old.get("model"), old.get("structure")) == (type(model).__name__, structure_hash(model)):
            return
        for path in sorted(out.iterdir(), key=lambda path: path.name == "recipe.json"):  # what says whose folder it is goes last
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)


def delete_checkpoints(folder: Path) -> None:
    """Delete what a finished stage no longer needs: its checkpoints, and the result that it replaced."""
    for part in (folder / PROGRESS, _replaced(folder)):
        shutil.rmtree(part, ignore_errors=True)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def file_digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of a stage but row.json, by name."""
    return {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != ROW}


def check_files(folder: Path, record: dict[str, Any]) -> None:
    """Raise `CheckpointError` unless the files of a finished stage have the digests in its row.json."""
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


@dataclass(frozen=True)
class StagePlan:
    """What a run would do for one stage: `action` is "reuse", "resume" or "run"; `why` is a sentence."""

    name: str
    action: str
    why: str


@dataclass(frozen=True)
class RunPlan:
    """What a run would do, stage by stage; prints as a table."""

    stages: tuple[StagePlan, ...]

    def __str__(self) -> str:
        width = max(len(stage.name) for stage in self.stages)
        return "\n".join(f"{stage.name:<{width}}  {stage.action:<6}  {stage.why}" for stage in self.stages)


def plan_run(out: Path, model: nn.Module, steps: Sequence[RunStep], record: dict[str, Any]) -> RunPlan:
    """What a run would do in a folder, which is only read.

    record: of the recipe, as `check_folder` writes it. Raises CheckpointError where a file is damaged.
    """
    old = read_json(out / "recipe.json", "a recipe") if (out / "recipe.json").exists() else None
    others = old is not None and _begins_from_other_new_weights(old, model, steps)
    done = "done, from other new weights" if others else "done, and nothing that it depends on has changed"
    if others and (fixed := _others_fixed(record, model)):
        done += f", and other buffers or frozen parameters: {fixed}"
    plans = []
    for step in steps:
        folder = out / step.name
        mark = folder / PROGRESS / "stage.json"
        if read_finished_stage(folder, step) is not None:
            action, why = "reuse", done
        elif mark.exists() and read_json(mark, "which stage its checkpoints are of").get("key") == step.key:
            newest = max((folder / PROGRESS).glob("*.safetensors"), key=lambda path: path.stat().st_mtime, default=mark)
            action, why = "resume", f"it was interrupted; from {PROGRESS}/{newest.name}"
        elif old is None or not folder.exists():
            action, why = "run", "not done yet"
        elif step.unknown:
            action, why = "run", why_unknown(step.unknown)
        else:
            action, why = "run", _what_changed(old, record, step.name)
        plans.append(StagePlan(step.name, action, why))
    return RunPlan(tuple(plans))


def _what_changed(old: dict[str, Any], new: dict[str, Any], name: str) -> str:
    if old.get("versions") != new["versions"]:
        return f"versions have changed: {old.get('versions')} then, {new['versions']} now"
    for i, (before, after) in enumerate(zip(old.get("stages", []), new["stages"], strict=False), 1):
        if before != after and i <= int(name.partition("-")[0]):
            changed = [key for key in after if before.get(key) != after[key]] if isinstance(before, dict) else []
            return f"stage {i} has changed" + (f": {', '.join(changed)}" if changed else "")
    for setting in ("seed", "dynamic", "opset"):
        if old.get(setting) != new.get(setting):
            return f"{setting} has changed: {old.get(setting)} then, {new.get(setting)} now"
    if changed := _other_entries(old.get("task", {}), new["task"]):
        return f"the task has changed: {', '.join(changed)}"
    before, after = old.get("tasks", {}), new.get("tasks", {})
    for i in range(1, int(name.partition("-")[0]) + 1):
        there, here = before.get(str(i)), after.get(str(i))
        if there is None and here is not None:
            return f"stage {i} has a task of its own now, and had none"
        if there is not None and here is None:
            return f"stage {i} had a task of its own, and has none now"
        if there and here and (changed := _other_entries(there, here)):
            return f"the task of stage {i} has changed: {', '.join(changed)}"
    before, after = old.get("start", {}), new.get("start", {})
    fixed = _other_entries(before.get("fixed", {}), after.get("fixed", {}))
    if fixed and before["drawn"] == after["drawn"]:
        return f"buffers or frozen parameters have changed: {', '.join(fixed)}"
    return "interrupted, or the model, or the weights it starts from, have changed"


def _other_entries(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of the parts of a task that are others than they were; a part that an older record lacks is none."""
    return [key for key in after if key in before and before[key] != after[key]]


def why_unknown(unknown: Sequence[str]) -> str:
    """The sentence that says why a stage runs again although nothing may have changed."""
    return f"whether these are the same as before cannot be told: {', '.join(unknown)}"


def check_not_foreign(out: Path) -> None:
    """Raise `CheckpointError` where a folder holds files and is not that of a run. Nothing is written."""
    if out.is_dir() and not (out / "recipe.json").exists() and any(not p.name.startswith(".") for p in out.iterdir()):
        raise CheckpointError(f"{out}: not empty, and not the folder of a run; choose another out=")


def _begins_from_other_new_weights(old: dict[str, Any], model: nn.Module, steps: Sequence[RunStep]) -> bool:
    """Whether a run that begins with the training of a new model did so from other weights than these.

    old: the contents of its recipe.json.
    """
    trains_first = steps[0].stage is not None
    return trains_first and not shows_training(model) and _are_others(old, model)


def start_of_run(out: Path, model: nn.Module, *, trained: bool) -> dict[str, Any]:
    """What a run in a folder starts from: a digest of the weights that it trains, and one of each value that is fixed, by name.

    Fixed are buffers, also those that no state dict has, and frozen parameters. Without a seed, weights are others in every
    process, and what is fixed may be: a new model with other weights counts as the one that the run started from. Where the
    weights are the same, other fixed values are a change. Empty where a version that did not compare them began the run.
    """
    old = read_json(out / "recipe.json", "a recipe") if (out / "recipe.json").exists() else None
    kept: dict[str, Any] = {} if old is None else old.get("start", {})
    if old is not None and not (kept and (trained or not _are_others(old, model))):
        return kept
    return {"drawn": _digest_of_drawn(model), "fixed": _digests_of_fixed(model)}


def _digest_of_drawn(model: nn.Module) -> str:
    return fingerprint([value for value in model.parameters() if value.requires_grad])


def _digests_of_fixed(model: nn.Module) -> dict[str, str]:
    frozen = [(name, value) for name, value in model.named_parameters() if not value.requires_grad]
    values = dict(frozen + [pair for pair in model.named_buffers() if not pair[0].rpartition(".")[2].startswith(MASK_PREFIX)])
    return {name: array_digest(value) for name, value in values.items()}


def _are_others(old: dict[str, Any], model: nn.Module) -> bool:
    """Whether the weights of a model are others than those of the contents of a recipe.json."""
    drawn = old.get("start", {}).get("drawn")
    return old.get("weights") != fingerprint(model) and (drawn is None or drawn != _digest_of_drawn(model))


def _others_fixed(record: dict[str, Any], model: nn.Module) -> str:
    """Names of what is fixed in a model and another than what the run started from."""
    return ", ".join(_other_entries(record.get("start", {}).get("fixed", {}), _digests_of_fixed(model)))


def check_folder(out: Path, model: nn.Module, steps: Sequence[RunStep], record: dict[str, Any]) -> None:
    """Write recipe.json into a new or empty folder, or check that the one there is of the same recipe and model.

    Raises CheckpointError where the folder belongs to another recipe, holds other files, or cannot be written. If the recipe
    begins with the training of a new model, other weights only give a warning: without a seed they are others in every process.
    """
    check_not_foreign(out)
    record = record | {"model": type(model).__name__, "structure": structure_hash(model), "weights": fingerprint(model)}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(unwritable(out, error)) from None
    if (out / "recipe.json").exists():
        old = read_json(out / "recipe.json", "a recipe")
        names = [step.name for step in steps if step.stage is not None]
        before = [f"{i}-{str(stage.get('kind', stage)).lower()}" for i, stage in enumerate(old.get("stages", []), 1)]
        shared = min(len(before), len(names))
        same = all(old.get(key) == record[key] for key in ("model", "structure"))
        if not same or before[:shared] != names[:shared]:
            raise CheckpointError(
                f"{out}: belongs to another recipe ({old.get('model')}: {', '.join(before)}), this one is {record['model']}:"
                f" {', '.join(names)}{'' if same else ' of another model'}; choose another out=, or delete the folder"
            )
        if _begins_from_other_new_weights(old, model, steps):
            fixed = _others_fixed(record, model)
            others = f", also with other buffers and frozen parameters ({fixed}); delete the folder if you changed one of them"
            warnings.warn(
                f"{out}: the incoming weights are not those that this run started from, and are taken for those of a new model: a"
                f" stage that nothing else has changed for is kept as it is{others if fixed else ''}. Seed before the model is"
                " made to silence this, or choose another out= to start from these weights",
                stacklevel=3,
            )
            record["weights"] = old.get("weights")
        if old == json.loads(json.dumps(record)):
            return
    write_json(out / "recipe.json", record)
