"""Export a stage's model, verify the file and measure the result: one `StageReport`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ExportError
from compresskit.base.files import FORMAT, write_json
from compresskit.base.inputs import some_batches
from compresskit.base.task import Inputs, RowDims, Task, batch_size, call, first_rows, rows_that_run, to_device
from compresskit.export.check.verify import Verification, depends_on_threads, verify_onnx
from compresskit.export.files import annotate, file_bytes, read_proto
from compresskit.export.onnx import Opset, export_onnx
from compresskit.export.rewrite.sparse import compressed_bytes
from compresskit.graph.capture import Dynamic
from compresskit.graph.masks import masks_of
from compresskit.graph.quantized import quantized_parts
from compresskit.graph.surgery import mode
from compresskit.measure import (
    count_macs,
    count_nonzero,
    count_parameters,
    few_rows,
    numpy_inputs,
    run_files,
    run_session,
    session,
)
from compresskit.prune.structure.repeatable import alike_rows, timed_rows
from compresskit.recipe.details import DETAILS, stage_details
from compresskit.recipe.outcomes import Outcomes, OutcomesOf, measure_outcomes
from compresskit.recipe.report import StageReport

log = logging.getLogger(__name__)

#: Entries of an ONNX file's metadata that a run adds.
RUN_METADATA = ("stage", "metric", "verification")


def measure_stage(
    model: nn.Module,
    task: Task,
    folder: Path,
    *,
    settings: Any,
    seconds: float,
    export: bool,
    dynamic: Dynamic = (0,),
    opset: Opset | None = None,
    compared: int | None = None,
    dims: RowDims | None = None,
) -> StageReport:
    """Measure a stage's model; with `export`, write its ONNX file first, verify it, and take the metric from it.

    Args:
        folder: of the stage; `model.onnx`, `verify.json` and `details.json` are written into it, the last where all is compared.
        settings: of the stage, JSON-ready; they are written into the ONNX file, with the metric and the verification.
        seconds: how long the stage took.
        export: whether to write an ONNX file.
        dynamic: dimensions of the inputs that may vary in the file of a float model; a quantized one has its own.
        opset: of the file, see `export_onnx`.
        compared: validation samples on which the file is compared with the model, and on all where it disagrees on these; None
            compares on all at once. The metric is of all samples in any case.
        dims: where the rows of each input are, where `dynamic` says it; see `task_row_dims`.

    Raises ExportError where the file does not agree with the model; it is kept as `model.rejected.onnx`.
    """
    path = folder / "model.onnx"
    verification: Verification | None = None
    if export:
        export_onnx(model, path, task.example(), opset=opset, dynamic=None if quantized_parts(model) else dynamic)
        verification, outcomes = _verify(path, model, task, compared, dims)
        write_json(folder / "verify.json", {"format": FORMAT, **verification.to_json()})
        if not verification.passed:
            path.replace(folder / "model.rejected.onnx")
            raise ExportError(f"{folder / 'model.rejected.onnx'}: {verification}")
    else:
        outcomes = measure_outcomes(model, task)
    metric = outcomes.metric
    if compared is None:
        write_json(folder / DETAILS, {"format": FORMAT, **stage_details(model, task, outcomes, dims)})
    if verification is not None:
        stage, found = {"name": folder.name, "settings": settings}, verification.to_json()
        annotate(path, **dict(zip(RUN_METADATA, (stage, metric, found), strict=True)))
    masks = masks_of(model)
    return StageReport(
        stage=folder.name,
        metric=metric,
        parameters=count_parameters(model),
        nonzero=count_nonzero(model),
        macs=count_macs(model, alike_rows(model, task.example(), 2, dims), dims=dims),
        seconds=round(seconds, 2),
        bytes=file_bytes(path) if export else None,
        executed=export,
        verified=None if verification is None else verification.passed,
        removed=None if masks is None else masks.removed,
        masked=None if masks is None else masks.total,
        zipped=compressed_bytes(path)["zip"] if export and masks is not None else None,
    )


def timed_sample(files: Sequence[Path], task: Task, dims: RowDims | None) -> Inputs:
    """What files are timed on: the first sample of a task, and its whole example where one of them takes no less.

    So where the rows are no samples for `Task.reference`, see `timed_rows`.

    dims: where the rows of each input are, where that is known.
    """
    example = task.example()
    sample, why = rows_that_run(partial(run_files, files), first_rows(example, 1, dims), example), "the files take no single one"
    if isinstance(model := task.reference, nn.Module) and sample is not example:
        there = to_device(example, next((p.device for p in model.parameters()), "cpu"))
        if timed_rows(model, there, dims) is there:
            sample, why = example, "a single one is another workload"
    if (rows := batch_size(sample, dims)) > 1:
        log.info("latencies are of the first validation batch, of %d rows: %s", rows, why)
    return sample


def _verify(
    path: Path, model: nn.Module, task: Task, compared: int | None, dims: RowDims | None
) -> tuple[Verification, Outcomes]:
    """Whether a file agrees with its model, and the outcomes of the file for all validation data; see `measure_stage`.

    They are of one thread where each thread rounds its part of a batch in its own way: they would else be others elsewhere.
    """
    own_way = depends_on_threads(read_proto(path))
    if compared is not None:
        batches = some_batches(task, "val", compared, "verify")
        few = [few_rows(model, task.inputs(batch), compared, dims) for batch in batches]
        if (verification := verify_onnx(path, model, few)).passed:
            return verification, _run_on_all(path, model, task, dims, threads=1 if own_way else torch.get_num_threads())
    data = _ValidationData(model, task, dims)
    verification = verify_onnx(path, model, data, executed=data.take)
    if own_way and verification.passed and torch.get_num_threads() > 1:
        return verification, _run_on_all(path, model, task, dims, threads=1)
    return verification, data.found.outcomes()


def _run_on_all(path: Path, model: nn.Module, task: Task, dims: RowDims | None, *, threads: int) -> Outcomes:
    """The outcomes of a file for all validation data, in ONNX Runtime with so many threads."""
    data, run = _ValidationData(model, task, dims), session(path, threads=threads)
    for inputs in data:
        data.take([np.atleast_1d(v) for v in run_session(run, numpy_inputs(run, inputs, path), path)])
    return data.found.outcomes()


class _ValidationData:
    """The inputs of all validation batches, a sized iterable; takes what a file gives for each, and has its outcomes then.

    One pass over the data is the proof of the file and the measurement of it.
    """

    def __init__(self, model: nn.Module, task: Task, dims: RowDims | None) -> None:
        self.task, self.found = task, OutcomesOf(task)
        self.target: Any = None  # of the batch whose inputs were given last
        with torch.no_grad(), mode(model, training=False):
            self.leaves, self.spec = pytree.tree_flatten(call(model, few_rows(model, task.example(), 2, dims)))

    def __len__(self) -> int:
        return self.task.length("val")

    def __iter__(self) -> Iterator[Inputs]:
        for batch in self.task.batches("val"):
            inputs, self.target = self.task.split(batch)
            yield inputs

    def take(self, arrays: list[np.ndarray]) -> None:
        """Count the outputs of the file, in the form in which the model returns them: a tensor, a tuple, a dict."""
        outputs = iter(arrays)
        filled = [_like(leaf, next(outputs)) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        self.found.add(pytree.tree_unflatten(filled, self.spec), self.target)


def _like(leaf: Tensor, output: np.ndarray) -> Tensor:
    """An output as a tensor; a single number, which comparisons take as an array of one, as a number."""
    return torch.from_numpy(output if leaf.ndim else output.reshape(()))
