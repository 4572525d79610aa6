"""Run a file in another runtime than ONNX Runtime, where that is installed here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from compresskit.base.errors import ExportError
from compresskit.base.task import Inputs
from compresskit.measure import numpy_inputs

OPENVINO_REMEDY = "pip install openvino"


@dataclass(frozen=True, kw_only=True)
class RuntimeRun:
    """Whether the runtime of the file's target executed it.

    name: of the runtime. version: of the one that ran the file; empty where none did, and `note` says why and what to install.
    """

    name: str
    version: str = ""
    note: str = ""


class OtherRuntime:
    """A file in OpenVINO, in fp32 where it does not compute in integers; nothing for other runtimes, and where it is missing.

    Raises ExportError where the runtime cannot load or run the file.
    """

    def __init__(self, path: str | Path, name: str) -> None:
        self.path, self.compiled = path, None
        if name != "openvino":
            self.record = RuntimeRun(name=name, note=f"{name} is not run here: verify the file where it is deployed")
            return
        openvino = installed_openvino()
        if openvino is None:
            note = f"openvino is not installed, the file was not run in it: {OPENVINO_REMEDY}"
            self.record = RuntimeRun(name=name, note=note)
            return
        self.record = RuntimeRun(name=name, version=str(openvino.__version__))
        self.compiled = _compiled(openvino, path, {})

    def run(self, session: Any, inputs: Inputs) -> list[np.ndarray]:
        """All outputs for a batch. session: of ONNX Runtime, whose inputs have the same names."""
        assert self.compiled is not None
        with _Named(f"{self.path}: OpenVINO {self.record.version} cannot run it"):
            found = self.compiled(numpy_inputs(session, inputs, self.path))
            return [np.atleast_1d(found[k]) for k in range(len(session.get_outputs()))]


def installed_openvino() -> Any:
    """The package openvino; None where it is not installed."""
    try:
        return importlib.import_module("openvino")
    except ImportError:
        return None


def _compiled(openvino: Any, path: str | Path, settings: dict[str, Any]) -> Any:
    """A file for this processor, in fp32 where it does not compute in integers."""
    with _Named(f"{path}: OpenVINO {openvino.__version__} cannot load it"):
        return openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32", **settings})


def openvino_run(path: str | Path, feed: Mapping[str, np.ndarray], threads: int) -> Callable[[], object]:
    """A function that runs a file in OpenVINO once, as fast as it can one request after another.

    Raises ExportError where OpenVINO is not installed, or cannot load or run the file.
    """
    if (openvino := installed_openvino()) is None:
        raise ExportError(f"bench: openvino is not installed; {OPENVINO_REMEDY}")
    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    request = _compiled(openvino, path, settings).create_infer_request()
    run = partial(request.infer, dict(feed), share_inputs=True, share_outputs=True)
    with _Named(f"{path}: OpenVINO {openvino.__version__} cannot run it"):
        run()
    return run


class _Named:
    """Turns an error of the runtime, whose classes are its own, into an ExportError that names the file."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise ExportError(f"{self.where}: {str(error).strip().splitlines()[-1]}") from error
