"""The engine: run the stages of a recipe one after the other, or read those that are finished from disk.

for step in steps:
    finished on disk?  ->  read_step: its model and its report
    otherwise          ->  run_step: seed, `model = stage(model, task)`, check, save, export, verify, measure, write row.json

`run_stage` is the function in which a stage runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compresskit.base import distributed
from compresskit.base.errors import CheckpointError, ModelError
from compresskit.base.files import FORMAT, read_json, write_json
from compresskit.base.fingerprint import describe
from compresskit.base.progress import Every, Progress, Stop, announce, progress_bar
from compresskit.base.randomness import seed_generators_
from compresskit.base.stage import Stage
from compresskit.base.task import Inputs, RowDims, Task
from compresskit.export.check.environment import environment
from compresskit.export.files import copy_onnx, file_bytes
from compresskit.export.onnx import Opset
from compresskit.graph.capture import Dynamic
from compresskit.graph.masks import masks_of
from compresskit.graph.quantized import quantized_parts
from compresskit.graph.surgery import frozen_copy
from compresskit.measure import latency
from compresskit.recipe.details import layer_times
from compresskit.recipe.folder import (
    PROGRESS,
    ROW,
    RunStep,
    check_folder,
    clear_stage_folder,
    delete_checkpoints,
    file_digests,
    read_finished_stage,
    why_unknown,
)
from compresskit.recipe.measure_stage import RUN_METADATA, measure_stage, timed_sample
from compresskit.recipe.page.records import read_run
from compresskit.recipe.page.render import write_csv, write_page
from compresskit.recipe.report import StageReport, read_stage_report, write_report
from compresskit.recipe.store import load, load_snapshots_, save, save_snapshots
from compresskit.train.callbacks import OnEpoch, OnStep, call_back
from compresskit.train.snapshots import Snapshots

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What all steps of one run share.

    Attributes:
        out: folder of the run.
        seed, save, dynamic, metadata: settings of the recipe.
        dims: where the rows of each input are, where `dynamic` says it.
        stop: whether a signal asked the run to stop.
        record: what recipe.json says of the recipe.
        on_step, on_epoch, on_stage: functions that are told of every step, epoch and stage.
        reused: of each step so far, whether it was read from its folder.
        models: filled with a copy of what each stage returned, by its index, where the run has baselines; else None.
    """

    out: Path
    seed: int
    save: Every
    dynamic: Dynamic
    opset: Opset | None
    metadata: bool
    stop: Stop
    record: dict[str, Any]
    on_step: Sequence[OnStep] = ()
    on_epoch: Sequence[OnEpoch] = ()
    on_stage: Sequence[Callable[[StageReport], Any]] = ()
    reused: list[bool] = field(default_factory=list)
    models: dict[int, nn.Module] | None = None
    dims: RowDims | None = None


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """The tasks of one step. trained_on: the stage's own, or the run's. measured_on: the run's, for the rows of all stages."""

    trained_on: Task
    measured_on: Task


def run_steps(run: RunSettings, steps: list[RunStep], model: nn.Module, task: Task) -> tuple[nn.Module, list[StageReport]]:
    """Run or read all steps, and write the report.

    `Task.reference` becomes the first trained float model, unless the task has one.

    Args:
        model: the incoming model, the same in all processes; it is changed.

    Returns:
        The last step's model and the report of every step.
    """
    distributed.on_rank_zero(lambda: check_folder(run.out, model, steps, run.record))
    reports: list[StageReport] = []
    snapshots: Snapshots | None = None  # of the preceding training
    for index, step in enumerate(steps):
        distributed.barrier()
        taken: Snapshots | None = None if step.snapshot is None else {step.snapshot: {}}
        progress = Progress(
            folder=run.out / step.name / PROGRESS,
            key=step.key,
            every=run.save,
            stop=run.stop,
            on_step=run.on_step,
            on_epoch=run.on_epoch,
        )
        own = task if step.task is None else replace(step.task, reference=step.task.reference or task.reference)
        trained_on = replace(own, snapshots=taken or snapshots, progress=progress)
        model, report = run_or_read_step(run, step, index, model, Tasks(trained_on=trained_on, measured_on=task), taken)
        reports.append(report)
        if run.models is not None:
            run.models[len(run.models) - 1] = frozen_copy(model)
        snapshots = taken
        if task.reference is None and (step.stage is None or not step.stage.starts_from_trained):
            task = replace(task, reference=frozen_copy(model))
    return model, distributed.on_rank_zero(lambda: finish_run(run, steps, reports, task))


def run_or_read_step(
    run: RunSettings, step: RunStep, index: int, model: nn.Module, tasks: Tasks, snapshots: Snapshots | None
) -> tuple[nn.Module, StageReport]:
    """The model and the report of one step, from disk where it is finished.

    snapshots: filled with the weights on the way through the step's training, if a later stage rewinds to them.
    """
    folder = run.out / step.name
    record = distributed.on_rank_zero(partial(read_finished_stage, folder, step))
    run.reused.append(record is not None)
    if record is not None:
        return read_step(step, folder, record, model, tasks.measured_on, snapshots)
    if step.unknown and (folder / ROW).exists():
        log.warning("%s runs again: %s", folder.name, why_unknown(step.unknown))
    distributed.on_rank_zero(partial(clear_stage_folder, folder))
    return run_step(run, step, index, model, tasks, snapshots)


def read_step(
    step: RunStep, folder: Path, record: dict[str, Any], model: nn.Module, task: Task, snapshots: Snapshots | None
) -> tuple[nn.Module, StageReport]:
    """The model and the report of a finished step, read from its folder."""
    skeleton = model if step.stage is None else step.stage.skeleton(model)
    distributed.on_rank_zero(partial(delete_checkpoints, folder))  # in case it was killed right after it wrote its row
    log.info("%s: done, loaded from %s", folder.name, folder)
    if snapshots is not None:
        load_snapshots_(snapshots, folder)
    return load(skeleton, folder).to(task.device).eval(), read_stage_report(record["row"], folder / ROW)


def run_step(
    run: RunSettings, step: RunStep, index: int, model: nn.Module, tasks: Tasks, snapshots: Snapshots | None
) -> tuple[nn.Module, StageReport]:
    """Run one step from its beginning, or from its trainings' last checkpoints, and write everything it leaves on disk."""
    folder, task = run.out / step.name, tasks.trained_on
    seed_generators_(run.seed + index, task.train, task.val, task.calibration)
    begin = time.perf_counter()
    log.info("%s: %s", folder.name, step.stage)
    if step.stage is not None:
        model = run_stage(step.stage, model, task)
    seconds = time.perf_counter() - begin + (0.0 if task.progress is None else task.progress.seconds)

    def write_step() -> StageReport:
        save(model, folder)
        if snapshots is not None:
            save_snapshots(snapshots, folder)
        report = measure_stage(
            model,
            tasks.measured_on,
            folder,
            settings=describe(step.stage),
            seconds=seconds,
            export=step.export,
            dynamic=run.dynamic,
            opset=run.opset,
            dims=run.dims,
        )
        row = {"format": FORMAT, "key": step.key, "row": asdict(report), "files": file_digests(folder)}
        row["history"] = [] if task.progress is None else task.progress.histories
        write_json(folder / ROW, row)
        delete_checkpoints(folder)
        return report

    report = distributed.on_rank_zero(write_step)
    size = "" if report.bytes is None else f", {report.bytes / 1024:.1f} KiB"
    announce(log, "%s: %s %.4g%s, %.1f s", step.name, tasks.measured_on.metric_name, report.metric, size, seconds)
    call_back(run.on_stage, report, f"{step.name}: Recipe(on_stage=...)")
    return model, report


def run_stage(stage: Stage, model: nn.Module, task: Task) -> nn.Module:
    """Run one stage, and check that it kept the masks of the incoming model.

    Raises ModelError if the stage returns no module, if the masks are gone, if a masked weight is no longer zero, or if a mask
    removes fewer weights than before.
    """
    masks = masks_of(model)
    zeros_before = {} if masks is None else {name: int((~mask).sum()) for name, mask in masks.masks.items()}
    model = stage(model, task)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{type(stage).__name__} returned {type(model).__name__}, wanted a module; a stage ends with `return model`"
        )
    if masks is not None and "dense" not in stage.restores:
        check_masks_kept_(stage, model, zeros_before)
    return model


def check_masks_kept_(stage: Stage, model: nn.Module, zeros_before: dict[str, int]) -> None:
    """Raise `ModelError` unless a stage's model carries the masks that came in.

    Weights of a quantized model that a mask keeps and rounding would make zero are moved to the nearest value that is not.

    zeros_before: how many weights of each tensor the incoming masks removed.
    """
    kind, masks = type(stage).__name__, masks_of(model)
    if masks is None:
        raise ModelError(
            f"{kind} lost the masks of its model ({sum(zeros_before.values())} weights at zero); a stage that is meant to take"
            " them off says restores = frozenset({'dense'})"
        )
    for part in quantized_parts(model).values():
        part.keep_masked_()
    for name, count in masks.violations(model).items():
        raise ModelError(
            f"{kind}: {count} weights of {name} that its mask removes are no longer zero; train through fit_, or call"
            " masks_of(model).zero_(model) after every step"
        )
    for name, mask in masks.masks.items():
        # A quantized model, or part, calls its tensors by the same names, in its body.
        before = zeros_before.get(name, zeros_before.get(name.replace("body.", "", 1), 0))
        if (now := int((~mask).sum())) < before:
            raise ModelError(f"{kind}: the mask of {name} removed {before} weights before it and {now} after it; masks only grow")


def finish_run(run: RunSettings, steps: list[RunStep], reports: list[StageReport], task: Task) -> list[StageReport]:
    """Measure the latency of all ONNX files in turn, write the report, and copy the last step's file to model.onnx.

    Where all steps were finished, the latencies that were measured then stay, and what is there already is not written again, so
    that a finished run can be read from where nothing can be written.
    """
    files = [run.out / step.name / "model.onnx" for step in steps]
    exported = [i for i, file in enumerate(files) if file.exists()]
    before = reports_before(run, steps) if all(run.reused) else []
    times = latencies_before(before, steps, exported)
    sample: Inputs | None = None
    if times is None:
        sample = timed_sample([files[i] for i in exported], task, run.dims)
        times = latency([files[i] for i in exported], sample)
    reports = list(reports)
    for i, milliseconds in zip(exported, times, strict=True):
        reports[i] = replace(reports[i], latency_ms=milliseconds, bytes=file_bytes(files[i]))
    if reports != before:
        inputs = sample or timed_sample([files[i] for i in exported], task, run.dims)
        found = {steps[i].name: layer_times(files[i], inputs) for i in progress_bar(exported, desc="time layers")}
        write_reports(run, steps, reports, task, {name: entry for name, entry in found.items() if entry})
    copy_onnx(files[-1], run.out / "model.onnx", without=() if run.metadata else RUN_METADATA)
    return reports


def write_reports(
    run: RunSettings, steps: list[RunStep], reports: list[StageReport], task: Task, times: dict[str, dict[str, Any]]
) -> None:
    """Write report.html, report.csv and, last, report.json. times: of the layers of each stage's file, as in `layer_times`."""
    rows = [read_json(run.out / step.name / ROW, "the row of a finished stage") for step in steps]
    extra = {
        "stages": run.record["stages"],
        "torch": torch.__version__,
        "metric": {"name": task.metric_name, "higher_is_better": task.prefers_higher},
        "keys": {step.name: step.key for step in steps},
        "reused": [step.name for step, reused in zip(steps, run.reused, strict=True) if reused],
        "history": {step.name: row.get("history", []) for step, row in zip(steps, rows, strict=True)},
        "environment": environment(),
        "layer_times": times,
    }
    record = read_run(run.out, report={"rows": [asdict(row) for row in reports], **extra})
    write_page(run.out / "report.html", [record])
    write_csv(run.out / "report.csv", [record])
    write_report(run.out / "report.json", reports, **extra)


def report_baselines(out: Path, rows: Sequence[StageReport]) -> None:
    """Put the rows of baselines into report.html, report.csv and, last, report.json, where they are not there."""
    report = read_json(out / "report.json", "the report of a run")
    new = {**report, "baselines": [asdict(row) for row in rows]}
    if new == report:
        return
    record = read_run(out, report=new)
    write_page(out / "report.html", [record])
    write_csv(out / "report.csv", [record])
    write_json(out / "report.json", new)


def reports_before(run: RunSettings, steps: list[RunStep]) -> list[StageReport]:
    """The rows of report.json; none where it is not there, damaged, or of other results in folders of the same names: a run that
    ended before its report leaves the one of the run before it.
    """
    path = run.out / "report.json"
    try:
        report = read_json(path, "a report") if path.exists() else {"rows": [], "keys": {}}
        same = all(report["keys"].get(step.name) == step.key for step in steps)
        return [read_stage_report(row, path) for row in report["rows"]] if same else []
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return []


def latencies_before(before: list[StageReport], steps: list[RunStep], exported: list[int]) -> list[float] | None:
    """The latencies of the exported steps in earlier reports, in ms; None where one is missing."""
    found = {row.stage: row.latency_ms for row in before}
    times = [time for i in exported if (time := found.get(steps[i].name)) is not None]
    return times if len(times) == len(exported) else None
