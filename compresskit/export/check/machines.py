"""Simulate the integer kernels of other machines: which products of a file come out differently there.

What ONNX Runtime computes in integers is the same everywhere, but for products of uint8 activations by int8 weights. Each family
of kernels adds them in its own way:

| machine | products | sums |
|---|---|---|
| vnni, amx | int32 | exact |
| avx2, avx512 without VNNI | of two neighbours in int16 | saturate, `quant.numerics.saturation` says more |
| neon | int32, or two neighbours in int16 after subtracting 128 | exact, unless both weights are -128 |
| wasm | int32 | exact |

Most files are proved from their weights alone: no pair can overflow, whatever the inputs. Where one could, the products of the
inputs at hand are computed in pairs.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from compresskit.base.errors import ExportError, SettingError
from compresskit.base.task import Inputs
from compresskit.export.files import KEY
from compresskit.measure import numpy_inputs, session

#: Name of each family of kernels -> how it adds products of uint8 by int8.
MACHINES = {
    "vnni": "exact", "amx": "exact", "avx2": "pairs", "avx512": "pairs", "neon": "shifted pairs", "wasm": "exact"
}  # fmt: skip
#: Operators of ONNX Runtime with integer products -> places of the activation, its zero point, and the weight among the inputs.
PRODUCT_OPERATORS = {
    "QLinearConv": (0, 2, 3),
    "QGemm": (0, 2, 3),
    "QLinearMatMul": (0, 2, 3),
    "MatMulInteger": (0, 2, 1),
    "MatMulIntegerToFloat": (0, 4, 1),
    "DynamicQuantizeMatMul": (0, None, 1),
    "QAttention": (0, None, 1),
}
INT16_MAX = 2**15 - 1
ROWS_AT_ONCE = 4096  # of a product that is computed in pairs


@dataclass(frozen=True, kw_only=True)
class MachineAgreement:
    """Whether a machine computes the same integers as exact sums.

    machine: of `MACHINES`.
    proved: no pair of weights can overflow there, whatever the inputs.
    layer, overflowing: where one did on the data: name of the first such operator, and the fraction of its sums that differ.
    """

    machine: str
    proved: bool
    layer: str = ""
    overflowing: float = 0.0

    def __str__(self) -> str:
        if self.layer:
            return f"{self.layer}: {self.overflowing:.2%} of the sums overflow int16"
        return "the same integers, whatever the inputs" if self.proved else "the same integers on these samples"


def machines_named(machines: str | Sequence[str]) -> tuple[str, ...]:
    """Names of machines, of "all" or a list of names. Raises SettingError for one that cannot be simulated."""
    names = tuple(MACHINES) if machines == "all" else (machines,) if isinstance(machines, str) else tuple(machines)
    if unknown := [name for name in names if name not in MACHINES]:
        raise SettingError(
            f'verify_onnx(machines=...): wanted "all" or names of {", ".join(MACHINES)}, got {unknown}; of other machines the'
            " kernels are not known here"
        )
    return names


class MachineCheck:
    """Compares the products of a file on several machines with exact ones: first its weights, then, where they allow it, data.

    Raises ExportError for a file that this library did not write, whose kernels and scales it cannot know.
    """

    def __init__(self, path: str | Path, machines: Sequence[str]) -> None:
        import onnx  # heavy, and only this needs it

        self.path, self.machines, self.run = path, tuple(machines), None
        self.suspects: list[_Product] = []
        self.found: dict[tuple[str, str], list[int]] = {}
        if not machines:
            return
        proto = onnx.load(path, load_external_data=False)
        if not any(entry.key == KEY for entry in proto.metadata_props):
            raise ExportError(
                f"{path}: verify_onnx(machines=...) takes files that export_onnx wrote, this one was made by"
                f" {proto.producer_name or 'an unknown tool'}: which kernels run it, and how they pair its weights, is not known;"
                " export the model with export_onnx, or leave machines out"
            )
        with tempfile.TemporaryDirectory() as folder:
            self.graph = _optimized(path, Path(folder))
            products = _products(self.graph.graph)
            self.suspects = [p for p in products if any(p.may_overflow(MACHINES[name]) for name in self.machines)]
            self.run = self._session(Path(folder)) if any(p.simulated for p in self.suspects) else None

    def _session(self, folder: Path) -> Any:
        """A session of the optimized file that also returns the inputs of the products in question."""
        import onnx

        wanted = dict.fromkeys(p.activation for p in self.suspects if p.simulated)
        given = {value.name for value in (*self.graph.graph.output, *self.graph.graph.input)}
        self.graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in given)
        onnx.save(self.graph, folder / "watched.onnx", save_as_external_data=False)
        return session(folder / "watched.onnx", optimize=False)

    def add(self, inputs: Inputs) -> None:
        """Compute, on one batch, the products that weights alone do not prove."""
        if self.run is None:
            return
        simulated = [p for p in self.suspects if p.simulated]
        fed = numpy_inputs(self.run, inputs)
        asked = [p.activation for p in simulated if p.activation not in fed]
        values = fed | dict(zip(asked, self.run.run(asked, fed), strict=True)) if asked else fed
        for product in simulated:
            rows = product.rows(values[product.activation])
            for how in {MACHINES[name] for name in self.machines} - {"exact"}:
                total = self.found.setdefault((product.name, how), [0, 0])
                total[0] += product.overflows(rows, how)
                total[1] += rows.shape[1] * len(product.weight)

    def result(self) -> tuple[MachineAgreement, ...]:
        """One entry for each machine."""
        return tuple(self._of(name) for name in self.machines)

    def _of(self, name: str) -> MachineAgreement:
        how = MACHINES[name]
        suspects = [p for p in self.suspects if p.may_overflow(how)]
        for product in suspects:
            wrong, count = self.found.get((product.name, how), (1, 1))
            if wrong:
                return MachineAgreement(machine=name, proved=False, layer=product.name, overflowing=wrong / count)
        return MachineAgreement(machine=name, proved=not suspects)


@dataclass(frozen=True, eq=False)
class _Product:
    """An integer product by a constant.

    weight: (outputs, values) of all groups, int8, in the order in which kernels pair values. activation: name of its input.
    simulated: whether its sums can be computed here; those of an LSTM, whose inputs are inside of it, cannot.
    """

    name: str
    activation: str
    weight: np.ndarray
    node: Any = None
    zero_point: int = 0
    simulated: bool = True

    def may_overflow(self, how: str) -> bool:
        return bool(self.offending(how).any())

    def offending(self, how: str) -> np.ndarray:
        """Which pairs could overflow on some input, (outputs, pairs)."""
        even = self.weight.shape[1] // 2 * 2
        first, second = (self.weight[:, i:even:2].astype(np.int32) for i in (0, 1))
        if how == "pairs":
            return np.abs(first + second) > INT16_MAX // 255
        return (first == -128) & (second == -128) if how == "shifted pairs" else np.zeros(first.shape, bool)

    def rows(self, activation: np.ndarray) -> np.ndarray:
        """The input as (groups, rows, values), uint8, at most `ROWS_AT_ONCE` rows of it."""
        if activation.dtype == np.float32:  # the operator itself rounds it
            low, high = min(0.0, float(activation.min())), max(0.0, float(activation.max()))
            scale = np.float32((high - low) / 255) or np.float32(1)
            activation = np.clip(np.rint(activation / scale) + np.rint(-low / scale), 0, 255).astype(np.uint8)
        rows = (
            activation.reshape(1, -1, activation.shape[-1]) if self.node.op_type != "QLinearConv" else self._columns(activation)
        )
        return rows[:, :: max(1, math.ceil(rows.shape[1] / ROWS_AT_ONCE))]

    def _columns(self, activation: np.ndarray) -> np.ndarray:
        settings = {a.name: list(a.ints) or a.i for a in self.node.attribute}
        x, rank = torch.from_numpy(activation), activation.ndim - 2
        pads, groups = settings.get("pads", [0] * 2 * rank), settings.get("group", 1)
        x = F.pad(x, [v for d in reversed(range(rank)) for v in (pads[d], pads[d + rank])], value=self.zero_point)
        for d, size in enumerate(settings["kernel_shape"]):
            dilation, stride = settings.get("dilations", [1] * rank)[d], settings.get("strides", [1] * rank)[d]
            x = x.unfold(2 + d, (size - 1) * dilation + 1, stride)[..., ::dilation]
        kept = max(1, math.ceil(len(x) * math.prod(x.shape[2 : 2 + rank]) / ROWS_AT_ONCE))
        x = x.unflatten(1, (groups, -1)).movedim(1, 0).movedim(2, -1)  # (groups, batch, *positions, *kernel, channels)
        return x.flatten(1 + 1 + rank).flatten(1, 1 + rank)[:, ::kept].numpy()

    def overflows(self, rows: np.ndarray, how: str) -> int:
        """How many sums of rows (groups, rows, values) times weights overflow somewhere."""
        groups, limit = len(rows), (-(2**15), INT16_MAX)
        wrong = np.zeros((len(self.weight), rows.shape[1]), bool)
        for output, pair in zip(*np.nonzero(self.offending(how)), strict=True):
            part = rows[output // (len(self.weight) // groups), :, 2 * pair : 2 * pair + 2].astype(np.int32)
            total = (part - (128 if how == "shifted pairs" else 0)) @ self.weight[output, 2 * pair : 2 * pair + 2].astype(
                np.int32
            )
            wrong[output] |= (total < limit[0]) | (total > limit[1])
        return int(wrong.sum())


def _optimized(path: str | Path, folder: Path) -> Any:
    """A file after ONNX Runtime's fusions, before it chooses memory layouts for this machine, with its weights."""
    import onnx
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
    try:
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(f"{path}: ONNX Runtime cannot load it: {error}") from error
    return onnx.load(folder / "optimized.onnx")


def _products(graph: Any) -> list[_Product]:
    """Every product of uint8 activations by an int8 constant whose kernel adds pairs, in the order of execution."""
    from onnx import numpy_helper

    constants = {tensor.name: tensor for tensor in graph.initializer}

    def constant(node: Any, place: int | None) -> np.ndarray | None:
        name = node.input[place] if place is not None and place < len(node.input) else ""
        return numpy_helper.to_array(constants[name]) if name in constants else None

    found: list[_Product] = []
    for node in graph.node:
        name = node.name or node.output[0]
        if node.op_type == "DynamicQuantizeLSTM":
            for place in (1, 2):  # (directions, inputs, outputs)
                weight = constant(node, place)
                if weight is not None and weight.dtype == np.int8:
                    rows = np.moveaxis(weight, 1, -1).reshape(-1, weight.shape[1])
                    found.append(_Product(name, node.input[0], rows, node, simulated=False))
        if node.op_type not in PRODUCT_OPERATORS:
            continue
        activation, zero, place = PRODUCT_OPERATORS[node.op_type]
        weight, zero_point = constant(node, place), constant(node, zero)
        signed = zero_point is not None and zero_point.dtype == np.int8
        packed = None if weight is None or weight.dtype != np.int8 or signed else _packed_rows(node, weight)
        if packed is not None:
            found.append(
                _Product(name, node.input[activation], packed, node, 0 if zero_point is None else int(zero_point.flat[0]))
            )
    return found


def _packed_rows(node: Any, weight: np.ndarray) -> np.ndarray | None:
    """The weight as (outputs, values) in the order that kernels pair; None where they add no pairs."""
    settings = {a.name: a.i for a in node.attribute}
    if node.op_type == "QLinearConv":
        groups = settings.get("group", 1)
        if groups > 1 and weight.shape[:2] == (groups, 1):
            return None
        return np.moveaxis(weight, 1, -1).reshape(len(weight), -1)
    if settings.get("transB", 0):
        return weight
    return np.moveaxis(weight, -2, -1).reshape(-1, weight.shape[-2])
