"""Write a model as an ONNX file: dynamic batch, weights as they are stored, nothing half-written."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.checkpoint import atomic
from compresskit.errors import ExportError, SettingError
from compresskit.export.ops import translations
from compresskit.graph import batch_dims, capture
from compresskit.surgery import mode
from compresskit.task import Inputs, call

OPSETS = range(19, 24)  # 19: the first whose QuantizeLinear is the one that torch's exporter writes
LIMIT = 2**31 - 2**24  # bytes a protobuf file can hold, less room for the graph


def export_onnx(
    model: nn.Module,
    path: str | Path,
    example: Inputs,
    *,
    opset: int = 20,
    dynamic_batch: bool = True,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a model to an ONNX file with the modern exporter.

    Args:
        model: a float module, or a quantized one of this library, whose weights are stored as int8.
        path: of the file; it is replaced only once the new one is complete. Weights past 2 GB go to `<path>.data`.
        example: inputs, a tuple or a dict; they name the inputs of the file.
        opset: version of the standard operators.
        metadata: key-value pairs kept inside the file.

    Raises ModelError where the model cannot be captured, ExportError where an operator has no translation or the file
    cannot be written.
    """
    path = Path(path)
    if opset not in OPSETS:
        raise SettingError(f"export_onnx(opset=...): wanted {OPSETS.start}..{OPSETS.stop - 1}, got {opset}")
    if not path.parent.is_dir():
        raise ExportError(f"{path}: the folder {path.parent} does not exist")
    import onnx_ir as ir  # heavy, and only exporting needs it

    from compresskit.export.kernels import pad_input_channels, pool_as_convolution
    from compresskit.export.passes import optimize_

    try:
        program = to_program(model, example, opset=opset, dynamic_batch=dynamic_batch)
    except ExportError as error:
        raise ExportError(f"{path.name}: {error}") from error.__cause__
    file = program.model
    tuned = getattr(getattr(model, "target", None), "tuned", False)
    optimize_(file, [pad_input_channels, pool_as_convolution] if tuned else [])
    _name_batch(file)
    file.producer_name = "compresskit"
    file.metadata_props.update(metadata or {})
    size = sum(v.const_value.nbytes for v in file.graph.initializers.values() if v.const_value is not None)
    try:
        with atomic(path) as temporary:
            ir.save(file, temporary, external_data=f"{path.name}.data" if size > LIMIT else None)
    except OSError as error:
        raise ExportError(f"{path}: cannot be written ({error})") from error
    return path


def to_program(model: nn.Module, example: Inputs, *, opset: int = 20, dynamic_batch: bool = True) -> torch.onnx.ONNXProgram:
    """What torch's exporter makes of a model: the ONNX graph, not yet rewritten, and the program it was made from."""
    deployed = getattr(model, "deployed", None)
    with torch.no_grad(), mode(model, training=False):
        module = model if deployed is None else deployed()
        outputs = output_names(call(module, example))
        captured = capture(module, example, dynamic_batch=dynamic_batch)
    args, kwargs = ((), captured.example) if isinstance(captured.example, dict) else (captured.example, {})
    batch = torch.export.Dim.DYNAMIC if dynamic_batch else torch.export.Dim.STATIC
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter warns of its own internals
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)
            program = torch.onnx.export(
                captured.module,
                args,
                kwargs=kwargs,
                dynamo=True,
                opset_version=opset,
                input_names=list(captured.inputs),
                output_names=outputs,
                dynamic_shapes=batch_dims(captured.example, batch),
                custom_translation_table=translations(),
                verbose=False,
            )
    except Exception as error:
        raise ExportError(f"the ONNX exporter failed: {_cause(error)}") from error
    assert program is not None
    return program


def _cause(error: BaseException) -> str:
    """The innermost cause's first line: the exporter wraps what went wrong in several layers of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _name_batch(file: Any) -> None:
    """Call the symbolic first dimension `batch` at every input and output."""
    import onnx_ir as ir

    symbols = {v.shape[0] for v in file.graph.inputs if v.shape is not None and len(v.shape) and not isinstance(v.shape[0], int)}
    for value in [*file.graph.inputs, *file.graph.outputs]:
        if value.shape is not None and len(value.shape) and value.shape[0] in symbols:
            value.shape = ir.Shape(["batch", *list(value.shape)[1:]])


def output_names(output: Any) -> list[str]:
    """`output` for a single tensor, the keys of a dict, else `output_0`, `output_1`, ..."""
    if isinstance(output, Tensor):
        return ["output"]
    if isinstance(output, Mapping) and all(isinstance(v, Tensor) for v in output.values()):
        return [str(key) for key in output]
    count = sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(output))
    return [f"output_{i}" for i in range(count)]
