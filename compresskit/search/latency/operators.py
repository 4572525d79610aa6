"""The operators of an ONNX file as ONNX Runtime runs them on this machine, and the milliseconds of each.

They are those of the optimized graph: fused convolutions, blocked layouts, integer kernels, reorders.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compresskit.base.errors import CheckpointError
from compresskit.base.files import read_json, write_json
from compresskit.base.inputs import AnyInputs
from compresskit.export.check.profile.kernels import (
    MOST_EVENTS,
    Kernel,
    ProfiledFile,
    TypedShape,
    profiler_cost,
    run_in_turn,
)
from compresskit.export.check.profile.optimized_graph import RECURRENT_OPERATORS, WEIGHT

BYTES_OF = {"double": 8, "int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "bool": 1}  # others 4
WIDEST_KERNEL = 16  # channels that a kernel computes at once
#: Attributes that change which kernel runs or how long; those of sizes are in the shapes.
TOLD_APART = (
    "activation",
    "auto_pad",
    "axis",
    "axes",
    "channels_last",
    "dilations",
    "mode",
    "perm",
    "strides",
    "transA",
    "transB",
)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator of a file, without its values.

    Attributes:
        kind: operator and type of what it reads, such as "Conv float depthwise".
        form: what else tells its kernel from others besides the number of channels: sizes of images and windows, attributes.
        alignment: of its channels, see `_alignment`.
        macs: multiply-accumulates of a call. read, stored, written: bytes of what it computes from, of weights, and of results.
    """

    kind: str
    form: str
    alignment: tuple[int, ...]
    macs: float
    read: float
    stored: float
    written: float


@dataclass(frozen=True, kw_only=True)
class MeasuredFile:
    """What a file and its operators took.

    Attributes:
        milliseconds: of a call of the file.
        outside: of them, what no operator accounts for.
        operators: that ran, with the milliseconds of each; they and `outside` sum to `milliseconds`.
    """

    milliseconds: float
    outside: float
    operators: tuple[tuple[Operator, float], ...]

    def write(self, path: Path) -> None:
        """Write it as JSON; `read_measured` reads it."""
        write_json(path, {"milliseconds": self.milliseconds, "outside": self.outside, "operators": _grouped(self.operators)})


def read_measured(path: Path) -> MeasuredFile:
    """What `MeasuredFile.write` wrote. Raises CheckpointError where the file holds something else."""
    record = read_json(path, "the operators of a candidate")
    try:
        operators = [
            (Operator(**entry["operator"] | {"alignment": tuple(entry["operator"]["alignment"])}), float(entry["milliseconds"]))
            for entry in record["operators"]
            for _ in range(entry["times"])
        ]
        return MeasuredFile(milliseconds=record["milliseconds"], outside=record["outside"], operators=tuple(operators))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: no operators of a candidate in it ({error}); delete it") from None


def _grouped(operators: Sequence[tuple[Operator, float]]) -> list[dict[str, Any]]:
    """Equal operators as one entry with their mean time."""
    times: dict[Operator, list[float]] = defaultdict(list)
    for operator, milliseconds in operators:
        times[operator].append(milliseconds)
    return [
        {"operator": asdict(o), "milliseconds": math.fsum(found) / len(found), "times": len(found)} for o, found in times.items()
    ]


def measure_operators(
    path: Path, inputs: AnyInputs, *, threads: int, seconds: float, milliseconds: float | None = None
) -> MeasuredFile:
    """Run a file with and without ONNX Runtime's profiler, and take the times of its operators.

    Args:
        path: of the file. inputs: what it runs on.
        threads: of the runtime. seconds: to measure, half of them with the profiler.
        milliseconds: latency of the file as it was measured before, to which the times are scaled; None takes this measurement.

    Raises ExportError where the file does not load or run.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = ProfiledFile(path, inputs, threads, Path(folder) / "profile")
        run_in_turn([file], seconds, MOST_EVENTS)
        file.milliseconds = milliseconds or file.milliseconds
        kernels, taken = file.kernel_times(profiler_cost(Path(folder)))
    outside = max(0.0, file.milliseconds - math.fsum(taken.values()))
    operators = _operators(file, kernels)
    return MeasuredFile(
        milliseconds=file.milliseconds, outside=outside, operators=tuple((operators[name], taken[name]) for name in operators)
    )


def read_operators(path: Path, inputs: AnyInputs) -> list[Operator]:
    """The operators of a file that need not be measured; it is run once. Raises ExportError where it does not load or run."""
    with tempfile.TemporaryDirectory() as folder:
        file = ProfiledFile(path, inputs, 1, Path(folder) / "profile")
        return list(_operators(file, file.kernels()).values())


def _operators(file: ProfiledFile, kernels: Mapping[str, Kernel]) -> dict[str, Operator]:
    stored = {tensor.name: (_type_name(tensor.data_type), tuple(tensor.dims)) for tensor in file.optimized.initializer}
    nodes = {node.name: node for node in file.optimized.node}
    return {name: operator_of(nodes[name], kernel, stored) for name, kernel in kernels.items()}


def operator_of(node: Any, kernel: Kernel, stored: Mapping[str, TypedShape]) -> Operator:
    """A node of an optimized graph as an operator. stored: types and shapes of the graph's constants."""
    inputs = _typed_inputs(node, kernel, stored)
    constant = [inputs[name] for name in inputs if name in stored]
    computed = [inputs[name] for name in inputs if name not in stored]
    first = next(iter(inputs.values()), ("", ()))
    sizes = {a.name: a for a in node.attribute}
    place = WEIGHT.get(node.op_type, len(node.input))
    weight = inputs.get(node.input[place], first)[1] if place < len(node.input) else ()
    form: list[Any] = [len(inputs), *(f"{name}={_plain(sizes[name])}" for name in TOLD_APART if name in sizes)]
    kind = f"{node.domain.removeprefix('com.')}:{node.op_type} {first[0]}".lstrip(":")
    if "Conv" in node.op_type and weight:
        groups = sizes["group"].i if "group" in sizes else 1
        kind += "" if groups == 1 else " depthwise" if len(weight) > 1 and weight[1] == 1 else " grouped"
        form += [weight[2:], _positions(first[1], "channels_last" in sizes or node.op_type.startswith("Nhwc")), len(computed)]
        alignment = [_alignment(weight[1] * groups), _alignment(weight[0])]
    else:
        form += [len(first[1]), bool(constant)]
        alignment = [_alignment(shape[-1]) for _, shape in (first, kernel.writes[0] if kernel.writes else first) if shape]
    macs = _macs(node, kernel, first[1], weight, list(inputs.values())[1:3])
    return Operator(
        kind=kind,
        form=json.dumps(form),
        alignment=tuple(alignment),
        macs=macs,
        read=float(sum(map(_byte_count, computed))),
        stored=float(sum(map(_byte_count, constant))),
        written=float(sum(map(_byte_count, kernel.writes))),
    )


def _typed_inputs(node: Any, kernel: Kernel, stored: Mapping[str, TypedShape]) -> dict[str, TypedShape]:
    """Name of each input of a node -> its type and shape. The profiler does not see weights that a kernel packed."""
    seen, found = list(kernel.reads), {}
    for name in filter(None, node.input):
        if name not in stored:
            found[name] = seen.pop(0) if seen else ("", ())
            continue
        found[name] = stored[name]
        if seen and seen[0][1] == stored[name][1]:
            del seen[0]
    return found


def _type_name(data_type: int) -> str:
    """The name that ONNX Runtime's profiler gives a type of ONNX."""
    from onnx import TensorProto

    return str(TensorProto.DataType.Name(data_type)).lower()


def _alignment(channels: int) -> int:
    """The largest of 16, 8, 4, 2 and 1 that divides a number of channels: kernels compute so many at once."""
    return math.gcd(channels, WIDEST_KERNEL)


def _positions(shape: Sequence[int], last: bool) -> Sequence[int]:
    return shape[1:-1] if last else shape[2:]


def _plain(attribute: Any) -> Any:
    return list(attribute.ints) or (attribute.s.decode() if attribute.s else attribute.i)


def _byte_count(entry: TypedShape) -> int:
    kind, shape = entry
    return BYTES_OF.get(kind, 4) * math.prod(shape)


def _macs(node: Any, kernel: Kernel, first: Sequence[int], weight: Sequence[int], matrices: Sequence[TypedShape]) -> float:
    """Multiply-accumulates of convolutions, matrix products and recurrent layers; 0 for others."""
    if not kernel.writes:
        return 0.0
    made = math.prod(kernel.writes[0][1])
    if node.op_type in RECURRENT_OPERATORS:
        return float(math.prod(first[:2]) * sum(math.prod(shape) for _, shape in matrices))
    if node.op_type == "ConvTranspose":
        return float(math.prod(first) * math.prod(weight[1:]))
    if "Conv" in node.op_type and weight:
        return float(made * math.prod(weight[1:]))
    if node.op_type in WEIGHT or node.op_type == "MatMulNBits":
        return float(made * (first or (1,))[-1])
    return 0.0
