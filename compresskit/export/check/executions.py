"""Executions of a file beside its model, over any number of batches, and whether they are near enough.

Outputs are held until there are `HELD` values of the model's, then judged, and forgotten: those of a large set, such as maps of
classes, fit in no memory. What is said of a set in several pieces is the mean of theirs, and the largest error of any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from compresskit.export.check.agreement import (
    FLOAT_STEPS,
    QUANTIZED_AGREEMENT,
    QUANTIZED_EXCESS,
    QUANTIZED_NOISE,
    QUANTIZED_WITHIN,
    WEIGHT_ONLY_NOISE,
    WEIGHT_ONLY_WITHIN,
    Agreement,
    beside_unrounded,
    compare,
    fills_as_infinity,
    float_part_that_differs,
    part_beyond_rounding,
    sizes_in_ranges,
    usable_reference,
)

HELD = 50_000_000  # output values
UNROUNDED_SAMPLES = 1000  # that show the quantization error: a ratio of norms of all their outputs
ROUNDED_INPUTS = (  # of a file that is exact as it is written
    "; the kernels that ONNX Runtime takes for such weights may round their inputs, where ones that do not are stored as"
    " storage=ck.quant.weight_only.MATMUL_NBITS"
)
Arrays = list[list[np.ndarray]]  # of each output, one for each of its shapes


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Outputs of one execution of a file, beside those of its model.

    Attributes:
        name: of the execution.
        wanted, got: outputs of the model and of the file.
        few: outputs of the first batches: of the model, of the file, and of the model without rounding; None for a model in fp32.
    """

    name: str
    wanted: Arrays
    got: Arrays
    few: tuple[Arrays, Arrays, Arrays] | None = None
    whole: Agreement = field(init=False)  # of all outputs together

    def __post_init__(self) -> None:
        few = None if self.few is None else tuple([v for output in arrays for v in output] for arrays in self.few)
        wanted, got = ([v for output in arrays for v in output] for arrays in (self.wanted, self.got))
        object.__setattr__(self, "whole", _agreement(wanted, got, few, heads=len(self.wanted[0]) if self.wanted else 0))

    def noise_of_range(self) -> float:
        """Root mean square error as a fraction of the standard deviation, of the worst output."""
        noises = []
        for wanted, got in zip(self.wanted, self.got, strict=True):
            a, b = (np.concatenate([v.ravel() for v in arrays] or [np.zeros(0)]).astype(np.float64) for arrays in (wanted, got))
            a, b = fills_as_infinity(a, b)
            finite = np.isfinite(a)
            error, spread = np.square(a[finite] - b[finite]), np.square(a[finite] - a[finite].mean() if finite.any() else a)
            noises.append(float(np.sqrt(error.sum() / max(spread.sum(), 1e-300))))
        return max(noises, default=0.0)

    def reason_to_reject(self, *, integers: bool, most: float, within: float, made: bool = False) -> str:
        """Why the file fails, or "".

        Args:
            integers: whether it computes in integers.
            most: the largest error, in steps.
            within: fraction of the values within two steps, of a file in integers.
            made: whether rows were made of the data. Of them, what is rounded is judged beside the unrounded model alone.
        """
        if self.whole.not_finite == 1:
            return f"{self.name}: no output value is finite, so nothing was compared"
        for i, (wanted, got) in enumerate(zip(self.wanted, self.got, strict=True)):
            few = None if self.few is None else (self.few[0][i], self.few[1][i], self.few[2][i])
            rounds = few is not None and usable_reference(few[0], few[2]) is not None
            half = not integers and most > FLOAT_STEPS
            if not any(v.size for v in wanted) or (made and (integers or half) and not rounds):
                continue
            level = self.whole if len(self.wanted) == 1 else _agreement(wanted, got, few, heads=0 if i else len(wanted))
            if integers:
                reason = _reason_of_integers(level, most, within)
            else:
                reason = "" if half and made else _reason_of_floats(level, most * sizes_in_ranges(wanted) if half else most)
            if not reason and few and rounds:
                reason = part_beyond_rounding(*few, integers=integers)
            elif not reason and not integers:
                reason = float_part_that_differs(wanted, got, most)
            if reason:
                return f"{self.name}{f', output {i}' if len(self.wanted) > 1 else ''}: {reason}"
        return ""


def _agreement(
    wanted: list[np.ndarray], got: list[np.ndarray], few: tuple[list[np.ndarray], ...] | None, *, heads: int
) -> Agreement:
    level = compare(wanted, got, heads=heads)
    exact = few and usable_reference(few[0], few[2])
    return beside_unrounded(level, few[0], few[1], exact) if few and exact else level


def _reason_of_floats(level: Agreement, most: float) -> str:
    if level.largest <= most:
        return ""
    return f"the largest error is {level.largest:.3g} steps, a file of this precision may have {most:.3g}"


def _reason_of_integers(level: Agreement, most: float, within: float) -> str:
    if _is_within_noise(level):
        return ""
    if level.flips > 1 - QUANTIZED_AGREEMENT:
        return f"the largest class agrees on {level.agreement:.2%} of the samples, wanted {QUANTIZED_AGREEMENT:.0%}"
    if level.largest > most:
        return f"the largest error is {level.largest:.3g} steps, a quantized file may have {most:.3g}"
    if level.within_two < within:
        return f"{level.within_two:.2%} of the values lie within two steps, wanted {within:.0%}"
    return ""


def _is_within_noise(level: Agreement) -> bool:
    """Whether the error is small next to the quantization error, or the file as near to the unrounded model as the simulation."""
    if level.noise is None or level.excess is None or not np.isfinite(level.largest):
        return False
    return level.noise <= QUANTIZED_NOISE or level.excess <= QUANTIZED_EXCESS


@dataclass(kw_only=True)
class Comparison:
    """What `verify_onnx` knows of the outputs of a file so far.

    Attributes:
        quantized: whether the model, or a part of it, is quantized. weight_only: whether only weights are.
        most_of_floats, most_of_integers: the largest errors that may be, in steps.
        random: whether the model draws random numbers, so that its outputs without rounding are of others.
        unrounded_fails: whether the model without rounding does not run.
        made: whether rows were made of the data, for there were few.
        reason: why the file does not pass, by the pieces that were judged; empty where it does.
    """

    quantized: bool
    weight_only: bool
    most_of_floats: float
    most_of_integers: float
    random: bool = False
    unrounded_fails: bool = False
    made: bool = False
    reason: str = ""
    _levels: dict[str, list[tuple[Agreement, int]]] = field(default_factory=dict)  # of each execution: pieces, and their values
    _model: list[list[np.ndarray]] = field(default_factory=list)
    _executed: dict[str, list[list[np.ndarray]]] = field(default_factory=dict)
    _unrounded: list[list[np.ndarray]] = field(default_factory=list)
    _samples: int = 0

    @property
    def wants_unrounded(self) -> bool:
        """Whether the next batch is wanted of the model without rounding, too."""
        rounds = not self.weight_only if self.quantized else self.most_of_floats > FLOAT_STEPS
        return rounds and not self.unrounded_fails and self._samples < UNROUNDED_SAMPLES

    def with_made_rows(self) -> Comparison:
        """Another one, of the outputs held now, to which those of rows made of the data are added."""
        executed = {name: [*batches] for name, batches in self._executed.items()}
        held = {"_model": [*self._model], "_executed": executed, "_unrounded": [*self._unrounded], "_levels": {}}
        return replace(self, made=True, reason="", **held)  # type: ignore[arg-type]

    def add(
        self, model: list[np.ndarray], executed: dict[str, list[np.ndarray]], *, unrounded: list[np.ndarray] | None, samples: int
    ) -> None:
        """Take the outputs of a batch: of the model, of each execution by its name, and of the model without rounding."""
        self._model.append(model)
        for name, outputs in executed.items():
            self._executed.setdefault(name, []).append(outputs)
        if unrounded is not None:
            self._unrounded.append(unrounded)
        self._samples += samples
        if sum(v.size for outputs in self._model for v in outputs) >= HELD:
            self._judge()

    def levels(self) -> dict[str, Agreement]:
        """The agreement of each execution over all batches; empty where there was none."""
        if self._model:
            self._judge()
        return {name: _over_all(pieces) for name, pieces in self._levels.items()}

    def _judge(self) -> None:
        count = sum(v.size for outputs in self._model for v in outputs)
        wanted, unrounded = _concatenated_outputs(self._model), [] if self.random or self.unrounded_fails else self._unrounded
        exact = _concatenated_outputs(unrounded) if unrounded else None
        for name, batches in self._executed.items():
            got = _concatenated_outputs(batches)
            few = None
            if exact is not None:
                few = (
                    _concatenated_outputs(self._model[: len(unrounded)]),
                    _concatenated_outputs(batches[: len(unrounded)]),
                    exact,
                )
            execution = Execution(name=name, wanted=wanted, got=got, few=few)
            self._levels.setdefault(name, []).append((execution.whole, count))
            integers = self.quantized and not (self.weight_only and name == "as written")
            most = self.most_of_integers if integers else self.most_of_floats
            within = WEIGHT_ONLY_WITHIN if self.weight_only else QUANTIZED_WITHIN
            if self.weight_only and integers and execution.noise_of_range() <= WEIGHT_ONLY_NOISE:
                within = 0  # as kernels that round activations make, where outputs vary by little
            reason = execution.reason_to_reject(integers=integers, most=most, within=within, made=self.made)
            self.reason = self.reason or (f"{reason}{ROUNDED_INPUTS}" if reason and integers and self.weight_only else reason)
        self._model, self._executed, self._unrounded, self._samples = [], {}, [], 0


def _over_all(pieces: Sequence[tuple[Agreement, int]]) -> Agreement:
    """One agreement of several, each with its number of values. Noise and excess are of the first."""
    levels, weights = [level for level, _ in pieces], [count for _, count in pieces]
    means = {
        name: float(np.average([getattr(level, name) for level in levels], weights=weights))
        for name in ("agreement", "within_one", "within_two", "flips", "not_finite")
        if all(getattr(level, name) is not None for level in levels)
    }
    return replace(levels[0], **means, largest=max(level.largest for level in levels)) if len(levels) > 1 else levels[0]


def _concatenated_outputs(batches: list[list[np.ndarray]]) -> Arrays:
    """Concatenate each output over all batches; one array per shape, where an output has several."""
    joined: list[dict[tuple[int, ...], list[np.ndarray]]] = [{} for _ in range(max(map(len, batches)))]
    for batch in batches:
        for arrays, output in zip(joined, batch, strict=False):
            arrays.setdefault(output.shape[1:], []).append(output)
    return [[np.concatenate(arrays[shape]) for shape in sorted(arrays)] for arrays in joined]
