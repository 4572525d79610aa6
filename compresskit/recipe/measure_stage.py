"""Export a stage's model, verify the file and measure the result: one `StageReport`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ExportError
from compresskit.base.files import FORMAT, write_json
from compresskit.base.inputs import ValidationInputs
from compresskit.base.task import Inputs, Task, call, first_rows
from compresskit.export.check.verify import Verification, verify_onnx
from compresskit.export.files import annotate, file_bytes
from compresskit.export.onnx import Opset, export_onnx
from compresskit.export.rewrite.sparse import compressed_bytes
from compresskit.graph.capture import Dynamic
from compresskit.graph.masks import masks_of
from compresskit.graph.quantized import quantized_parts
from compresskit.measure import count_macs, count_nonzero, count_parameters, numpy_inputs, session
from compresskit.recipe.details import DETAILS, stage_details
from compresskit.recipe.outcomes import measure_outcomes
from compresskit.recipe.report import StageReport

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
) -> StageReport:
    """Measure a stage's model; with `export`, write its ONNX file first, verify it, and take the metric from it.

    Args:
        folder: of the stage; `model.onnx`, `verify.json` and `details.json` are written into it.
        settings: of the stage, JSON-ready; they are written into the ONNX file, with the metric and the verification.
        seconds: how long the stage took.
        export: whether to write an ONNX file.
        dynamic: dimensions of the inputs that may vary in the file of a float model; a quantized one has its own.
        opset: of the file, see `export_onnx`.

    Raises ExportError where the file does not agree with the model; it is kept as `model.rejected.onnx`.
    """
    path = folder / "model.onnx"
    verification: Verification | None = None
    run: Callable[..., Any] = model
    if export:
        export_onnx(model, path, task.example(), opset=opset, dynamic=None if quantized_parts(model) else dynamic)
        verification = verify_onnx(path, model, ValidationInputs(task))
        write_json(folder / "verify.json", {"format": FORMAT, **verification.to_json()})
        if not verification.passed:
            path.replace(folder / "model.rejected.onnx")
            raise ExportError(f"{folder / 'model.rejected.onnx'}: {verification}")
        run = _like_model(session(path, threads=torch.get_num_threads()), model, task.example())
    outcomes = measure_outcomes(run, task)
    metric = outcomes.metric
    write_json(folder / DETAILS, {"format": FORMAT, **stage_details(model, task, outcomes)})
    if verification is not None:
        stage, found = {"name": folder.name, "settings": settings}, verification.to_json()
        annotate(path, **dict(zip(RUN_METADATA, (stage, metric, found), strict=True)))
    masks = masks_of(model)
    return StageReport(
        stage=folder.name,
        metric=metric,
        parameters=count_parameters(model),
        nonzero=count_nonzero(model),
        macs=count_macs(model, first_rows(task.example(), 2)),
        seconds=round(seconds, 2),
        bytes=file_bytes(path) if export else None,
        executed=export,
        verified=None if verification is None else verification.passed,
        removed=None if masks is None else masks.removed,
        masked=None if masks is None else masks.total,
        zipped=compressed_bytes(path)["zip"] if export and masks is not None else None,
    )


def _like_model(onnx_session: Any, model: nn.Module, example: Inputs) -> Callable[..., Any]:
    """A function of the model's inputs that runs the session and returns what the model returns: a tensor, a tuple, a dict."""
    with torch.no_grad():
        leaves, spec = pytree.tree_flatten(call(model, first_rows(example, 2)))

    def run(*args: Any, **kwargs: Any) -> Any:
        outputs = iter(onnx_session.run(None, numpy_inputs(onnx_session, kwargs or args)))
        filled = [torch.from_numpy(np.asarray(next(outputs))) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(filled, spec)

    return run
