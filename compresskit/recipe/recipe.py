"""`Recipe`: a list of stages, checked for their order when it is made, and run by `compresskit.recipe.engine`.

out/recipe.json                 the settings of the recipe and of its stages, and the model's structure
out/1-train/                    model.safetensors, structure.json, model.onnx, verify.json, row.json (written last)
out/report.json                 one row per stage
out/model.onnx                  of the last stage
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from compresskit.base import distributed
from compresskit.base.errors import CheckpointError, ExportError, ModelError, SettingError, StageOrderError
from compresskit.base.files import FORMAT, read_json
from compresskit.base.fingerprint import describe, describe_task
from compresskit.base.progress import Every, stoppable
from compresskit.base.randomness import seed_generators_
from compresskit.base.settings import as_python, as_python_dims
from compresskit.base.stage import PROPERTIES, Stage
from compresskit.base.task import Task, check_is_task
from compresskit.export.onnx import Opset, check_opset
from compresskit.graph.capture import Dynamic
from compresskit.graph.masks import masks_of
from compresskit.graph.quantized import is_quantized
from compresskit.graph.surgery import check_is_module, copy_model
from compresskit.measure import task_row_dims
from compresskit.recipe.baselines import baselines, last_dense_float, with_new_weights
from compresskit.recipe.dependencies import (
    Dependencies,
    StageKey,
    describe_model,
    describe_stages,
    shows_training,
    versions,
)
from compresskit.recipe.engine import RunSettings, report_baselines, run_steps
from compresskit.recipe.folder import (
    ROW,
    START,
    RunPlan,
    RunStep,
    clear_other_network,
    folder_of_run,
    locked,
    plan_run,
    start_of_run,
)
from compresskit.recipe.half_precision import HALF_DTYPES, half_precision_row
from compresskit.recipe.preflight import check_labelled, preflight_check
from compresskit.recipe.report import StageReport, remarks, table
from compresskit.train.callbacks import Callbacks, as_callbacks
from compresskit.train.modes import remember_modes_
from compresskit.train.train import Train

log = logging.getLogger(__name__)

DEFAULT_SAVE = Every()
MOST_PERMUTED = 6  # stages of which all orders are tried for an advice
_LOST = {"float": "quantized the model", "dense": "put masks on the model"}


@dataclass(frozen=True)
class Result:
    """The result of a run; prints as a table.

    Attributes:
        model: the model of the last stage, in eval mode.
        onnx: its ONNX file.
        rows: one report per stage.
        out: the folder of the run.
        higher_is_better: whether a larger metric is better; None where neither the task nor the metric says so.
        baselines: with `Recipe(baselines=True)`, a report of each baseline; their runs are in `out/baselines`.
    """

    model: nn.Module
    onnx: Path | None
    rows: tuple[StageReport, ...]
    out: Path
    higher_is_better: bool | None = None
    baselines: tuple[StageReport, ...] = ()

    @property
    def report(self) -> Path:
        """The JSON file with the rows."""
        return self.out / "report.json"

    def best(self, *, drop: float | None = None, by: Callable[[StageReport], float | None] | None = None) -> StageReport:
        """Return the row of the best stage; its files are in `out / row.stage`.

        result.best()                                                  the best metric; of equal ones, the smallest file
        result.best(drop=0.01)                                         the smallest file that loses at most 0.01 of the metric
        result.best(drop=0.01, by=lambda row: row.latency_ms)          the fastest one

        Args:
            drop: how much worse than that of the first row the metric may be, in its own unit; None for any.
            by: what is to be least, such as `lambda row: row.latency_ms`; rows for which it is None are left out. The default is
                the metric, or, with `drop`, the size of the file.

        Raises:
            SettingError: which metric is better is not said, `drop` is no number, `by` is no function, or no row is left.
        """
        drop = as_python(drop)
        if drop is not None and (not isinstance(drop, int | float) or isinstance(drop, bool) or math.isnan(drop)):
            raise SettingError(
                "Result.best(drop=...): wanted a number in the unit of the metric, such as 0.01 for a point of accuracy, got"
                f" {drop!r}"
            )
        if by is not None and not callable(by):
            raise SettingError(f"Result.best(by=...): wanted a function of a row, such as lambda row: row.latency_ms, got {by!r}")
        if self.higher_is_better is None:
            raise SettingError("Result.best: which of two metrics is better is not said; pass Task(higher_is_better=...)")
        sign = 1 if self.higher_is_better else -1
        least = min(sign * row.metric for row in self.rows) if drop is None else sign * self.rows[0].metric - drop
        found = [row for row in self.rows if sign * row.metric >= least]
        if by is None and drop is None:
            return max(found, key=lambda row: (sign * row.metric, -(row.bytes or math.inf)))
        measured = [(value, row) for row in found if (value := row.bytes if by is None else by(row)) is not None]
        if not measured:
            raise SettingError(
                f"Result.best: of {len(found)} stages that lose at most {drop}, none has the figure that is asked for"
            )
        return min(measured, key=lambda pair: (pair[0], -sign * pair[1].metric))[1]

    def __str__(self) -> str:
        return "\n".join([table([*self.rows, *self.baselines]), *remarks(self.rows), "", f"model: {self.onnx or self.out}"])


def check_order(stages: Sequence[Stage]) -> None:
    """Raise `StageOrderError` if a stage needs a property that an earlier stage removed; the message names a legal order."""
    try:
        _check_needs(stages)
    except StageOrderError as error:
        legal = next(filter(_is_legal, _other_orders(stages)), None)
        if legal is None:
            advice = "no order of these stages is legal, leave one of them out"
        else:
            advice = f"a legal order is {', '.join(type(s).__name__ for s in legal)}"
        raise StageOrderError(f"{error}; {advice}") from None


def _check_needs(stages: Sequence[Stage]) -> None:
    lost_at: dict[str, int] = {}
    for i, stage in enumerate(stages):
        if stage.makes_student and (sparsifier := lost_at.get("dense")) is not None:
            raise StageOrderError(
                f"stage {i + 1}, {type(stage).__name__}, puts a new student in the place of the model that stage"
                f" {sparsifier + 1}, {type(stages[sparsifier]).__name__}, made sparse; make the student first, or leave"
                " student= out"
            )
        if missing := sorted(stage.needs & lost_at.keys()):
            first = min(lost_at[name] for name in missing)
            culprit = type(stages[first]).__name__
            raise StageOrderError(
                f"stage {i + 1}, {type(stage).__name__}, needs a {' and '.join(missing)} model, but stage {first + 1}, {culprit},"
                f" {_LOST[missing[0]]}"
            )
        for name in PROPERTIES if stage.makes_student else stage.restores:  # a student's weights are its own
            lost_at.pop(name, None)
        for name in PROPERTIES - stage.keeps:
            lost_at.setdefault(name, i)


def _is_legal(stages: Sequence[Stage]) -> bool:
    try:
        _check_needs(stages)
    except StageOrderError:
        return False
    return True


def _other_orders(stages: Sequence[Stage]) -> Iterator[Sequence[Stage]]:
    """Orders with one stage at an earlier place, the shortest move first; then, of a few stages, all orders."""
    for i, j in sorted(itertools.combinations(range(len(stages)), 2), key=lambda places: places[1] - places[0]):
        yield [*stages[:i], stages[j], *stages[i:j], *stages[j + 1 :]]
    if len(stages) <= MOST_PERMUTED:
        yield from itertools.permutations(stages)


def snapshot_fractions(stages: Sequence[Stage]) -> dict[int, float]:
    """Which trainings must keep a snapshot for the stage after them: index of the training -> fraction of it, in [0, 1).

    Raises StageOrderError where the stage before is no training.
    """
    fractions = {}
    for i, stage in enumerate(stages):
        if (fraction := stage.rewinds_to) is None:
            continue
        if i == 0 or not isinstance(stages[i - 1], Train):
            after = "it is the first stage" if i == 0 else f"stage {i}, {type(stages[i - 1]).__name__}, is none"
            raise StageOrderError(
                f"stage {i + 1}, {type(stage).__name__}, rewinds to {fraction:g} of a training, so it must come right after one;"
                f" {after}; put a Train or Distill before it"
            )
        fractions[i - 1] = fraction
    return fractions


def own_tasks(stages: Sequence[Stage], task: Task, tasks: Sequence[Task | None], where: str) -> dict[int, Task]:
    """The tasks of stages that have their own, by the stage's index; SettingError, for `where`, where `tasks` does not fit."""
    if isinstance(tasks, Task) or any(not isinstance(own, Task | None) for own in tasks) or len(tasks) not in (0, len(stages)):
        kinds = [None if own is None else type(own).__name__ for own in ([] if isinstance(tasks, Task) else tasks)]
        raise SettingError(
            f"{where}(tasks=...): wanted a Task or None for each of the {len(stages)} stages, got"
            f" {'one Task' if isinstance(tasks, Task) else kinds}; None takes the task of the run"
        )
    return {i: replace(own, device=task.device) for i, own in enumerate(tasks) if own is not None}


def _first_that_needs_dense(stages: Sequence[Stage]) -> Stage | None:
    for stage in stages:
        if "dense" in stage.restores:
            return None
        if "dense" in stage.needs:
            return stage
    return None


class Recipe:
    """Stages that run in order.

    Args:
        stages: such as `Train(epochs=1)`; see `compresskit.Stage` for writing one.
        seed: each stage starts from generators (torch, numpy, random) seeded with this number plus its own, so that a stage that
            runs again gives the same result. The global generators are set.
        export: "each" writes and verifies an ONNX file after every stage, "last" only after the last.
        save: how often a training saves a checkpoint.
        dynamic: dimensions of the inputs that may vary in the ONNX files of float models, such as `(0, 1)` for batch and
            length. A quantized model uses those that its stage was given.
        opset: version of ONNX's operators in all files, see `export_onnx`; "lowest" for the lowest that each of them needs.
        metadata: whether `out/model.onnx`, the file to hand on, holds the settings of its stage, its metric and its verification.
            The files in the folders of the stages always do.
        baselines: whether networks of the sizes that the stages made are also trained from new weights, as long and on labels
            alone: a student without its teacher, and for a pruned network one that was never larger. It costs their training.
            The last network in float is also written and measured in fp16 and in bf16.
        on_step, on_epoch: functions that all trainings of the run call, besides their own; see `Train`.
        on_stage: a function, or several, that is called with a `StageReport` after every stage that has run. Latencies are
            measured at the end of the run.

    Raises SettingError for settings out of range, StageOrderError for an order of stages in which one would undo another.
    """

    def __init__(
        self,
        *stages: Stage,
        seed: int = 0,
        export: str = "each",
        save: Every = DEFAULT_SAVE,
        dynamic: Dynamic = (0,),
        opset: Opset | None = None,
        metadata: bool = True,
        baselines: bool = False,
        on_step: Callbacks = None,
        on_epoch: Callbacks = None,
        on_stage: Callbacks = None,
    ) -> None:
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
        self.snapshot_fractions = snapshot_fractions(stages)
        if not isinstance(save, Every):
            raise SettingError(f"Recipe(save=...): wanted Every(seconds=...), got {save!r}")
        if not isinstance(metadata, bool):
            raise SettingError(f"Recipe(metadata=...): wanted True or False, got {metadata!r}")
        if not isinstance(baselines, bool):
            raise SettingError(f"Recipe(baselines=...): wanted True or False, got {baselines!r}")
        check_opset(opset, "Recipe")
        self.stages, self.seed, self.export, self.save = stages, seed, export, save
        self.dynamic, self.opset = as_python_dims(dynamic), opset
        self.metadata, self.baselines = metadata, baselines
        self.on_step = as_callbacks(on_step, "Recipe(on_step=...)")
        self.on_epoch = as_callbacks(on_epoch, "Recipe(on_epoch=...)")
        self.on_stage = as_callbacks(on_stage, "Recipe(on_stage=...)")

    def __repr__(self) -> str:
        return f"Recipe({', '.join(map(repr, self.stages))}, seed={self.seed}, export={self.export!r})"

    def run(self, model: nn.Module, task: Task, out: str | Path, *, tasks: Sequence[Task | None] = ()) -> Result:
        """Run all stages that are not finished yet.

        A run that was interrupted resumes, and ends with the same bits as one that was not.

        Args:
            model: the first stage's input. It is copied and never changed.
            task: data, loss and metric.
            out: folder of the run, made where it is missing.
            tasks: for each stage a task of its own, or None for `task`: pre-training on other data, imitation without labels.
                Device and, where it has none, reference are those of `task`, on which the rows of all stages are measured.

        Raises:
            SettingError: `tasks` is not as long as the recipe.
            ModelError, DataError: the model, the data, the loss or the metric fails on the first batches.
            CheckpointError: `out` belongs to another recipe, is in use by another process or cannot be written.
            ExportError: an ONNX file does not agree with its model; the file is kept as `model.rejected.onnx`. Or ONNX Runtime
                cannot read files in `out`, whose path is not UTF-8.
            Interrupted: the process got SIGINT or SIGTERM.
            Other errors that the stages raise.
        """
        out = folder_of_run(out)
        self._check_arguments(model, task, "Recipe.run")
        own = own_tasks(self.stages, task, tasks, "Recipe.run")
        described = self._described(task, own)  # before the check calls the loss, which may count its calls
        preflight_check(model, task, self.stages, own, dynamic=self.dynamic)
        if self.baselines:
            with_new_weights(model)  # raises where it cannot
            check_labelled(task, "Recipe(baselines=True): the training of baselines", "Task(train=...)")
        made: dict[int, nn.Module] | None = None
        with distributed.process_group(task.device), locked(out), stoppable(out) as stop:
            model = copy_model(model).to(task.device)
            remember_modes_(model)
            made = ({} if self._reports_start else {-1: copy_model(model)}) if self.baselines else None
            distributed.broadcast_model_(model)
            record, keys = distributed.on_rank_zero(lambda: self._record_and_keys(model, described, out))
            run = RunSettings(
                out=out,
                seed=self.seed,
                save=self.save,
                dynamic=self.dynamic,
                opset=self.opset,
                metadata=self.metadata,
                stop=stop,
                record=record,
                on_step=self.on_step,
                on_epoch=self.on_epoch,
                on_stage=self.on_stage,
                models=made,
                dims=task_row_dims(model, task, self.dynamic),
            )
            model, rows = run_steps(run, self._steps(keys, own), model, task)
        extra = () if made is None else self._run_baselines(made, task, own, out)
        better = task.prefers_higher
        return Result(model=model, onnx=out / "model.onnx", rows=tuple(rows), out=out, higher_is_better=better, baselines=extra)

    def _run_baselines(
        self, made: Mapping[int, nn.Module], task: Task, own: Mapping[int, Task], out: Path
    ) -> tuple[StageReport, ...]:
        """Make the baselines, each by a run in `out/baselines`, and put them into the reports."""
        rows = []
        seed_generators_(self.seed)
        settings: dict[str, Any] = {"seed": self.seed, "dynamic": self.dynamic, "opset": self.opset, "save": self.save}
        for baseline in baselines(self.stages, made, task, own):
            name = f"{baseline.stage + 1}-{type(self.stages[baseline.stage]).__name__.lower()}"
            alone = Recipe(baseline.train, **settings, on_step=self.on_step, on_epoch=self.on_epoch)
            folder = out / "baselines" / name
            distributed.on_rank_zero(partial(clear_other_network, folder, baseline.model))
            row = alone.run(baseline.model, task, folder).rows[0]
            rows.append(replace(row, stage=f"{name}, alone"))
        trained = made if self._reports_start else {stage: model for stage, model in made.items() if stage >= 0}
        if (last := last_dense_float(trained)) is not None:
            before = f"{last + 1}-{type(self.stages[last]).__name__.lower()}" if last >= 0 else START
            key = read_json(out / before / ROW, "the row of a finished stage")["key"]
            for dtype in HALF_DTYPES:
                folder = out / "baselines" / f"{before}-{dtype}"
                measure = partial(half_precision_row, key=key, dynamic=self.dynamic, opset=self.opset)
                try:
                    row = distributed.on_rank_zero(partial(measure, made[last], dtype, task, folder))
                except CheckpointError:
                    raise  # of the disk or the folder
                except (ExportError, ModelError) as error:
                    log.warning("no baseline in %s: %s", dtype, error)
                else:
                    rows.append(replace(row, stage=f"{before}, {dtype}"))
        distributed.on_rank_zero(lambda: report_baselines(out, rows))
        return tuple(rows)

    def plan(self, model: nn.Module, task: Task, out: str | Path, *, tasks: Sequence[Task | None] = ()) -> RunPlan:
        """Which stages `run` would reuse, resume or run in that folder, and why. Nothing is written."""
        self._check_arguments(model, task, "Recipe.plan")
        own = own_tasks(self.stages, task, tasks, "Recipe.plan")
        out = folder_of_run(out)
        record, keys = self._record_and_keys(model, self._described(task, own), out)
        return plan_run(out, model, self._steps(keys, own), record)

    @property
    def _reports_start(self) -> bool:
        return self.stages[0].starts_from_trained

    def _check_arguments(self, model: nn.Module, task: Task, where: str) -> None:
        check_is_module(model, where)
        check_is_task(task, where)
        if is_quantized(model) and "float" in self.stages[0].needs:
            raise ModelError("the model is quantized already; start from the float model it came from")
        if masks_of(model) is not None and (stage := _first_that_needs_dense(self.stages)) is not None:
            raise ModelError(
                f"the model carries masks, and {type(stage).__name__} needs a dense model; put Densify before it, or leave it out"
            )

    def _described(self, task: Task, own: Mapping[int, Task]) -> Callable[..., Dependencies]:
        """What the stages depend on, but for the model and the settings of the recipe."""
        return partial(
            Dependencies,
            stages=describe_stages(self.stages),
            task=describe_task(task),
            own={i: describe_task(each) for i, each in own.items()},
        )

    def _record_and_keys(
        self, model: nn.Module, described: Callable[..., Dependencies], out: Path
    ) -> tuple[dict[str, Any], list[StageKey]]:
        """The contents of recipe.json but for the model, and the key of each stage."""
        trained = self.stages[0].starts_from_trained or shows_training(model)
        start = start_of_run(out, model, trained=trained)
        settings = {"seed": self.seed, "dynamic": describe(self.dynamic)}
        settings |= {} if self.opset is None else {"opset": self.opset}
        depends = described(model=describe_model(model, trained=trained, fixed=start.get("fixed")), settings=settings)
        record = {"format": FORMAT, "stages": depends.stage_records, "task": depends.task_records, **settings}
        record |= {"tasks": depends.own_records} if depends.own else {}
        record |= {"start": start} if start else {}
        return record | {"versions": versions()}, depends.keys()

    def _steps(self, keys: list[StageKey], own: Mapping[int, Task]) -> list[RunStep]:
        """One step per folder of the run; step 0 is the incoming model, if the first stage starts from a trained one."""
        steps = []
        if self._reports_start:  # the row that all others are compared with
            key, unknown = keys[0]
            steps.append(RunStep(name=START, key=f"{key}-start", stage=None, export=True, unknown=unknown))
        for i, (stage, (key, unknown)) in enumerate(zip(self.stages, keys, strict=True)):
            steps.append(
                RunStep(
                    name=f"{i + 1}-{type(stage).__name__.lower()}",
                    key=key,
                    stage=stage,
                    export=self.export == "each" or not steps or i == len(self.stages) - 1,
                    snapshot=self.snapshot_fractions.get(i),
                    unknown=unknown,
                    task=own.get(i),
                )
            )
        return steps
