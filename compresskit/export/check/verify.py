"""Verify an ONNX file: run it and its model on real batches, at two optimization levels of ONNX Runtime, and compare.

Errors are counted in *steps*: one step is 1/255 of the range of the reference output, as on an 8-bit grid over it. Fused integer
kernels may round ties to the other side (onnxruntime#32132), and one step that flips early moves all later values a little.

* A quantized file passes if enough values lie within two steps and the largest class agrees; classes within two steps of each
  other count as a tie. Where the network amplifies every rounding (deep and untrained, for example), it also passes if its
  difference is small next to the quantization error, or if it is as near to the unrounded model as the simulation is: after
  dozens of layers, two correct executions differ as much as independent noise does. Neither says anything of a model that draws
  random numbers, or whose quantization error is as large as its outputs.
  A model with layers of signs (`graph.replacements.Signed`) counts as quantized, and its largest error is not judged: a value at
  a threshold may fall to either side, and move many outputs of its sample.
  On several threads, each thread of ONNX Runtime's quantized LSTM finds the ranges of its own part of the batch. So a file with
  one is executed on one thread as written, which shows that it computes what the model does, and optimized as it runs here.
* A float file passes by its largest error; in half precision, by the sum of that precision's roundings. As written, a file of
  which only weights are rounded counts as a float file; optimized, ONNX Runtime may round its activations, too.
* NaN and infinity agree with the same at the same places, and the record counts them. A file none of whose values is finite does
  not pass, since nothing was compared.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError, ExportError
from compresskit.base.inputs import AnyInputs, call_checked, each_inputs
from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs, batch_size, call
from compresskit.export.check.bisect import first_layer_that_differs
from compresskit.export.check.machines import MachineAgreement, MachineCheck, machines_named
from compresskit.export.check.runtimes import OtherRuntime, RuntimeRun
from compresskit.export.files import read_proto
from compresskit.export.rewrite.dtypes import least_precise_dtype
from compresskit.graph.capture import inputs_inside
from compresskit.graph.quantized import quantized_parts
from compresskit.graph.replacements import takes_signs
from compresskit.graph.surgery import mode, state_kept
from compresskit.measure import numpy_inputs, run_session, session

#: Limits for a file to pass. FLOAT_STEPS: largest error of a float file, in steps. QUANTIZED_AGREEMENT and QUANTIZED_WITHIN:
#: fraction of samples whose largest class agrees, and of values within two steps. Or QUANTIZED_NOISE: error as a fraction of the
#: quantization error. Or QUANTIZED_EXCESS: distance from the unrounded model as a fraction of the simulation's distance.
FLOAT_STEPS, QUANTIZED_AGREEMENT, QUANTIZED_WITHIN, QUANTIZED_NOISE, QUANTIZED_EXCESS = 0.1, 0.98, 0.97, 0.7, 1.1
WEIGHT_ONLY_WITHIN = 0.9  # fraction within two steps where only weights are rounded: the quantization error is not known
RANDOM = "; the model draws random numbers, of which a file draws its own"
UNROUNDED_SAMPLES = 1000  # that show the quantization error: a ratio of norms of all their outputs
QUANTIZED_STEPS = 16  # largest error: a single wrong output among many is an error, not a rounding


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far the outputs of a file agree with a reference, at one optimization level of ONNX Runtime.

    A step is 1/255 of the range of the reference output.

    Attributes:
        agreement: fraction of samples with the same largest class; None where the output has no classes. Classes lie in dimension
            1, of three-dimensional outputs (sequences) in the last.
        within_one, within_two: fraction of output values that are at most one or two steps off.
        largest: largest error, in steps.
        noise: root mean square error, as a fraction of the quantization error; None where that is unknown, as for a float model.
            Both are of the first batches, of 1,000 samples at least where there are as many.
        excess: root mean square distance of the file from the unrounded model, as a fraction of the simulation's distance; None
            where `noise` is.
        flips: fraction of samples with another largest class that are no ties: in the reference, the two classes lie more than
            two steps apart.
        not_finite: fraction of output values that are NaN or the same infinity in both, which counts as agreement.
    """

    agreement: float | None
    within_one: float
    within_two: float
    largest: float
    noise: float | None = None
    excess: float | None = None
    flips: float = 0.0
    not_finite: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Result of `verify_onnx`; prints as one line and one per optimization level.

    Attributes:
        samples: number of samples that were compared.
        quantized: whether the model, or a part of it, is quantized.
        plain, optimized: agreement of the file as it is written, and with all optimizations of ONNX Runtime.
        reason: why the file does not pass; empty where it passes.
        machines: whether other machines compute the same integers, for those that were asked for.
        runtime, elsewhere: where a quantized model's target is another runtime than ONNX Runtime: whether that executed the file,
            and how far it agrees, None where it did not.
    """

    samples: int
    quantized: bool
    plain: Agreement
    optimized: Agreement
    reason: str = ""
    machines: tuple[MachineAgreement, ...] = ()
    runtime: RuntimeRun | None = None
    elsewhere: Agreement | None = None

    @property
    def passed(self) -> bool:
        """Whether the file agrees with its model."""
        return not self.reason

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        record = asdict(self) | {"passed": self.passed}
        for name in ("plain", "optimized", "elsewhere"):  # JSON has no infinity
            if record[name] is None:
                continue
            record[name] = {k: v if v is None or np.isfinite(v) else None for k, v in record[name].items()}
        return record

    def __str__(self) -> str:
        verdict = "agrees" if self.passed else "cannot be compared" if self.optimized.not_finite == 1 else "DISAGREES"
        lines = [f"{verdict} with its model on {self.samples} samples {self.reason}".rstrip()]
        levels = {"as written": self.plain, "optimized": self.optimized}
        if self.runtime and self.elsewhere:
            levels[f"{self.runtime.name} {self.runtime.version}"] = self.elsewhere
        for name, level in levels.items():
            top = "" if level.agreement is None else f"same class {level.agreement:.2%}, "
            lines.append(f"  {name:<10}  {top}within a step {level.within_one:.2%}, largest error {level.largest:.3g} steps")
        lines += [f"  {remark}"] if (remark := not_finite_remark(levels.values())) else []
        lines += [f"  {self.runtime.note}"] if self.runtime and self.runtime.note else []
        lines += [f"  {each.machine:<10}  {each}" for each in self.machines]
        return "\n".join(lines)


def not_finite_remark(levels: Iterable[Agreement]) -> str:
    """How many output values are not finite at any level, in words; empty where all are finite."""
    fraction = max((level.not_finite for level in levels), default=0.0)
    values = "all values" if fraction == 1 else f"{fraction:.2%} of the values"
    return f"not finite: {values} are NaN or infinite, at the same places in both" if fraction else ""


def verify_onnx(
    path: str | Path,
    model: nn.Module,
    batches: Iterable[AnyInputs],
    *,
    inside: str | None = None,
    machines: str | Sequence[str] = (),
    executed: Callable[[list[np.ndarray]], None] | None = None,
    label: str = "verify",
) -> Verification:
    """Run an ONNX file and its model on the same inputs and compare all outputs; NaN agrees with NaN, if not all values are such.

    Args:
        path, model: the ONNX file, and the PyTorch model it was written from, float or quantized.
        batches: real data: an iterable of inputs, each a tuple or a dict.
        inside: dotted name of the submodule that the file was written from; `batches` are still those of the whole model.
        machines: families of kernels that are simulated, too: "all", or names of `export.check.machines.MACHINES`.
        executed: called after each batch with the outputs of the file, optimized, for what else is to be known of them.
        label: of the progress bar.

    Returns the agreement with all optimizations and without, and why the file does not pass, if it does not. One more run, on the
    first batch with zeros for all numbers, must give numbers where the model does.
    Raises ExportError where the file does not load or run; a file that runs and disagrees is reported, not raised.
    """
    proto = read_proto(path)  # refuses weights outside its folder
    others = MachineCheck(path, machines_named(machines))
    total, batches = len(batches) if isinstance(batches, Sized) else None, each_inputs(batches, "verify_onnx")
    threads = torch.get_num_threads()
    as_written = session(path, optimize=False, threads=1 if _depends_on_threads(proto) else threads)
    sessions = [as_written, session(path, threads=threads)]
    if inside:
        model, batches = _batches_inside(model, batches, inside)
    parts = quantized_parts(model).values()
    other = next((OtherRuntime(path, part.runtime) for part in parts if part.runtime != "onnxruntime"), None)
    signs = takes_signs(model)
    quantized = bool(parts) or signs
    weight_only = not signs and all(part.exact for part in parts)  # quantizers switched off leave rounded weights
    outputs: list[list[list[np.ndarray]]] = [[], [], [], []]
    unrounded, samples, first, random = list[list[np.ndarray]](), 0, None, False
    with torch.no_grad(), mode(model, training=False), state_kept(model):
        for inputs in progress_bar(batches, total=total, desc=label, unit="batch"):
            drawn = _rng_states()
            outputs[0].append(_arrays(call_checked(model, inputs, "verification data")))
            random = random or any(not torch.equal(*pair) for pair in zip(drawn, _rng_states(), strict=False))
            first = inputs if first is None else first
            if parts and not weight_only and samples < UNROUNDED_SAMPLES:
                unrounded.append(_unrounded(model, inputs))
            for store, run in zip(outputs[1:], sessions, strict=False):
                store.append(_run(run, inputs, path))
            if executed:
                executed(outputs[2][-1])
            if other and other.compiled:
                outputs[3].append(other.run(sessions[0], inputs))
            others.add(inputs)
            samples += batch_size(inputs)
        zeros = "" if first is None else _lost_on_zeros(path, model, first, sessions)
    levels = _agreements(outputs, [] if random else unrounded, other)
    allowed = steps_allowed(least_precise_dtype(model)), sys.float_info.max if signs else QUANTIZED_STEPS
    reason = _reason_to_reject(levels, quantized, allowed, weight_only=weight_only)
    reason += "" if not reason or first is None else RANDOM if random else _place(path, model, first)
    reason, run = reason or zeros or _machine_that_differs(others.result()), other.record if other else None
    return _verification(levels, run, samples=samples, quantized=quantized, reason=reason, machines=others.result())


def _depends_on_threads(proto: Any) -> bool:
    """Whether a file has an operator of which each thread of ONNX Runtime finds the ranges of its own part of the batch."""
    return any(node.op_type == "DynamicQuantizeLSTM" for node in proto.graph.node)


def _verification(levels: dict[str, Agreement], run: RuntimeRun | None, **known: Any) -> Verification:
    """The record. run: of the runtime that the file was written for, where that is another."""
    elsewhere = levels.get(f"in {run.name}") if run else None
    return Verification(plain=levels["as written"], optimized=levels["optimized"], runtime=run, elsewhere=elsewhere, **known)


def _agreements(
    outputs: list[list[list[np.ndarray]]], unrounded: list[list[np.ndarray]], other: OtherRuntime | None
) -> dict[str, Agreement]:
    """How far each execution of a file agrees; DataError for no batch. outputs: of the model, the file, optimized, elsewhere."""
    if not outputs[0]:
        raise DataError("verify_onnx: no batch was given")
    names = ["model", "as written", "optimized", *([f"in {other.record.name}"] if other and outputs[3] else [])]
    runs = dict(zip(names, outputs, strict=False))
    wanted, *executed = map(_concatenated_outputs, runs.values())
    heads = len({batch[0].shape[1:] for batch in outputs[0]})
    levels = {name: compare(wanted, got, heads=heads) for name, got in zip(names[1:], executed, strict=True)}
    if not unrounded:
        return levels
    few = {name: _concatenated_outputs(batches[: len(unrounded)]) for name, batches in runs.items()}
    exact = usable_reference(few["model"], _concatenated_outputs(unrounded))
    if exact is None:
        return levels
    return {name: beside_unrounded(level, few["model"], few[name], exact) for name, level in levels.items()}


def _lost_on_zeros(path: str | Path, model: nn.Module, inputs: Inputs, sessions: Sequence[Any]) -> str:
    """The reason to reject a file that gives NaN or infinity on numbers that are all zero, as in a black image or padding, where
    its model does not; "" where there is none. Divisions and logarithms that need their small number show there alone.
    """
    zeros = pytree.tree_map(lambda v: torch.zeros_like(v) if isinstance(v, Tensor) and v.is_floating_point() else v, inputs)
    try:
        wanted = _arrays(call(model, zeros))
        executed = [_run(run, zeros, path) for run in sessions]
    except Exception:  # a model need not run on zeros
        return ""
    for name, outputs in zip(("as written", "optimized"), executed, strict=True):
        for i, (expected, got) in enumerate(zip(wanted, outputs, strict=False)):
            if expected.shape == got.shape and bool((np.isfinite(expected) & ~np.isfinite(got)).any()):
                return f"{name}: on inputs of zeros, output {i} is NaN or infinite where the model gives a number"
    return ""


def _machine_that_differs(machines: Sequence[MachineAgreement]) -> str:
    """The reason to reject a file that overflows somewhere; empty where it does not."""
    return next((f"on {each.machine}: {each}; quantize for X86" for each in machines if each.layer), "")


def _place(path: str | Path, model: nn.Module, inputs: Inputs) -> str:
    """Where the file and its model begin to differ, to append to a reason; empty where that is not found."""
    with state_kept(model):
        where = first_layer_that_differs(path, model, inputs)
    return f"; {where}" if where else ""


def _rng_states() -> list[Tensor]:
    """States of torch's random generators; a model that draws from one changes it."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _run(run: Any, inputs: Inputs, path: str | Path) -> list[np.ndarray]:
    """Outputs of a session of ONNX Runtime."""
    return [np.atleast_1d(v) for v in run_session(run, numpy_inputs(run, inputs, path), path)]


def usable_reference(reference: list[np.ndarray], exact: list[np.ndarray]) -> list[np.ndarray] | None:
    """The unrounded outputs; None where they say nothing of the file: where data decides their shape, rounding changes it, and a
    quantization error as large as the outputs vary is one to which any file is near.
    """
    if [v.shape for v in reference] != [v.shape for v in exact]:
        return None
    centered = [v - v[np.isfinite(v)].mean() if np.isfinite(v).any() else v for v in exact]
    return exact if _error_norm(reference, exact) < _error_norm(centered, [np.zeros_like(v) for v in centered]) else None


def _batches_inside(model: nn.Module, batches: Iterable[Inputs], inside: str) -> tuple[nn.Module, Iterable[Inputs]]:
    """A submodule, and the inputs that it receives for each batch of the whole model."""

    def received() -> Iterator[Inputs]:
        for inputs in batches:
            with torch.no_grad(), mode(model, training=False), state_kept(model):
                seen = inputs_inside(model, inputs, inside)[1]
            yield seen  # outside: a generator that waits within no_grad would leave it switched off for its caller

    stream = received()
    first = next(stream, None)
    if first is None:
        raise DataError("verify_onnx: no batch was given")
    return model.get_submodule(inside), itertools.chain([first], stream)


def _arrays(output: Any) -> list[np.ndarray]:
    """All tensors of an output, in order; a single number as an array of one, so that batches can be joined."""
    tensors = [v for v in pytree.tree_leaves(output) if isinstance(v, Tensor)]
    return [np.atleast_1d(v.detach().float().cpu().numpy()) for v in tensors]


def _concatenated_outputs(batches: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Concatenate each output over all batches; one array per shape, where an output has several."""
    joined: dict[tuple[int, tuple[int, ...]], list[np.ndarray]] = {}
    for batch in batches:
        for i, output in enumerate(batch):
            joined.setdefault((i, output.shape[1:]), []).append(output)
    return [np.concatenate(joined[key]) for key in sorted(joined)]


def _unrounded(model: nn.Module, inputs: Inputs) -> list[np.ndarray]:
    """Outputs of a quantized model with its quantizers switched off."""
    parts = quantized_parts(model).values()
    for part in parts:
        part.enable_(False)
    try:
        return _arrays(call(model, inputs))
    finally:
        for part in parts:
            part.enable_(True)


def beside_unrounded(
    level: Agreement, reference: list[np.ndarray], outputs: list[np.ndarray], exact: list[np.ndarray]
) -> Agreement:
    """The agreement with its distances from the unrounded model. exact: outputs of a quantized model without rounding."""
    error = max(_error_norm(reference, exact), 1e-30)
    return replace(level, noise=_error_norm(reference, outputs) / error, excess=_error_norm(outputs, exact) / error)


def compare(reference: list[np.ndarray], outputs: list[np.ndarray], *, heads: int = 1) -> Agreement:
    """Compare outputs with reference outputs, over all samples at once.

    heads: how many of the arrays, from the first, are predictions.

    Raises ExportError for outputs of other shapes, or that are no numbers; DataError where they hold no values.
    """
    steps, same_infinities = [], 0
    shapes = [[v.shape for v in values] for values in (reference, outputs)]
    if len(reference) != len(outputs):
        raise ExportError(f"the file gives outputs of shapes {shapes[1]} where the model gives {shapes[0]}")
    reference, outputs = [_as_numbers(v) for v in reference], [_as_numbers(v) for v in outputs]
    for wanted, got in zip(reference, outputs, strict=True):
        if wanted.shape != got.shape:
            raise ExportError(f"the file gives an output of shape {got.shape} where the model gives {wanted.shape}")
        with np.errstate(invalid="ignore"):  # inf - inf
            error = np.abs(wanted.astype(np.float64) - got)
        equal = (wanted == got) | (np.isnan(wanted) & np.isnan(got))  # a masked logit of -inf agrees with itself
        error[equal] = 0
        same_infinities += int((equal & ~np.isfinite(wanted)).sum())
        steps.append(error.ravel() / _step(wanted))
    errors = np.nan_to_num(np.concatenate(steps or [np.zeros(0)]), nan=np.inf, posinf=np.inf)
    if not errors.size:
        raise DataError(f"the outputs hold no values to compare, got shapes {shapes[0]}; give inputs with at least one row")
    classes = all(v.ndim > 1 and v.shape[_class_dim(v)] > 1 for v in reference[:heads])
    compared = [_compare_classes(*pair) for pair in zip(reference[:heads], outputs, strict=False)] if classes else []
    same, flips = (np.concatenate([pair[i] for pair in compared] or [np.zeros(1)]) for i in (0, 1))
    return Agreement(
        agreement=float(same.mean()) if classes else None,
        flips=float(flips.mean()),
        within_one=float((errors <= 1).mean()),
        within_two=float((errors <= 2).mean()),
        largest=float(errors.max()),
        not_finite=same_infinities / errors.size,
    )


def _as_numbers(output: np.ndarray) -> np.ndarray:
    """An output that can be subtracted: truth values as 0 and 1."""
    if output.dtype.kind not in "biuf":
        raise ExportError(f"an output holds {output.dtype}; only numbers and truth values are compared, so drop it from the file")
    return output.astype(np.float32) if output.dtype.kind == "b" else output


def _class_dim(output: np.ndarray) -> int:
    """Dimension of the classes: (samples, classes, ...), or (samples, steps, classes) of a sequence."""
    return 2 if output.ndim == 3 else 1


def _compare_classes(wanted: np.ndarray, got: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each sample, whether the largest class is the same, and whether it is another that is no tie in `wanted`."""
    dim = _class_dim(wanted)
    best, other = (np.expand_dims(v.argmax(dim), dim) for v in (wanted, got))
    with np.errstate(invalid="ignore"):  # inf - inf
        lead = np.take_along_axis(wanted, best, dim) - np.take_along_axis(wanted, other, dim)
    return (best == other).ravel(), ((best != other) & ~(lead <= 2 * _step(wanted))).ravel()


def _step(reference: np.ndarray) -> float:
    """1/255 of the range of the finite values; of their size, where they are all the same."""
    finite = reference[np.isfinite(reference)].astype(np.float64)  # the range of half precision may be none of its numbers
    span = float(np.ptp(finite)) if finite.size else 0.0
    return (span or max(1.0, float(np.abs(finite).max(initial=0)))) / 255


def _error_norm(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """Root of the sum of all squared differences; entries that are not finite are left out."""
    total = 0.0
    for x, y in zip(a, b, strict=True):
        finite = np.isfinite(x) & np.isfinite(y)
        total += float(np.square(x[finite].astype(np.float64) - y[finite]).sum())
    return float(np.sqrt(total))


def steps_allowed(dtype: torch.dtype) -> float:
    """Largest error of a float file, in steps: 0.1 for fp32; for half precision eight roundings (2 in fp16, 16 in bf16)."""
    return FLOAT_STEPS if dtype in (torch.float32, torch.float64) else 8 * 255 * torch.finfo(dtype).eps


def _reason_to_reject(
    levels: Mapping[str, Agreement], quantized: bool, allowed: tuple[float, float], *, weight_only: bool
) -> str:
    """Why a file fails, or "". allowed: the largest error in steps, of a float file and of a quantized one."""
    within = WEIGHT_ONLY_WITHIN if weight_only else QUANTIZED_WITHIN
    for name, level in levels.items():
        if level.not_finite == 1:
            return f"{name}: no output value is finite, so nothing was compared"
        integers = quantized and not (weight_only and name == "as written")
        if not integers and level.largest > allowed[0]:
            return f"{name}: the largest error is {level.largest:.3g} steps, a file of this precision may have {allowed[0]:.3g}"
        if not integers or _is_within_noise(level):
            continue
        if level.flips > 1 - QUANTIZED_AGREEMENT:
            return f"{name}: the largest class agrees on {level.agreement:.2%} of the samples, wanted {QUANTIZED_AGREEMENT:.0%}"
        if level.largest > allowed[1]:
            return f"{name}: the largest error is {level.largest:.3g} steps, a quantized file may have {allowed[1]:.3g}"
        if level.within_two < within:
            return f"{name}: {level.within_two:.2%} of the values lie within two steps, wanted {within:.0%}"
    return ""


def _is_within_noise(level: Agreement) -> bool:
    """Whether the error is small next to the quantization error, or the file as near to the unrounded model as the simulation."""
    if level.noise is None or level.excess is None or not np.isfinite(level.largest):
        return False
    return level.noise <= QUANTIZED_NOISE or level.excess <= QUANTIZED_EXCESS
