"""Benchmark ONNX files against one another, and make random inputs for a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compresskit.base.errors import ExportError, SettingError
from compresskit.base.task import Inputs
from compresskit.export.files import file_bytes, read_proto
from compresskit.measure import latency, session

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


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Latency of one file. milliseconds: median. ratio: to the first file. bytes: of the file with its external data."""

    path: str
    milliseconds: float
    ratio: float
    bytes: int


def benchmark(
    paths: Sequence[str | Path],
    inputs: Inputs | None = None,
    *,
    batch: int = 1,
    size: int = 64,
    threads: int = 1,
    seconds: float = 1.0,
) -> list[Timing]:
    """Median milliseconds of each file in ONNX Runtime, all files run in turn so that they see the same machine.

    Args:
        paths: of ONNX files that take the same inputs.
        inputs: a tuple or a dict; random numbers if None, see `random_inputs`.
        batch, size: of random inputs: rows, and the size of other dimensions that vary.
        threads: of ONNX Runtime.
        seconds: time to measure each file.

    Raises ExportError where a file does not load.
    """
    for path in paths:
        open_session(path)
    inputs = random_inputs(paths[0], batch=batch, size=size) if inputs is None else inputs
    times = latency(paths, inputs, threads=threads, seconds=seconds)
    return [
        Timing(path=str(path), milliseconds=t, ratio=t / times[0], bytes=file_bytes(path))
        for path, t in zip(paths, times, strict=True)
    ]


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
