"""Benchmark ONNX files against one another, and make random inputs for a file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compresskit.base.errors import ExportError, SettingError
from compresskit.base.task import Inputs
from compresskit.export.check.runtimes import installed_openvino, openvino_run
from compresskit.export.files import file_bytes, read_proto
from compresskit.measure import numpy_inputs, run_session, session, time_in_turn

log = logging.getLogger(__name__)

#: Input types by the name that ONNX Runtime gives them.
NUMPY_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


TIMED_RUNTIMES = ("onnxruntime", "openvino")  # that files are timed in


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Latency of one file in one runtime.

    milliseconds: median. ratio: to the first file in the first runtime. bytes: of the file with its external data.
    """

    path: str
    milliseconds: float
    ratio: float
    bytes: int
    runtime: str = "onnxruntime"


def benchmark(
    paths: Sequence[str | Path],
    inputs: Inputs | None = None,
    *,
    batch: int = 1,
    size: int = 64,
    threads: int = 1,
    seconds: float = 1.0,
    runtimes: Sequence[str] | None = None,
) -> list[Timing]:
    """Median milliseconds of each file in each runtime, all run in turn so that they see the same machine.

    Args:
        paths: of ONNX files that take the same inputs.
        inputs: a tuple or a dict; random numbers if None, see `random_inputs`.
        batch, size: of random inputs: rows, and the size of other dimensions that vary.
        threads: of each runtime.
        seconds: time to measure each file in each runtime.
        runtimes: some of "onnxruntime" and "openvino"; None for ONNX Runtime and, where it is installed, OpenVINO. In OpenVINO
            values in float are fp32.

    Returns the timings of all files in the first runtime, then in the next. Where `runtimes` is None, a file that OpenVINO cannot
    run is left out there, with a warning in the log.
    Raises ExportError where a file does not load or run, or a runtime that is named is not installed; DataError where a file has
    other inputs; SettingError for a setting out of range.
    """
    chosen = _runtimes_to_time(runtimes)
    if threads < 1 or seconds <= 0:
        raise SettingError(f"bench: wanted threads >= 1 and seconds > 0, got {threads} and {seconds}")
    for path in paths:
        open_session(path)
    if inputs is None:
        inputs = shared_inputs(random_inputs(paths[0], batch=batch, size=size), paths[1:])
    runs: dict[tuple[str, str | Path], Callable[[], object]] = {}
    for runtime in chosen:
        for path in paths:
            try:
                runs[runtime, path] = _RUNS[runtime](path, inputs, threads)
            except ExportError as error:
                if runtimes is not None or runtime == "onnxruntime":
                    raise
                log.warning("%s", error)
    times = time_in_turn(list(runs.values()), seconds=seconds)
    return [
        Timing(path=str(path), milliseconds=t, ratio=t / times[0], bytes=file_bytes(path), runtime=runtime)
        for (runtime, path), t in zip(runs, times, strict=True)
    ]


def _runtimes_to_time(runtimes: Sequence[str] | None) -> Sequence[str]:
    if runtimes is None:
        return TIMED_RUNTIMES if installed_openvino() else TIMED_RUNTIMES[:1]
    if isinstance(runtimes, str) or not runtimes or not set(runtimes) <= set(TIMED_RUNTIMES):
        raise SettingError(f"bench: wanted runtimes among {TIMED_RUNTIMES}, got {runtimes!r}")
    return runtimes


def _onnxruntime_run(path: str | Path, inputs: Inputs, threads: int) -> Callable[[], object]:
    runner = session(path, threads=threads)
    feed = numpy_inputs(runner, inputs, path)
    run_session(runner, feed, path)
    return partial(runner.run, None, feed)


def _openvino_run(path: str | Path, inputs: Inputs, threads: int) -> Callable[[], object]:
    return openvino_run(path, numpy_inputs(session(path), inputs, path), threads)


_RUNS = {"onnxruntime": _onnxruntime_run, "openvino": _openvino_run}


def open_session(path: str | Path, *, optimize: bool | str = True) -> Any:
    """An ONNX Runtime session; ExportError where the file does not load or names weights outside its folder."""
    read_proto(path)
    return session(path, optimize=optimize)


def free_dimensions(path: str | Path) -> dict[str, tuple[int | str, ...]]:
    """Inputs of a file with a dimension besides the first that varies: name -> dimensions, "?" for one without a name."""
    entries = ((entry.name, tuple(s if s is not None else "?" for s in entry.shape)) for entry in open_session(path).get_inputs())
    return {name: shape for name, shape in entries if any(isinstance(size, str) for size in shape[1:])}


def ask_for_sizes(path: str | Path, size: int | None, where: str, remedy: str) -> None:
    """Raise SettingError where a file takes any size and none is given: times of a size that nobody asked for say nothing."""
    if size is None and (free := free_dimensions(path)):
        shapes = ", ".join(f"{name} ({', '.join(map(str, shape))})" for name, shape in free.items())
        raise SettingError(f"{where}: {path} takes any size of {shapes}; {remedy}")


def random_inputs(path: str | Path, *, batch: int = 1, size: int = 64) -> dict[str, torch.Tensor]:
    """Random inputs for a file, by name: seeded normal numbers, and zeros for integer inputs.

    batch, size: size of dimensions that vary: the first, and all others.
    """
    if batch < 1 or size < 1:
        raise SettingError(f"random inputs: wanted batch >= 1 and size >= 1, got {batch} and {size}")
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for entry in open_session(path).get_inputs():
        if entry.type not in NUMPY_TYPES:
            raise ExportError(f"{path}: input {entry.name!r} is {entry.type}; give inputs of your own")
        shape = [s if isinstance(s, int) else (size if i else batch) for i, s in enumerate(entry.shape)]
        kind = np.dtype(NUMPY_TYPES[entry.type])
        values = torch.randn(shape, generator=generator) if kind.kind == "f" else torch.zeros(shape)
        inputs[entry.name] = torch.from_numpy(values.numpy().astype(kind))
    return inputs


def shared_inputs(inputs: dict[str, torch.Tensor], others: Sequence[str | Path]) -> Inputs:
    """Inputs with the names that one file has, such that other files run on them, too: in order where one has other names."""
    names = [{entry.name for entry in open_session(path).get_inputs()} for path in others]
    return inputs if all(found <= set(inputs) for found in names) else tuple(inputs.values())
