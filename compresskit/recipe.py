"""Recipe: run stages in order, prove each one's ONNX file, keep all on disk, go on where a run was interrupted.

out/recipe.json                 what was asked for
out/1-train/                    model.safetensors, structure.json, model.onnx, row.json (written last: the stage is done)
out/report.json, out/model.onnx of the last stage
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from compresskit.checkpoint import FORMAT, atomic, read_json, write_json
from compresskit.errors import CheckpointError, ExportError, ModelError, SettingError, StageOrderError
from compresskit.export.onnx import export_onnx
from compresskit.export.verify import Verification, verify_onnx
from compresskit.graph import capture, check_runs
from compresskit.measure import (
    Row,
    count_macs,
    count_nonzero,
    count_parameters,
    evaluate,
    latency,
    numpy_inputs,
    session,
)
from compresskit.report import read_row, table, write_report
from compresskit.store import load, save
from compresskit.surgery import frozen_copy, structure
from compresskit.task import PROPERTIES, Stage, Task, call, describe, first_rows
from compresskit.train import supervised_loss

log = logging.getLogger(__name__)

_LOST = {"float": "quantized the model", "dense": "put masks on the model"}


@dataclass(frozen=True)
class Result:
    """What a run gave: the last stage's model, its ONNX file, a row for each stage, the folder. Prints as a table."""

    model: nn.Module
    onnx: Path | None
    rows: tuple[Row, ...]
    out: Path

    @property
    def report(self) -> Path:
        """The rows as JSON."""
        return self.out / "report.json"

    def __str__(self) -> str:
        return f"{table(self.rows)}\n\nmodel: {self.onnx or self.out}"


def check_order(stages: Sequence[Stage]) -> None:
    """Raise `StageOrderError` where a stage needs what an earlier one took away; the message names a legal order."""
    lost: dict[str, int] = {}
    for i, stage in enumerate(stages):
        missing = sorted(getattr(stage, "needs", frozenset()) & lost.keys())
        if missing:
            first = min(lost[m] for m in missing)
            legal = [*stages[:first], stage, *stages[first:i], *stages[i + 1 :]]
            culprit = type(stages[first]).__name__
            raise StageOrderError(
                f"stage {i + 1}, {type(stage).__name__}, needs a {' and '.join(missing)} model, but stage {first + 1}, {culprit},"
                f" {_LOST[missing[0]]}; a legal order is {', '.join(type(s).__name__ for s in legal)}"
            )
        for gone in PROPERTIES - getattr(stage, "keeps", PROPERTIES):
            lost.setdefault(gone, i)


class Recipe:
    """Stages in order.

    export: "each" writes and proves an ONNX file after every stage, "last" only after the last.
    seed: every stage starts from generators seeded with it and the stage's number, so that a stage that is run again gives
        the same result; the global generators of torch, numpy and random are set.
    """

    def __init__(self, *stages: Stage, seed: int = 0, export: str = "each") -> None:
        if not stages:
            raise SettingError("Recipe(): give at least one stage")
        if export not in ("each", "last"):
            raise SettingError(f"Recipe(export=...): wanted 'each' or 'last', got {export!r}")
        for stage in stages:
            if not callable(stage):
                raise SettingError(f"Recipe(...): wanted stages such as Train(epochs=1), got {type(stage).__name__}")
        check_order(stages)
        self.stages, self.seed, self.export = stages, seed, export

    def describe(self) -> list[Any]:
        """The settings of all stages, JSON-ready."""
        return [describe(stage) for stage in self.stages]

    def run(self, model: nn.Module, task: Task, out: str | Path) -> Result:
        """Run all stages that are not done yet.

        The model is copied first and stays as it is. Raises what the stages raise; CheckpointError where `out` belongs to
        another recipe or cannot be written; ExportError where a file does not agree with its model: the file is then kept as
        `model.rejected.onnx`.
        """
        out = Path(out)
        if hasattr(model, "deployed") and "float" in getattr(self.stages[0], "needs", ()):
            raise ModelError("the model is quantized already; start from the float model it came from")
        rehearse(model, task)
        names = [f"{i}-{type(stage).__name__.lower()}" for i, stage in enumerate(self.stages, 1)]
        keys = self._keys(model)
        _claim(out, {"format": FORMAT, "stages": self.describe(), "seed": self.seed, "model": type(model).__name__}, names)
        model = copy.deepcopy(model).to(task.device)
        steps: list[tuple[str, str, Stage | None]] = list(zip(names, keys, self.stages, strict=True))
        if "train" not in _kind(self.stages[0]):
            # The model comes trained: it is the row that all others are compared with.
            steps.insert(0, ("0-start", keys[0] + "-start", None))
        rows: list[Row] = []
        for i, (name, key, stage) in enumerate(steps):
            wanted = self.export == "each" or i in (0, len(steps) - 1)
            model, row = self._step(model, task, out / name, key, stage, wanted=wanted, index=i)
            rows.append(row)
            if task.reference is None and (stage is None or _kind(stage) == "train"):
                task = replace(task, reference=frozen_copy(model))
        return self._finish(model, task, out, [name for name, _, _ in steps], rows)

    def _step(
        self, model: nn.Module, task: Task, folder: Path, key: str, stage: Stage | None, *, wanted: bool, index: int
    ) -> tuple[nn.Module, Row]:
        done = folder / "row.json"
        if done.exists() and (record := read_json(done, "the row of a finished stage")).get("key") == key:
            make = getattr(stage, "skeleton", None)
            skeleton = model if make is None else make(model)
            log.info("%s: done, loaded from %s", folder.name, folder)
            return load(copy.deepcopy(skeleton), folder).to(task.device).eval(), read_row(record["row"], done)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _seed(self.seed + index)
        begin = time.perf_counter()
        log.info("%s: %s", folder.name, stage)
        if stage is not None:
            model = stage(model, task)
        seconds = time.perf_counter() - begin
        save(model, folder)
        row = _measure(model, task, folder, seconds=seconds, wanted=wanted)
        write_json(done, {"format": FORMAT, "key": key, "row": asdict(row)})
        return model, row

    def _finish(self, model: nn.Module, task: Task, out: Path, names: list[str], rows: list[Row]) -> Result:
        files = [out / name / "model.onnx" for name in names]
        have = [i for i, file in enumerate(files) if file.exists()]
        times = latency([files[i] for i in have], first_rows(task.example(), 1))
        for i, milliseconds in zip(have, times, strict=True):
            rows[i] = replace(rows[i], latency_ms=milliseconds, bytes=_bytes(files[i]))
        write_report(out / "report.json", rows, stages=self.describe(), torch=torch.__version__)
        with atomic(out / "model.onnx") as temporary:
            shutil.copyfile(files[-1], temporary)
        return Result(model=model, onnx=out / "model.onnx", rows=tuple(rows), out=out)

    def _keys(self, model: nn.Module) -> list[str]:
        """A stage is the same if its settings, all before it, and the incoming model are."""
        digest = hashlib.sha256(json.dumps([structure(model), self.seed, self.export], sort_keys=True).encode())
        if "train" not in _kind(self.stages[0]):
            for name, value in model.state_dict().items():
                digest.update(name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        keys = []
        for record in self.describe():
            digest.update(json.dumps(record, sort_keys=True).encode())
            keys.append(digest.hexdigest()[:16])
        return keys


def rehearse(model: nn.Module, task: Task) -> None:
    """Try everything once that would otherwise fail hours later: the model, its capture, the loss and the metric on one batch.

    Raises ModelError or DataError; the model is not changed.
    """
    for which in ("val", "train"):
        if which == "train" and task.train is None:
            continue
        task.length(which)
        inputs, target = task.split(next(iter(task.batches(which))))
        probe = copy.deepcopy(model).to(task.device)
        check_runs(probe, inputs)
        with torch.no_grad():
            predictions = task.predict(call(probe.eval(), inputs))
            if which == "train":
                supervised_loss(task, predictions, target)
            elif not hasattr(task.metric, "update"):
                task.metric(predictions, target)
    if not hasattr(model, "deployed"):
        capture(model, first_rows(task.example(), 2))


def _kind(stage: Stage | None) -> str:
    """`train` for stages that start from any model and leave it dense and float."""
    free = stage is not None and not getattr(stage, "needs", frozenset())
    return "train" if free and getattr(stage, "keeps", PROPERTIES) == PROPERTIES else "other"


def _measure(model: nn.Module, task: Task, folder: Path, *, seconds: float, wanted: bool) -> Row:
    path = folder / "model.onnx"
    proof: Verification | None = None
    executed = None
    if wanted:
        opset = getattr(getattr(model, "target", None), "opset", 20)
        export_onnx(model, path, task.example(), opset=opset, metadata={"stage": folder.name})
        proof = verify_onnx(path, model, (task.split(batch)[0] for batch in task.batches("val")))
        write_json(folder / "verify.json", {"format": FORMAT, **proof.to_json()})
        if not proof.passed:
            path.replace(folder / "model.rejected.onnx")
            raise ExportError(f"{folder / 'model.rejected.onnx'}: {proof}")
        executed = session(path)
    run = model if executed is None else lambda *a, **k: _run(executed, a or k)
    return Row(
        stage=folder.name,
        metric=evaluate(run, task),
        parameters=count_parameters(model),
        nonzero=count_nonzero(model),
        macs=count_macs(model, task.example()),
        seconds=round(seconds, 2),
        bytes=_bytes(path) if wanted else None,
        executed=executed is not None,
        verified=None if proof is None else proof.passed,
    )


def _run(executed: Any, inputs: Any) -> Any:
    outputs = executed.run(None, numpy_inputs(executed, inputs))
    names = [o.name for o in executed.get_outputs()]
    tensors = [torch.from_numpy(o) for o in outputs]
    return tensors[0] if len(tensors) == 1 else dict(zip(names, tensors, strict=True))


def _bytes(path: Path) -> int:
    data = path.with_name(path.name + ".data")
    return path.stat().st_size + (data.stat().st_size if data.exists() else 0)


def _claim(out: Path, record: dict[str, Any], names: list[str]) -> None:
    """Make `out` this recipe's, or raise `CheckpointError` where it is somebody else's or cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / "recipe.json").exists() and any(out.iterdir()):
            raise CheckpointError(f"{out}: not empty, and not the folder of a run; choose another out=")
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written ({error.strerror}); choose another out=") from None
    if (out / "recipe.json").exists():
        old = read_json(out / "recipe.json", "a recipe")
        before = [f"{i}-{str(stage.get('kind', stage)).lower()}" for i, stage in enumerate(old.get("stages", []), 1)]
        shared = min(len(before), len(names))
        if old.get("model") != record["model"] or before[:shared] != names[:shared]:
            raise CheckpointError(
                f"{out}: belongs to another recipe ({old.get('model')}: {', '.join(before)}), this one is {record['model']}:"
                f" {', '.join(names)}; choose another out=, or delete the folder"
            )
    try:
        write_json(out / "recipe.json", record)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written ({error.strerror}); choose another out=") from None


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  what data loaders of users draw from
