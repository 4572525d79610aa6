"""Measure a model: parameters, non-zeros, multiply-accumulates (MACs), the task's metric, latency in ONNX Runtime."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compresskit.base.errors import DataError, ExportError, SettingError, runtime_message
from compresskit.base.inputs import AnyInputs, as_inputs, call_checked, counted_rows
from compresskit.base.progress import progress_bar
from compresskit.base.task import (
    Inputs,
    MetricError,
    RowDims,
    RunningMetric,
    Task,
    check_is_task,
    first_rows,
    row_dims,
    rows_that_run,
    to_device,
)
from compresskit.graph.capture import Dynamic, input_names
from compresskit.graph.surgery import call_unmoved, check_is_module, check_not_lazy, mode, state_kept
from compresskit.measure.flops import flop_formulas

#: Setting of a session: microseconds that its threads wait busily for more work before they sleep. By the runtime's default they
#: wait for tens of milliseconds, on cores that the next of several sessions wants. Before 1.26, ONNX Runtime ignores it.
SHORT_SPIN = ("session.intra_op.spin_duration_us", "200")


def count_parameters(model: nn.Module) -> int:
    """Return the number of values in all parameters; a tied parameter counts once.

    Raises ModelError for a lazy parameter, whose shape no data have told yet.
    """
    check_is_module(model, "count_parameters")
    check_not_lazy(model, "count_parameters")
    return sum(p.numel() for p in model.parameters())


def count_nonzero(model: nn.Module) -> int:
    """Return the number of parameter values that are not zero; ModelError as `count_parameters`."""
    check_is_module(model, "count_nonzero")
    check_not_lazy(model, "count_nonzero")
    return sum(int(torch.count_nonzero(p)) for p in model.parameters())


def input_row_dims(model: nn.Module, inputs: Inputs, dynamic: Dynamic) -> RowDims | None:
    """Where the rows of a batch are in each input of a model, as the dimensions that may vary in its file say; see `row_dims`."""
    return row_dims(input_names(model, inputs), dynamic)


def task_row_dims(model: nn.Module, task: Task, dynamic: Dynamic) -> RowDims | None:
    """The same of a task's inputs. Data are read only where dimensions are named or the batch is fixed."""
    if not isinstance(dynamic, Mapping) and 0 in dynamic:
        return None
    return input_row_dims(model, task.example(), dynamic)


def few_rows(model: nn.Module, inputs: Inputs, count: int, dims: RowDims | None = None) -> Inputs:
    """Return the first rows of inputs where a model runs on them in eval mode, and the inputs as they are where it does not.

    dims: where the rows of each input are, where that is known.
    """
    return rows_that_run(partial(run_once, model), first_rows(inputs, count, dims), inputs)


def run_once(model: nn.Module, inputs: Inputs) -> None:
    """Run a model in eval mode and leave it as it was. Raises what the model raises."""
    with torch.no_grad(), mode(model, training=False):
        call_unmoved(model, inputs)


def count_macs(model: nn.Module, inputs: AnyInputs, *, dims: RowDims | None = None) -> int:
    """Return the multiply-accumulates of one sample in eval mode: half of the operations that torch's flop counter counts.

    These are of convolutions, products of matrices and vectors, attention, and distances (`torch.cdist`, `pdist`), each of which
    counts as a product of two vectors. Elementwise operators and sums of what they give, embeddings, interpolation, Fourier
    transforms, solvers, decompositions, and `torch.sparse.mm` of matrices in COO layout count 0.

    Fused kernels (attention's fast path, oneDNN's LSTM) are disabled meanwhile: the counter does not see the operations inside.

    Args:
        model: any module; its mode is restored, and so is state that its forward writes.
        inputs: a batch of inputs, as a tensor, a tuple or a dict.
        dims: where its samples are in each input, where they are not in the first dimension; see `input_row_dims`.

    Raises DataError for inputs without rows, or on which the model does not run, SettingError for dimensions that they have not.
    """
    from torch.utils.flop_counter import FlopCounterMode  # loads triton: a tenth of a second

    check_is_module(model, "count_macs")
    inputs = as_inputs(inputs, "count_macs")
    rows = counted_rows(inputs, dims, "count_macs")
    counter = FlopCounterMode(display=False, custom_mapping=flop_formulas())
    counter.mod_tracker = _WholeModel()  # type: ignore[assignment]
    fused = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags would set, and warn of, more than this
    try:
        with (
            torch.no_grad(),
            mode(model, training=False),
            state_kept(model),
            counter,
        ):
            call_checked(model, inputs, "count_macs")
    finally:
        torch._C._set_mkldnn_enabled(fused)
    return counter.get_total_flops() // 2 // rows


class _WholeModel:
    """In the place of the flop counter's tracker of modules, whose gradient hooks fail on views of parameters."""

    parents: ClassVar[set[str]] = {"Global"}

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def evaluate(model: Callable[..., Any], task: Task, *, label: str = "evaluate", finite: bool = True) -> float:
    """Return the task's metric over its whole validation set.

    Args:
        model: a module, which is put in eval mode meanwhile, or any function of the inputs.
        task: has the data and the metric.
        label: name of the progress bar.
        finite: whether a metric that is nan or infinite is an error.

    Raises:
        DataError: the model does not run on the data, or the metric is not finite.
    """
    check_is_task(task, label)
    evaluation = Evaluation(task)
    each_output(model, task, evaluation.add, label=label)
    return evaluation.value(finite=finite)


def each_output(model: Callable[..., Any], task: Task, take: Callable[[Any, Any], None], *, label: str = "evaluate") -> None:
    """Call `take(output, target)` with what a model returns for each validation batch, without gradients and in eval mode."""
    total = task.length("val")
    context = mode(model, training=False) if isinstance(model, nn.Module) else nullcontext()
    with torch.no_grad(), context:
        for batch in progress_bar(task.batches("val"), total=total, desc=label):
            inputs, target = task.split(batch)
            take(call_checked(model, inputs, "validation data"), target)


class Evaluation:
    """A task's metric, from what a model returns for one validation batch after another."""

    def __init__(self, task: Task) -> None:
        self.task, self.outputs, self.batches = task, list[tuple[Tensor, Any]](), 0
        if isinstance(task.metric, RunningMetric):
            task.metric.reset()

    def add(self, output: Any, target: Any) -> None:
        """Count a batch: what the model returned for it, and its target."""
        predictions = self.task.predicted(output).float()
        self.batches += 1
        if isinstance(self.task.metric, RunningMetric):
            with checked_shapes(predictions, target):
                self.task.metric.update(predictions, target)
        else:
            self.outputs.append((predictions.cpu(), to_device(target, "cpu")))

    def value(self, *, finite: bool = True) -> float:
        """The metric of all batches; DataError where there was none or, with `finite`, it is not finite."""
        if not self.batches:
            raise DataError("Task(val=...): the loader gave no batch")
        metric = self.task.metric
        found = metric.compute() if isinstance(metric, RunningMetric) else checked_score(self.task, *_joined(self.outputs))
        value = metric_value(found)
        if finite and not math.isfinite(value):
            raise MetricError(f"the metric is {value} on the validation set; look at the predictions and at Task(metric=...)")
        return value


def checked_score(task: Task, predictions: Tensor, target: Any) -> Any:
    """What the metric of a task, a function, gives; DataError where it compares each prediction with every target."""
    with checked_shapes(predictions, target):
        return task.score(predictions, target)


def checked_shapes(predictions: Any, target: Any) -> AbstractContextManager[Any]:
    """Inside the block, watch predictions (N, 1) beside targets (N,), or the other way round.

    Most losses and metrics would broadcast them to (N, N), which raises DataError here. Other shapes are not watched.
    """
    if not isinstance(predictions, Tensor) or not isinstance(target, Tensor) or target.shape[:1] <= (1,):
        return nullcontext()
    shapes = predictions.shape, target.shape
    row, column = sorted(shapes, key=len)
    return BroadcastCheck(*shapes) if column == (*row, 1) and _broadcast_to(*shapes) is not None else nullcontext()


def _broadcast_to(predictions: torch.Size, target: torch.Size) -> torch.Size | None:
    """What they are broadcast to; None where they cannot be."""
    try:
        return torch.broadcast_shapes(predictions, target)
    except RuntimeError:
        return None


class BroadcastCheck(TorchDispatchMode):
    """Raise `DataError` where predictions and targets, one of them a column, are broadcast to (N, N)."""

    def __init__(self, predictions: torch.Size, target: torch.Size) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.predictions, self.target = predictions, target
        self.column, self.square = max(predictions, target, key=len), _broadcast_to(predictions, target)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shapes = {leaf.shape for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)}
        column = func is torch.ops.aten.expand.default and shapes == {self.column}
        both = column or shapes == {self.predictions, self.target}
        if both and isinstance(result, Tensor) and result.shape == self.square:
            raise DataError(
                f"predictions {tuple(self.predictions)} and targets {tuple(self.target)} are broadcast to {tuple(self.square)},"
                f" each prediction beside every target; let the loader give targets {tuple(self.predictions)}, or pass a predict="
                f" that gives predictions {tuple(self.target)}"
            )
        return result


def metric_value(found: Any) -> float:
    """What a metric gave as a number; DataError where it is none."""
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"a dict of {list(found)}" if isinstance(found, Mapping) else type(found).__name__
        raise DataError(f"Task(metric=...): wanted one number for all of the data, got {got}; return one") from error


def _joined(outputs: list[tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
    predictions, targets = zip(*outputs, strict=True)
    if len(outputs) > 1 and all(isinstance(y, Tensor) and y.shape[:1] == p.shape[1:2] != p.shape[:1] for p, y in outputs):
        raise DataError(  # (T, N, C), as nn.CTCLoss takes them
            f"Task(metric=...): a function wants all batches as one tensor, but predictions {tuple(predictions[0].shape)} have"
            f" the {len(targets[0])} samples of their targets in dimension 1; put them first, Task(predict=lambda output:"
            " output.transpose(0, 1)), or give a metric with update, compute and reset, which takes one batch after another"
        )
    return _one_tensor(predictions, "predictions"), _joined_targets(targets, [len(part) for part in predictions])


def _one_tensor(parts: Sequence[Tensor], what: str) -> Tensor:
    if len(sizes := dict.fromkeys(tuple(part.shape[1:]) for part in parts)) > 1:
        first, second = list(sizes)[:2]
        raise DataError(
            f"Task(metric=...): a function wants all batches as one tensor, got {what} of size {first} and {second} for each"
            " sample; give a metric with update, compute and reset, which takes one batch after another, such as those of"
            " torchmetrics, or make Task(predict=...) return one size"
        )
    return torch.cat(list(parts))


def _joined_targets(targets: Sequence[Any], rows: Sequence[int], *, placed: bool = False) -> Any:
    """The targets of all batches in the form of those of one: dicts by key, lists by place where they hold tensors of all rows,
    and else by sample; single values stay a list of them.

    rows: of the predictions of each batch. placed: whether they are entries of lists by place; then lists in them are, too.

    Raises DataError where a list has neither one entry for each sample nor tensors of all rows, or may have either.
    """
    first = targets[0]
    if isinstance(first, Mapping):
        return {key: _joined_targets([target[key] for target in targets], rows) for key in first}
    if isinstance(first, Tensor):
        return _one_tensor(targets, "targets") if first.ndim else list(targets)
    if not isinstance(first, list | tuple):
        return list(targets)
    by_place, by_sample = _entries(targets, rows)
    if by_place and by_sample and not placed and len(targets) > 1:  # a single batch stays as it is
        raise DataError(
            f"Task(metric=...): in every validation batch, of {(n := len(first))} samples, targets are lists of {n} tensors of"
            " as many rows, which may be one for each sample or one for each of several targets; let the loader give batches of"
            " another size or a dict of targets, or give a metric with update, compute and reset, which takes batch after batch"
        )
    if by_place:
        values = [_joined_targets(of_all, rows, placed=True) for of_all in zip(*targets, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    if not by_sample:
        raise DataError(
            "Task(metric=...): a function wants the targets of all batches together, got lists of"
            f" {[len(t) for t in targets[:3]]} beside predictions of {list(rows[:3])} samples; give a metric with update, compute"
            " and reset, which takes one batch after another"
        )
    return [value for target in targets for value in target]


def _entries(targets: Sequence[Any], rows: Sequence[int]) -> tuple[bool, bool]:
    """Whether the entries of lists can be tensors of all rows, as `default_collate` makes them of several targets, and whether
    they can be of one sample each, as a collate function for detection makes them. What they are fits in all batches.

    Named tuples, and entries of several kinds, are the first where both fit: tensors of samples have one dtype and rank.
    """
    first, both = targets[0], [*zip(targets, rows, strict=True)]
    by_sample = all(len(target) == n for target, n in both)
    alike = len({len(target) for target in targets}) == 1 and any(isinstance(value, Tensor) for value in first)
    by_place = alike and all(_has_rows(value, n) for target, n in both for value in target)
    kinds = ({(value.dtype, value.ndim) if isinstance(value, Tensor) else None for value in target} for target in targets)
    told = type(first) not in (list, tuple) or any(len(kind) > 1 for kind in kinds)
    return by_place, by_sample and not (by_place and told)


def has_two_readings(target: Any, rows: int) -> bool:
    """Whether a list in the target of one batch leaves open what its entries are; other batches, of other sizes, may tell."""
    if isinstance(target, Mapping):
        return any(has_two_readings(value, rows) for value in target.values())
    return isinstance(target, list | tuple) and all(_entries([target], [rows]))


def _has_rows(value: Any, rows: int) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(_has_rows(entry, rows) for entry in value.values())
    sized = value.ndim > 0 if isinstance(value, Tensor) else isinstance(value, list | tuple)
    return sized and len(value) == rows


def numpy_inputs(session: Any, inputs: AnyInputs, path: str | Path | None = None) -> dict[str, np.ndarray]:
    """Return the tensors among the inputs as numpy arrays, by the input names of an ONNX Runtime session.

    Inputs by name must have the names of the file; those in order, and those that hold tensors in lists, are taken in order.

    Args:
        session: of the file.
        inputs: a tensor, a tuple or a dict.
        path: of the file, for messages.

    Raises:
        DataError: the session has another number of inputs, or other names.
    """
    names = [entry.name for entry in session.get_inputs()]
    if isinstance(inputs, Mapping) and set(names) <= set(inputs):
        return {name: _array(inputs[name]) for name in names}
    tensors = [value for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor)]
    file = "the file" if path is None else f"{path}: the file"
    if len(tensors) != len(names):
        raise DataError(f"{file} wants inputs {names}, got {len(tensors)} tensors")
    if isinstance(inputs, Mapping):
        given = [name for name, value in inputs.items() if isinstance(value, Tensor)]
        if len(given) == len(tensors):  # else the exporter made names for what lists hold
            raise DataError(f"{file} wants inputs {names}, got {given}; give them these names, or as a tuple in this order")
    return {name: _array(value) for name, value in zip(names, tensors, strict=True)}


def _array(value: Tensor) -> np.ndarray:
    value = value.detach().cpu()
    return (value.float() if value.dtype is torch.bfloat16 else value).numpy()  # files of bf16 models take fp32


def session(path: str | Path | bytes, *, threads: int = 1, optimize: bool | str = True) -> Any:
    """Return an ONNX Runtime session on the CPU.

    Args:
        path: an ONNX file, or its bytes.
        threads: for the operators of the graph.
        optimize: graph optimizations of the runtime: True all, False none, "basic" and "extended" the levels in between.

    Raises ExportError where ONNX Runtime cannot load the file.
    """
    import onnxruntime as ort  # heavy, and only measuring and exporting need it

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry(*SHORT_SPIN)
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = {
        False: levels.ORT_DISABLE_ALL,
        "basic": levels.ORT_ENABLE_BASIC,
        "extended": levels.ORT_ENABLE_EXTENDED,
        True: levels.ORT_ENABLE_ALL,
    }[optimize]
    source = path if isinstance(path, bytes) else runtime_path(path)
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        name = "the model" if isinstance(path, bytes) else path
        raise ExportError(f"{name}: ONNX Runtime cannot load it: {runtime_message(error)}") from error


def runtime_path(path: str | Path) -> str:
    """A path as ONNX Runtime takes it, which is UTF-8 whatever the locale. Raises ExportError where its bytes are not."""
    try:
        return os.fsencode(path).decode()
    except UnicodeDecodeError:
        raise ExportError(
            f"{os.fsencode(path)!r}: ONNX Runtime cannot load it: its path is not UTF-8; rename the file or its folder"
        ) from None


def run_session(session: Any, feed: Mapping[str, np.ndarray], path: str | Path, *, quiet: bool = False) -> list[Any]:
    """The outputs of a session for inputs by name. Raises ExportError, with what ONNX Runtime says, where it cannot run.

    quiet: print nothing there.
    """
    try:
        return session.run(None, feed, _quiet_run() if quiet else None)  # type: ignore[no-any-return]
    except Exception as error:
        message = f"{path}: ONNX Runtime cannot run it: {runtime_message(error)}"
        if "Got invalid dimensions" in message:
            raise ExportError(f"{message}; name the dimensions that vary in dynamic=") from error
        raise ExportError(message) from error


def run_files(paths: Sequence[str | Path], inputs: AnyInputs) -> None:
    """Run ONNX files once in ONNX Runtime, which prints nothing where one does not run; raises the runtime's error then."""
    for path in paths:
        runner = session(path)
        runner.run(None, numpy_inputs(runner, inputs, path), _quiet_run())


def _quiet_run() -> Any:
    import onnxruntime as ort  # heavy, and only measuring and exporting need it

    options = ort.RunOptions()
    options.log_severity_level = 4
    return options


def latency(
    paths: Sequence[str | Path], inputs: AnyInputs, *, threads: int = 1, seconds: float = 1.0, rounds: int = 15
) -> list[float]:
    """Return the median latency of ONNX files in ONNX Runtime, in milliseconds.

    The files run in turn, in alternating order, so that all see the same load of the machine. A round runs each file for
    `seconds / rounds`. The median is that of the single runs: with two threads on a busy machine, some runs wait a millisecond
    for the second one, which would decide a mean.

    Args:
        paths: the files.
        inputs: what every file is run on.
        threads: of the runtime.
        seconds: time for each file.
        rounds: number of rounds, at least 1.

    Raises:
        SettingError: `rounds`, `seconds` or `threads` is out of range.
        DataError: a file has other inputs.
        ExportError: a file does not load, or does not run on the inputs.
    """
    if rounds < 1 or not 0 < seconds < math.inf:
        raise SettingError(f"latency: wanted rounds >= 1 and seconds > 0, got {rounds} and {seconds}")
    if threads < 1:
        raise SettingError(f"latency: wanted threads >= 1, got {threads}")
    runs = []
    for path in paths:
        runner = session(path, threads=threads)
        feed = numpy_inputs(runner, inputs, path)
        run_session(runner, feed, path)
        runs.append(partial(runner.run, None, feed))
    return time_in_turn(runs, seconds=seconds, rounds=rounds)


def time_in_turn(runs: Sequence[Callable[[], object]], *, seconds: float, rounds: int = 15) -> list[float]:
    """Return the median milliseconds of each of several functions, called in turn as `latency` explains."""
    repeats = []
    for run in runs:
        for _ in range(2):
            run()
        begin = time.perf_counter()
        run()
        repeats.append(max(1, round(seconds / rounds / max(time.perf_counter() - begin, 1e-5))))  # a clock may stand still
    times: list[list[float]] = [[] for _ in runs]
    order = list(range(len(runs)))
    for turn in range(rounds):
        for i in order if turn % 2 == 0 else reversed(order):
            begin = time.perf_counter()
            for _ in range(repeats[i]):
                runs[i]()
                begin, before = time.perf_counter(), begin
                times[i].append(begin - before)
    return [statistics.median(t) * 1000 for t in times]
