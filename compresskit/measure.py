"""Measure a model: parameters, non-zeros, multiply-accumulates (MACs), the task's metric, latency in ONNX Runtime."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

from compresskit.base.errors import DataError, SettingError
from compresskit.base.inputs import AnyInputs, as_inputs
from compresskit.base.task import Task, batch_size, call, call_checked
from compresskit.graph.surgery import mode


def count_parameters(model: nn.Module) -> int:
    """Number of values in all parameters; a tied one counts once."""
    return sum(p.numel() for p in model.parameters())


def count_nonzero(model: nn.Module) -> int:
    """Number of parameter values that are not zero."""
    return sum(int(torch.count_nonzero(p)) for p in model.parameters())


def count_macs(model: nn.Module, inputs: AnyInputs) -> int:
    """Multiply-accumulates of one sample in eval mode, half of what torch's own flop counter says.

    Fused kernels (the fast path of attention, oneDNN's LSTM) are switched off meanwhile: the counter does not see into them.
    """
    from torch.utils.flop_counter import FlopCounterMode  # loads triton: a tenth of a second

    inputs = as_inputs(inputs, "count_macs")
    fused = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags would set, and warn of, more than this
    try:
        with (
            torch.no_grad(),
            mode(model, training=False),
            FlopCounterMode(display=False) as counter,
        ):
            call(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused[0])
        torch._C._set_mkldnn_enabled(fused[1])
    return counter.get_total_flops() // 2 // batch_size(inputs)


def evaluate(model: Callable[..., Any], task: Task, *, label: str = "evaluate") -> float:
    """The task's metric over its whole validation set.

    model: a module (put in eval mode meanwhile), or any function of the inputs, such as an ONNX Runtime session.
    """
    total = task.length("val")
    kept: list[tuple[Tensor, Any]] = []
    running = task.metric if hasattr(task.metric, "update") and hasattr(task.metric, "compute") else None
    if running is not None and hasattr(running, "reset"):
        running.reset()
    context = mode(model, training=False) if isinstance(model, nn.Module) else nullcontext()
    with torch.no_grad(), context:
        for batch in tqdm(task.batches("val"), total=total, desc=label, disable=None, leave=False):
            inputs, target = task.split(batch)
            predictions = task.predict(call_checked(model, inputs, "validation data")).float()
            if running is not None:
                running.update(predictions, target)
            else:
                kept.append((predictions.cpu(), target.cpu() if isinstance(target, Tensor) else target))
    if running is not None:
        value = float(running.compute())
    elif not kept:
        raise DataError("Task(val=...): the loader gave no batch")
    else:
        targets = [target for _, target in kept]
        joined = torch.cat(targets) if isinstance(targets[0], Tensor) and targets[0].ndim else targets
        value = float(task.metric(torch.cat([p for p, _ in kept]), joined))
    if not math.isfinite(value):
        raise DataError(f"the metric is {value} on the validation set; look at the predictions and at Task(metric=...)")
    return value


def numpy_inputs(session: Any, inputs: AnyInputs) -> dict[str, np.ndarray]:
    """Name the tensors among the inputs as the ONNX Runtime session wants them."""
    names = [entry.name for entry in session.get_inputs()]
    if isinstance(inputs, Mapping) and set(names) <= set(inputs):
        return {name: _array(inputs[name]) for name in names}
    tensors = [value for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor)]
    if len(tensors) != len(names):
        raise DataError(f"the file wants inputs {names}, got {len(tensors)} tensors")
    return {name: _array(value) for name, value in zip(names, tensors, strict=True)}


def _array(value: Tensor) -> np.ndarray:
    value = value.detach().cpu()
    return (value.float() if value.dtype is torch.bfloat16 else value).numpy()  # files of bf16 models take fp32


def session(path: str | Path | bytes, *, threads: int = 1, optimize: bool | str = True) -> Any:
    """An ONNX Runtime session on the CPU, of a file or of its bytes.

    optimize: False runs the file as it is written; "basic" and "extended" are levels between that and all.
    """
    import onnxruntime as ort  # heavy, and only measuring and exporting need it

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = {
        False: levels.ORT_DISABLE_ALL,
        "basic": levels.ORT_ENABLE_BASIC,
        "extended": levels.ORT_ENABLE_EXTENDED,
        True: levels.ORT_ENABLE_ALL,
    }[optimize]
    return ort.InferenceSession(path if isinstance(path, bytes) else str(path), options, providers=["CPUExecutionProvider"])


def latency(
    paths: Sequence[str | Path], inputs: AnyInputs, *, threads: int = 1, seconds: float = 1.0, rounds: int = 15
) -> list[float]:
    """Median milliseconds of each file for `inputs`, the files run in turn so that all see the same machine.

    Each round runs every file often enough to fill its share of `seconds`; the order is reversed every other round.
    The median of the rounds' means is robust against a neighbour that wakes up for a moment.
    """
    if rounds < 1 or seconds <= 0:
        raise SettingError(f"latency: wanted rounds >= 1 and seconds > 0, got {rounds} and {seconds}")
    sessions = [session(path, threads=threads) for path in paths]
    feeds = [numpy_inputs(s, inputs) for s in sessions]
    repeats = []
    for s, feed in zip(sessions, feeds, strict=True):
        for _ in range(3):
            s.run(None, feed)
        begin = time.perf_counter()
        s.run(None, feed)
        repeats.append(max(1, round(seconds / rounds / (time.perf_counter() - begin))))
    times: list[list[float]] = [[] for _ in sessions]
    order = list(range(len(sessions)))
    for turn in range(rounds):
        for i in order if turn % 2 == 0 else reversed(order):
            begin = time.perf_counter()
            for _ in range(repeats[i]):
                sessions[i].run(None, feeds[i])
            times[i].append((time.perf_counter() - begin) / repeats[i] * 1000)
    return [statistics.median(t) for t in times]
