"""Verify an ONNX file: run it and its model on real batches, at two optimization levels of ONNX Runtime, and compare.

Errors are counted in *steps*: one step is 1/255 of the range of the reference output, as on an 8-bit grid over it. Fused integer
kernels may round ties to the other side (onnxruntime#32132), and one step that flips early moves all later values a little.

* A quantized file passes if enough values lie within two steps and the largest class agrees. Where the network amplifies every
  rounding (deep and untrained, for example), it also passes if its difference is small next to the quantization error, or if
  it is as near to the unrounded model as the simulation is: after dozens of layers, two correct executions differ as much as
  independent noise does.
* A float file passes by its largest error; in half precision, by the sum of that precision's roundings. As written, a file of
  which only weights are rounded counts as a float file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError, ExportError
from compresskit.base.inputs import AnyInputs, each_inputs
from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs, batch_size, call, call_checked
from compresskit.export.check.bisect import first_layer_that_differs
from compresskit.export.files import read_proto
from compresskit.export.rewrite.dtypes import least_precise_dtype
from compresskit.graph.capture import inputs_inside
from compresskit.graph.quantized import quantized_parts
from compresskit.graph.surgery import mode
from compresskit.measure import numpy_inputs, session

#: Limits for a file to pass. FLOAT_STEPS: largest error of a float file, in steps. QUANTIZED_AGREEMENT and QUANTIZED_WITHIN:
#: fraction of samples whose largest class agrees, and of values within two steps. Or QUANTIZED_NOISE: error as a fraction of the
#: quantization error. Or QUANTIZED_EXCESS: distance from the unrounded model as a fraction of the simulation's distance.
FLOAT_STEPS, QUANTIZED_AGREEMENT, QUANTIZED_WITHIN, QUANTIZED_NOISE, QUANTIZED_EXCESS = 0.1, 0.98, 0.97, 0.7, 1.1
QUANTIZED_STEPS = 16  # largest error: a single wrong output among many is an error, not a rounding


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far the outputs of a file agree with a reference, at one optimization level of ONNX Runtime.

    A step is 1/255 of the range of the reference output.

    Attributes:
        agreement: fraction of samples with the same largest class; None where the output has no classes.
        within_one, within_two: fraction of output values that are at most one or two steps off.
        largest: largest error, in steps.
        noise: root mean square error, as a fraction of the quantization error; None for a float model.
        excess: root mean square distance of the file from the unrounded model, as a fraction of the simulation's distance; None
            for a float model.
    """

    agreement: float | None
    within_one: float
    within_two: float
    largest: float
    noise: float | None = None
    excess: float | None = None


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Result of `verify_onnx`; prints as one line and one per optimization level.

    Attributes:
        samples: number of samples that were compared.
        quantized: whether the model, or a part of it, is quantized.
        plain, optimized: agreement of the file as it is written, and with all optimizations of ONNX Runtime.
        reason: why the file does not pass; empty where it passes.
    """

    samples: int
    quantized: bool
    plain: Agreement
    optimized: Agreement
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether the file agrees with its model."""
        return not self.reason

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        record = asdict(self) | {"passed": self.passed}
        for name in ("plain", "optimized"):  # JSON has no infinity
            record[name] = {k: v if v is None or np.isfinite(v) else None for k, v in record[name].items()}
        return record

    def __str__(self) -> str:
        lines = [f"{'agrees' if self.passed else 'DISAGREES'} with its model on {self.samples} samples {self.reason}".rstrip()]
        for name, level in (("as written", self.plain), ("optimized", self.optimized)):
            top = "" if level.agreement is None else f"same class {level.agreement:.2%}, "
            lines.append(f"  {name:<10}  {top}within a step {level.within_one:.2%}, largest error {level.largest:.3g} steps")
        return "\n".join(lines)


def verify_onnx(
    path: str | Path, model: nn.Module, batches: Iterable[AnyInputs], *, inside: str | None = None, label: str = "verify"
) -> Verification:
    """Run an ONNX file and its model on the same inputs and compare all outputs.

    Args:
        path: of the ONNX file.
        model: the PyTorch model it was written from, float or quantized.
        batches: real data: an iterable of inputs, each a tuple or a dict.
        inside: dotted name of the submodule that the file was written from; `batches` are still those of the whole model.
        label: of the progress bar.

    Returns:
        The agreement with all optimizations and without, and why the file does not pass, if it does not.

    Raises ExportError where the file does not load or run; a file that runs and disagrees is reported, not raised.
    """
    read_proto(path)  # refuses weights outside its folder
    total = len(batches) if isinstance(batches, Sized) else None
    batches = each_inputs(batches, "verify_onnx")
    try:
        sessions = [session(path, optimize=False), session(path)]
    except Exception as error:
        raise ExportError(f"{path}: ONNX Runtime cannot load it: {_last_line(error)}") from error
    if inside:
        model, batches = _batches_inside(model, batches, inside)
    parts = quantized_parts(model).values()
    quantized = bool(parts)
    exact_parts = all(part.exact for part in parts)  # only weights are rounded
    outputs: list[list[list[np.ndarray]]] = [[], [], []]
    unrounded: list[list[np.ndarray]] = []  # what the outputs are without it
    samples, first = 0, None
    with torch.no_grad(), mode(model, training=False):
        for inputs in progress_bar(batches, total=total, desc=label, unit="batch"):
            first = inputs if first is None else first
            outputs[0].append(_arrays(call_checked(model, inputs, "verification data")))
            if quantized:
                unrounded.append(_unrounded(model, inputs))
            for store, run in zip(outputs[1:], sessions, strict=True):
                try:
                    store.append([np.atleast_1d(v) for v in run.run(None, numpy_inputs(run, inputs))])
                except DataError:
                    raise
                except Exception as error:
                    raise ExportError(f"{path}: ONNX Runtime cannot run it: {_last_line(error)}") from error
            samples += batch_size(inputs)
    if first is None:
        raise DataError("verify_onnx: no batch was given")
    wanted, written, fast = map(_concatenated_outputs, outputs)
    heads = len({batch[0].shape[1:] for batch in outputs[0]})
    exact = _concatenated_outputs(unrounded) if quantized else None
    plain, optimized = (compare(wanted, got, exact, heads=heads) for got in (written, fast))
    reason = _reason_to_reject(
        plain, optimized, quantized, steps_allowed(least_precise_dtype(model)), as_written=quantized and not exact_parts
    )
    if reason and (where := first_layer_that_differs(path, model, first)):
        reason = f"{reason}; {where}"
    return Verification(samples=samples, quantized=quantized, plain=plain, optimized=optimized, reason=reason)


def _batches_inside(model: nn.Module, batches: Iterable[Inputs], inside: str) -> tuple[nn.Module, Iterable[Inputs]]:
    """A submodule, and the inputs that it receives for each batch of the whole model."""

    def received() -> Iterator[Inputs]:
        for inputs in batches:
            with torch.no_grad(), mode(model, training=False):
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


def compare(
    reference: list[np.ndarray], outputs: list[np.ndarray], exact: list[np.ndarray] | None = None, *, heads: int = 1
) -> Agreement:
    """Compare outputs with reference outputs, over all samples at once.

    exact: outputs of a quantized model without rounding. heads: how many of the arrays, from the first, are predictions.
    """
    steps = []
    shapes = [[v.shape for v in values] for values in (reference, outputs)]
    if len(reference) != len(outputs):
        raise ExportError(f"the file gives outputs of shapes {shapes[1]} where the model gives {shapes[0]}")
    for wanted, got in zip(reference, outputs, strict=True):
        if wanted.shape != got.shape:
            raise ExportError(f"the file gives an output of shape {got.shape} where the model gives {wanted.shape}")
        finite = wanted[np.isfinite(wanted)]
        span = float(np.ptp(finite)) if finite.size else 0.0
        span = span or max(1.0, float(np.abs(finite).max(initial=0)))
        with np.errstate(invalid="ignore"):  # inf - inf
            error = np.abs(wanted.astype(np.float64) - got)
        error[wanted == got] = 0  # a masked logit of -inf agrees with itself
        steps.append(error.ravel() / (span / 255))
    errors = np.nan_to_num(np.concatenate(steps), nan=np.inf)
    classes = all(v.ndim > 1 and v.shape[1] > 1 for v in reference[:heads])
    same = [(a.argmax(1) == b.argmax(1)).ravel() for a, b in zip(reference[:heads], outputs, strict=False)] if classes else []
    return Agreement(
        agreement=float(np.concatenate(same).mean()) if classes else None,
        within_one=float((errors <= 1).mean()),
        within_two=float((errors <= 2).mean()),
        largest=float(errors.max()),
        noise=None if exact is None else _error_norm(reference, outputs) / max(_error_norm(reference, exact), 1e-30),
        excess=None if exact is None else _error_norm(outputs, exact) / max(_error_norm(reference, exact), 1e-30),
    )


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


def _reason_to_reject(plain: Agreement, optimized: Agreement, quantized: bool, allowed: float, *, as_written: bool) -> str:
    for name, level, integers in (("as written", plain, as_written), ("optimized", optimized, quantized)):
        if not integers and level.largest > allowed:
            return f"{name}: the largest error is {level.largest:.3g} steps, a file of this precision may have {allowed:.3g}"
        if (
            level.noise is not None
            and np.isfinite(level.largest)
            and (level.noise <= QUANTIZED_NOISE or (level.excess or 0) <= QUANTIZED_EXCESS)
        ):
            continue
        if integers and level.agreement is not None and level.agreement < QUANTIZED_AGREEMENT:
            return f"{name}: the largest class agrees on {level.agreement:.2%} of the samples, wanted {QUANTIZED_AGREEMENT:.0%}"
        if integers and level.largest > QUANTIZED_STEPS:
            return f"{name}: the largest error is {level.largest:.3g} steps, a quantized file may have {QUANTIZED_STEPS}"
        if integers and level.within_two < QUANTIZED_WITHIN:
            return f"{name}: {level.within_two:.2%} of the values lie within two steps, wanted {QUANTIZED_WITHIN:.0%}"
    return ""


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
