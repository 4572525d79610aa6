"""Profile the kernels of ONNX files in ONNX Runtime: the times, types and shapes of each, and what the profiler itself takes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from compresskit.base.errors import ExportError, runtime_message
from compresskit.base.inputs import AnyInputs
from compresskit.export.check.profile.file_layers import file_layers, name_nodes_
from compresskit.export.files import DiskError, read_proto
from compresskit.measure import SHORT_SPIN, numpy_inputs, run_session, runtime_path, session

ROUNDS = 10
CHAIN, CHAIN_RUNS = 32, 50  # kernels, and runs, to measure what the profiler costs
MOST_EVENTS = 200_000  # of the profiler, which keeps a million at most
FLOATS = frozenset(("float", "float16", "double", "bfloat16"))

TypedShape = tuple[str, tuple[int, ...]]


@dataclass
class Kernel:
    """One node of the optimized graph: types and shapes of what it reads and writes, and the microseconds of its runs."""

    operator: str
    reads: tuple[TypedShape, ...]
    writes: tuple[TypedShape, ...]
    microseconds: list[float] = field(default_factory=list)

    @property
    def narrow(self) -> bool:
        """Whether it gives values of 8 bits."""
        return any(kind in ("uint8", "int8") for kind, _ in self.writes)

    @property
    def floating(self) -> bool:
        """Whether it computes in float."""
        return any(kind in FLOATS for kind, _ in (*self.reads, *self.writes)) and not self.narrow

    def milliseconds(self, cost: ProfilerCost) -> float:
        """Of a run that is neither disturbed nor lucky, without what the profiler takes."""
        return max(0.0, middle_mean(self.microseconds) / 1000 - cost.base - len(self.reads) * cost.each)


@dataclass(frozen=True)
class ProfilerCost:
    """Milliseconds that the profiler adds to a kernel: base, and each for every value that it reads; and between two kernels."""

    base: float
    each: float
    between: float


def middle_mean(times: Sequence[float]) -> float:
    """Mean of the middle half: the profiler counts in whole microseconds, so that a median would be coarse."""
    ordered = sorted(times)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def profiler_cost(folder: Path) -> ProfilerCost:
    """Measure what the profiler adds, on chains of kernels that have next to nothing to compute."""
    (one, between), (eight, _) = (_time_added(folder, values) for values in (1, 8))
    each = max(0.0, (eight - one) / 7)
    return ProfilerCost(max(0.0, one - each), each, between)


def _time_added(folder: Path, values: int) -> tuple[float, float]:
    """Milliseconds that the profiler adds to a kernel that reads so many values, and between two kernels."""
    from onnx import TensorProto, helper

    nodes = [helper.make_node("Max", [f"x{i}"] * values, [f"x{i + 1}"], name=f"n{i}") for i in range(CHAIN)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x0", f"x{CHAIN}")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    feed = {"x0": np.ones(1, np.float32)}
    plain = session(model, optimize=False)
    profiled = profiling_session(model, folder / f"chain{values}", threads=1, optimize=False)
    times = []
    for _ in range(CHAIN_RUNS):
        begin = time.perf_counter()
        plain.run(None, feed)
        times.append((time.perf_counter() - begin) * 1000 / CHAIN)
        profiled.run(None, feed)
    events = profiler_events(profiled)
    kernels = [event["dur"] / 1000 for event in events if event.get("cat") == "Node"]
    runs = [event["dur"] / 1000 for event in events if event["name"] == "model_run"]
    kernel = middle_mean(kernels)
    return kernel - middle_mean(times), middle_mean(runs) / CHAIN - kernel


def profiler_events(session: Any) -> list[dict[str, Any]]:
    """What the profiler of a session recorded; it records no more.

    Raises DiskError where ONNX Runtime could not write all of it, of which it says nothing.
    """
    path = Path(session.end_profiling())
    try:
        events: list[dict[str, Any]] = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise DiskError(
            f"{path.parent}: wanted to write what ONNX Runtime measured of each operator, got a file that was cut short; free"
            " space there, allow larger files (ulimit -f), or set TMPDIR to another folder"
        ) from error
    return events


def profiling_session(
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
    options.add_session_config_entry(*SHORT_SPIN)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
    if weights is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


class ProfiledFile:
    """A file in two sessions, one of them with the profiler."""

    def __init__(self, path: str | Path, inputs: AnyInputs, threads: int, folder: Path) -> None:
        import onnx  # heavy, and only auditing needs it

        self.path = path
        proto = read_proto(path)
        renamed = name_nodes_(proto.graph)
        self.source, self.layers = proto.graph, file_layers(proto.graph)
        self.plain = session(path, threads=threads)
        self.feed = numpy_inputs(self.plain, inputs, path)
        self.rows = next((a.shape[0] for a in self.feed.values() if a.ndim), 1)
        run_session(self.plain, self.feed, path)
        source = proto.SerializeToString() if renamed else runtime_path(path)
        try:
            self.profiled = profiling_session(source, folder, threads=threads, weights=Path(path).resolve().parent)
        except Exception as error:
            raise ExportError(f"{path}: ONNX Runtime cannot profile it: {runtime_message(error)}") from error
        self.optimized = onnx.load(folder / "optimized.onnx", load_external_data=False).graph
        self.milliseconds = self.scale = 0.0
        self.runs: list[float] = []
        self.profiled.run(None, self.feed)

    def kernel_times(self, cost: ProfilerCost) -> tuple[dict[str, Kernel], dict[str, float]]:
        """Node -> its kernel, and its milliseconds, scaled so that they and what is outside of kernels sum to the latency."""
        kernels = self.kernels()
        taken = {name: kernel.milliseconds(cost) for name, kernel in kernels.items()}
        among = [run - sum(each) for run, *each in zip(self.runs, *(k.microseconds for k in kernels.values()), strict=True)]
        outside = max(0.0, middle_mean(among) / 1000 - len(kernels) * cost.between)
        # Kernels are measured one by one, the latency as a whole; load on the machine shifts one against the other.
        self.scale = self.milliseconds / (sum(taken.values()) + outside)
        return kernels, {name: ms * self.scale for name, ms in taken.items()}

    def kernels(self) -> dict[str, Kernel]:
        """Node -> its kernel. Times of graphs inside of a node are part of the time of that node."""
        events = profiler_events(self.profiled)
        self.runs = [event["dur"] for event in events if event["name"] == "model_run"]
        return kernels_of(events, {node.name for node in self.optimized.node})


def kernels_of(events: Sequence[dict[str, Any]], names: Container[str]) -> dict[str, Kernel]:
    """Node -> its kernel, for nodes of these names, read from what the profiler recorded."""
    kernels: dict[str, Kernel] = {}
    for event in events:
        name = event["name"].removesuffix("_kernel_time")
        if event.get("cat") != "Node" or name == event["name"] or name not in names:
            continue
        about = event["args"]
        if name not in kernels:
            reads, writes = (
                tuple((kind, tuple(shape)) for entry in about.get(f"{end}_type_shape", ()) for kind, shape in entry.items())
                for end in ("input", "output")
            )
            kernels[name] = Kernel(about["op_name"], reads, writes)
        kernels[name].microseconds.append(event["dur"])
    return kernels


def run_in_turn(files: Sequence[ProfiledFile], seconds: float, runs: int) -> None:
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
