"""Verify an ONNX file: run it and its model on real batches, at two optimization levels of ONNX Runtime, and compare.

Errors are counted in *steps*: one step is 1/255 of the range of the reference output, as on an 8-bit grid over it. Fused integer
kernels may round ties to the other side (onnxruntime#32132), and one step that flips early moves all later values a little.

* A quantized file passes if enough values lie within two steps and the largest class agrees; classes within two steps of each
  other count as a tie. Where the network amplifies every rounding (deep and untrained, for example), it also passes if its
  difference is small next to the quantization error, which is what rounding the activations changes, or if it is as near to the
  model with float activations as the simulation is: after dozens of layers, two correct executions differ as much as independent
  noise does. Neither says anything of a model that draws random numbers, or whose quantization error is as large as its outputs.
  A model with layers of signs (`graph.replacements.Signed`) counts as quantized, and its largest error is not judged: a value at
  a threshold may fall to either side, and move many outputs of its sample.
  On several threads, each thread of ONNX Runtime's quantized LSTM finds the ranges of its own part of the batch. So a file with
  one is executed on one thread as written, which shows that it computes what the model does, and optimized as it runs here.
* Each output passes alone, and each part of it, such as a channel, whose errors the range of the whole would hide.
* A float file passes by its largest error; in half precision, by the sum of that precision's roundings, and each part by its
  distance from the model in fp32, where the half model's own says how far is right. As written, a file of
  which only weights are rounded counts as a float file; optimized, ONNX Runtime may round its activations, too.
* Few samples show little: a unit that they leave off may be lost. Below `FEWEST` of them, rows are made that hold their values in
  another order, and judged with them. They may reject the file, and count nowhere else.
* Where a file names dimensions that vary, it runs at other sizes than the data's, too (`other_sizes`). A difference there does
  not reject it, since data of those sizes may never come: a warning says it, and so does the record.
* NaN and infinity agree with the same at the same places, and the record counts them. A file none of whose values is finite does
  not pass, since nothing was compared.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError, ExportError, SettingError
from compresskit.base.files import check_is_path
from compresskit.base.inputs import AnyInputs, check_has_rows, each_inputs
from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs, batch_size, call, copied_tensors
from compresskit.export.check.agreement import FEWEST, QUANTIZED_STEPS, Agreement, not_finite_remark, steps_allowed
from compresskit.export.check.bisect import first_layer_that_differs
from compresskit.export.check.executions import Comparison
from compresskit.export.check.machines import MachineAgreement, MachineCheck, machines_named
from compresskit.export.check.other_sizes import called_with_data, remark_on_other_sizes
from compresskit.export.check.runtimes import OtherRuntime, RuntimeRun
from compresskit.export.files import read_proto
from compresskit.export.rewrite.dtypes import least_precise_dtype
from compresskit.graph.capture import inputs_inside
from compresskit.graph.quantized import quantized_parts
from compresskit.graph.replacements import takes_signs
from compresskit.graph.surgery import check_is_module, copy_model, mode, state_kept
from compresskit.measure import numpy_inputs, run_session, session

RANDOM = "; the model draws random numbers, of which a file draws its own"
COPIED = 500_000_000  # parameters of the largest half-precision model that is copied in fp32, in 2 GB
MADE_SECONDS = 10.0  # after which no more rows are made
#: Operators whose result may jump where rounding changes a value by little, as it often does in rows that mean nothing.
JUMP = frozenset(
    {"ArgMax", "ArgMin", "If", "Loop", "NonMaxSuppression", "NonZero", "Scan", "TopK", "Unique"}
    | {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Ceil", "Floor", "Round", "Sign"}
)


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
        other_sizes: what is wrong at sizes that the data has not, where dimensions vary; empty where nothing was found.
    """

    samples: int
    quantized: bool
    plain: Agreement
    optimized: Agreement
    reason: str = ""
    machines: tuple[MachineAgreement, ...] = ()
    runtime: RuntimeRun | None = None
    elsewhere: Agreement | None = None
    other_sizes: str = ""

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
            if level.not_finite == 1:  # nothing was compared, which is said once below
                continue
            top = "" if level.agreement is None else f"same class {level.agreement:.2%}, "
            lines.append(f"  {name:<10}  {top}within a step {level.within_one:.2%}, largest error {level.largest:.3g} steps")
        lines += [f"  {remark}"] if (remark := not_finite_remark(levels.values())) else []
        lines += [f"  but {self.other_sizes}"] if self.other_sizes else []
        lines += [f"  {self.runtime.note}"] if self.runtime and self.runtime.note else []
        lines += [f"  {each.machine:<10}  {each}" for each in self.machines]
        return "\n".join(lines)


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
    Raises ExportError where the file does not load or run (not where it disagrees), DataError where the first batch has no row.
    """
    proto = _checked_proto(path, model, executed)
    others = MachineCheck(path, machines_named(machines))
    total, batches = _batch_count(batches), _first_has_rows(each_inputs(batches, "verify_onnx"))
    sessions = _sessions(path, proto)
    model, batches = _batches_inside(model, batches, inside) if inside else (model, batches)
    parts = quantized_parts(model).values()
    other = next((OtherRuntime(path, part.runtime) for part in parts if part.runtime != "onnxruntime"), None)
    found = _comparison(model)
    few, samples = list[Inputs](), 0  # the first batches, of FEWEST samples
    with torch.no_grad(), mode(model, training=False), state_kept(model):
        unrounded = _unrounded_model(model)
        for inputs in progress_bar(batches, total=total, desc=label, unit="batch"):
            got = _add_batch(found, path, (model, unrounded), inputs, sessions, other)
            if executed:
                executed(got)
            others.add(inputs)
            few, samples = [*few, inputs] if samples < FEWEST else few, samples + batch_size(inputs)
        if not few:
            raise DataError("verify_onnx: no batch was given")
        zeros = _lost_on_zeros(path, model, few[0], sessions)
        sized = _remark_on_sizes(found, path, model, few[0], sessions)
    made = "" if _jumps(proto) else _wrong_on_made_rows(found, path, (model, unrounded), few, sessions)
    levels = found.levels()  # judges what is left
    where = "" if not (found.reason or made) else RANDOM if found.random else _place(path, model, few[0])
    reason = f"{found.reason or made}{where}" or zeros or _machine_that_differs(others.result())
    return Verification(
        samples=samples,
        quantized=found.quantized,
        plain=levels["as written"],
        optimized=levels["optimized"],
        reason=reason,
        machines=others.result(),
        runtime=other.record if other else None,
        elsewhere=levels.get(f"in {other.record.name}") if other else None,
        other_sizes="" if reason else _warn_of_sizes(path, sized),
    )


def _checked_proto(path: Any, model: Any, executed: Any) -> Any:
    """The file as a protobuf. Raises SettingError and ModelError for arguments of another kind, ExportError as `read_proto`."""
    check_is_path(path, "verify_onnx(path=...)", "; write verify_onnx(path, model, batches)")
    check_is_module(model, "verify_onnx")
    if executed is not None and not callable(executed):
        raise SettingError(f"verify_onnx(executed=...): wanted a function of the outputs, got {executed!r:.60}")
    return read_proto(path)  # refuses weights outside its folder


def _batch_count(batches: Any) -> int | None:
    """How many there are, where that is known."""
    if isinstance(batches, Tensor):  # one batch
        return 1
    return len(batches) if isinstance(batches, Sized) else None


def _first_has_rows(batches: Iterable[Inputs]) -> Iterator[Inputs]:
    """The same batches; DataError where the first, of which other inputs are made, has no rows."""
    for i, inputs in enumerate(batches):
        if i == 0:
            check_has_rows(inputs, "verify_onnx: the first batch")
        yield inputs


def _comparison(model: nn.Module) -> Comparison:
    """With the limits for a model, whose quantizers must be on."""
    parts, signs = quantized_parts(model).values(), takes_signs(model)
    for part in parts:
        part.check_rounds("verify_onnx")
    return Comparison(
        quantized=bool(parts) or signs,
        weight_only=not signs and all(part.exact for part in parts),
        most_of_floats=steps_allowed(least_precise_dtype(model)),
        most_of_integers=sys.float_info.max if signs else QUANTIZED_STEPS,
    )


def _add_batch(
    found: Comparison,
    path: str | Path,
    models: tuple[nn.Module, nn.Module | None],
    inputs: Inputs,
    sessions: Sequence[Any],
    other: OtherRuntime | None = None,
) -> list[np.ndarray]:
    """Compare the outputs for one batch, and return those of the file, optimized. models: the model, and the unrounded one."""
    model, exact = models
    drawn = _rng_states()
    wanted = _arrays(called_with_data(model, inputs))
    found.random = found.random or any(not torch.equal(*pair) for pair in zip(drawn, _rng_states(), strict=False))
    unrounded = None
    if exact is model and found.wants_unrounded:
        unrounded = _unrounded(model, inputs)
    elif exact and found.wants_unrounded:
        try:
            unrounded = _unrounded(exact, pytree.tree_map(_in_fp32, inputs))
        except Exception:  # a forward that casts to half precision by itself
            found.unrounded_fails = True
    got = {name: _run(run, inputs, path) for name, run in zip(("as written", "optimized"), sessions, strict=True)}
    if other and other.compiled:
        got[f"in {other.record.name}"] = other.run(sessions[0], inputs)
    found.add(wanted, got, unrounded=unrounded, samples=batch_size(inputs))
    return got["optimized"]


def _unrounded_model(model: nn.Module) -> nn.Module | None:
    """What `_unrounded` takes: a quantized model itself, a copy in fp32 of one in half precision; None of others, and where it is
    too large or cannot be copied.
    """
    if quantized_parts(model):
        return model
    if least_precise_dtype(model).itemsize > 2 or sum(v.numel() for v in model.parameters()) > COPIED:
        return None
    try:
        return copy_model(model).float()
    except Exception:  # whatever the classes of a user's attributes raise
        return None


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _jumps(proto: Any) -> bool:
    """Whether two right executions of a file may differ much where two values are nearly the same; see JUMP."""
    bodies = (proto.graph, *proto.functions)
    return any(node.op_type in JUMP for body in bodies for node in body.node)


def _wrong_on_made_rows(
    found: Comparison,
    path: str | Path,
    models: tuple[nn.Module, nn.Module | None],
    few: Sequence[Inputs],
    sessions: Sequence[Any],
) -> str:
    """The reason to reject a file by few samples together with rows made of them, `FEWEST` in all; "" where there is none, and
    where the model does not take such rows. On a GPU none are made: an index outside of its table ends the process there.

    Each batch keeps its shapes, so nothing is asked of the model's rows.
    """
    model, samples, began = models[0], sum(map(batch_size, few)), time.perf_counter()
    if samples >= FEWEST or found.random or found.reason or takes_signs(model) or any(map(_is_cuda, pytree.tree_leaves(few))):
        return ""
    more = found.with_made_rows()
    for seed, inputs in enumerate(itertools.cycle(few)):
        made = _in_another_order(inputs, seed)
        try:
            with torch.no_grad(), mode(model, training=False), state_kept(model):  # each comes first, where a state moves
                _add_batch(more, path, models, made, sessions)
        except Exception:  # a model need not run on them
            return ""
        samples += max(batch_size(made), 1)
        if samples >= FEWEST or time.perf_counter() - began > MADE_SECONDS:
            break
    try:
        more.levels()
    except ExportError:  # rounding decides the shape of an output
        return ""
    return f"with rows that hold the values of the data in another order, {more.reason}" if more.reason else ""


def _in_another_order(inputs: Inputs, seed: int) -> Inputs:
    """The inputs, with the numbers of each row in another order, which is one for all tensors of a shape, such as tokens and
    their masks.
    """
    random = torch.Generator().manual_seed(seed)
    orders: dict[tuple[int, ...], Tensor] = {}

    def ordered(value: Tensor) -> Tensor:
        if value.ndim < 2 or value.dtype is torch.bool:
            return value
        rows = value.flatten(1)
        drawn = torch.randperm(rows.shape[1], generator=random, device="cpu")
        order = orders.setdefault(tuple(value.shape[1:]), drawn)
        return rows[:, order].reshape(value.shape)

    return pytree.tree_map_only(Tensor, ordered, copied_tensors(inputs))  # type: ignore[no-any-return]


def _is_cuda(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _remark_on_sizes(found: Comparison, path: str | Path, model: nn.Module, inputs: Inputs, sessions: Sequence[Any]) -> str:
    """See `other_sizes`; nothing of a model that draws random numbers."""
    dtype = None if found.quantized else least_precise_dtype(model)
    return "" if found.random else remark_on_other_sizes(path, model, inputs, sessions, dtype)


def _sessions(path: str | Path, proto: Any) -> list[Any]:
    """Of a file as it is written, and optimized."""
    threads = torch.get_num_threads()
    first = 1 if depends_on_threads(proto) else threads
    return [session(path, optimize=False, threads=first), session(path, threads=threads)]


def depends_on_threads(proto: Any) -> bool:
    """Whether a file has an operator of which each thread of ONNX Runtime finds the ranges of its own part of the batch."""
    return any(node.op_type == "DynamicQuantizeLSTM" for node in proto.graph.node)


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


def _warn_of_sizes(path: str | Path, remark: str) -> str:
    """The remark on other sizes, of which a warning is given, too."""
    if remark:
        warnings.warn(
            f"{Path(path).name} names dimensions that vary, and agrees with its model at the sizes of the data, but {remark};"
            " leave the dimension out of dynamic=, or export with an example of the sizes that will come",
            stacklevel=3,
        )
    return remark


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


def _unrounded(model: nn.Module, inputs: Inputs) -> list[np.ndarray]:
    """Outputs of a model whose activations are not rounded. Its weights are, since no right execution has others."""
    with ExitStack() as stack:
        for part in quantized_parts(model).values():
            stack.enter_context(part.float_activations())
        return _arrays(call(model, inputs))
