"""Quantize to an accuracy target: each weight matrix in the fastest precision that keeps the outputs accurate enough.

candidates        each product by a weight matrix in dynamic int8, in blocks of 8 or 4 bits (MatMulNBits), or in float
latency           each candidate is timed for each shape of product, by itself, in ONNX Runtime on this machine
noise             the error that a candidate alone adds to the outputs, on calibration data
search            start with the fastest candidates; while the outputs are too noisy, make the change that removes most noise
                  for its time
check             the exported file is run on the data; where it misses the target, search again with a stricter one

An int8 matrix has one scale per channel: one scale for all is no faster, and never more accurate.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.inputs import Batches, first_and_all, not_finite_error
from compresskit.base.progress import progress_bar
from compresskit.base.settings import stands_in
from compresskit.base.task import Inputs, call, first_rows, rows_that_run
from compresskit.export import export_onnx
from compresskit.graph.capture import Captured, Dynamic, module_path
from compresskit.graph.differences import without_fills
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor, mode
from compresskit.graph.tracing import no_modes_of_caller
from compresskit.measure import input_row_dims, latency, numpy_inputs, run_files, session
from compresskit.metrics import decibels
from compresskit.quant.accuracy_target.mixed_model import (
    FLOAT,
    PRECISIONS,
    MatrixPrecision,
    MixedQuantized,
    build_mixed,
    run_with_precisions,
)
from compresskit.quant.dynamic.insert_dynamic import build_dynamic
from compresskit.quant.dynamic.noisy_layers import noisy_lstm_layers
from compresskit.quant.dynamic.placement_dynamic import DEFAULT_OPERATORS
from compresskit.quant.dynamic.quantize_dynamic import quantize_dynamic
from compresskit.quant.numerics.operators import PRODUCTS
from compresskit.quant.numerics.targets import X86, Target, check_target
from compresskit.quant.passes.channel_scaling import weight_of
from compresskit.quant.passes.prepare_graph import prepare_graph
from compresskit.quant.weight_only.quantize_weights import quantize_weights
from compresskit.quant.weight_only.storage import MATMUL_NBITS_INT8

log = logging.getLogger(__name__)

MAX_SEARCHES = 6  # how often the search is repeated where the whole model is noisier than the sum of its parts


@dataclass(frozen=True, kw_only=True)
class MatrixChoice:
    """The precision that was chosen for one weight matrix.

    name: of the weight. layer: dotted name of its module. precision: as text.
    ms: latency of its product by itself, in milliseconds at batch 1.
    noise: squared error that it alone adds to the outputs, as a fraction of their squared sum.
    """

    name: str
    layer: str
    precision: str
    ms: float
    noise: float


@dataclass(frozen=True, kw_only=True)
class AccuracyReport:
    """What `quantize_to_accuracy` chose, and what the exported file reaches; prints as a table.

    matrices: the choice for each weight matrix.
    wanted_sqnr: the target, in dB. sqnr: of the file's outputs in ONNX Runtime, in dB.
    cosine: similarity of all outputs of the file and of the float model.
    ms, float_ms: latency of the file and of the float model's file, measured in turn, batch 1, one thread.
    """

    matrices: tuple[MatrixChoice, ...]
    wanted_sqnr: float
    sqnr: float
    cosine: float
    ms: float
    float_ms: float

    def __str__(self) -> str:
        head = (
            f"{self.sqnr:.1f} dB (wanted {self.wanted_sqnr:.1f}), cosine {self.cosine:.5f}, {self.ms:.3f} ms,"
            f" {self.ms / self.float_ms:.2f} of float"
        )
        names, precisions = (
            max(map(len, column)) for column in zip(*((m.name, m.precision) for m in self.matrices), strict=True)
        )
        rows = [f"  {m.name:<{names}}  {m.precision:<{precisions}}  {m.ms:.3f} ms  noise {m.noise:.1e}" for m in self.matrices]
        return "\n".join([head, *rows])

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        return asdict(self)


@no_modes_of_caller()
def quantize_to_accuracy(
    model: nn.Module,
    batches: Batches,
    *,
    sqnr: float | None = None,
    cosine: float | None = None,
    target: Target = X86,
    skip: tuple[str, ...] = (),
    dynamic: Dynamic = (0,),
    seconds: float = 0.3,
) -> tuple[MixedQuantized, AccuracyReport]:
    """Return the fastest quantized copy of a model whose outputs are still accurate enough, and a report of what was chosen.

    Each product by a weight matrix runs in dynamic int8, in blocks of 8 or 4 bits with inputs rounded in blocks, or in float.
    Embeddings and recurrent layers run in dynamic int8 where that takes at most a quarter of the noise that is allowed,
    and of an LSTM the layers of which that is true.

    Args:
        model: any float module; it is not changed.
        batches: an iterable of inputs, or one batch, of the batch size and length that the model will see: dynamic ranges are
            those of a batch. The file is timed on the first row of the first batch.
        sqnr: the target: signal-to-quantization-noise ratio of all outputs, in dB, that the file must reach on these batches; or
        cosine: similarity of the outputs to the float model's, in (0, 1), which means sqnr = -10 log10(2 (1 - cosine)).
        target, skip, dynamic: as in `quantize_dynamic`.
        seconds: how long each precision of each shape of product is timed.

    Raises SettingError unless one valid target is given, DataError where there is no batch, ModelError where no quantized model
    reaches the target or float is the fastest.
    """
    check_target(target, "quantize_to_accuracy")
    wanted_sqnr = _wanted_sqnr(sqnr, cosine)
    data = list(first_and_all(batches, "quantize_to_accuracy")[1])
    captured, _, _ = prepare_graph(model, data[0], replace(target, operators={}), skip, dynamic)
    search = _PrecisionSearch(captured, data, target, skip)
    if not search.products:
        raise ModelError(f"{type(model).__name__}: it has no product by a stored matrix whose form could be chosen")
    search.time_products(seconds)
    search.measure_noise()
    if all(precision == FLOAT for precision in search.choose(math.inf).values()):
        name = type(model).__name__
        raise ModelError(f"{name}: float is the fastest form of its products here; quantize_dynamic makes it smaller")
    operators, noisy = _dynamic_operators(model, search, wanted_sqnr, skip, dynamic)
    noise_budget = 10 ** (-wanted_sqnr / 10)
    for _ in range(MAX_SEARCHES):
        precisions = search.choose(noise_budget)
        if all(precision == FLOAT for precision in precisions.values()):
            break
        mixed = build_mixed(model, data[0], target, precisions, operators=operators, skip=skip, floating=noisy, dynamic=dynamic)
        with TemporaryDirectory() as folder:
            path = export_onnx(mixed, Path(folder) / "mixed.onnx", data[0])
            outputs = _file_outputs(path, data)
            error = sum(noise_power(exact, got) for got, exact in zip(outputs, search.float_outputs, strict=True))
            if (reached := decibels(search.signal, error)) >= wanted_sqnr:
                whole = export_onnx(search.captured.module, Path(folder) / "float.onnx", data[0])
                ms, float_ms = _timed_on_one(model, (path, whole), data[0], dynamic, max(seconds, 0.5))
                return mixed, _report(search, precisions, wanted_sqnr, reached, outputs, (ms, float_ms))
        noise_budget *= min(0.9, 10 ** ((reached - wanted_sqnr) / 10))
    raise ModelError(
        f"{type(model).__name__}: nothing that is rounded reaches {wanted_sqnr:.1f} dB; keep it in float, or lower the target"
    )


def _timed_on_one(model: nn.Module, files: Sequence[Path], example: Inputs, dynamic: Dynamic, seconds: float) -> list[float]:
    """Latencies of files of a model, for the first row of the example, and for all of it where they take no less."""
    one = first_rows(example, 1, input_row_dims(model, example, dynamic))
    return latency(files, rows_that_run(partial(run_files, files), one, example), seconds=seconds)


def _wanted_sqnr(sqnr: float | None, cosine: float | None) -> float:
    if (sqnr is None) == (cosine is None):
        raise SettingError("quantize_to_accuracy: give sqnr= (dB) or cosine=, one of the two")
    if cosine is not None:
        if not 0 < cosine < 1:
            raise SettingError(f"quantize_to_accuracy(cosine=...): wanted a number in (0, 1), got {cosine}")
        return -10 * math.log10(2 * (1 - cosine))
    assert sqnr is not None
    if not math.isfinite(sqnr) or sqnr <= 0:
        raise SettingError(f"quantize_to_accuracy(sqnr=...): wanted decibels > 0, got {sqnr}")
    return sqnr


class _PrecisionSearch:
    """The products of a captured graph, with latency and noise of each candidate precision.

    products: name -> node. ms, noise: (name of a product, precision) -> latency; -> noise as a fraction of the signal.
    """

    def __init__(self, captured: Captured, data: Sequence[Inputs], target: Target, skip: tuple[str, ...]) -> None:
        self.captured, self.data, self.target = captured, data, target
        self.products: dict[str, Node] = {}
        for node in captured.module.graph.nodes:
            path = module_path(node)
            if (weight := weight_of(node)) is None or stands_in(path, skip):
                continue
            readers = [n for n in captured.module.graph.nodes if n.op == "get_attr" and n.target == weight[0]]
            if sum(len(n.users) for n in readers) == 1 and bool(get_tensor(captured.module, weight[0]).any()):
                self.products[node.name] = node
        self.ms: dict[tuple[str, MatrixPrecision], float] = {}
        self.noise: dict[tuple[str, MatrixPrecision], float] = {}
        with torch.no_grad():
            self.float_outputs = [self._outputs(inputs, {}) for inputs in data]
        self.signal = sum(float(without_fills(v, v)[0].square().sum()) for v in self.float_outputs)
        if not self.signal:
            raise not_finite_error("quantize_to_accuracy", "each output of the model is 0, or", data)

    def _outputs(self, inputs: Inputs, precisions: Mapping[str, MatrixPrecision]) -> Tensor:
        leaves = pytree.tree_leaves(inputs)
        return flat_outputs(run_with_precisions(self.captured.module, leaves, precisions, self.target))

    def time_products(self, seconds: float) -> None:
        """Time each precision of each shape of product by itself, the precisions in turn."""
        shapes: dict[tuple[int, int, int], list[str]] = {}
        for name, node in self.products.items():
            x = self.captured.shapes[node.args[PRODUCTS[node.target][0]].name]
            channels = self.captured.shapes[name][-1]
            rows = max(1, math.prod(x[:-1]) // max(1, next(iter(pytree.tree_leaves(self.captured.example))).shape[0]))
            shapes.setdefault((rows, x[-1], channels), []).append(name)
        for (rows, inputs, channels), names in progress_bar(shapes.items(), desc="time products"):
            layer, example = nn.Linear(inputs, channels).eval(), (torch.randn(2, rows, inputs),)
            with TemporaryDirectory() as folder:
                paths = []
                for i, precision in enumerate(PRECISIONS):
                    variant: nn.Module = layer
                    if precision.int8:
                        variant = quantize_dynamic(layer, example, target=self.target)
                    elif precision.scheme is not None:
                        variant = quantize_weights(layer, example, scheme=precision.scheme, storage=MATMUL_NBITS_INT8)
                    paths.append(export_onnx(variant, Path(folder) / f"{i}.onnx", example))
                times = latency(paths, first_rows(example, 1), seconds=seconds, rounds=7)
            for name in names:
                self.ms.update({(name, precision): time for precision, time in zip(PRECISIONS, times, strict=True)})

    def measure_noise(self) -> None:
        """Measure each precision of each product that is faster than every more accurate one."""
        for name in progress_bar(self.products, desc="measure noise"):
            self.noise[name, FLOAT] = 0.0
            fastest = self.ms[name, FLOAT]
            for precision in PRECISIONS[1:]:
                if self.ms[name, precision] < fastest:
                    fastest = self.ms[name, precision]
                    self.noise[name, precision] = self.total_noise({name: precision})

    def total_noise(self, precisions: Mapping[str, MatrixPrecision]) -> float:
        """Squared error of the outputs with the given precisions, as a fraction of the float outputs' squared sum."""
        with torch.no_grad():
            error = sum(
                noise_power(exact, self._outputs(inputs, precisions))
                for inputs, exact in zip(self.data, self.float_outputs, strict=True)
            )
        return error / self.signal

    def choose(self, noise_budget: float) -> dict[str, MatrixPrecision]:
        """Choose a precision for each product, so that their noise adds up to at most `noise_budget`."""
        measured = {name: [p for p in PRECISIONS if (name, p) in self.noise] for name in self.products}
        chosen = {name: min(ps, key=lambda p, n=name: self.ms[n, p]) for name, ps in measured.items()}  # type: ignore[misc]
        while sum(self.noise[item] for item in chosen.items()) > noise_budget:
            best_ratio, change = 0.0, None
            for name, current in chosen.items():
                for precision in measured[name]:
                    noise_removed = self.noise[name, current] - self.noise[name, precision]
                    ms_added = max(self.ms[name, precision] - self.ms[name, current], 1e-9)
                    if noise_removed > 0 and noise_removed / ms_added > best_ratio:
                        best_ratio, change = noise_removed / ms_added, (name, precision)
            if change is None:
                break
            chosen[change[0]] = change[1]
        return chosen


def noise_power(exact: Tensor, got: Tensor) -> float:
    """The sum of squared differences; what code fills in is left out."""
    exact, got = without_fills(exact, got)
    return float((got - exact).square().sum())


def flat_outputs(outputs: Any) -> Tensor:
    """All floating point tensors of a model's output as one vector in float64, with 0 for nan and infinite values.

    Raises ModelError where there is none.
    """
    tensors = [v for v in pytree.tree_leaves(outputs) if isinstance(v, Tensor) and v.is_floating_point()]
    if not tensors:
        raise ModelError(
            "quantize_to_accuracy: wanted an output in floating point to compare, the model has none; pass it without its argmax"
        )
    return torch.cat([v.detach().double().flatten() for v in tensors]).nan_to_num(0, 0, 0)


def _dynamic_operators(
    model: nn.Module, search: _PrecisionSearch, wanted_sqnr: float, skip: tuple[str, ...], dynamic: Dynamic
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """The kinds of operators to quantize dynamically, embeddings and recurrent layers only where their noise is small, and the
    layers of LSTMs that stay float for that, each with its reason.
    """
    others = tuple(kind for kind in DEFAULT_OPERATORS if kind not in ("linear", "matmul"))
    try:
        quantized = build_dynamic(model, search.data[0], search.target, operators=others, skip=skip, dynamic=dynamic)
    except ModelError:  # there are none
        return DEFAULT_OPERATORS, {}

    def quality(candidate: nn.Module) -> float:
        with torch.no_grad(), mode(candidate, training=False):
            pairs = zip(search.data, search.float_outputs, strict=True)
            return decibels(search.signal, sum(noise_power(exact, flat_outputs(call(candidate, x))) for x, exact in pairs))

    least = wanted_sqnr - 10 * math.log10(0.25)
    noisy = noisy_lstm_layers(quantized, quality, least)
    try:
        if noisy:
            quantized = build_dynamic(
                model, search.data[0], search.target, operators=others, skip=skip, floating=noisy, dynamic=dynamic
            )
        if quality(quantized) >= least:
            return DEFAULT_OPERATORS, noisy
    except ModelError:  # nothing is left
        pass
    log.warning(
        "%s: its embeddings and recurrent layers stay float; quantized, they would take over a quarter of the allowed noise",
        type(model).__name__,
    )
    return ("linear", "matmul"), {}


def _file_outputs(path: Path, data: Sequence[Inputs]) -> list[Tensor]:
    """Outputs of a file for each batch, as `flat_outputs` makes them."""
    runtime = session(path)
    outputs = [runtime.run(None, numpy_inputs(runtime, inputs)) for inputs in data]
    return [flat_outputs([torch.from_numpy(v) for v in values]) for values in outputs]


def _report(
    search: _PrecisionSearch,
    precisions: Mapping[str, MatrixPrecision],
    wanted_sqnr: float,
    reached: float,
    outputs: Sequence[Tensor],
    times: tuple[float, float],
) -> AccuracyReport:
    """The record. reached: sqnr of the file's outputs. times: latency of the file, and of the float model's file."""
    matrices = tuple(
        MatrixChoice(
            name=str(weight[0]),
            layer=module_path(search.products[name]),
            precision=str(precision),
            ms=search.ms[name, precision],
            noise=search.noise[name, precision],
        )
        for name, precision in precisions.items()
        if (weight := weight_of(search.products[name])) is not None
    )
    cosine = torch.nn.functional.cosine_similarity(
        *without_fills(torch.cat(search.float_outputs), torch.cat(list(outputs))), dim=0
    )
    return AccuracyReport(
        matrices=matrices, wanted_sqnr=wanted_sqnr, sqnr=reached, cosine=float(cosine), ms=times[0], float_ms=times[1]
    )
