"""Profile ONNX files in ONNX Runtime, layer by layer: milliseconds, in integers or not, conversions, and why a layer is slow.

profile_layers(int8, fp32): the files run in turn, with and without the runtime's profiler; kernels are summed by layer.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from compresskit.base.errors import ExportError, SettingError
from compresskit.base.inputs import AnyInputs
from compresskit.export.check.file_layers import (
    BEFORE,
    FileLayer,
    file_layers,
    kind_of,
    match_layers,
    name_nodes_,
    optimized_layers,
)
from compresskit.export.check.optimized_graph import INTEGER_KERNELS
from compresskit.export.files import read_proto
from compresskit.measure import numpy_inputs, run_session, runtime_message, runtime_path, session

#: Operators that only change how values are stored.
CONVERSIONS = frozenset("QuantizeLinear DequantizeLinear DynamicQuantizeLinear ReorderInput ReorderOutput Cast".split())
FEW_CHANNELS = 16  # kernels compute so many at once
ROUNDS = 10
CHAIN, CHAIN_RUNS = 32, 50  # kernels, and runs, to measure what the profiler costs
MOST_EVENTS = 200_000  # of the profiler, which keeps a million at most
MOST_NAMED = 3  # operators
USUAL_SCALE = (0.8, 1.25)  # outside of it the factor is printed
FLOATS = frozenset(("float", "float16", "double", "bfloat16"))
INPUTS = "(inputs)"  # name of what comes before the first layer
WORST = 5  # layers that are named as eating the gain


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Time of one layer in one file.

    milliseconds: of all its kernels. head: of the kernel with the weight; conversions: of kernels that only change how values are
    stored (QuantizeLinear, DequantizeLinear, reorders, transposes that the runtime inserted); the rest is of other operators.
    floats: the operators that compute in float -> milliseconds. integer: whether any kernel computes in integers.
    operators: that ran, conversions included.
    """

    milliseconds: float = 0.0
    head: float = 0.0
    conversions: float = 0.0
    floats: dict[str, float] = field(default_factory=dict)
    integer: bool = False
    operators: tuple[str, ...] = ()

    @property
    def in_integers(self) -> str:
        """One of "yes", "partly", "no", and "-" where nothing is computed."""
        return ("partly" if self.floats else "yes") if self.integer else "no" if self.floats else "-"


@dataclass(frozen=True, kw_only=True)
class ProfiledLayer:
    """One layer of the model in a file and, where there is one to compare with, in the other.

    name: of the module or node; `INPUTS` for what comes before the first layer. this, other: None where the file has no such
    layer. cause: why it is not faster than in the other file; "" where it is, or where there is none. place: its number among the
    layers of the file; None for `INPUTS`, and for a layer that only the other file has.
    """

    name: str
    this: LayerTime | None
    other: LayerTime | None = None
    cause: str = ""
    place: int | None = None

    @property
    def lost(self) -> float:
        """Milliseconds that the layer takes longer than in the other file; negative where it takes less."""
        return (self.this.milliseconds if self.this else 0.0) - (self.other.milliseconds if self.other else 0.0)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a file goes; prints as a table.

    Attributes:
        path: of the file. against: of the one that it is compared with, "" for none.
        threads: of ONNX Runtime. rows: size of the first dimension of the first input.
        milliseconds: median latency without the profiler. outside: of it, what no kernel accounts for: calling the runtime,
            handing over between kernels. The times of the layers and this sum to the latency.
        scale: factor from the profiler's times to those shown, near 1 on a machine that does nothing else.
        against_milliseconds, against_outside: the same of the other file; None where there is none.
        layers: in the order of the file.
    """

    path: str
    against: str
    threads: int
    rows: int
    milliseconds: float
    outside: float
    scale: float
    against_milliseconds: float | None = None
    against_outside: float | None = None
    layers: tuple[ProfiledLayer, ...] = ()

    @property
    def eating(self) -> tuple[ProfiledLayer, ...]:
        """The layers that take at least as long as in the other file, the worst first."""
        return tuple(sorted((layer for layer in self.layers if layer.cause), key=lambda layer: -layer.lost))

    def __str__(self) -> str:
        both = self.against_milliseconds is not None
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        lines = [f"latency {self.milliseconds:.3f} ms with {threads}, {self.rows} at a time"]
        if self.against_milliseconds:
            ratio = self.milliseconds / self.against_milliseconds
            lines[0] += f"; {self.against} {self.against_milliseconds:.3f} ms ({ratio:.2f}x)"
        rows = [
            (
                "layer",
                *(("other ms",) if both else ()),
                "ms",
                "conversions",
                "in integers",
                "why not faster" if both else "in float",
            )
        ]
        for layer in self.layers:
            this = layer.this or LayerTime()
            other = (_shown(layer.other.milliseconds if layer.other else None),) if both else ()
            why = layer.cause if both else ", ".join(this.floats)
            conversions = _shown(this.conversions or None)
            rows.append(
                (layer.name, *other, _shown(this.milliseconds if layer.this else None), conversions, this.in_integers, why)
            )
        ends = ("", "", "")
        rows.append(("outside of kernels", *((_shown(self.against_outside),) if both else ()), _shown(self.outside), *ends))
        rows.append(("sum", *((_shown(self.against_milliseconds),) if both else ()), _shown(self.milliseconds), *ends))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        numbers = range(1, 3 + both)
        for row in rows:
            cells = (
                cell.rjust(w) if i in numbers else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  " + "  ".join(cells).rstrip())
        if not USUAL_SCALE[0] < self.scale < USUAL_SCALE[1]:
            lines.append(f"  the profiler's times were multiplied by {self.scale:.2f} to sum to the latency")
        if both:
            worst = [f"{layer.name} {layer.lost:+.3f} ms ({layer.cause})" for layer in self.eating[:WORST]]
            lines.append(f"  eat the gain: {'; '.join(worst)}" if worst else "  every layer is faster than in the other file")
        return "\n".join(lines)


def _shown(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.3f}"


def profile_layers(
    path: str | Path,
    inputs: AnyInputs,
    *,
    against: str | Path | None = None,
    threads: int = 1,
    seconds: float = 1.0,
    runs: int | None = None,
) -> Profile:
    """Measure where the time of a file goes, beside a second file of the same network.

    Args:
        path: of the file. against: of the other one, usually of the float model.
        inputs: what both files run on.
        threads: of ONNX Runtime.
        seconds: time to measure each file, half of it with the profiler. runs: at most so many, of which `ROUNDS` are the least.

    Raises SettingError for a setting out of range, or where the files have no layer in common; ExportError where a file does not
    load or run.
    """
    if threads < 1 or seconds <= 0:
        raise SettingError(f"audit(profile=True): wanted threads >= 1 and seconds > 0, got {threads} and {seconds}")
    paths = [path] if against is None else [path, against]
    with tempfile.TemporaryDirectory() as folder:
        files = [_ProfiledFile(p, inputs, threads, Path(folder) / str(i)) for i, p in enumerate(paths)]
        _run_in_turn(files, seconds, MOST_EVENTS if runs is None else runs)
        cost = _profiler_cost(Path(folder))
        times = [file.layer_times(cost) for file in files]
    outside = [file.milliseconds - sum(t.milliseconds for t in found.values()) for file, found in zip(files, times, strict=True)]
    this, other = files[0], files[-1]
    if against is None:
        names = {BEFORE: INPUTS} | {i: layer.name for i, layer in enumerate(this.layers)}
        layers = [ProfiledLayer(name=names[i], this=times[0][i], place=None if i < 0 else i) for i in sorted(times[0])]
    else:
        layers = _side_by_side(this, other, times)
    return Profile(
        path=str(path),
        against="" if against is None else str(against),
        threads=threads,
        rows=this.rows,
        milliseconds=this.milliseconds,
        outside=outside[0],
        scale=this.scale,
        against_milliseconds=None if against is None else other.milliseconds,
        against_outside=None if against is None else outside[1],
        layers=tuple(layers),
    )


def _side_by_side(this: _ProfiledFile, other: _ProfiledFile, times: Sequence[dict[int, LayerTime]]) -> list[ProfiledLayer]:
    pairs = match_layers(this.layers, other.layers)
    if this.layers and other.layers and not any(i is not None and j is not None for i, j in pairs):
        raise SettingError(
            f"audit(against=...): {this.path} and {other.path} have no layer in common: wanted two files of one network"
        )
    rows = [ProfiledLayer(name=INPUTS, this=times[0].get(BEFORE), other=times[1].get(BEFORE))]
    for i, j in pairs:
        layers = [files.layers[k] for files, k in ((other, j), (this, i)) if k is not None]
        name = next((layer.name for layer in layers if layer.name != layer.node), layers[0].name)
        own = None if i is None else times[0].get(i)
        their = None if j is None else times[1].get(j)
        rows.append(ProfiledLayer(name=name, this=own, other=their, cause=slow_cause(layers[-1], own, their), place=i))
    return [row for row in rows if row.this or row.other]


def slow_cause(layer: FileLayer, this: LayerTime | None, other: LayerTime | None) -> str:
    """Why a layer is no faster than in the other file: the part of it that grew most; "" where it is faster."""
    if this is None or other is None or this.milliseconds < other.milliseconds or this == other:
        return ""
    grown = {
        "conversion": this.conversions - other.conversions,
        "kernel": this.head - other.head,
        "others": (this.milliseconds - this.conversions - this.head) - (other.milliseconds - other.conversions - other.head),
    }
    part = max(grown, key=lambda name: grown[name])
    if part == "conversion":
        return f"conversions: {', '.join(kind for kind in this.operators if kind in CONVERSIONS or kind == 'Transpose')}"
    if part == "others":
        floating = [kind for kind in sorted(this.floats, key=lambda kind: -this.floats[kind]) if kind != layer.kind]
        if floating:
            return f"no integer kernel: {', '.join(floating[:MOST_NAMED])}"
        more = [kind for kind in this.operators if kind not in CONVERSIONS and kind not in other.operators]
        return f"operators of their own: {', '.join(more)}" if more else "other operators"
    if layer.kind in this.floats:
        return f"in float: {layer.kind}"
    if layer.depthwise:
        return "depthwise kernel"
    if 0 < layer.fewest_channels < FEW_CHANNELS:
        return f"few {'channels' if layer.kind in ('Conv', 'ConvTranspose') else 'features'}: {layer.fewest_channels}"
    return "integer kernel"


@dataclass
class _Kernel:
    """One node of the optimized graph, the type of what it computes, and the microseconds of its runs."""

    operator: str
    values: int
    floating: bool
    narrow: bool
    microseconds: list[float] = field(default_factory=list)

    def milliseconds(self, cost: _ProfilerCost) -> float:
        """Of a run that is neither disturbed nor lucky, without what the profiler takes."""
        return max(0.0, _middle_mean(self.microseconds) / 1000 - cost.base - self.values * cost.each)


@dataclass(frozen=True)
class _ProfilerCost:
    """Milliseconds that the profiler adds to a kernel: base, and each for every value that it reads; and between two kernels."""

    base: float
    each: float
    between: float


def _middle_mean(times: Sequence[float]) -> float:
    """Mean of the middle half: the profiler counts in whole microseconds, so that a median would be coarse."""
    ordered = sorted(times)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _profiler_cost(folder: Path) -> _ProfilerCost:
    """Measure what the profiler adds, on chains of kernels that have next to nothing to compute."""
    (one, between), (eight, _) = (_time_added(folder, values) for values in (1, 8))
    each = max(0.0, (eight - one) / 7)
    return _ProfilerCost(max(0.0, one - each), each, between)


def _time_added(folder: Path, values: int) -> tuple[float, float]:
    """Milliseconds that the profiler adds to a kernel that reads so many values, and between two kernels."""
    from onnx import TensorProto, helper

    nodes = [helper.make_node("Max", [f"x{i}"] * values, [f"x{i + 1}"], name=f"n{i}") for i in range(CHAIN)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x0", f"x{CHAIN}")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    feed = {"x0": np.ones(1, np.float32)}
    plain = session(model, optimize=False)
    profiled = _profiling_session(model, folder / f"chain{values}", threads=1, optimize=False)
    times = []
    for _ in range(CHAIN_RUNS):
        begin = time.perf_counter()
        plain.run(None, feed)
        times.append((time.perf_counter() - begin) * 1000 / CHAIN)
        profiled.run(None, feed)
    events = _events(profiled)
    kernels = [event["dur"] / 1000 for event in events if event.get("cat") == "Node"]
    runs = [event["dur"] / 1000 for event in events if event["name"] == "model_run"]
    kernel = _middle_mean(kernels)
    return kernel - _middle_mean(times), _middle_mean(runs) / CHAIN - kernel


def _events(session: Any) -> list[dict[str, Any]]:
    """What the profiler of a session recorded; it records no more."""
    events: list[dict[str, Any]] = json.loads(Path(session.end_profiling()).read_text())
    return events


def _profiling_session(
    source: str | bytes, folder: Path, *, threads: int, optimize: bool = True, weights: Path | None = None
) -> Any:
    """A session with the profiler, which writes its records and the optimized graph to a new folder.

    source: a path or the bytes of a file. weights: folder of its external data, where it is given as bytes.
    """
    import onnxruntime as ort

    folder.mkdir()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
    if weights is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


class _ProfiledFile:
    """A file in two sessions, one of them with the profiler."""

    def __init__(self, path: str | Path, inputs: AnyInputs, threads: int, folder: Path) -> None:
        import onnx  # heavy, and only auditing needs it

        self.path = path
        proto = read_proto(path)
        renamed = name_nodes_(proto.graph)
        self.source, self.layers = proto.graph, file_layers(proto.graph)
        self.plain = session(path, threads=threads)
        self.feed = numpy_inputs(self.plain, inputs)
        self.rows = next((a.shape[0] for a in self.feed.values() if a.ndim), 1)
        run_session(self.plain, self.feed, path)
        source = proto.SerializeToString() if renamed else runtime_path(path)
        try:
            self.profiled = _profiling_session(source, folder, threads=threads, weights=Path(path).resolve().parent)
        except Exception as error:
            raise ExportError(f"{path}: ONNX Runtime cannot profile it: {runtime_message(error)}") from error
        self.optimized = onnx.load(folder / "optimized.onnx", load_external_data=False).graph
        self.milliseconds = self.scale = 0.0
        self.runs: list[float] = []
        self.profiled.run(None, self.feed)

    def layer_times(self, cost: _ProfilerCost) -> dict[int, LayerTime]:
        """Index of the layer -> its time, read from the profile."""
        of_node = optimized_layers(self.source, self.layers, self.optimized)
        written = {node.name for node in self.source.node}
        kernels = self._kernels(of_node)
        taken = {name: kernel.milliseconds(cost) for name, kernel in kernels.items()}
        among = [run - sum(each) for run, *each in zip(self.runs, *(k.microseconds for k in kernels.values()), strict=True)]
        outside = max(0.0, _middle_mean(among) / 1000 - len(kernels) * cost.between)
        # Kernels are measured one by one, the latency as a whole; load on the machine shifts one against the other.
        self.scale = self.milliseconds / (sum(taken.values()) + outside)
        taken = {name: ms * self.scale for name, ms in taken.items()}
        members: dict[int, list[tuple[str, _Kernel]]] = defaultdict(list)
        for name, kernel in kernels.items():
            members[of_node[name]].append((name, kernel))
        times = {}
        for index, some in members.items():
            kind = self.layers[index].kind if index >= 0 else ""
            heads, conversions, floats = 0.0, 0.0, defaultdict[str, float](float)
            for name, kernel in some:
                ms, operator = taken[name], kind_of(kernel.operator)
                if operator in CONVERSIONS or (operator == "Transpose" and name not in written):
                    conversions += ms
                    continue
                if operator == kind:
                    heads += ms
                if kernel.floating and kernel.operator not in INTEGER_KERNELS:
                    floats[operator] += ms
            operators = dict.fromkeys(kind_of(kernel.operator) for _, kernel in some)
            computed = [k for _, k in some if kind_of(k.operator) not in CONVERSIONS]
            times[index] = LayerTime(
                milliseconds=sum(taken[name] for name, _ in some),
                head=heads,
                conversions=conversions,
                floats=dict(floats),
                integer=any(k.operator in INTEGER_KERNELS or (k.narrow and not k.floating) for k in computed),
                operators=tuple(operators),
            )
        return times

    def _kernels(self, names: dict[str, int]) -> dict[str, _Kernel]:
        """Node -> its times. Those of graphs inside of a node are part of the time of that node."""
        kernels: dict[str, _Kernel] = {}
        events = _events(self.profiled)
        self.runs = [event["dur"] for event in events if event["name"] == "model_run"]
        for event in events:
            name = event["name"].removesuffix("_kernel_time")
            if event.get("cat") != "Node" or name == event["name"] or name not in names:
                continue
            about = event["args"]
            if name not in kernels:
                given, made = (
                    {kind for entry in about.get(f"{end}_type_shape", ()) for kind in entry} for end in ("input", "output")
                )
                narrow = bool(made & {"uint8", "int8"})
                reads = len(about.get("input_type_shape", ()))
                kernels[name] = _Kernel(about["op_name"], reads, bool((given | made) & FLOATS) and not narrow, narrow)
            kernels[name].microseconds.append(event["dur"])
        return kernels


def _run_in_turn(files: Sequence[_ProfiledFile], seconds: float, runs: int) -> None:
    """Time the files without the profiler, and fill their profiles meanwhile."""
    repeats = []
    for file in files:
        begin = time.perf_counter()
        file.plain.run(None, file.feed)
        once = time.perf_counter() - begin
        most = min(runs, MOST_EVENTS // max(1, len(file.optimized.node))) // ROUNDS
        repeats.append(max(1, min(most, round(seconds / 2 / ROUNDS / once))))
    times: list[list[float]] = [[] for _ in files]
    for _ in range(ROUNDS):
        for i, file in enumerate(files):
            for _ in range(repeats[i]):
                begin = time.perf_counter()
                file.plain.run(None, file.feed)
                times[i].append((time.perf_counter() - begin) * 1000)
            for _ in range(repeats[i]):
                file.profiled.run(None, file.feed)
    for file, measured in zip(files, times, strict=True):
        file.milliseconds = statistics.median(measured)
