"""What one convolution in the place of a run saves: `(model, example, runs) -> {name: saved}`, negative where it costs more.

saved_milliseconds   in ONNX Runtime on this machine, one sample on one thread: the default
saved_macs           multiply-accumulates of one sample
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs
from compresskit.export import export_onnx
from compresskit.graph.replacements import Unmerged
from compresskit.graph.surgery import copy_model, frozen_copy
from compresskit.measure import count_macs, latency
from compresskit.prune.depth.costs import received_by
from compresskit.prune.depth.merging.merge_runs import ConvolutionRun, gather_, merge_, merged_of

log = logging.getLogger(__name__)

SECONDS_EACH = 0.4  # for each of the two files of a run

MergeCost = Callable[[nn.Module, Inputs, Mapping[str, ConvolutionRun]], dict[str, float]]


def saved_macs(model: nn.Module, example: Inputs, runs: Mapping[str, ConvolutionRun]) -> dict[str, float]:
    """Multiply-accumulates of one sample that the model does not do with one convolution in the place of each run."""
    whole = count_macs(model, example)
    return {name: float(whole - count_macs(merge_(gather_(frozen_copy(model), [run])), example)) for name, run in runs.items()}


def saved_milliseconds(model: nn.Module, example: Inputs, runs: Mapping[str, ConvolutionRun]) -> dict[str, float]:
    """Milliseconds that one convolution saves: the layers of each run and the one are exported alone and run in turn.

    Runs of the same layers and inputs are measured once. Where one cannot be exported, all count their MACs instead, and a
    warning says so.
    """
    model = frozen_copy(model)
    received = received_by(model, example, {run.layers[0] for run in runs.values()})
    shapes = {path: tuple(args[0].shape) for path, (args, _) in received.items()}
    alike: dict[str, list[str]] = {}
    for name, run in runs.items():
        shrunk = [path in run.shrunk for path in run.layers]
        alike.setdefault(f"{_apart(model, run)} {shapes[run.layers[0]]} {shrunk}", []).append(name)
    try:
        bar = progress_bar(alike.values(), desc="time convolutions", unit="run")
        times = [_saved(model, runs[names[0]], shapes[runs[names[0]].layers[0]]) for names in bar]
    except Exception as error:  # whatever the exporter or the runtime raises
        log.warning("runs are compared by MACs: layers of %s cannot be measured alone (%s)", type(model).__name__, error)
        return saved_macs(model, example, runs)
    saved = {name: time for names, time in zip(alike.values(), times, strict=True) for name in names}
    return {name: saved[name] for name in runs}


def _apart(model: nn.Module, run: ConvolutionRun) -> nn.Sequential:
    """The layers of a run as they are, with activations between them."""
    parts: list[nn.Module] = []
    for layer, norm, activation in zip(run.layers, (*run.norms, ""), (*run.activations, None), strict=True):
        parts += [model.get_submodule(path) for path in (layer, norm) if path]
        if activation and activation != norm:
            parts.append(model.get_submodule(activation))
        elif activation == "" and run.stays:
            parts.append(nn.ReLU())  # what is called in code is one, or a ReLU6, which takes as long
    return nn.Sequential(*parts)


def _saved(model: nn.Module, run: ConvolutionRun, shape: tuple[int, ...]) -> float:
    apart = copy_model(_apart(model, run)).eval()
    gathered = gather_(copy_model(model), [run]).get_submodule(run.path)
    assert isinstance(gathered, Unmerged)
    parameter = next(model.parameters())
    x: Tensor = torch.randn(shape, dtype=parameter.dtype, device=parameter.device)
    with tempfile.TemporaryDirectory() as folder:
        files = [
            export_onnx(part, Path(folder) / f"{name}.onnx", (x,), dynamic=())
            for name, part in (("apart", apart), ("merged", merged_of([*gathered.children()]).eval()))
        ]
        slow, fast = latency(files, (x,), seconds=SECONDS_EACH)
    return slow - fast
