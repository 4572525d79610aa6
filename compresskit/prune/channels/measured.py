"""Targets that only an exported file can tell: its bytes, and its milliseconds in ONNX Runtime."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from types import TracebackType

from torch import nn

from compresskit.base.task import Inputs, first_rows
from compresskit.export import export_onnx
from compresskit.measure import latency
from compresskit.prune.structure.plan import Plan, apply_

SECONDS, ROUNDS = 0.6, 15


class Files:
    """The dense model's file, and candidates beside it, in a folder that is gone afterwards.

    kind: "bytes" or "latency", the latter for one sample on one thread, dense and candidate run in turn.
    """

    def __init__(self, model: nn.Module, example: Inputs, kind: str) -> None:
        self.model, self.example, self.kind = model, example, kind

    def __enter__(self) -> Files:
        self.folder = tempfile.TemporaryDirectory()
        self.dense = self._write(self.model, "dense")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.folder.cleanup()

    def _write(self, model: nn.Module, name: str) -> Path:
        return export_onnx(model, Path(self.folder.name) / f"{name}.onnx", self.example)

    def share(self, plan: Plan) -> tuple[float, str]:
        """Share of the dense model's figure that a plan keeps, and what was measured, in words."""
        file = self._write(apply_(copy.deepcopy(self.model), plan), "candidate")
        if self.kind == "bytes":
            before, after = (_bytes(f) for f in (self.dense, file))
            return after / before, f"ONNX file of {after} bytes, {after / before:.1%} of the {before} of the dense one"
        one = first_rows(self.example, 1)
        slow, fast = latency([self.dense, file], one, seconds=SECONDS, rounds=ROUNDS)
        return fast / slow, (
            f"{fast:.3f} ms in ONNX Runtime, {fast / slow:.1%} of the {slow:.3f} of the dense model"
            " (one sample, one thread, fp32, run in turn)"
        )


def _bytes(file: Path) -> int:
    return sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*"))
