"""How long files take, measured in turn; and inputs for a file of which nothing but the file is known."""

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

#: What ONNX Runtime calls the types of inputs.
TYPES = {
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
    """One file of a comparison. milliseconds: median of a run. ratio: to the first file. bytes: with external data."""

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
        inputs: a tuple or a dict; random numbers where nothing is given, see `random_inputs`.
        threads: of ONNX Runtime. seconds: spent on each file.
    """
    for path in paths:
        open_session(path)
    inputs = random_inputs(paths[0], batch=batch, size=size) if inputs is None else inputs
    times = latency(paths, inputs, threads=threads, seconds=seconds)
    return [
        Timing(path=str(path), milliseconds=t, ratio=t / times[0], bytes=file_bytes(path))
        for path, t in zip(paths, times, strict=True)
    ]


def open_session(path: str | Path, *, threads: int = 1, optimize: bool | str = True) -> Any:
    """A session on a file whose weights lie in its own folder; ExportError where it does not load."""
    read_proto(path)
    try:
        return session(path, threads=threads, optimize=optimize)
    except Exception as error:
        raise ExportError(f"{path}: ONNX Runtime cannot load it: {str(error).strip().splitlines()[-1]}") from error


def random_inputs(path: str | Path, *, batch: int = 1, size: int = 64) -> dict[str, torch.Tensor]:
    """Inputs for a file: seeded normal numbers, zeros where it wants integers.

    A first dimension without a number becomes `batch`, any other one `size`.
    """
    if batch < 1 or size < 1:
        raise SettingError(f"random inputs: wanted batch >= 1 and size >= 1, got {batch} and {size}")
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for entry in open_session(path).get_inputs():
        if entry.type not in TYPES:
            raise ExportError(f"{path}: input {entry.name!r} is {entry.type}; give inputs of your own")
        shape = [s if isinstance(s, int) else (size if i else batch) for i, s in enumerate(entry.shape)]
        kind = np.dtype(TYPES[entry.type])
        values = torch.randn(shape, generator=generator) if kind.kind == "f" else torch.zeros(shape)
        inputs[entry.name] = torch.from_numpy(values.numpy().astype(kind))
    return inputs
