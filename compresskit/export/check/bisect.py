"""Find the first layer whose value in an ONNX file differs from the model's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs
from compresskit.export.files import read_proto
from compresskit.export.onnx import to_program
from compresskit.export.rewrite.dtypes import widen_to_fp32
from compresskit.graph.capture import module_path
from compresskit.graph.interpreter import run_graph
from compresskit.graph.normalize import Node
from compresskit.graph.tracing import no_autocast
from compresskit.measure import numpy_inputs, session

LARGEST_MEAN_ERROR = 0.02  # mean error, as a fraction of a value's range; rounding ties stay far below it


def first_layer_that_differs(path: str | Path, model: nn.Module, inputs: Inputs) -> str | None:
    """Name the first operator, in the order of execution, whose value in the file differs from the model's.

    Values are matched by the names that torch's exporter gives to both.

    Returns:
        A line that names the operator and the user's module, or None where all values that can be matched agree (mean error
        within 2 % of the range).
    """
    import onnx  # heavy, and only looking for an error needs it

    program = to_program(model, inputs)
    assert program.exported_program is not None
    module = program.exported_program.module()
    inputs = widen_to_fp32(model, inputs)[1]
    values: dict[str, np.ndarray] = {}

    def keep(node: Node, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point() and node.op == "call_function":
            values[node.name] = value.detach().cpu().numpy()

    with torch.no_grad(), no_autocast():
        run_graph(module, pytree.tree_leaves(inputs), keep)
    file = read_proto(path)
    here = {output for node in file.graph.node for output in node.output}
    names = [name for name in values if name in here]
    outside = {output.name for output in file.graph.output}
    file.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outside)
    with tempfile.NamedTemporaryFile(dir=Path(path).parent, prefix=".probe.", suffix=".onnx") as beside:
        beside.write(file.SerializeToString())  # beside the file, where its external data is
        beside.flush()
        probe = session(beside.name, optimize=False)
    got = dict(zip([o.name for o in probe.get_outputs()], probe.run(None, numpy_inputs(probe, inputs)), strict=True))
    nodes = {node.name: node for node in module.graph.nodes}
    for name in names:
        wanted, found = values[name], got[name]
        if found.ndim == wanted.ndim > 1 and found.shape[1] > wanted.shape[1]:
            found = found[:, : wanted.shape[1]]  # the file may have more channels, see `rewrite.onnxruntime.channel_padding`
        if wanted.shape != found.shape or not _share_of_range(wanted, found) <= LARGEST_MEAN_ERROR:
            return f"the first layer that differs is {module_path(nodes[name]) or 'the model itself'} (value {name!r})"
    return None


def _share_of_range(wanted: np.ndarray, found: np.ndarray) -> float:
    """Mean error as a fraction of the range; where both are nan, or the same infinity, there is none."""
    alike = (wanted == found) | (np.isnan(wanted) & np.isnan(found))
    finite = wanted[np.isfinite(wanted)]
    span = float(np.ptp(finite)) if finite.size else 0.0
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        return float(np.where(alike, 0.0, np.abs(wanted - found)).mean()) / (span or 1.0)
