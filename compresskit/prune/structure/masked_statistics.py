"""Run the zeroed model of a proof as if the zeroed channels were not there, where code takes statistics over channels.

A layer norm over channels, and a mean over the inputs of a standardized weight, are taken over the channels that stay. Values
that are computed from weights are zero where a weight is, whatever the formula makes of zeros. Where the code divides by a
parameter or buffer, zeros would make everything NaN: `DivisorSearch` finds those tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from compresskit.graph.normalize import aten, usual_operator
from compresskit.graph.surgery import get_tensor
from compresskit.prune.structure.groups import ChannelAnalysis
from compresskit.prune.structure.plan import Plan

_NORMS = (aten.layer_norm.default, aten.rms_norm.default, aten.group_norm.default, aten.batch_norm.default)


@dataclass(frozen=True, kw_only=True)
class ZeroedMasks:
    """What the calls of operators leave out.

    keep: (operator, n) -> dimension -> (size,) bool: the nth call takes its statistics over the entries that are set.
    zero: (operator, n) -> part -> bool, broadcastable: entries of that result of the nth call that are zero.
    """

    keep: dict[tuple[Any, int], dict[int, Tensor]]
    zero: dict[tuple[Any, int], dict[int, Tensor]]

    @property
    def targets(self) -> set[Any]:
        """The operators."""
        return {target for target, _ in (*self.keep, *self.zero)}


def removed_sets(analysis: ChannelAnalysis, plan: Plan) -> Tensor:
    """Roots of the channel sets that a plan removes, sorted."""
    removed = [
        axis.labels[list(indices)]
        for (tensor, dim), axis in analysis.resolved.axes.items()
        if (indices := plan.remove.get(analysis.prefix + tensor, {}).get(dim))
    ]
    roots = analysis.resolved.sets.roots(torch.cat([torch.zeros(1, dtype=torch.long), *removed])).unique()
    return roots[roots > 0]


def zeroed_masks(analysis: ChannelAnalysis, plan: Plan) -> ZeroedMasks:
    """What statistics and computed weights leave out when the channels of a plan are zero."""
    sets, removed = analysis.resolved.sets, removed_sets(analysis, plan)
    masks = ZeroedMasks(keep={}, zero={})
    for s in analysis.propagation.statistics:
        keep = ~torch.isin(sets.roots(s.labels), removed)
        if not bool(keep.all()):
            dims = masks.keep.setdefault((s.target, s.nth), {})
            dims[s.dim] = dims[s.dim] & keep if s.dim in dims else keep
    for value in analysis.propagation.computed_weights:
        for labels in value.labels:
            zero = torch.isin(sets.roots(labels), removed)
            if bool(zero.any()):
                parts = masks.zero.setdefault((value.target, value.nth), {})
                parts[value.part] = parts[value.part] | zero if value.part in parts else zero
    return masks


class MaskedStatistics(TorchDispatchMode):
    """Runs the calls that are named in `masks` without the channels that are zero."""

    def __init__(self, masks: ZeroedMasks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.masks = masks
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        call, kwargs = (func, self.calls[func]), kwargs or {}
        if func is aten._weight_norm.default:
            return torch.nan_to_num(func(*args, **kwargs))  # a row of zeros has no direction: 0 / 0, times 0
        keep = self.masks.keep.get(call)
        result = func(*args, **kwargs) if keep is None else _over_kept(func, keep, args, kwargs)
        for part, zero in self.masks.zero.get(call, {}).items():
            value = result if isinstance(result, Tensor) else result[part]
            value.masked_fill_(zero.to(value.device), 0)
        return result


def _over_kept(func: Any, masks: dict[int, Tensor], args: Any, kwargs: Any) -> Any:
    """The result of an operator whose statistics are over the entries of some dimensions that are kept."""
    x = small = args[0]
    others = list(args[1:])
    kept = {dim: mask.to(x.device).nonzero().flatten() for dim, mask in masks.items()}
    for dim, indices in kept.items():
        small = small.index_select(dim, indices)
        if func in _NORMS and func is not aten.batch_norm.default:
            others = _selected_arguments(func, x, args, indices, dim)
    result = func(small, *others, **kwargs)
    if func not in _NORMS:
        return result
    for dim, indices in reversed(kept.items()):
        shape = list(result.shape)
        shape[dim] = x.shape[dim]
        result = result.new_zeros(shape).index_copy(dim, indices, result)
    return result


def _selected_arguments(func: Any, x: Tensor, args: Any, keep: Tensor, dim: int) -> list[Any]:
    """The other arguments of a norm, for the channels that stay."""
    others: list[Any] = list(args[1:])
    if func is aten.group_norm.default:
        own_dim = 0
    else:
        own_dim = dim - (x.ndim - len(args[1]))
        shape = list(others[0])
        shape[own_dim] = len(keep)
        others[0] = shape
    return [v.index_select(own_dim, keep) if isinstance(v, Tensor) else v for v in others]


class DivisorSearch(TorchDispatchMode):
    """Finds the tensors of a zeroed model by whose zeros it divides, or whose logarithm or negative power it takes: `names`.

    An entry-by-entry operator whose result is not finite is run again with ones in the place of the zeros of one operand. Where
    more of the result is finite then, the parameters and buffers that the operand was computed from are such tensors. So that the
    search goes on behind it, its result gets zeros where it is not finite.
    """

    def __init__(self, zeroed: nn.Module, plan: Plan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self._origins: Any = WeakIdKeyDictionary()  # tensor -> names of the zeroed tensors that it is computed from
        same: dict[int, set[str]] = defaultdict(set)
        for name in plan.remove:  # a tied tensor has several names, each of which would zero it
            tensor = get_tensor(zeroed, name)
            same[id(tensor)].add(name)
            self._origins[tensor] = same[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        origins = [self._origins.get(v, set()) for v in leaves if isinstance(v, Tensor)]
        entrywise = torch.Tag.pointwise in usual_operator(func).tags
        with _disable_current_modes():  # one of them counts the operators of the model
            copies = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs)) if entrywise and any(origins) else None
        result = func(*args, **kwargs)
        if copies is not None and isinstance(result, Tensor) and not bool(result.isfinite().all()):
            with _disable_current_modes():
                if found := list(self._behind_zeros(func, leaves, copies, result)):
                    self.names.update(*found)
                    result.nan_to_num_(0, 0, 0)
        if any(origins) and (entrywise or all(origins)):
            for value in pytree.tree_leaves(result):
                if isinstance(value, Tensor):
                    self._origins[value] = set().union(*origins)
        return result

    def _behind_zeros(self, func: Any, leaves: list[Any], copies: Any, result: Tensor) -> Iterator[set[str]]:
        """The origins of each operand whose zeros make a part of the result of an operator not finite."""
        values, structure = pytree.tree_flatten(copies)
        count = int(result.isfinite().sum())
        for position, (given, value) in enumerate(zip(leaves, values, strict=True)):
            if not isinstance(given, Tensor) or not (names := self._origins.get(given)) or bool((value != 0).all()):
                continue
            tried = [v.clone() if isinstance(v, Tensor) else v for v in values]
            tried[position] = value.masked_fill(value == 0, 1)
            args, kwargs = pytree.tree_unflatten(tried, structure)
            if int(func(*args, **kwargs).isfinite().sum()) > count:
                yield names
