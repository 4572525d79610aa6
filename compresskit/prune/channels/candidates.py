"""Candidates of a plan, exported to measure what counting does not tell: bytes of the file, milliseconds in ONNX Runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from torch import nn

from compresskit.base.task import Inputs, batch_size
from compresskit.export import export_onnx
from compresskit.measure import latency
from compresskit.prune.structure.repeatable import timed_rows

SECONDS, ROUNDS = 0.6, 15
#: `(module, inputs) -> module`: what a later stage makes of a module, so that it is measured as it will run.
Form = Callable[[nn.Module, Inputs], nn.Module]


class ExportedCandidates:
    """The dense model's file and a candidate's beside it, in a temporary folder; a context manager.

    kind: "bytes" or "latency", the latter for one sample on one thread, dense and candidate run in turn; see `timed_rows`.
    form: of what is exported; None exports the float models.
    """

    def __init__(self, model: nn.Module, example: Inputs, kind: str, form: Form | None = None) -> None:
        self.model, self.example, self.kind, self.form = model, example, kind, form

    def __enter__(self) -> ExportedCandidates:
        self.folder = tempfile.TemporaryDirectory()
        self.dense = self._write(self.model, "dense")
        if self.kind == "latency":
            self.timed = timed_rows(self.model, self.example)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.folder.cleanup()

    def _write(self, model: nn.Module, name: str) -> Path:
        formed = model if self.form is None else self.form(model, self.example)
        return export_onnx(formed, Path(self.folder.name) / f"{name}.onnx", self.example)

    def measure(self, candidate: nn.Module) -> tuple[float, str]:
        """Fraction of the dense model's figure that a pruned copy of it keeps, and the measurement in words."""
        file = self._write(candidate, "candidate")
        if self.kind == "bytes":
            before, after = (_onnx_bytes(f) for f in (self.dense, file))
            return after / before, f"ONNX file of {after} bytes, {after / before:.1%} of the {before} of the dense one"
        slow, fast = latency([self.dense, file], self.timed, seconds=SECONDS, rounds=ROUNDS)
        what = "one sample" if (rows := batch_size(self.timed)) == 1 else f"the example, {rows} rows"
        return fast / slow, (
            f"{fast:.3f} ms in ONNX Runtime, {fast / slow:.1%} of the {slow:.3f} of the dense model"
            f" ({what}, one thread, {'fp32' if self.form is None else 'in the form wanted'}, run in turn)"
        )


def _onnx_bytes(file: Path) -> int:
    return sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*"))
