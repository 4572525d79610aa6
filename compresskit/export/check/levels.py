"""Verify an ONNX file without its model: at every optimization level, against the file as written or another file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compresskit.base.task import Inputs
from compresskit.export.check.agreement import FLOAT_STEPS, QUANTIZED_WITHIN, Agreement, compare, not_finite_remark
from compresskit.export.check.benchmark import open_session, random_inputs, shared_inputs
from compresskit.export.files import read_proto
from compresskit.measure import numpy_inputs, run_session

#: One of them is in every quantized file: of static and weight-only quantization, dynamic quantization, and packed weights.
QUANTIZED_OPERATORS = frozenset({"DequantizeLinear", "DynamicQuantizeLinear", "MatMulNBits"})


@dataclass(frozen=True, kw_only=True)
class LevelVerification:
    """Agreement of each optimization level of ONNX Runtime with a reference; prints as a table.

    Attributes:
        reference: what the levels are compared with, in words.
        quantized: whether the file has quantized weights or activations.
        levels: name of each level -> its agreement.
        drawn: whether the inputs were random.
        undecided: whether a difference says nothing: the inputs were random, outside the ranges that a quantized file was
            calibrated for, and the reference is another file.
    """

    reference: str
    quantized: bool
    levels: dict[str, Agreement]
    drawn: bool = False
    undecided: bool = False

    @property
    def passed(self) -> bool | None:
        """Whether, at every level, 97 % of the values lie within two steps; for a float file, all within a tenth of a step.

        None where they do not and the inputs do not allow a verdict, see `undecided`, and where no output is finite.
        """
        if self._nothing_compared:
            return None
        if not self.quantized:
            return all(level.largest <= FLOAT_STEPS for level in self.levels.values())
        if all(level.within_two >= QUANTIZED_WITHIN for level in self.levels.values()):
            return True
        return None if self.undecided else False

    @property
    def _nothing_compared(self) -> bool:
        """Whether no output value is finite, at any level, in neither of the two."""
        return all(level.not_finite == 1 for level in self.levels.values())

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        levels = {name: {k: v for k, v in asdict(level).items() if k != "noise"} for name, level in self.levels.items()}
        for record in levels.values():  # JSON has no infinity
            record["largest"] = record["largest"] if np.isfinite(record["largest"]) else None
        return {
            "reference": self.reference,
            "quantized": self.quantized,
            "passed": self.passed,
            "drawn": self.drawn,
            "undecided": self.undecided,
            "levels": levels,
        }

    def __str__(self) -> str:
        lines = [f"{'agrees' if self.passed else 'DISAGREES'} with {self.reference}"]
        if self._nothing_compared:
            lines = ["no verdict: no output is finite, so nothing was compared"]
        elif self.passed is None:
            lines = [
                f"no verdict: on random inputs, which may lie outside the ranges it was calibrated for, it differs from"
                f" {self.reference}; give real inputs"
            ]
        compared = {} if self._nothing_compared else self.levels
        if compared:
            lines.append(f"  {'optimization':<12}  {'same class':>10}  {'1 step':>8}  {'2 steps':>8}  {'largest error':>13}")
        for name, level in compared.items():
            top = "-" if level.agreement is None else f"{level.agreement:.2%}"
            cells = f"{top:>10}  {level.within_one:>8.2%}  {level.within_two:>8.2%}  {level.largest:>8.3g} steps"
            lines.append(f"  {name:<12}  {cells}")
        if remark := not_finite_remark(self.levels.values()):
            lines.append(f"  {remark}" + ("; random inputs may be why: give real ones" if self.drawn else ""))
        return "\n".join(lines)


def verify_levels(
    path: str | Path, inputs: Inputs | None = None, *, reference: str | Path | None = None, batch: int = 8, size: int = 64
) -> LevelVerification:
    """Run a file at every optimization level of ONNX Runtime and compare with the file as it is written, or with another.

    Args:
        path: of the file.
        inputs: a tuple or a dict; random numbers if None, see `random_inputs`.
        reference: another file that takes the same inputs, such as the fp32 original; it is run with all optimizations.
        batch, size: of random inputs: rows, and the size of other dimensions that vary.

    Raises ExportError where a file does not load or run.
    """
    drawn = inputs is None
    if inputs is None:
        inputs = shared_inputs(random_inputs(reference or path, batch=batch, size=size), [path])
    operators = {node.op_type for node in read_proto(path).graph.node}
    wanted = _run_file(path, inputs, optimize=False) if reference is None else _run_file(reference, inputs, optimize=True)
    names: dict[str, bool | str] = {"none": False, "basic": "basic", "extended": "extended", "all": True}
    if reference is None:
        del names["none"]
    return LevelVerification(
        reference="the file as it is written" if reference is None else str(reference),
        quantized=not operators.isdisjoint(QUANTIZED_OPERATORS),
        drawn=drawn,
        undecided=drawn and reference is not None and "QuantizeLinear" in operators,
        levels={name: compare(wanted, _run_file(path, inputs, optimize=level)) for name, level in names.items()},
    )


def _run_file(path: str | Path, inputs: Inputs, *, optimize: bool | str) -> list[np.ndarray]:
    runtime = open_session(path, optimize=optimize)
    return [np.atleast_1d(value) for value in run_session(runtime, numpy_inputs(runtime, inputs, path), path)]
