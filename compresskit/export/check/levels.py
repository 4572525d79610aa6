"""A file without its model: does it compute the same however far the runtime optimizes it, and the same as another file?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compresskit.base.errors import ExportError
from compresskit.base.task import Inputs
from compresskit.export.check.benchmark import open_session, random_inputs
from compresskit.export.check.verify import FLOAT_STEPS, QUANTIZED_WITHIN, Level, compare
from compresskit.export.files import read_proto
from compresskit.measure import numpy_inputs


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Agreement of each optimization level with the reference, by its name; prints as a table.

    reference: what they are compared with. quantized: whether the file holds integers, which may round apart by a step.
    """

    reference: str
    quantized: bool
    levels: dict[str, Level]

    @property
    def passed(self) -> bool:
        """97 % of the values within two steps at every level; of a float file, all within a tenth of a step."""
        if self.quantized:
            return all(level.within_two >= QUANTIZED_WITHIN for level in self.levels.values())
        return all(level.largest <= FLOAT_STEPS for level in self.levels.values())

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        levels = {name: {k: v for k, v in asdict(level).items() if k != "noise"} for name, level in self.levels.items()}
        for record in levels.values():  # JSON has no infinity
            record["largest"] = record["largest"] if np.isfinite(record["largest"]) else None
        return {"reference": self.reference, "quantized": self.quantized, "passed": self.passed, "levels": levels}

    def __str__(self) -> str:
        lines = [f"{'agrees' if self.passed else 'DISAGREES'} with {self.reference}"]
        lines.append(f"  {'optimization':<12}  {'same class':>10}  {'1 step':>8}  {'2 steps':>8}  {'largest error':>13}")
        for name, level in self.levels.items():
            top = "-" if level.agreement is None else f"{level.agreement:.2%}"
            cells = f"{top:>10}  {level.within_one:>8.2%}  {level.within_two:>8.2%}  {level.largest:>8.3g} steps"
            lines.append(f"  {name:<12}  {cells}")
        return "\n".join(lines)


def verify_levels(
    path: str | Path, inputs: Inputs | None = None, *, reference: str | Path | None = None, batch: int = 8, size: int = 64
) -> Levels:
    """Run a file at every optimization level of ONNX Runtime and compare with the file as it is written, or with another.

    Args:
        path: of the file.
        inputs: a tuple or a dict; random numbers where nothing is given, see `bench.random_inputs`.
        reference: another file that takes the same inputs, run with all optimizations, such as the fp32 original.

    Raises ExportError where a file does not load or run.
    """
    inputs = random_inputs(reference or path, batch=batch, size=size) if inputs is None else inputs
    wanted = _run(path, inputs, optimize=False) if reference is None else _run(reference, inputs, optimize=True)
    names: dict[str, bool | str] = {"none": False, "basic": "basic", "extended": "extended", "all": True}
    if reference is None:
        del names["none"]
    return Levels(
        reference="the file as it is written" if reference is None else str(reference),
        quantized=any(node.op_type == "DequantizeLinear" for node in read_proto(path).graph.node),
        levels={name: compare(wanted, _run(path, inputs, optimize=level)) for name, level in names.items()},
    )


def _run(path: str | Path, inputs: Inputs, *, optimize: bool | str) -> list[np.ndarray]:
    runtime = open_session(path, optimize=optimize)
    feed = numpy_inputs(runtime, inputs)
    try:
        return [np.atleast_1d(value) for value in runtime.run(None, feed)]
    except Exception as error:
        raise ExportError(f"{path}: ONNX Runtime cannot run it: {str(error).strip().splitlines()[-1]}") from error
