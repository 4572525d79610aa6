"""Proof of a plan, on a copy: the pruned model equals the model with exactly those values set to zero.

Where a normalisation mixes channels (LayerNorm, GroupNorm, a mean over channels), zeros would count in its statistics while
channels that are gone do not. There the zeroed model takes its statistics over the channels that stay: *masked* normalisation.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compresskit.base.inputs import AnyInputs, as_inputs
from compresskit.base.task import Inputs, call, first_rows
from compresskit.graph.normalize import aten
from compresskit.graph.surgery import mode
from compresskit.prune.structure.groups import ChannelAnalysis, find_groups
from compresskit.prune.structure.plan import Plan, apply_, zero_
from compresskit.prune.structure.propagate import Walk
from compresskit.prune.structure.trace import following, plain_kernels, record, twice

TOLERANCE = 1e-9  # of the largest output, in float64
LARGE = 150_000_000  # parameters above which the proof runs in float32, so that the copy fits
MANY = 30_000_000  # parameters above which one sample has to do, where the model takes one


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What is wrong with a plan. path: the module in whose forward the pruned copy failed; None where values differ."""

    reason: str
    path: str | None = None


def prove(model: nn.Module, plan: Plan, example: AnyInputs) -> str | None:
    """None where the plan is right, else what is wrong with it; the model is not changed.

    The pruned copy must run in train and eval mode, and in eval mode give what the zeroed copy gives: in float64, or in float32
    for a model that makes its own float32 values and so cannot run in float64.
    """
    example = as_inputs(example)
    failure = examine(model, plan, example, find_groups(Walk(record(model, example)), 0))
    return None if failure is None else failure.reason


def examine(model: nn.Module, plan: Plan, example: Inputs, found: ChannelAnalysis) -> Failure | None:
    """`prove`, with what the walk found for this model."""
    prefix = f"{found.propagation.recorded.prefix}." if found.propagation.recorded.prefix else ""
    masks = masks_of(found, gone(found, plan, prefix))
    size = sum(p.numel() for p in model.parameters())
    if size >= MANY and _takes(model, first_rows(example, 1)):
        example = first_rows(example, 1)
    if size < LARGE:
        wide = copy.deepcopy(model).double().eval()
        try:
            with torch.random.fork_rng():
                return _examine(wide, model, plan, _double(example), masks, TOLERANCE)
        except _CannotRunWide:
            del wide
    with torch.random.fork_rng():
        return _examine(copy.deepcopy(model).eval(), model, plan, example, masks, 1e-4)


def runs(model: nn.Module, plan: Plan, example: Inputs) -> Failure | None:
    """Whether a pruned copy runs in eval mode, which costs far less than a proof."""
    pruned = apply_(copy.deepcopy(model).eval(), plan)
    failure = None
    for inputs in (first_rows(example, 1), example):  # one row is cheap; all of them where the code does not stand one
        paths = [""]
        try:
            with torch.inference_mode(), following(pruned, paths), torch.random.fork_rng():
                call(pruned, inputs)
            return None
        except Exception as error:
            failure = Failure(reason=f"the pruned model does not run: {_first(error)}", path=paths[-1])
    return failure


def _takes(model: nn.Module, example: Inputs) -> bool:
    try:
        with torch.inference_mode(), mode(model, training=False):
            call(model, example)
    except Exception:
        return False
    return True


class _CannotRunWide(Exception):
    pass


def _examine(
    zeroed: nn.Module, model: nn.Module, plan: Plan, example: Inputs, masks: list[Masked], tolerance: float
) -> Failure | None:
    watched = [n for n, m in zeroed.named_modules() if _keeps_outputs(n, m, plan)]
    zero_(zeroed, plan)
    try:
        with plain_kernels(), torch.inference_mode(), Masking(masks):
            wanted, inner = _run(zeroed, example, watched)
    except Exception as error:
        if tolerance == TOLERANCE:
            raise _CannotRunWide from None
        return Failure(reason=f"the model does not run with zeros: {_first(error)}")
    pruned = apply_(zeroed, plan)
    paths = [""]
    try:
        with torch.inference_mode(), following(pruned, paths):
            got, inner_got = _run(pruned, example, watched)
        with torch.no_grad(), following(pruned, paths):
            _train_once(pruned.float(), model, _single(example))
    except Exception as error:
        return Failure(reason=f"the pruned model does not run: {_first(error)}", path=paths[-1])
    return _compare(wanted + inner, got + inner_got, tolerance)


def _keeps_outputs(name: str, module: nn.Module, plan: Plan) -> bool:
    """Whether a layer has weights and none of its outputs goes: where boxes are few or none, it is compared instead."""
    own = [f"{name}.{leaf}" if name else leaf for leaf, _ in module.named_parameters(recurse=False)]
    weighted = isinstance(module, nn.modules.conv._ConvNd | nn.Linear)
    return weighted and not any(0 in plan.remove.get(tensor, {}) for tensor in own)


def _run(model: nn.Module, example: Inputs, watched: Iterable[str]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of the model, and of the watched layers where the model itself gives next to nothing."""
    inner: list[Tensor] = []
    modules = dict(model.named_modules())
    handles = [modules[n].register_forward_hook(lambda _m, _i, out: inner.extend(_tensors(out))) for n in watched]
    try:
        outputs = _tensors(call(model, example))
    finally:
        for handle in handles:
            handle.remove()
    few = sum(v.numel() for v in outputs) < 64
    return outputs, inner if few else []


def _train_once(pruned: nn.Module, model: nn.Module, example: Inputs) -> None:
    more = twice(example)
    try:
        call(pruned.train(), more)
    except Exception:
        dense = copy.deepcopy(model).float().train()
        try:
            call(dense, more)
        except Exception:
            return  # training needs more than inputs, such as targets
        raise


def _compare(wanted: list[Tensor], got: list[Tensor], tolerance: float) -> Failure | None:
    if len(wanted) != len(got):
        return Failure(reason=f"the pruned model gives {len(got)} tensors where the zeroed model gives {len(wanted)}")
    for a, b in zip(wanted, got, strict=True):
        if a.shape != b.shape:
            return Failure(reason=f"the pruned model gives {tuple(b.shape)} where the model gives {tuple(a.shape)}")
        difference = float((a - b).abs().max()) if a.numel() else 0.0
        if not difference <= tolerance * max(1.0, float(a.abs().max()) if a.numel() else 1.0):
            return Failure(reason=f"removed is not zeroed: the outputs differ by {difference:.2g}")
    return None


def gone(found: ChannelAnalysis, plan: Plan, prefix: str) -> set[int]:
    """The units that a plan removes."""
    roots: set[int] = set()
    for (tensor, dim), member in found.resolved.vectors.items():
        if indices := plan.remove.get(prefix + tensor, {}).get(dim):
            roots.update(found.resolved.units.roots(member.labels)[list(indices)].tolist())
    return roots - {0}


@dataclass(frozen=True, kw_only=True)
class Masked:
    """The nth call of an operator takes its statistics over the entries of `dim` that `keep`, (size,) bool, names."""

    target: Any
    nth: int
    dim: int
    keep: Tensor


def masks_of(found: ChannelAnalysis, roots: set[int]) -> list[Masked]:
    """What normalisations must leave out when these units are zero."""
    masks = []
    removed = torch.tensor(sorted(roots), dtype=torch.long)
    for s in found.propagation.statistics:
        keep = ~torch.isin(found.resolved.units.roots(s.labels), removed)
        if not bool(keep.all()):
            masks.append(Masked(target=s.target, nth=s.nth, dim=s.dim, keep=keep))
    return masks


class Masking(TorchDispatchMode):
    """Runs the named calls of normalisations over the channels that stay."""

    def __init__(self, masks: Iterable[Masked]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.masks = {(m.target, m.nth): m for m in masks}
        self.seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func] += 1
        masked = self.masks.get((func, self.seen[func]))
        kwargs = kwargs or {}
        if func is aten._weight_norm.default:
            return torch.nan_to_num(func(*args, **kwargs))  # a row of zeros has no direction: 0 / 0, times 0
        if masked is None:
            return func(*args, **kwargs)
        x = args[0]
        stays = masked.keep.to(x.device).nonzero().flatten()
        small = x.index_select(masked.dim, stays)
        if func in (aten.layer_norm.default, aten.rms_norm.default, aten.group_norm.default):
            result = func(small, *_narrowed(func, x, args, stays, masked.dim), **kwargs)
            return torch.zeros_like(x).index_copy(masked.dim, stays, result)
        return func(small, *args[1:], **kwargs)


def _narrowed(func: Any, x: Tensor, args: Any, stays: Tensor, dim: int) -> list[Any]:
    """The other arguments of a norm, for the channels that stay."""
    first = 1 if func is aten.group_norm.default else x.ndim - len(args[1])
    own = 0 if func is aten.group_norm.default else dim - first
    given: list[Any] = list(args[1:])
    if func is not aten.group_norm.default:
        shape = list(given[0])
        shape[own] = len(stays)
        given[0] = shape
    return [v.index_select(own, stays) if isinstance(v, Tensor) else v for v in given]


def _first(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _double(inputs: Inputs) -> Inputs:
    doubled: Inputs = pytree.tree_map(lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v, inputs)
    return doubled


def _single(inputs: Inputs) -> Inputs:
    single: Inputs = pytree.tree_map(lambda v: v.float() if isinstance(v, Tensor) and v.dtype == torch.float64 else v, inputs)
    return single


def _tensors(output: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(output) if isinstance(v, Tensor) and v.is_floating_point()]
