"""A network in half precision, for inference: what fp16 and bf16 files reach is a baseline of a run."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compresskit.base.files import FORMAT, read_json, write_json
from compresskit.base.task import Task
from compresskit.export.onnx import Opset
from compresskit.export.rewrite.dtypes import least_precise_dtype
from compresskit.graph.capture import Dynamic
from compresskit.graph.surgery import copy_model
from compresskit.measure import latency, task_row_dims
from compresskit.mixed.formats.casts import cast_floating
from compresskit.recipe.folder import ROW
from compresskit.recipe.measure_stage import measure_stage, timed_sample
from compresskit.recipe.report import StageReport, read_stage_report

#: Names of the dtypes, as rows call them.
HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class HalfPrecision(nn.Module):
    """A network in half precision that takes and returns fp32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = copy_model(model).to(dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dtype = least_precise_dtype(self.model)  # a bf16 network is widened where its file is written
        args, kwargs = cast_floating((args, kwargs), dtype)
        return cast_floating(self.model(*args, **kwargs), torch.float32)


def half_precision_row(
    model: nn.Module, dtype: str, task: Task, folder: Path, *, key: str, dynamic: Dynamic, opset: Opset | None
) -> StageReport:
    """Export a float network in fp16 or bf16, verify and measure it; what was measured with the same key is read.

    Args:
        folder: of the file and what is measured of it; made where it is missing.
        key: of the stage that made the network.
        dynamic, opset: as in `export_onnx`.

    Raises ModelError or ExportError where the network or the runtime does not take that dtype.
    """
    path = folder / ROW
    if path.exists() and (record := read_json(path, "the row of a baseline")).get("key") == key:
        return read_stage_report(record["row"], path)
    folder.mkdir(parents=True, exist_ok=True)
    half = HalfPrecision(model, HALF_DTYPES[dtype]).eval()
    settings: dict[str, Any] = {"dtype": dtype}
    dims = task_row_dims(model, task, dynamic)
    row = measure_stage(half, task, folder, settings=settings, seconds=0.0, export=True, dynamic=dynamic, opset=opset, dims=dims)
    files = [folder / "model.onnx"]
    row = replace(row, latency_ms=latency(files, timed_sample(files, replace(task, reference=task.reference or model), dims))[0])
    write_json(path, {"format": FORMAT, "key": key, "row": asdict(row)})
    return row
