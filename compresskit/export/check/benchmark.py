"""Benchmark ONNX files against one another, and make random inputs for a file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compresskit.base.errors import DataError, ExportError, SettingError
from compresskit.base.settings import as_python, check_timing
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
KEYWORD = "{}={}"  # how messages write a setting and its value; the command line writes an option


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Latency of one file in one runtime.

    milliseconds: median. ratio: to the first file in the first runtime. bytes: of the file with its external data. batch: rows of
    the inputs that were timed; None where no input has any.
    """

    path: str
    milliseconds: float
    ratio: float
    bytes: int
    runtime: str = "onnxruntime"
    batch: int | None = None


def benchmark(
    paths: Sequence[str | Path],
    inputs: Inputs | None = None,
    *,
    batch: int | None = None,
    size: int | None = None,
    threads: int = 1,
    seconds: float = 1.0,
    runtimes: Sequence[str] | None = None,
) -> list[Timing]:
    """Median milliseconds of each file in each runtime, all run in turn so that they see the same machine.

    Args:
        paths: of ONNX files that take the same inputs.
        inputs: a tuple or a dict; random numbers if None, see `random_inputs`.
        batch, size: of random inputs: rows, and the size of other dimensions that vary. None for those that all files take, see
            `agreed_sizes`; where every file takes any, 1 and 64.
        threads: of each runtime.
        seconds: time to measure each file in each runtime.
        runtimes: some of "onnxruntime" and "openvino"; None for ONNX Runtime and, where it is installed, OpenVINO. In OpenVINO
            values in float are fp32.

    Returns the timings of all files in the first runtime, then in the next. Where `runtimes` is None, a file that OpenVINO cannot
    run is left out there, with a warning in the log.
    Raises ExportError where a file does not load or run, or a runtime that is named is not installed; DataError where a file has
    other inputs, or they have no rows; SettingError for a setting out of range, or a batch or a size that a file does not take.
    """
    chosen = _runtimes_to_time(runtimes)
    check_timing(threads, seconds, "bench")
    if not isinstance(paths, Sequence) or isinstance(paths, str) or not paths:
        raise SettingError(f"benchmark(paths=...): wanted a list of one path or more, got {paths!r:.60}")
    for path in paths:
        open_session(path)
    if inputs is None:
        batch, size = agreed_sizes(paths, batch, size, "bench")
        drawn = random_inputs(paths[0], batch=1 if batch is None else batch, size=64 if size is None else size)
        inputs = shared_inputs(drawn, paths[1:])
    else:
        check_sizes_of(numpy_inputs(session(paths[0], optimize=False), inputs, paths[0]), batch, size, "bench")
    rows = _rows_of(paths[0], inputs)
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
        Timing(path=str(path), milliseconds=t, ratio=t / times[0], bytes=file_bytes(path), runtime=runtime, batch=rows)
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
        raise SettingError(f"{where}: {path} takes any size of {_named_shapes(free)}; {remedy}")


def _rows_of(path: str | Path, inputs: Inputs) -> int | None:
    """Rows of the first input whose first dimension varies, else of the first that has any; None where none has."""
    runner = session(path, optimize=False)
    feed = numpy_inputs(runner, inputs, path)
    free = [entry.name for entry in runner.get_inputs() if entry.shape and not isinstance(entry.shape[0], int)]
    return next((len(feed[name]) for name in [*free, *feed] if feed[name].ndim), None)


def check_sizes_of(inputs: Mapping[str, Any], batch: int | None, size: int | None, where: str, option: str = KEYWORD) -> None:
    """Raise DataError for arrays without rows, and SettingError for others than were asked for, where anything was."""
    shapes = {name: tuple(value.shape) for name, value in inputs.items()}
    rows = [shape[0] for shape in shapes.values() if shape]
    if rows and rows[0] == 0:
        raise DataError(f"{where}: the inputs have no rows, got {_named_shapes(shapes)}; give at least one")
    others = [length for shape in shapes.values() for length in shape[1:]]
    for name, wanted, lengths in (("batch", batch, rows), ("size", size, others)):
        if wanted is not None and wanted not in lengths:
            raise SettingError(
                f"{where}: wanted inputs for {option.format(name, wanted)}, got {_named_shapes(shapes)}; leave out one of the two"
            )


def _named_shapes(shapes: Mapping[str, tuple[Any, ...]]) -> str:
    return ", ".join(f"{name} ({', '.join(map(str, shape))})" for name, shape in shapes.items())


def agreed_sizes(
    paths: Sequence[str | Path], batch: int | None, size: int | None, where: str, option: str = KEYWORD
) -> tuple[int | None, int | None]:
    """Rows, and the size of other dimensions that vary, of inputs that all files take.

    Args:
        paths: of the files.
        batch, size: what was asked for. None: the one length that those files fix which do not take any; None where they fix
            none, or several.
        where, option: for messages: the caller, and how a setting and its value are written.

    Raises SettingError where a file does not take what was asked for, or two files fix other lengths of an input.
    """
    every = [{entry.name: tuple(entry.shape) for entry in open_session(path, optimize=False).get_inputs()} for path in paths]
    for path, shapes in zip(paths, every, strict=True):
        _check_asked_for(path, shapes, batch, size, where, option)
    fixed: dict[bool, set[int]] = {True: set(), False: set()}
    for first, lengths in _aligned_dimensions(every):
        known = {length: path for length, path in zip(lengths, paths, strict=True) if isinstance(length, int)}
        if len(known) > 1:
            (one, file), (two, other) = list(known.items())[:2]
            raise SettingError(
                f"{where}: wanted files that take the same inputs, got {file} with {one} in a dimension where {other} has {two};"
                " export one with dimensions that vary, or give each alone"
            )
        if len(known) < len(set(lengths)):
            fixed[first] |= set(known)
    only = {first: next(iter(lengths)) if len(lengths) == 1 else None for first, lengths in fixed.items()}
    return only[True] if batch is None else batch, only[False] if size is None else size


def _check_asked_for(
    path: str | Path, shapes: Mapping[str, tuple[Any, ...]], batch: int | None, size: int | None, where: str, option: str
) -> None:
    """Raise SettingError where a batch or a size is none of those that a file takes, and none varies."""
    rows, others = ([n for shape in shapes.values() for n in shape[part]] for part in (slice(0, 1), slice(1, None)))
    for name, wanted, lengths in (("batch", batch, rows), ("size", size, others)):
        if wanted is None or wanted in lengths or not all(isinstance(length, int) for length in lengths):
            continue
        remedy = f"say {option.format(name, lengths[0])}, or leave it out" if len({*lengths}) == 1 else "leave it out"
        raise SettingError(
            f"{where}: {path} takes {_named_shapes(shapes)} and no other {name}, got {option.format(name, wanted)}; {remedy}"
        )


def _aligned_dimensions(files: Sequence[Mapping[str, tuple[Any, ...]]]) -> Iterator[tuple[bool, tuple[Any, ...]]]:
    """Whether it is the first, and its length in each file, of each dimension of each input; a name where it varies.

    Inputs go by name or in order, as in `shared_inputs`; what does not fit is left to the error that running it raises.
    """
    names = files[0].keys()
    named = all(shapes.keys() <= names for shapes in files)
    for i, name in enumerate(names):
        shapes = [file.get(name) if named else [*file.values()][i] if i < len(file) else None for file in files]
        if all(shape is not None and len(shape) == len(shapes[0] or ()) for shape in shapes):
            yield from ((d == 0, lengths) for d, lengths in enumerate(zip(*(s or () for s in shapes), strict=True)))


def random_inputs(path: str | Path, *, batch: int = 1, size: int = 64) -> dict[str, torch.Tensor]:
    """Random inputs for a file, by name: seeded normal numbers, and zeros for integer inputs.

    batch, size: size of dimensions that vary: the first, and all others.
    """
    if any(not isinstance(count := as_python(given), int) or count < 1 for given in (batch, size)):
        raise SettingError(f"random inputs: wanted batch >= 1 and size >= 1, whole numbers, got {batch!r} and {size!r}")
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for entry in open_session(path).get_inputs():
        if entry.type not in NUMPY_TYPES:
            raise ExportError(f"{path}: input {entry.name!r} is {entry.type}; give inputs of your own")
        shape = [s if isinstance(s, int) else (size if i else batch) for i, s in enumerate(entry.shape)]
        kind = np.dtype(NUMPY_TYPES[entry.type])
        values = torch.randn(shape, generator=generator, device="cpu").numpy() if kind.kind == "f" else np.zeros(shape)
        inputs[entry.name] = torch.from_numpy(values.astype(kind))
    return inputs


def shared_inputs(inputs: dict[str, torch.Tensor], others: Sequence[str | Path]) -> Inputs:
    """Inputs with the names that one file has, such that other files run on them, too: in order where one has other names."""
    names = [{entry.name for entry in open_session(path).get_inputs()} for path in others]
    return inputs if all(found <= set(inputs) for found in names) else tuple(inputs.values())
