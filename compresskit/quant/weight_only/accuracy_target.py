"""Accuracy first: each matrix in the fastest form that still lets the model's outputs meet a floor, as measured on this machine.

    forms of a matrix      dynamic int8; 8 and 4 bits in blocks (MatMulNBits, its inputs rounded in blocks); float
    latency of a form      timed for each shape of product, by itself, in ONNX Runtime
    damage of a form       noise that it alone puts into the outputs, on calibration data
    choice                 all in their fastest forms, then, while the outputs are too noisy, the change that takes away most
                           noise for its time
    proof                  the file that comes out, run on the data

An int8 matrix has a scale for each channel: one for all is no faster, and never better.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.inputs import Batches, first_and_all
from compresskit.base.task import Inputs, call, first_rows
from compresskit.export import export_onnx
from compresskit.graph.capture import Captured, Dynamic, module_path
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor, mode
from compresskit.measure import latency, numpy_inputs, session
from compresskit.quant.dynamic.placement_dynamic import DEFAULT
from compresskit.quant.dynamic.quantize_dynamic import quantize_dynamic
from compresskit.quant.numerics.operators import PRODUCTS
from compresskit.quant.numerics.targets import X86, Target
from compresskit.quant.passes.channel_scaling import weight_of
from compresskit.quant.passes.prepare_graph import prepare_graph
from compresskit.quant.weight_only.per_matrix import FLOAT, FORMS, MatrixForm, Mixed, build_mixed, run_in_forms
from compresskit.quant.weight_only.quantize_weights import quantize_weights
from compresskit.quant.weight_only.storage import NBITS_INT8

log = logging.getLogger(__name__)

ROUNDS = 6  # times that a choice is made again after the whole model turned out noisier than the sum of its parts


@dataclass(frozen=True, kw_only=True)
class MatrixRow:
    """One matrix: its form, milliseconds of its products by themselves at batch 1, and the noise that it puts into the outputs, a
    share of the signal.
    """

    name: str
    layer: str
    form: str
    ms: float
    noise: float


@dataclass(frozen=True, kw_only=True)
class Met:
    """What was chosen, and what the file that came out does; prints as a table.

    floor, reached: SQNR of the outputs in dB, wanted, and of the file in ONNX Runtime. cosine: of all outputs together.
    ms, float_ms: of the file and of the float model's, measured in turn, batch 1, one thread.
    """

    rows: tuple[MatrixRow, ...]
    floor: float
    reached: float
    cosine: float
    ms: float
    float_ms: float

    def __str__(self) -> str:
        head = (
            f"{self.reached:.1f} dB (floor {self.floor:.1f}), cosine {self.cosine:.5f}, {self.ms:.3f} ms,"
            f" {self.ms / self.float_ms:.2f} of float"
        )
        width, kind = (max(len(getattr(row, which)) for row in self.rows) for which in ("name", "form"))
        return "\n".join(
            [head, *(f"  {r.name:<{width}}  {r.form:<{kind}}  {r.ms:.3f} ms  noise {r.noise:.1e}" for r in self.rows)]
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        return asdict(self)


def meet_floor(
    model: nn.Module,
    batches: Batches,
    *,
    floor: float | None = None,
    cosine: float | None = None,
    target: Target = X86,
    skip: tuple[str, ...] = (),
    dynamic: Dynamic = (0,),
    seconds: float = 0.3,
) -> tuple[Mixed, Met]:
    """The fastest quantized copy of a model whose outputs are still good enough, and what was chosen.

    Each product by a stored matrix runs as dynamic int8, in blocks of 8 or 4 bits whose inputs are rounded in blocks, too, or in
    float. Tables and recurrent layers are in dynamic int8 where that takes at most a quarter of the noise that is allowed.

    Args:
        model: any float module; it is left as it was.
        batches: an iterable of inputs, or one batch, of the batch size and length that it will see: dynamic ranges are those of a
            batch. The file is timed on the first row of the first.
        floor: SQNR of all outputs, in dB, that the file must have on these batches; or
        cosine: of outputs with the float model's, in (0, 1), from which the floor follows: -10 log10(2 (1 - cosine)).
        target, skip, dynamic: as in `quantize_dynamic`.
        seconds: to time each form of each shape of product.

    Raises SettingError for a floor that is none, DataError without batches, ModelError where nothing that is rounded meets it or
    is faster than float.
    """
    floor = _floor(floor, cosine)
    data = list(first_and_all(batches, "meet_floor")[1])
    captured, _, _ = prepare_graph(model, data[0], replace(target, operators={}), skip, dynamic)
    work = _Work(captured, data, target, skip)
    if not work.products:
        raise ModelError(f"{type(model).__name__}: it has no product by a stored matrix whose form could be chosen")
    work.time_forms(seconds)
    work.measure_damage()
    if all(form == FLOAT for form in work.choose(math.inf).values()):
        name = type(model).__name__
        raise ModelError(f"{name}: float is the fastest form of its products here; quantize_dynamic makes it smaller")
    operators = _others(model, work, floor, skip, dynamic)
    budget = 10 ** (-floor / 10)
    for _ in range(ROUNDS):
        forms = work.choose(budget)
        if all(form == FLOAT for form in forms.values()):
            break
        mixed = build_mixed(model, data[0], target, forms, operators=operators, skip=skip, dynamic=dynamic)
        met = _proof(model, mixed, work, forms, floor, seconds)
        if met.reached >= floor:
            return mixed, met
        budget *= min(0.9, 10 ** ((met.reached - floor) / 10))
    raise ModelError(
        f"{type(model).__name__}: nothing that is rounded meets {floor:.1f} dB; keep it in float, or lower the floor"
    )


def _floor(floor: float | None, cosine: float | None) -> float:
    if (floor is None) == (cosine is None):
        raise SettingError("meet_floor: give floor= (dB) or cosine=, one of the two")
    if cosine is not None:
        if not 0 < cosine < 1:
            raise SettingError(f"meet_floor(cosine=...): wanted a number in (0, 1), got {cosine}")
        return -10 * math.log10(2 * (1 - cosine))
    assert floor is not None
    if not math.isfinite(floor) or floor <= 0:
        raise SettingError(f"meet_floor(floor=...): wanted decibels > 0, got {floor}")
    return floor


class _Work:
    """Products of a captured graph, what each form of each costs, and what it does to the outputs."""

    def __init__(self, captured: Captured, data: Sequence[Inputs], target: Target, skip: tuple[str, ...]) -> None:
        self.captured, self.data, self.target = captured, data, target
        self.products: dict[str, Node] = {}
        for node in captured.module.graph.nodes:
            path = module_path(node)
            if (found := weight_of(node)) is None or any(path == s or path.startswith(f"{s}.") for s in skip):
                continue
            weight = get_tensor(captured.module, found[0])
            readers = [n for n in captured.module.graph.nodes if n.op == "get_attr" and n.target == found[0]]
            if sum(len(n.users) for n in readers) == 1 and bool(weight.any()):
                self.products[node.name] = node
        self.ms: dict[tuple[str, MatrixForm], float] = {}
        self.noise: dict[tuple[str, MatrixForm], float] = {}
        with torch.no_grad():
            self.wanted = [self._outputs(inputs, {}) for inputs in data]
        self.signal = sum(float(v.square().sum()) for v in self.wanted)

    def _outputs(self, inputs: Inputs, forms: Mapping[str, MatrixForm]) -> Tensor:
        return joined(run_in_forms(self.captured.module, pytree.tree_leaves(inputs), forms, self.target.weights))

    def time_forms(self, seconds: float) -> None:
        """Time each form of each shape of product by itself, the forms in turn."""
        shapes: dict[tuple[int, int, int], list[str]] = {}
        for name, node in self.products.items():
            x = self.captured.shapes[node.args[PRODUCTS[node.target][0]].name]
            channels = self.captured.shapes[name][-1]
            rows = max(1, math.prod(x[:-1]) // max(1, next(iter(pytree.tree_leaves(self.captured.example))).shape[0]))
            shapes.setdefault((rows, x[-1], channels), []).append(name)
        for (rows, inputs, channels), names in tqdm(shapes.items(), desc="time products", disable=None, leave=False):
            layer, example = nn.Linear(inputs, channels).eval(), (torch.randn(2, rows, inputs),)
            with TemporaryDirectory() as folder:
                paths = []
                for i, form in enumerate(FORMS):
                    kept: nn.Module = layer
                    if form.dynamic:
                        kept = quantize_dynamic(layer, example, target=self.target)
                    elif form.blocks is not None:
                        kept = quantize_weights(layer, example, blocks=form.blocks, form=NBITS_INT8)
                    paths.append(export_onnx(kept, Path(folder) / f"{i}.onnx", example))
                times = latency(paths, first_rows(example, 1), seconds=seconds, rounds=7)
            for name in names:
                self.ms.update({(name, form): time for form, time in zip(FORMS, times, strict=True)})

    def measure_damage(self) -> None:
        """Noise of each form of each product that is faster than every more accurate one, as a share of the signal."""
        for name in tqdm(self.products, desc="measure damage", disable=None, leave=False):
            self.noise[name, FLOAT] = 0.0
            best = self.ms[name, FLOAT]
            for form in FORMS[1:]:
                if self.ms[name, form] < best:
                    best = self.ms[name, form]
                    self.noise[name, form] = self.total({name: form})

    def total(self, forms: Mapping[str, MatrixForm]) -> float:
        """Noise in the outputs with the given forms, as a share of the signal."""
        with torch.no_grad():
            lost = sum(
                float((self._outputs(inputs, forms) - wanted).square().sum())
                for inputs, wanted in zip(self.data, self.wanted, strict=True)
            )
        return lost / self.signal

    def choose(self, budget: float) -> dict[str, MatrixForm]:
        """A form for each product, so that their noise adds up to at most `budget`."""
        open_ = {name: [f for f in FORMS if (name, f) in self.noise] for name in self.products}
        forms = {name: min(given, key=lambda f, n=name: self.ms[n, f]) for name, given in open_.items()}  # type: ignore[misc]
        while sum(self.noise[item] for item in forms.items()) > budget:
            best, found = 0.0, None
            for name, now in forms.items():
                for form in open_[name]:
                    less = self.noise[name, now] - self.noise[name, form]
                    more = max(self.ms[name, form] - self.ms[name, now], 1e-9)
                    if less > 0 and less / more > best:
                        best, found = less / more, (name, form)
            if found is None:
                break
            forms[found[0]] = found[1]
        return forms


def joined(outputs: Any) -> Tensor:
    """All floating point tensors of an output as one row, in float64; what is not finite as 0."""
    tensors = [v for v in pytree.tree_leaves(outputs) if isinstance(v, Tensor) and v.is_floating_point()]
    return torch.cat([v.detach().double().flatten() for v in tensors]).nan_to_num(0, 0, 0)


def _others(model: nn.Module, work: _Work, floor: float, skip: tuple[str, ...], dynamic: Dynamic) -> tuple[str, ...]:
    """The kinds of operators that are quantized dynamically: tables and recurrent layers only where they may be."""
    others = tuple(kind for kind in DEFAULT if kind not in ("linear", "matmul"))
    try:
        quantized = quantize_dynamic(model, work.data[0], target=work.target, operators=others, skip=skip, dynamic=dynamic)
    except ModelError:  # there are none
        return DEFAULT
    with torch.no_grad(), mode(quantized, training=False):
        pairs = zip(work.data, work.wanted, strict=True)
        lost = sum(float((joined(call(quantized, inputs)) - wanted).square().sum()) for inputs, wanted in pairs)
    if lost <= 0.25 * 10 ** (-floor / 10) * work.signal:
        return DEFAULT
    log.warning("%s: its tables and recurrent layers stay float, rounded they take too much of the floor", type(model).__name__)
    return ("linear", "matmul")


def _proof(model: nn.Module, mixed: Mixed, work: _Work, forms: Mapping[str, MatrixForm], floor: float, seconds: float) -> Met:
    """Write the file, run it on the data, time it beside the float one."""
    with TemporaryDirectory() as folder:
        paths = [export_onnx(m, Path(folder) / f"{i}.onnx", work.data[0]) for i, m in enumerate((mixed, work.captured.module))]
        runtime = session(paths[0])
        got = [joined([torch.from_numpy(v) for v in runtime.run(None, numpy_inputs(runtime, x))]) for x in work.data]
        times = latency(paths, first_rows(work.data[0], 1), seconds=max(seconds, 0.5))
    lost = sum(float((g - w).square().sum()) for g, w in zip(got, work.wanted, strict=True))
    a, b = torch.cat(got), torch.cat(work.wanted)
    rows = tuple(
        MatrixRow(
            name=str(found[0]),
            layer=module_path(work.products[name]),
            form=str(form),
            ms=work.ms[name, form],
            noise=work.noise[name, form],
        )
        for name, form in forms.items()
        if (found := weight_of(work.products[name])) is not None
    )
    return Met(
        rows=rows,
        floor=floor,
        reached=10 * math.log10(work.signal / lost) if lost > 0 else math.inf,
        cosine=float(torch.nn.functional.cosine_similarity(a, b, dim=0)),
        ms=times[0],
        float_ms=times[1],
    )
