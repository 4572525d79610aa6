"""Recipe: run stages in order, prove each one's ONNX file, keep all on disk, go on where a run was interrupted.

out/recipe.json                 what was asked for
out/1-train/                    model.safetensors, structure.json, model.onnx, row.json (written last: the stage is done)
out/report.json, out/model.onnx of the last stage
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compresskit.base import distributed
from compresskit.base.errors import ModelError, SettingError, StageOrderError
from compresskit.base.files import FORMAT, write_json
from compresskit.base.fingerprint import describe
from compresskit.base.stage import PROPERTIES, Stage
from compresskit.base.task import Task, first_rows
from compresskit.export.files import copy_model, file_bytes
from compresskit.graph.capture import Dynamic
from compresskit.graph.masks import masks_of
from compresskit.graph.surgery import frozen_copy
from compresskit.measure import Row, latency
from compresskit.recipe.folder import (
    PROGRESS,
    ROW,
    RunPlan,
    claim,
    digests,
    finished,
    locked,
    look_ahead,
    make_room,
    shape_of,
    stage_keys,
    tidy,
    versions,
)
from compresskit.recipe.preflight import held, measure, rehearse, seed_everything
from compresskit.recipe.report import read_row, table, write_report
from compresskit.recipe.store import load, load_snapshots_, save, save_snapshots
from compresskit.train.progress import Every, Progress, Stop, stoppable
from compresskit.train.snapshots import Snapshots
from compresskit.train.train import Train

log = logging.getLogger(__name__)

EVERY = Every()
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
        if (begin := lost.get("dense")) is not None and stage.makes_student:
            raise StageOrderError(
                f"stage {i + 1}, {type(stage).__name__}, puts a new student in the place of the model that stage {begin + 1},"
                f" {type(stages[begin]).__name__}, made sparse; make the student first, or leave student= out"
            )
        missing = sorted(stage.needs & lost.keys())
        if missing:
            first = min(lost[m] for m in missing)
            legal = [*stages[:first], stage, *stages[first:i], *stages[i + 1 :]]
            culprit = type(stages[first]).__name__
            raise StageOrderError(
                f"stage {i + 1}, {type(stage).__name__}, needs a {' and '.join(missing)} model, but stage {first + 1}, {culprit},"
                f" {_LOST[missing[0]]}; a legal order is {', '.join(type(s).__name__ for s in legal)}"
            )
        for back in stage.restores:
            lost.pop(back, None)
        for gone in PROPERTIES - stage.keeps:
            lost.setdefault(gone, i)


def check_rewinding(stages: Sequence[Stage]) -> dict[int, float]:
    """Which trainings must keep a snapshot, and of which share: index -> share. Raises `StageOrderError` where there is none."""
    found = {}
    for i, stage in enumerate(stages):
        if (fraction := stage.rewinds_to) is None:
            continue
        if i == 0 or not isinstance(stages[i - 1], Train):
            after = "it is the first stage" if i == 0 else f"stage {i}, {type(stages[i - 1]).__name__}, is none"
            raise StageOrderError(
                f"stage {i + 1}, {type(stage).__name__}, rewinds to {fraction:g} of a training, so it must come right after one;"
                f" {after}; put a Train or Distill before it"
            )
        found[i - 1] = fraction
    return found


def _needing_dense(stages: Sequence[Stage]) -> str | None:
    for stage in stages:
        if "dense" in stage.restores:
            return None
        if "dense" in stage.needs:
            return type(stage).__name__
    return None


class Recipe:
    """Stages in order.

    dynamic: dimensions of the inputs that vary in the files of float models, `(0, 1)` for batch and length; a quantized model has
        those that its stage was given.
    export: "each" writes and proves an ONNX file after every stage, "last" only after the last.
    seed: every stage starts from generators seeded with it and the stage's number, so that a stage that is run again gives
        the same result; the global generators of torch, numpy and random are set.
    save: how often a training is saved on its way.
    """

    def __init__(self, *stages: Stage, seed: int = 0, export: str = "each", save: Every = EVERY, dynamic: Dynamic = (0,)) -> None:
        if not stages:
            raise SettingError("Recipe(): give at least one stage")
        if export not in ("each", "last"):
            raise SettingError(f"Recipe(export=...): wanted 'each' or 'last', got {export!r}")
        for stage in stages:
            if not isinstance(stage, Stage):
                raise SettingError(
                    f"Recipe(...): wanted stages such as Train(epochs=1), got {type(stage).__name__}; a stage of your own is a"
                    " dataclass derived from compresskit.Stage"
                )
        check_order(stages)
        self.rewound = check_rewinding(stages)
        if not isinstance(save, Every):
            raise SettingError(f"Recipe(save=...): wanted Every(seconds=...), got {save!r}")
        self.stages, self.seed, self.export, self.save, self.dynamic = stages, seed, export, save, dynamic

    def describe(self) -> list[Any]:
        """The settings of all stages, JSON-ready; a student that is to be made, also by its structure."""
        records = [describe(stage) for stage in self.stages]
        for record, stage in zip(records, self.stages, strict=True):
            if stage.makes_student:
                with torch.random.fork_rng(devices=[]):
                    shape = shape_of(stage.skeleton(nn.Module()))
                record["student"] = {"made by": record["student"], "structure": shape}
        return records

    def run(self, model: nn.Module, task: Task, out: str | Path) -> Result:
        """Run all stages that are not done yet.

        A run that was interrupted, wherever that was, goes on and ends with the same bits. The model is copied first and stays
        as it is. Raises what the stages raise; CheckpointError where `out` belongs to another recipe, is in use by another
        process or cannot be written; ExportError where a file does not agree with its model: the file is then kept as
        `model.rejected.onnx`; Interrupted, which ends the process, after SIGINT or SIGTERM.
        """
        out = Path(out)
        self._check_model(model)
        rehearse(model, task)
        with distributed.joined(task.device), locked(out), stoppable(out) as stop:
            return self._run(model, task, out, stop)

    def plan(self, model: nn.Module, task: Task, out: str | Path) -> RunPlan:
        """What `run` would do with that folder: which stages it would reuse, go on with or run, and why. Nothing is written."""
        self._check_model(model)
        steps = self._steps(model, task)
        first = len(steps) - len(self.stages)
        asked = [(name, key, self._wanted(i, len(steps)), i - first in self.rewound) for i, (name, key, _) in enumerate(steps)]
        return look_ahead(Path(out), asked, self._record())

    def _wanted(self, index: int, count: int) -> bool:
        """Whether a step leaves an ONNX file."""
        return self.export == "each" or index in (0, count - 1)

    def _record(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "stages": self.describe(),
            **self._settings(),
            "versions": versions(),
        }

    def _settings(self) -> dict[str, Any]:
        """What of the recipe itself all results depend on."""
        return {"seed": self.seed, "dynamic": describe(self.dynamic)}

    def _check_model(self, model: nn.Module) -> None:
        if hasattr(model, "deployed") and "float" in self.stages[0].needs:
            raise ModelError("the model is quantized already; start from the float model it came from")
        if masks_of(model) is not None and (bad := _needing_dense(self.stages)) is not None:
            raise ModelError(f"the model carries masks, and {bad} needs a dense model; put Densify before it, or leave it out")

    def _steps(self, model: nn.Module, task: Task) -> list[tuple[str, str, Stage | None]]:
        """(name, key, stage) of each folder of a run; the first may be the model as it came."""
        keys = stage_keys(model, task, self.describe(), self._settings(), trained=self.stages[0].starts_from_trained)
        steps: list[tuple[str, str, Stage | None]] = list(zip(self._names(), keys, self.stages, strict=True))
        if self.stages[0].starts_from_trained:
            # The model comes trained: it is the row that all others are compared with.
            steps.insert(0, ("0-start", keys[0] + "-start", None))
        return steps

    def _names(self) -> list[str]:
        return [f"{i}-{type(stage).__name__.lower()}" for i, stage in enumerate(self.stages, 1)]

    def _run(self, model: nn.Module, task: Task, out: Path, stop: Stop) -> Result:
        trained = self.stages[0].starts_from_trained
        model = copy.deepcopy(model).to(task.device)
        distributed.equal_(model)
        steps = self._steps(model, task)
        distributed.first_of(lambda: claim(out, model, self._names(), self._record(), trained=trained))
        rows: list[Row] = []
        snapshots: dict[int, Snapshots] = {i: {share: {}} for i, share in self.rewound.items()}
        for i, (name, key, stage) in enumerate(steps):
            wanted = self._wanted(i, len(steps))
            fills = snapshots.get(i - trained)
            distributed.wait()
            progress = Progress(folder=out / name / PROGRESS, key=key, every=self.save, stop=stop)
            stage_task = replace(task, snapshots=fills or snapshots.get(i - trained - 1), progress=progress)
            model, row = self._step(model, stage_task, out / name, key, stage, wanted=wanted, index=i, fills=fills)
            rows.append(row)
            if task.reference is None and (stage is None or not stage.starts_from_trained):
                task = replace(task, reference=frozen_copy(model))
        names = [name for name, _, _ in steps]
        rows = distributed.first_of(lambda: self._finish(task, out, names, rows))
        return Result(model=model, onnx=out / "model.onnx", rows=tuple(rows), out=out)

    def _step(
        self,
        model: nn.Module,
        task: Task,
        folder: Path,
        key: str,
        stage: Stage | None,
        *,
        wanted: bool,
        index: int,
        fills: Snapshots | None,
    ) -> tuple[nn.Module, Row]:
        done = folder / ROW
        asked = partial(finished, folder, key, wanted=wanted, snapshots=fills is not None)
        if (record := distributed.first_of(asked)) is not None:
            skeleton = model if stage is None else stage.skeleton(model)
            distributed.first_of(partial(tidy, folder))  # killed right after it wrote its row
            log.info("%s: done, loaded from %s", folder.name, folder)
            if fills is not None:
                load_snapshots_(fills, folder)
            return load(copy.deepcopy(skeleton), folder).to(task.device).eval(), read_row(record["row"], done)
        distributed.first_of(partial(make_room, folder))
        seed_everything(self.seed + index, task)
        begin = time.perf_counter()
        log.info("%s: %s", folder.name, stage)
        if stage is not None:
            model = held(stage, model, task)
        seconds = time.perf_counter() - begin + task.progress.seconds

        def keep() -> Row:
            save(model, folder)
            if fills is not None:
                save_snapshots(fills, folder)
            row = measure(model, task, folder, stage=describe(stage), seconds=seconds, wanted=wanted, dynamic=self.dynamic)
            write_json(done, {"format": FORMAT, "key": key, "row": asdict(row), "files": digests(folder)})
            tidy(folder)
            return row

        return model, distributed.first_of(keep)

    def _finish(self, task: Task, out: Path, names: list[str], rows: list[Row]) -> list[Row]:
        files = [out / name / "model.onnx" for name in names]
        have = [i for i, file in enumerate(files) if file.exists()]
        times = latency([files[i] for i in have], first_rows(task.example(), 1))
        for i, milliseconds in zip(have, times, strict=True):
            rows[i] = replace(rows[i], latency_ms=milliseconds, bytes=file_bytes(files[i]))
        write_report(out / "report.json", rows, stages=self.describe(), torch=torch.__version__)
        copy_model(files[-1], out / "model.onnx")
        return rows
