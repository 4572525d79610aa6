"""Prove a plan on a copy of the model: with the channels removed it gives what it gives with exactly those values set to zero.

Where a normalisation mixes channels (LayerNorm, GroupNorm, a mean over channels), zeros would count in its statistics, while
channels that are removed do not. There the zeroed model takes its statistics over the channels that stay (`MaskedStatistics`).
What the model divides by keeps its values there (`DivisorSearch`): 0 / 0 would say nothing, and 0 / g is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from compresskit.base.errors import named_first_line
from compresskit.base.inputs import AnyInputs, as_inputs
from compresskit.base.task import Inputs, call, first_rows
from compresskit.graph.differences import NOTHING_FINITE, any_finite, relative_difference
from compresskit.graph.surgery import copy_model, mode
from compresskit.prune.evidence import watched_calls
from compresskit.prune.structure.cuts import CutRecorder
from compresskit.prune.structure.groups import ChannelAnalysis, find_groups
from compresskit.prune.structure.masked_statistics import DivisorSearch, MaskedStatistics, ZeroedMasks, removed_sets, zeroed_masks
from compresskit.prune.structure.plan import Plan, apply_, zero_
from compresskit.prune.structure.propagate import propagate
from compresskit.prune.structure.repeatable import repeatable, varied_inputs, vary_constants_
from compresskit.prune.structure.trace import repeat_rows, running_modules, trace_model

FLOAT64_TOLERANCE, FLOAT32_TOLERANCE = 1e-9, 1e-4  # of the largest output
TRAINING_TOLERANCE = 100  # times as much in train mode, where BatchNorm divides by the deviations of a few samples
TIMES_NOISE, MOST_NOISE = 10, 1e-5  # of a difference in train mode that rounding explains; in eval mode none is taken
LARGE_MODEL = 150_000_000  # parameters above which the proof runs in float32, so that the copy fits
SINGLE_SAMPLE_MODEL = 30_000_000  # parameters above which one sample has to do, where the model takes one
PROOF_ROWS = 8  # of a larger batch, where the model takes so few: more rows run through the same channels
MOST_INNER_VALUES = 2**16  # of a call of a layer inside the model that are compared, at random places
ZEROS_NOT_FINITE = (
    "with the removed channels at zero no output of the model is finite (a division by them, or their logarithm), so that nothing"
    " can be compared"
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What is wrong with a plan.

    path: the module in whose forward the pruned copy failed; None where values differ.
    cuts: numbers of the cuts of channels whose places did not follow the width.
    """

    reason: str
    path: str | None = None
    cuts: tuple[int, ...] = ()


def prove(model: nn.Module, plan: Plan, example: AnyInputs) -> str | None:
    """Check that a plan removes what it may; the model is not changed.

    The pruned copy must run in train and eval mode and give what the zeroed copy gives: in float64, or in float32 for a model
    that makes its own float32 values and so cannot run in float64. Noise is the same in both, and parameters and inputs that are
    constant (zeros) get other values. Layers that keep all their outputs are compared, too: outputs that are filled, saturated or
    few say little. In train mode values are compared where the model needs nothing but its inputs.

    Args:
        model: the dense model. plan: what to remove from it. example: its inputs.

    Returns:
        None where the plan is right, else what is wrong with it.
    """
    example = as_inputs(example)
    failure = check_plan(model, plan, example, find_groups(propagate(trace_model(model, example)), 0))
    return None if failure is None else failure.reason


def check_plan(model: nn.Module, plan: Plan, example: Inputs, analysis: ChannelAnalysis) -> Failure | None:
    """`prove` with an analysis of the model that is already there."""
    masks = zeroed_masks(analysis, plan)
    size = sum(p.numel() for p in model.parameters())
    rows = 1 if size >= SINGLE_SAMPLE_MODEL else PROOF_ROWS
    if (size >= SINGLE_SAMPLE_MODEL or _has_more_rows(example, rows)) and _runs(model, first_rows(example, rows)):
        example = first_rows(example, rows)
    if size < LARGE_MODEL:
        with suppress(_DoesNotRun), torch.random.fork_rng():
            return _compare_copies(model, plan, _to_float64(example), masks, FLOAT64_TOLERANCE)
    try:
        with torch.random.fork_rng():
            return _compare_copies(model, plan, example, masks, FLOAT32_TOLERANCE)
    except _DoesNotRun as error:
        return Failure(reason=str(error))


def try_pruned_copy(model: nn.Module, plan: Plan, example: Inputs, analysis: ChannelAnalysis | None = None) -> Failure | None:
    """Run a pruned copy in eval mode, which costs far less than a proof; None where it runs.

    With the analysis that the plan is of, it also fails where the code cuts channels at other places than the plan needs.
    """
    pruned = apply_(copy_model(model).eval(), plan)
    cuts = [] if analysis is None else analysis.propagation.cuts
    failure = None
    for inputs in (first_rows(example, 1), example):  # one sample is cheap; all of them where the code does not take one
        paths = [""]
        recorder = CutRecorder(cuts, paths, "" if analysis is None else analysis.propagation.trace.prefix)
        failure = None
        try:
            with torch.inference_mode(), running_modules(pruned, paths), torch.random.fork_rng(), repeatable(pruned), recorder:
                call(pruned, inputs)
        except Exception as error:
            failure = _does_not_run(error, paths)
        if cuts and analysis is not None:
            removed = removed_sets(analysis, plan)
            wrong = recorder.wrong(cuts, analysis.resolved.sets, removed, finished=failure is None)
            if wrong:
                return Failure(reason=f"{cuts[wrong[0]].reason}, which do not follow the width", cuts=wrong)
        if failure is None:
            return None
    return failure


def _has_more_rows(example: Inputs, count: int) -> bool:
    """Whether all tensors have one number of rows, which is larger."""
    sizes = {len(v) for v in pytree.tree_leaves(example) if isinstance(v, Tensor) and v.ndim}
    return len(sizes) == 1 and sizes.pop() > count


def _runs(model: nn.Module, example: Inputs) -> bool:
    try:
        with torch.inference_mode(), mode(model, training=False), torch.random.fork_rng(), repeatable(model):
            call(model, example)
    except Exception:
        return False
    return True


class _DoesNotRun(Exception):
    """The zeroed model does not run, perhaps in float64 alone."""


def _compare_copies(model: nn.Module, plan: Plan, example: Inputs, masks: ZeroedMasks, tolerance: float) -> Failure | None:
    """Zero a copy and run it, then prune it and run it again, in eval and in train mode; `model` is the dense model."""
    wide = tolerance == FLOAT64_TOLERANCE
    unchanged = [n for n, m in model.named_modules() if _keeps_outputs(n, m, plan)]
    zeroed, inputs, expected = _run_zeroed(model, plan, example, masks, unchanged, wide=wide)
    if expected.says_nothing():
        return Failure(reason=_why_nothing_is_finite(model, inputs, wide=wide))
    training = _training_run(zeroed, inputs, masks, expected.calls)
    pruned = apply_(zeroed, plan)
    paths = [""]
    try:
        with torch.inference_mode(), running_modules(pruned, paths), repeatable(pruned):
            found = _run(pruned, inputs, unchanged)
        failure = _difference(expected.outputs, found.outputs, tolerance) or _inner_difference(expected, found, tolerance)
        if failure is not None:
            return failure
        with torch.no_grad(), running_modules(pruned, paths):
            if training is None:
                _check_training_mode(pruned.float(), model, _to_float32(inputs))
                return None
            with torch.inference_mode(), repeatable(pruned.train()):
                got = _float_tensors(call(pruned, training.inputs))
    except Exception as error:
        return _does_not_run(error, paths)
    if not training.comparable:
        return None
    failure = _difference(training.outputs, got, tolerance * TRAINING_TOLERANCE)
    if failure is not None:  # perhaps no more than rounding makes where BatchNorm has two values that are nearly equal
        noise = min(TIMES_NOISE * _training_noise(pruned, training.inputs, got), MOST_NOISE)
        failure = _difference(training.outputs, got, noise)
    return None if failure is None else replace(failure, reason=f"in train mode {failure.reason}")


def _run_zeroed(
    model: nn.Module, plan: Plan, example: Inputs, masks: ZeroedMasks, unchanged: Iterable[str], *, wide: bool
) -> tuple[nn.Module, Inputs, _Run]:
    """A zeroed copy of a model in eval mode, the inputs that it takes, and what it gives; raises `_DoesNotRun`.

    Where that is not finite, what the model divides by keeps its values. The pruned model must then give what the model gives
    with all else at zero: a channel whose layer gives zeros, or is read by zeros, does not depend on its divisor.
    """
    left: Collection[str] = ()
    while True:
        zeroed = copy_model(model).double().eval() if wide else copy_model(model).eval()
        vary_constants_(zeroed)
        zero_(zeroed, plan, left)
        try:
            inputs = varied_inputs(example)
            if inputs is not example and not _runs(zeroed, inputs):
                inputs = example
            with torch.inference_mode(), repeatable(zeroed), MaskedStatistics(masks) as statistics:
                expected = _run(zeroed, inputs, unchanged)
            if left or expected.is_finite() or not (left := _divisors(zeroed, plan, inputs, masks)):
                return zeroed, inputs, replace(expected, calls=statistics.calls)
        except Exception as error:
            raise _DoesNotRun(f"the model does not run with zeros: {named_first_line(error)}") from None
        del zeroed  # so that there is one copy in memory


def _divisors(zeroed: nn.Module, plan: Plan, inputs: Inputs, masks: ZeroedMasks) -> set[str]:
    """Names of the tensors by whose zeros a zeroed model divides."""
    search = DivisorSearch(zeroed, plan)
    with torch.inference_mode(), repeatable(zeroed), MaskedStatistics(masks), search:
        call(zeroed, inputs)
    return search.names


def _why_nothing_is_finite(model: nn.Module, inputs: Inputs, *, wide: bool) -> str:
    """Why a zeroed copy, none of whose outputs is finite, proves nothing: because of the zeros, or as the model itself."""
    dense = copy_model(model).double().eval() if wide else model
    with torch.inference_mode(), mode(dense, training=False), repeatable(dense):
        finite = any_finite(_float_tensors(call(dense, inputs)))
    return ZEROS_NOT_FINITE if finite else NOTHING_FINITE


@dataclass(frozen=True, kw_only=True)
class _TrainingRun:
    """A run in train mode. comparable: whether it takes its statistics over channels where eval mode does."""

    inputs: Inputs
    outputs: list[Tensor]
    comparable: bool


def _training_run(zeroed: nn.Module, example: Inputs, masks: ZeroedMasks, eval_calls: Counter[Any]) -> _TrainingRun | None:
    """Run the zeroed model in train mode; None where that needs more than inputs, such as targets.

    eval_calls: how often each operator was called in eval mode.
    """
    # BatchNorm may need more than one value a channel, and of two that lie near each other it makes 1 and -1
    for inputs in (first_rows(example, 1), example, first_rows(example, 2), repeat_rows(example)):
        statistics = MaskedStatistics(masks)
        try:
            with torch.inference_mode(), mode(zeroed, training=True), repeatable(zeroed), statistics:
                outputs = _float_tensors(call(zeroed, inputs))
        except Exception:
            continue
        comparable = all(statistics.calls[target] == eval_calls[target] for target in masks.targets)
        return _TrainingRun(inputs=inputs, outputs=outputs, comparable=comparable)
    return None


def _training_noise(pruned: nn.Module, inputs: Inputs, outputs: list[Tensor]) -> float:
    """How far these outputs, of train mode, move where every second weight moves by a rounding error, relative to their size."""
    moved = copy_model(pruned)
    with torch.no_grad():
        for weight in moved.parameters():
            if weight.is_floating_point():
                every_second = (torch.arange(weight.numel(), device=weight.device) % 2).to(weight).view_as(weight)
                weight.mul_(1 + torch.finfo(weight.dtype).eps * every_second)
    with torch.inference_mode(), repeatable(moved.train()):
        again = _float_tensors(call(moved, inputs))
    return max((relative_difference(a, b) for a, b in zip(outputs, again, strict=True)), default=0.0)


def _keeps_outputs(name: str, module: nn.Module, plan: Plan) -> bool:
    """Whether a layer has weights and none of its outputs is removed or rescaled."""
    parameters = [f"{name}.{leaf}" if name else leaf for leaf, _ in module.named_parameters(recurse=False)]
    weighted = isinstance(module, nn.modules.conv._ConvNd | nn.Linear)
    return weighted and not any(0 in plan.remove.get(parameter, {}) or parameter in plan.scales for parameter in parameters)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What a model gave.

    inner: (path, shape, some of the values) of each call of the layers that keep all their outputs.
    calls: how often each operator was called, where they were counted.
    """

    outputs: list[Tensor]
    inner: list[tuple[str, torch.Size, Tensor]]
    calls: Counter[Any] = field(default_factory=Counter)

    @property
    def values(self) -> list[Tensor]:
        """All of them."""
        return [*self.outputs, *(v for _, _, v in self.inner)]

    def is_finite(self) -> bool:
        """Whether all values are finite."""
        return all(bool(v.isfinite().all()) for v in self.values)

    def says_nothing(self) -> bool:
        """Whether there are values, and none of them is finite."""
        return any(v.numel() for v in self.values) and not any_finite(self.values)


def _run(model: nn.Module, example: Inputs, unchanged: Iterable[str]) -> _Run:
    inner: list[tuple[str, torch.Size, Tensor]] = []

    def visit(path: str, _module: nn.Module, _x: Tensor, out: Any) -> None:
        with _disable_current_modes():  # they count the operators of the model
            inner.extend((path, value.shape, _some_values(value)) for value in _float_tensors(out))

    with watched_calls(model, list(unchanged), visit):
        outputs = _float_tensors(call(model, example))
    return _Run(outputs=outputs, inner=inner)


def _some_values(values: Tensor) -> Tensor:
    """(values,) a copy of all entries, or of as many at the same random places for every tensor of a size."""
    flat = values.flatten()
    if len(flat) <= MOST_INNER_VALUES:
        return flat.clone()  # what follows may write into it
    places = torch.randint(len(flat), (MOST_INNER_VALUES,), generator=torch.Generator().manual_seed(0))
    return flat[places.to(flat.device)]


def _check_training_mode(pruned: nn.Module, model: nn.Module, example: Inputs) -> None:
    """Run the pruned model in train mode; raises what it raises where the dense model runs."""
    repeated = repeat_rows(example)
    try:
        call(pruned.train(), repeated)
    except Exception:
        dense = copy_model(model).float().train()
        try:
            call(dense, repeated)
        except Exception:
            return  # training needs more than inputs, such as targets
        raise


def _difference(expected: list[Tensor], got: list[Tensor], tolerance: float) -> Failure | None:
    if len(expected) != len(got):
        return Failure(reason=f"the pruned model gives {len(got)} tensors where the zeroed model gives {len(expected)}")
    for a, b in zip(expected, got, strict=True):
        if a.shape != b.shape:
            return Failure(reason=f"the pruned model gives {tuple(b.shape)} where the model gives {tuple(a.shape)}")
        difference = relative_difference(a, b)
        if not difference <= tolerance:
            return Failure(reason=f"removed is not zeroed: the outputs differ by {difference:.2g} of their size")
    return None


def _inner_difference(expected: _Run, found: _Run, tolerance: float) -> Failure | None:
    """The first layer inside the model that keeps its outputs, and gives others."""
    if [path for path, _, _ in expected.inner] != [path for path, _, _ in found.inner]:
        return None  # a layer that is called for each channel, say
    for (path, shape, a), (_, cut, b) in zip(expected.inner, found.inner, strict=True):
        if shape != cut:
            continue  # channels are another dimension there, as in a layer that mixes positions
        difference = relative_difference(a, b)
        if not difference <= tolerance:
            return Failure(reason=f"removed is not zeroed: the outputs of {path} differ by {difference:.2g} of their size")
    return None


def _does_not_run(error: BaseException, paths: list[str]) -> Failure:
    return Failure(reason=f"the pruned model does not run: {named_first_line(error)}", path=paths[-1])


def _to_float64(inputs: Inputs) -> Inputs:
    doubled: Inputs = pytree.tree_map(lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v, inputs)
    return doubled


def _to_float32(inputs: Inputs) -> Inputs:
    single: Inputs = pytree.tree_map(lambda v: v.float() if isinstance(v, Tensor) and v.dtype == torch.float64 else v, inputs)
    return single


def _float_tensors(output: Any) -> list[Tensor]:
    """Without gradients: a model may ask for them itself, as one of coordinates does that is derived by them."""
    return [v.detach() for v in pytree.tree_leaves(output) if isinstance(v, Tensor) and v.is_floating_point()]
