"""Make candidates without training, and measure their exported files; each once for a folder."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import nn

from compresskit.base.budget import keep
from compresskit.base.errors import CheckpointError, CompressError, DataError, SettingError
from compresskit.base.files import read_json, write_json
from compresskit.base.fingerprint import describe, describe_by_value, describe_task, short_hash
from compresskit.base.inputs import calibration_inputs
from compresskit.base.progress import announce
from compresskit.base.randomness import seed_generators_
from compresskit.base.stage import Stage
from compresskit.base.task import Inputs, RowDims, Task, batch_size, repeated_rows, rows_that_run
from compresskit.export.check.environment import environment
from compresskit.export.onnx import export_onnx
from compresskit.graph.capture import Dynamic
from compresskit.graph.quantized import quantized_parts
from compresskit.graph.surgery import copy_model, frozen_copy
from compresskit.measure import count_macs, evaluate, few_rows, run_once, task_row_dims
from compresskit.prune import Prune
from compresskit.prune.depth import Depth
from compresskit.prune.depth.costs import milliseconds, parameters, times_alone
from compresskit.prune.depth.find_blocks import ResidualBlock
from compresskit.prune.depth.importance import after_training, influence
from compresskit.prune.depth.merging.plan_merges import rank_runs
from compresskit.prune.depth.plan_blocks import order_blocks
from compresskit.prune.low_rank.plan_ranks import plan_ranks
from compresskit.prune.structure.repeatable import alike_rows
from compresskit.quant import quantize_static
from compresskit.quant.numerics.targets import Deployment, Target
from compresskit.recipe.dependencies import describe_model, versions
from compresskit.recipe.engine import run_stage
from compresskit.recipe.folder import LOCK
from compresskit.recipe.locks import exclusive
from compresskit.recipe.measure_stage import measure_stage
from compresskit.search.candidate import DYNAMIC_SHARE, OF_DYNAMIC, TABLE_SHARE, Candidate, Removable, Storage, share_in
from compresskit.search.figures import Figures, read_figures
from compresskit.search.latency.stopwatch import Stopwatch, start_stopwatch
from compresskit.search.proxy.beginnings import Beginnings
from compresskit.search.proxy.held_out import HeldOut
from compresskit.search.study import STEP_OF_RANK
from compresskit.search.workers import LOCKS, timing_alone
from compresskit.train.batchnorm import reestimate_batchnorm_
from compresskit.train.train import Train

log = logging.getLogger(__name__)

IDENTITY, FIGURES, ORDER, LATENCY = "search.json", "figures.json", "order.json", "latency.json"
PART, ON_PART, STATISTICS = "part.json", "figures-{}.json", "statistics-{}.json"  # of the held-out samples, and named by them
DIRECTION = "higher_is_better"  # the part of a task
FOLDER_VERSION = 12  # another where candidates of one name are made or judged in another way
CANDIDATES, DENSE = "candidates", "uncompressed"
NAME_DIGITS = 8  # of a hash of settings in the name of a file or folder
#: What the plan of named blocks says of them, which nobody reads here; by default that is measured, block by block.
BRIEFLY: dict[str, Any] = {"importance": influence, "cost": parameters, "samples": 1}
SCORED_SAMPLES = 64  # that the importance of blocks and of activations reads
LEAST_SAVED_TIME = 0.01  # of the uncompressed file's time, below which it is not worth while to merge some convolutions
COMPARED_SAMPLES = 64  # that the file of a candidate is compared with its model on first; a finalist's is on all
SKETCH_SAMPLES = 16  # that the stages of a sketch read

Read = TypeVar("Read")


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """Makes candidates of one model in one folder.

    Attributes:
        model: the trained model, in eval mode on the task's device.
        task: with all validation data. held: the same with those batches of them that candidates are judged by.
        out: folder of the search.
        samples: calibration samples of a stage.
        batch, threads, seconds: of latencies.
        saves: what blocks have to save, "latency" or "bytes". trains: whether candidates are to be trained. Both order blocks.
        seed: of the stages.
        target: runtime of quantized files.
        dynamic: dimensions of the inputs that may vary in the files.
        beginnings: what the first stages of candidates made, in this process.
    """

    model: nn.Module
    task: Task
    held: Task
    out: Path
    samples: int
    batch: int
    threads: int
    seconds: float
    seed: int
    target: Target
    dynamic: Dynamic = (0,)
    saves: Literal["latency", "bytes"] = "latency"
    trains: bool = False
    beginnings: Beginnings = field(init=False, default_factory=Beginnings, repr=False, compare=False)

    def prepare(self) -> None:
        """Claim the folder. Raises CheckpointError where it belongs to another model, task, version or setting."""
        described = {
            "model": describe_model(self.model, trained=True).record,
            "task": {name: part.record for name, part in describe_task(self.task).items() if name != DIRECTION},
            "versions": versions(),
            "target": describe(self.target),
        }
        settings: dict[str, Any] = {
            "version of its folder": FOLDER_VERSION,
            "calibration samples": self.samples,
            "held-out samples": sum(batch_size(self.task.inputs(batch)) for batch in self.held.batches("val")),
            "batch": self.batch,
            "threads": self.threads,
            "seed": self.seed,
            "dynamic": json.dumps(describe(self.dynamic)),
            DIRECTION: self.task.prefers_higher,  # by its value, for the message; the signs of all drops come from it
        }
        mine = {name: short_hash(part) for name, part in described.items()} | settings | {"class": type(self.model).__name__}
        path = self.out / IDENTITY
        if not path.exists() and any(entry.name != LOCKS for entry in self.out.iterdir()):
            raise CheckpointError(f"{self.out}: not empty, and not the folder of a search; choose another out=")
        if path.exists():
            other = read_json(path, "whose search it is")
            changed = [name for name in described if other.get(name) != mine[name]]
            changed += [
                f"{name} (there: {other.get(name)}, here: {value})"
                for name, value in settings.items()
                if other.get(name) != value
            ]
            if changed:
                raise CheckpointError(
                    f"{self.out}: belongs to the search of another {' and '.join(changed)} for {other.get('class')}, compared"
                    f" by value; this one is for {mine['class']}; choose another out=, or delete the folder"
                )
        else:
            write_json(path, mine)

    def dense(self) -> Figures:
        """The figures of the uncompressed model but for its latency, which `stopwatch` measures.

        They are on the samples that this process holds out: those of a loader with an order of its own may be others each time.
        """
        folder = self.out / DENSE
        if not all((folder / name).exists() for name in (FIGURES, PART, "model.onnx")):
            figures = self._export(copy_model(self.model), folder, None, settings=[])
            write_json(folder / PART, {"samples": self.part})
            write_json(folder / FIGURES, asdict(figures))
            return figures
        if read_json(folder / PART, "which samples are held out")["samples"] == self.part:
            return read_figures(folder / FIGURES)
        log.warning(
            "compress: Task(val=...) gives other samples than when %s was begun, so that what is made now is compared with the"
            " uncompressed model on other held-out samples than what was made before; give the data in a fixed order",
            self.out,
        )
        path = folder / ON_PART.format(self.part)
        if not path.exists():
            with tempfile.TemporaryDirectory() as aside:
                write_json(path, asdict(self._export(copy_model(self.model), Path(aside), None, settings=[])))
        return read_figures(path)

    @cached_property
    def part(self) -> str:
        """A hash of the held-out samples."""
        return short_hash(describe_by_value(self.held.val, data=True).record)

    def metric_with_new_statistics(self) -> float | None:
        """The uncompressed model's metric with BatchNorm statistics of calibration data; None without any. Once for a folder."""
        path = self.out / DENSE / STATISTICS.format(self.part)
        if not path.exists():
            model, metric = copy_model(self.model), None
            with suppress(DataError):  # batches of one row have no statistics
                if reestimate_batchnorm_(model, calibration_inputs(self.task, self.samples, "re-estimate BatchNorm")):
                    metric = evaluate(model, self.held)
            write_json(path, {"metric": metric})
        found: float | None = read_json(path, "the metric with new BatchNorm statistics")["metric"]
        return found

    def stopwatch(self, *, strict: bool) -> Stopwatch:
        """Measures latencies beside that of the uncompressed file, which the first process of a search measures for all others.

        strict: whether a noisy machine is an error, and a processor of another kind than that of the other processes.
        """
        file, path = self.out / DENSE / "model.onnx", self.out / DENSE / LATENCY
        with timing_alone():
            watch = start_stopwatch(file, self.timed_inputs(), threads=self.threads, seconds=self.seconds, strict=strict)
        processor = str(environment()["processor"])
        if not path.exists():
            write_json(path, {"milliseconds": watch.milliseconds, "processor": processor})
            return watch
        first = read_json(path, "the latency of the uncompressed file")
        if strict and first["processor"] != processor:
            raise SettingError(
                f"at_most(latency=...): latencies in {self.out} are of the processor {first['processor']}, this machine has"
                f" {processor}; use machines of one kind, or choose another out="
            )
        return replace(watch, milliseconds=float(first["milliseconds"]))

    def timed_inputs(self) -> Inputs:
        """What files are timed on: as many samples as the budget says, the first batch where the model does not run on those."""
        example = self.held.whole if isinstance(self.held, HeldOut) else self.task.example()
        return rows_that_run(partial(run_once, self.model), repeated_rows(example, self.batch, self.dims), example)

    def macs(self, model: nn.Module) -> int:
        """The multiply-accumulates of a model for one sample, the same one for all that is compared."""
        return count_macs(model, alike_rows(model, self.held.example(), 2, self.dims), dims=self.dims)  # as `measure_stage` does

    @cached_property
    def dims(self) -> RowDims | None:
        """Where the rows of each input are, where its dimensions say it."""
        return task_row_dims(self.model, self.task, self.dynamic)

    @cached_property
    def gains_by_dynamic(self) -> bool:
        """Whether much of the model is in layers that dynamic quantization rounds: linear, and recurrent and tables besides."""
        return share_in(self.model, *OF_DYNAMIC) >= DYNAMIC_SHARE

    @cached_property
    def has_large_tables(self) -> bool:
        """Whether much of the model is in embedding tables, and the target's runtime has operators that look up few bits."""
        return self.target.runtime == "onnxruntime" and share_in(self.model, nn.Embedding, nn.EmbeddingBag) >= TABLE_SHARE

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The precisions that candidates have."""
        dynamic: tuple[Storage, ...] = ("dynamic",) if self.gains_by_dynamic else ()
        tables: tuple[Storage, ...] = ("weights4",) if self.has_large_tables else ()
        return ("float", "int8", "int4", *dynamic, *tables)

    def removable(self, milliseconds: float) -> Removable:
        """The residual blocks that can go and the convolutions that can become one, what is worth least for what it saves first.

        What candidates lose without several of them is measured on them.
        milliseconds: of the uncompressed file, of which a merge has to save some.
        """
        path = self.out / ORDER
        record = read_json(path, "the order in which blocks and activations go") if path.exists() else {"blocks": {}}
        if "runs" not in record:
            record["runs"] = self._ranked_runs(LEAST_SAVED_TIME * milliseconds)
        if "factors" not in record:
            record["factors"] = self._can_factor()
            write_json(path, record)
        if self.ranking not in record["blocks"]:
            announce(log, "compress: ordering residual blocks")
            record["blocks"][self.ranking] = self._ranked_blocks()
            write_json(path, record)
        return Removable(
            blocks=tuple(record["blocks"][self.ranking]), runs=tuple(record["runs"]), factors=bool(record["factors"])
        )

    @property
    def ranking(self) -> str:
        """What orders blocks, in the names of what depends on it: a folder may have candidates of several budgets."""
        return f"{self.saves}{'-trained' if self.trains else ''}"

    def folder(self, candidate: Candidate) -> Path:
        """Where a candidate is made."""
        return self.out / CANDIDATES / self.unique_name(candidate)

    def unique_name(self, candidate: Candidate) -> str:
        """The name of a candidate, with all that it is made by: the order of blocks that go, and the placement for a training."""
        if candidate.blocks:
            return f"{candidate.name}-by-{self.ranking}"
        return f"{candidate.name}-trained" if self.trains and candidate.effort != "fast" else candidate.name

    def measured(self) -> dict[Candidate, Figures]:
        """The candidates that were measured in the folder, for other budgets, too, as they would be made now; by name."""
        found = {}
        for path in sorted((self.out / CANDIDATES).glob(f"*/{FIGURES}")):
            candidate = Candidate.named(path.parent.name)
            if candidate is None or self.unique_name(candidate) != path.parent.name:
                continue
            if "failure" not in read_json(path, "the figures of a candidate"):
                found[candidate] = read_figures(path)
        return found

    def _ranked_runs(self, least: float) -> tuple[str, ...]:
        announce(log, "compress: measuring which convolutions are faster as one")  # minutes in a large network
        try:
            return rank_runs(self.model, self.task, samples=SCORED_SAMPLES, least=least)
        except CheckpointError:
            raise  # of the disk
        except CompressError as error:
            log.info("compress: no convolutions are merged: %s", error)
            return ()

    def _can_factor(self) -> bool:
        """Whether low rank saves as much as candidates ask for at least; recurrent layers, for example, stay whole."""
        try:
            plan_ranks(self.model, few_rows(self.model, self.task.example(), 2), keep(macs=1 - STEP_OF_RANK))
        except CompressError:
            return False
        return True

    def _ranked_blocks(self) -> tuple[str, ...]:
        try:
            return order_blocks(
                self.model,
                self.task.example(),
                importance=after_training,
                cost=parameters if self.saves == "bytes" else self._milliseconds,
                task=self.task,
                samples=SCORED_SAMPLES,
            )
        except CheckpointError:
            raise  # of the disk
        except CompressError as error:
            log.warning("compress: no residual blocks are removed: %s", error)
            return ()

    def _milliseconds(self, model: nn.Module, example: Inputs, blocks: Mapping[str, ResidualBlock]) -> dict[str, float]:
        """Of blocks in integers, or in float where they cannot be measured so."""
        form = partial(quantize_static, target=self.target)
        times = times_alone(model, example, blocks, form, instead="their time in float") if self.target.runs_here else None
        return milliseconds(model, example, blocks) if times is None else times

    def make(self, candidate: Candidate, order: Removable, dense: Figures, stopwatch: Stopwatch) -> Figures | str:
        """The figures of a candidate without training, or why it cannot be made; from its folder where it was made before."""
        folder = self.folder(candidate)
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / LOCK):  # another process may make it now
            if (folder / FIGURES).exists():
                record = read_json(folder / FIGURES, "the figures of a candidate")
                return str(record["failure"]) if "failure" in record else read_figures(folder / FIGURES)
            try:
                figures = self._measured(candidate, order, folder, dense, stopwatch)
            except CheckpointError:
                raise  # of the disk or the folder, not of the candidate
            except CompressError as error:
                write_json(folder / FIGURES, {"failure": str(error)})
                return str(error)
            write_json(folder / FIGURES, asdict(figures))
            return figures

    def _measured(self, candidate: Candidate, order: Removable, folder: Path, dense: Figures, stopwatch: Stopwatch) -> Figures:
        begin = time.perf_counter()
        model, stages = self.compressed(candidate, order, self.samples)
        figures = self._export(model, folder, dense, settings=describe(stages[-1]) if stages else [])  # as in a run's file
        milliseconds_now = stopwatch.measure(folder / "model.onnx")
        return replace(figures, latency=milliseconds_now, seconds=time.perf_counter() - begin)

    def compressed(
        self, candidate: Candidate, order: Removable, samples: int, train: Train | None = None
    ) -> tuple[nn.Module, tuple[Stage, ...]]:
        """The model of a candidate, and the stages that made it.

        train: of its stages, all in all, which looks at the held-out data if at any; None trains nothing. What is to be trained
            later is placed as it will be then, and gets no other effort before.
        """
        stages = self._brief_stages(candidate, order, samples, train)
        return self._run(stages, candidate, begun=self.beginnings.of(stages)), stages

    def sketched(self, candidate: Candidate, order: Removable) -> nn.Module:
        """A model with the candidate's layers, whose values come from a few samples. Raises the errors of its stages."""
        whole = self._brief_stages(candidate, order, self.samples)
        stages = tuple(
            replace(stage, reconstruct=False) if isinstance(stage, Prune | Depth) else stage  # which changes values alone
            for stage in self._brief_stages(candidate, order, min(self.samples, SKETCH_SAMPLES))
        )
        begun = max(self.beginnings.of(whole), self.beginnings.of(stages), key=lambda found: 0 if found is None else found[1])
        return self._run(stages, candidate, begun)

    def _brief_stages(
        self, candidate: Candidate, order: Removable, samples: int, train: Train | None = None
    ) -> tuple[Stage, ...]:
        """The stages of a candidate, whose plans are read by nobody."""
        stages = self.stages(candidate, order, samples=samples, train=train, to_train=self.trains)
        return tuple(replace(stage, **BRIEFLY) if isinstance(stage, Depth) else stage for stage in stages)

    def _run(self, stages: tuple[Stage, ...], candidate: Candidate, begun: tuple[nn.Module, int] | None) -> nn.Module:
        """The model that the stages of a candidate make. begun: what the first ones made, and how many those are."""
        model, done = begun or (copy_model(self.model), 0)
        task = with_reference(self.held, self.model)
        with timing_alone() if candidate.effort != "fast" else nullcontext():  # it may time placements
            for i, stage in enumerate(stages[done:], done):
                seeded = (self.task.train, self.task.val, self.task.calibration)
                seed_generators_(self.seed + i + 1, *seeded)  # as a run, whose step 0 is the incoming model
                model = run_stage(stage, model, task)
                self.beginnings.keep(stages[: i + 1], model)
        return model

    def stages(
        self,
        candidate: Candidate,
        order: Removable,
        *,
        samples: int | None = None,
        train: Train | None = None,
        to_train: bool = False,
    ) -> tuple[Stage, ...]:
        """The stages of a candidate, for the target, threads and batch of the search.

        samples: calibration samples of a stage; None for those of the search. train, to_train: see `Candidate.stages`.
        """
        return candidate.stages(
            order=order,
            samples=samples or self.samples,
            train=train,
            to_train=to_train,
            target=self.target,
            deployment=Deployment(threads=self.threads, batch=self.batch),
            depthwise=any(isinstance(m, nn.Conv2d) and m.groups == m.in_channels > 1 for m in self.model.modules()),
            dynamic=self.dynamic,
        )

    def sketch(self, candidate: Candidate, order: Removable, read: Callable[[Path], Read]) -> Read:
        """What `read` says of a file with the candidate's layers, as `sketched` makes them; it is not checked.

        Raises the errors of its stages.
        """
        model = self.sketched(candidate, order)
        with tempfile.TemporaryDirectory() as folder:
            dynamic = None if quantized_parts(model) else self.dynamic
            return read(export_onnx(model.eval(), Path(folder) / "model.onnx", self.task.example(), dynamic=dynamic))

    def _export(self, model: nn.Module, folder: Path, dense: Figures | None, settings: Any) -> Figures:
        """Write, verify and measure a file; all but its latency, which is 0."""
        begin = time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        report = measure_stage(
            model.eval(),
            self.held,
            folder,
            settings=settings,
            seconds=0,
            export=True,
            dynamic=self.dynamic,
            compared=COMPARED_SAMPLES,
            dims=self.dims,
        )
        assert report.bytes is not None
        drop = 0.0 if dense is None else (dense.metric - report.metric) * (1 if self.task.prefers_higher else -1)
        spent = time.perf_counter() - begin
        return Figures(metric=report.metric, drop=drop, latency=0.0, bytes=report.bytes, macs=report.macs, seconds=spent)


def with_reference(task: Task, model: nn.Module) -> Task:
    """The task with the model to imitate, as a Recipe sets it."""
    return task if task.reference is not None else replace(task, reference=frozen_copy(model).to(task.device))
