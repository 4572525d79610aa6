"""What a report shows of a stage besides its row: how sure its metric is, the layers, their noise and their time."""

from __future__ import annotations

import itertools
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compresskit.base.errors import CompressError
from compresskit.base.task import Inputs, RowDims, Task
from compresskit.export.check.profile.layers import profile_layers
from compresskit.measure import few_rows
from compresskit.quant import Quantized, diagnose
from compresskit.recipe.outcomes import Outcomes

log = logging.getLogger(__name__)

DETAILS = "details.json"  # in the folder of a stage
PROFILED_RUNS = 200  # of a file at most: reading the profiler's record of more takes longer than the runs
DIAGNOSED_SAMPLES = 128  # of the validation data's first batch at most: noise by layer is for looking at


def stage_details(model: nn.Module, task: Task, outcomes: Outcomes, dims: RowDims | None = None) -> dict[str, Any]:
    """What details.json holds, JSON-ready: how sure the metric is, the layers, and noise.

    A layer is a parameter of two dimensions or more: its name, shape, and how many of its values are 0. `remedies` are lines on
    what `effort=` or `Repair` tried against rounding errors. dims: where the rows of each input are, where that is known.
    """
    layers = [
        {"name": name.removesuffix(".weight"), "shape": list(value.shape), "zeros": int((value == 0).sum())}
        for name, value in model.named_parameters()
        if value.ndim >= 2
    ]
    remedies = [str(remedy) for remedy in model.origin.remedies] if isinstance(model, Quantized) else []
    return {**outcomes.to_json(), "layers": layers, "noise": _noise(model, task, dims), "remedies": remedies}


def layer_times(path: Path, inputs: Inputs, *, seconds: float = 0.3) -> dict[str, Any] | None:
    """Where the latency of a file goes, JSON-ready; None where ONNX Runtime's profiler does not say.

    `milliseconds` is the latency, `outside` the part of it that no layer accounts for. Of each layer of `layers`: `milliseconds`;
    `conversions`, those of them for changing how values are stored; `in_integers`: "yes", "partly", "no", "-".
    """
    try:
        found = profile_layers(path, inputs, seconds=seconds, runs=PROFILED_RUNS)
    except CompressError as error:
        log.info("milliseconds by layer could not be measured, and are not in the report: %s", error)
        return None
    layers = [
        {
            "name": layer.name,
            "milliseconds": round(layer.this.milliseconds, 5),
            "conversions": round(layer.this.conversions, 5),
            "in_integers": layer.this.in_integers,
        }
        for layer in found.layers
        if layer.this is not None
    ]
    return {"milliseconds": round(found.milliseconds, 5), "outside": round(found.outside, 5), "layers": layers}


def _noise(model: nn.Module, task: Task, dims: RowDims | None) -> dict[str, Any] | None:
    if not isinstance(model, Quantized):
        return None
    first = [task.split(batch)[0] for batch in itertools.islice(task.batches("val"), 1)]
    batches = [few_rows(model, inputs, DIAGNOSED_SAMPLES, dims) for inputs in first]
    try:
        with torch.no_grad():
            found = diagnose(model, batches)
    except CompressError as error:
        log.info("noise by layer could not be measured, and is not in the report: %s", error)
        return None
    rows = [
        {"layer": row.layer or row.name, "runs": row.runs, "sqnr": row.sqnr if math.isfinite(row.sqnr) else None}
        for row in found.rows
        if row.macs
    ]
    return {"sqnr": found.sqnr if math.isfinite(found.sqnr) else None, "samples": found.samples, "layers": rows}
