"""Rules of operators that only move values: they are run on the labels themselves."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from compresskit.graph.normalize import Node, aten, functional_form
from compresskit.prune.structure.channel_sets import (
    UNCONSTRAINED,
    collapse,
    collapse_expanded,
    expand_along,
    fixed_labels,
    tighten,
    varying_dims,
)
from compresskit.prune.structure.constraints import ChannelCut, HardCodedSize
from compresskit.prune.structure.cuts import CUTS, cut_places
from compresskit.prune.structure.rules.arithmetic import join_broadcast
from compresskit.prune.structure.rules.base import (
    MOVING_OPERATORS,
    OperatorCall,
    RuleResult,
    overloads,
    rule_for,
)
from compresskit.prune.structure.rules.parameter_view import ParameterView
from compresskit.prune.structure.rules.width_scaling import remember_moved_product


@rule_for(aten.cat.default, aten.concat.default, aten.stack.default, aten.hstack.default, aten.vstack.default)
def rule_concat(call: OperatorCall) -> RuleResult:
    """Labels side by side."""
    dim = call.argument("dim", 0)
    if call.target in (aten.hstack.default, aten.vstack.default):
        if any(len(v.shape) < 2 for v in call.args[0]):
            return call.lock_inputs(f"no rule for {call.target} of vectors")
        dim = int(call.target is aten.hstack.default)
    values, states = _with_free_states(call, dim)
    values = [v for v in values if not (v.shape == (0,) and len(call.args[0]) > 1)]
    if call.target is aten.stack.default:
        dim %= len(values[0].shape) + 1
        values = [v.map(lambda a: a.unsqueeze(dim)) if isinstance(v, ParameterView) else v.unsqueeze(dim) for v in values]
    dim %= len(values[0].shape)
    moving = sorted({d for v in values if isinstance(v, Tensor) for d in varying_dims(v)} | {dim})
    parts = [_labels_beside(call, v, moving) for v in values]
    dims = [varying_dims(p) for p in parts]
    if all(d == dims[0] for d in dims) and dims[0] and dim not in dims[0]:
        # Tokens one after the other: whoever reads them reads the same channels of all.
        first = collapse(parts[0])
        for other in parts[1:]:
            first = call.sets.join(first, collapse(other), f"put behind values that cannot be cut by {call.where}")
        return first.expand(call.shape)
    for d in range(parts[0].ndim):
        if d != dim and not any(d in varying for varying in dims):
            parts = [p.narrow(d, 0, 1) if p.shape[d] else p for p in parts]
    result = tighten(torch.cat(parts, dim).expand(call.shape))
    for made in states:
        call.add_size_beside_blank(made, result)
    if not states and any(bool((collapse_expanded(v) == UNCONSTRAINED).any()) for v in parts):
        call.add_given_size(result)
    return result


def _with_free_states(call: OperatorCall, dim: int) -> tuple[list[Any], list[Node]]:
    """What is put side by side; zeros or ones beside activations take any width, as the first state of a recurrent cell does.

    Behind channels they are channels of their own, as those that fill up the width of a shortcut. Returns the values, and the
    operators that made those that take any width.
    """
    values, states = list(call.args[0]), []
    if not all(isinstance(v, Tensor) for v in values):
        return values, []
    behind_channels = any(dim % v.ndim in varying_dims(v) for v in values if v.ndim)
    for i, (value, node) in enumerate(zip(values, call.node.args[0], strict=True)):
        made = None if bool((collapse_expanded(value) != 0).any()) else call.blank_behind(node)
        if made is not None and behind_channels:
            along = dim % value.ndim
            values[i] = expand_along(call.labels_of_blank(made, tuple(value.shape), along), along, tuple(value.shape))
        elif made is not None:
            values[i] = torch.full((), UNCONSTRAINED).expand(value.shape)
            states.append(made)
    return values, states


def _labels_beside(call: OperatorCall, value: Any, moving: list[int]) -> Tensor:
    """Labels of one of several values that are concatenated; a parameter (class token) has them where the others vary."""
    if isinstance(value, Tensor):
        return value
    dims = [d for d in moving if d in {d for a in value.axes for d in varying_dims(a)}]
    if len(dims) == 1 and (labels := call.parameter_labels(value, dims[0])) is not None:
        return labels
    call.state.lock_tensor(value.name, f"concatenated by {call.where}")
    return fixed_labels(value.shape)


@rule_for(*overloads(MOVING_OPERATORS))
def rule_move(call: OperatorCall) -> RuleResult:
    """Run the operator on the labels themselves."""
    x, *rest = call.args
    rest = [fixed_labels(v.shape) if isinstance(v, ParameterView) else v for v in rest]  # `view_as` of a parameter
    if call.kind == "roll" and isinstance(x, Tensor) and len(rest) > 1 and not {d % x.ndim for d in rest[1]} & {*varying_dims(x)}:
        return x
    function = aten.reshape.default if call.target is aten.view.default else functional_form(call.target) or call.target
    try:
        if isinstance(x, ParameterView):
            view = x.map(lambda a: function(a, *rest, **call.kwargs))
            call.add_hard_coded_size_of(view)
            return view
        moved = tighten(function(x, *rest, **call.kwargs))
    except (RuntimeError, TypeError):
        return call.lock_inputs()
    if "expand" in call.kind or "repeat" in call.kind or call.kind == "tile":
        moved = _labels_of_copies(x, moved, rest[0] if call.kind == "expand_as" else None)
        _take_grown_dims(call, x)
    if len(varying_dims(moved)) > len(varying_dims(x)) or _is_one_head(call, x, moved):
        # (N, C) viewed as (N, heads, C / heads): which of the two sizes stays is decided once the whole graph has been seen.
        call.add_split(moved)
    call.add_hard_coded_size(moved)
    remember_moved_product(call)
    return moved


def _is_one_head(call: OperatorCall, x: Tensor, moved: Tensor) -> bool:
    """Whether (..., width) is viewed as (..., 1, width): heads of which there is one."""
    last = moved.ndim - 1
    return (
        call.kind in ("reshape", "view", "unflatten")
        and moved.ndim == x.ndim + 1 > 2
        and varying_dims(moved) == [last]
        and moved.shape[-2:] == (1, x.shape[-1])
    )


def _labels_of_copies(x: Tensor, moved: Tensor, like: Any) -> Tensor:
    """Copies of a value that is no channel take any width. like: what gives the new shape, where that is a value."""
    if x.ndim and moved.ndim == x.ndim and bool((collapse_expanded(x) == 0).all()):
        grown = [d for d in range(x.ndim) if moved.shape[d] > 1 == x.shape[d]]
        kept = [d for d in range(1, x.ndim) if x.shape[d] > 1]
        if grown and (not kept or (isinstance(like, Tensor) and not {*kept} & {*varying_dims(like)})):
            return torch.full((), UNCONSTRAINED).expand(moved.shape)
    return moved


def _take_grown_dims(call: OperatorCall, x: Tensor) -> None:
    """What is expanded or repeated takes any width where it had one entry, and where it took any before."""
    added = len(call.shape) - x.ndim
    sizes, copies = (1,) * added + tuple(x.shape), call.state.copies.get(call.node.args[0], ())
    call.take_copies(d for d, size in enumerate(call.shape) if size > 1 == sizes[d] or d - added in copies)


@rule_for(aten.pixel_shuffle.default)
def rule_pixel_shuffle(call: OperatorCall) -> RuleResult:
    """(N, C r^2, H, W) to (N, C, H r, W r): the r^2 channels that make one are joined."""
    x, r = call.args
    if not isinstance(x, Tensor):
        return call.lock_inputs(f"{call.where} works on a parameter")
    return _join_blocks(call, x, 1, r * r)


def _join_blocks(call: OperatorCall, x: Tensor, dim: int, size: int) -> Tensor:
    """Labels of a result of which each channel is put together from `size` channels of x, one after the other along `dim`."""
    blocks = call.labels_along(x, dim).reshape(-1, size)
    call.sets.join(blocks[:, :1], blocks, f"one of the channels that {call.where} puts together cannot be cut")
    return expand_along(blocks.amax(1), dim, call.shape)


@rule_for(aten.im2col.default, aten.col2im.default)
def rule_unfold(call: OperatorCall) -> RuleResult:
    """(N, C, H, W) to the windows (N, C kh kw, L), or back: the kh kw values of a channel stand one after the other."""
    x, window = call.args[0], math.prod(call.argument("kernel_size"))
    if not isinstance(x, Tensor):
        return call.lock_inputs(f"{call.where} works on a parameter")
    if call.target is aten.col2im.default:
        return _join_blocks(call, x, x.ndim - 2, window)
    return expand_along(call.labels_along(x, x.ndim - 3).repeat_interleave(window), x.ndim - 3, call.shape)


@rule_for(aten.channel_shuffle.default)
def rule_channel_shuffle(call: OperatorCall) -> RuleResult:
    """The number of groups stays, so groups get narrower together."""
    x, groups = call.args
    rows = call.labels_along(x, 1).view(groups, -1)
    call.sets.join_rows(rows, f"{call.where} needs equal groups, and one of them cannot be cut")
    return expand_along(rows.T.reshape(-1), 1, call.shape)


@rule_for(aten.pad.default, aten.constant_pad_nd.default)
def rule_pad(call: OperatorCall) -> RuleResult:
    """Zeros around positions have no channels; zeros beside channels are channels that stay."""
    x, sizes = call.args[:2]
    if not isinstance(x, Tensor):
        return call.lock_inputs(f"{call.where} works on a parameter")
    moving, beside = varying_dims(x), list(sizes)
    for d in range(len(beside) // 2):
        if x.ndim - 1 - d not in moving:
            beside[2 * d : 2 * d + 2] = [0, 0]
    if any(beside) and call.argument("mode", "constant") != "constant":
        return call.lock_inputs(f"{call.where} repeats channels")
    small = collapse(x)
    return (torch.nn.functional.pad(small, beside) if any(beside) else small).expand(call.shape)


@rule_for(aten.chunk.default, aten.tensor_split.sections)
def rule_chunk(call: OperatorCall) -> RuleResult:
    """Equal parts: the channels at the same position of every part are joined."""
    x, count = call.args[:2]
    dim = call.argument("dim", 0)
    if isinstance(x, ParameterView):
        return x.map_parts(lambda a: torch.chunk(a, count, dim))
    parts = torch.chunk(x, count, dim)
    if dim % x.ndim in varying_dims(x):
        if any(part.shape != parts[0].shape for part in parts):
            return call.lock_inputs(f"{call.where} makes unequal parts")
        _join_equal_parts(call, torch.stack([collapse(p) for p in parts]))
    return [tighten(part) for part in parts]


@rule_for(aten.glu.default)
def rule_glu(call: OperatorCall) -> RuleResult:
    """`a * sigmoid(b)` of two halves: channels i and i + C/2 are joined."""
    if not isinstance(call.args[0], Tensor):
        return call.lock_inputs(f"{call.where} works on a parameter")
    first, second = torch.chunk(call.args[0], 2, call.argument("dim"))
    return join_broadcast(call, first, second).expand(call.shape)


_ONE_PART = (aten.slice.Tensor, aten.select.int, aten.narrow.default)
_SEVERAL_PARTS = (
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.tensor_split.indices,
    aten.unbind.int,
)


@rule_for(*_ONE_PART, *_SEVERAL_PARTS)
def rule_constant_cut(call: OperatorCall) -> RuleResult:
    """Cuts at places that the code gives: allowed across positions; those of channels must follow the width, or it stays."""
    x, *rest = call.args
    if isinstance(x, ParameterView):
        return (x.map if call.target in _ONE_PART else x.map_parts)(lambda a: call.target(a, *rest, **call.kwargs))
    dim = call.argument("dim", 0) % max(x.ndim, 1)
    result = call.target(x, *rest, **call.kwargs)
    if dim in varying_dims(x):
        if call.target in (aten.unbind.int, aten.select.int) and len(varying_dims(x)) > 1:
            _join_equal_parts(call, collapse(x).movedim(dim, 0))  # (3, heads, width) taken apart into q, k and v
        elif call.target in CUTS and call.state.main_run:
            _add_cut(call, x, dim)
        elif call.target is not aten.slice.Tensor or result.shape[dim] != x.shape[dim]:
            call.sets.lock(x, f"cut at fixed places by {call.where}")
    return tighten(result) if isinstance(result, Tensor) else [tighten(r) for r in result]


def _add_cut(call: OperatorCall, x: Tensor, dim: int) -> None:
    """Record a cut, whose parts are sizes that an attribute may repeat; equal parts stay equal."""
    size = x.shape[dim]
    places = cut_places(call.target, call.args, call.kwargs, size)
    if places == ((0, size, 1),):
        return
    reason, small = f"cut at fixed places by {call.where}", collapse(x)
    lengths = tuple(len(range(*place)) for place in places)
    for position, place in enumerate(places):
        part = small.index_select(dim, torch.arange(*place))
        shape = (*x.shape[:dim], lengths[position], *x.shape[dim + 1 :])
        call.state.hard_coded_sizes.append(
            HardCodedSize(
                path=call.path,
                labels=part,
                shape=shape,
                reason=reason,
                cut=len(call.state.cuts),
                position=position,
                sizes=lengths,
            )
        )
    call.state.cuts.append(
        ChannelCut(
            target=call.target,
            nth=call.state.calls[call.target],
            path=call.path,
            labels=small,
            dim=dim,
            places=places,
            reason=reason,
        )
    )
    (start, _, step), length = places[0], lengths[0]
    if step > 1 and size % step == 0:
        _join_equal_parts(call, small.unflatten(dim, (-1, step)).movedim(dim + 1, 0))
    elif step == 1 and length and size % length == 0 == start % length and set(lengths) == {length}:
        _join_equal_parts(call, small.unflatten(dim, (-1, length)).movedim(dim, 0))


def _join_equal_parts(call: OperatorCall, parts: Tensor) -> None:
    """Join the channels at the same position of every part, (parts, ...)."""
    call.sets.join_rows(parts, f"split into equal parts by {call.where}")


@rule_for(aten.index.Tensor, aten.index_select.default)
def rule_look_up(call: OperatorCall) -> RuleResult:
    """x[integers]: tables are followed entry by entry; rows of activations keep their channels."""
    x, recorded = call.args[0], _on_cpu(call.node.meta["indices"])
    if isinstance(x, ParameterView):
        return x.map(lambda a: call.target(a, *recorded))
    for index in call.args[1] if isinstance(call.args[1], list | tuple) else call.args[1:]:
        if isinstance(index, Tensor):
            call.sets.lock(index, f"read as positions by {call.where}")
    touched, moving = _touched_dims(call, x, recorded), varying_dims(x)
    if any(d in moving for d in touched):
        return call.lock_inputs(f"looked up at fixed places by {call.where}")
    shape = call.shape
    if not moving:
        value = collapse(x).flatten()[:1]
        return value.view([1] * len(shape)).expand(shape) if len(value) and shape else fixed_labels(shape)
    if max(touched) > min(moving) or 0 in shape:
        try:
            return tighten(call.target(x.contiguous(), *recorded))
        except (RuntimeError, IndexError):
            return call.lock_inputs()
    # The looked-up dimensions stand before the channels, which keep their places counted from the end.
    small = collapse(x)
    small = small.flatten(0, min(moving) - 1)[0] if min(moving) else small
    return small.expand(x.shape[min(moving) :]).expand(shape)


def _touched_dims(call: OperatorCall, x: Tensor, recorded: list[Any]) -> list[int]:
    """The dimensions that are indexed."""
    if call.target is aten.index_select.default:
        return [recorded[0] % x.ndim]
    indices = recorded[0]
    # A mask of several dimensions takes as many.
    if any(v is not None and v.dtype == torch.bool and v.ndim > 1 for v in indices):
        return list(range(sum(v.ndim if v is not None and v.dtype == torch.bool else 1 for v in indices)))
    return [d for d, index in enumerate(indices) if index is not None]


def _on_cpu(recorded: list[Any]) -> list[Any]:
    """The arguments of a look-up, where labels are."""

    def moved(value: Any) -> Any:
        return value.cpu() if isinstance(value, Tensor) else value

    return [[moved(v) for v in value] if isinstance(value, list) else moved(value) for value in recorded]


@rule_for(*overloads("index_put index_copy index_add copy index_fill slice_scatter select_scatter"))
def rule_write(call: OperatorCall) -> RuleResult:
    """Values written into a tensor: a blank one takes their labels, the channels of another one are joined with theirs."""
    x, args, copies = call.args[0], call.args, "copy" in str(call.target)
    if not isinstance(x, Tensor):
        return call.lock_inputs(f"{call.where} writes into a parameter")
    target: Node = call.node.args[0]
    if len(args) > 2 and isinstance(args[2], Tensor) and args[2].numel() == 0:
        if call.is_blank(target):
            call.state.blank.add(call.node)  # nothing was written yet
        return x
    if call.kind == "index_put" and isinstance(args[2], ParameterView):
        return _write_vector(call, x, args[2])
    if call.kind == "index_put" and varying_dims(x) and args[2].numel() == 1 and bool((args[2] <= 0).all()):
        return _fill_places(call, x)
    values = [v for v in (*args[1:], *call.kwargs.values()) if isinstance(v, Tensor) and bool((collapse_expanded(v) > 0).any())]
    if not values:
        if not varying_dims(x) or "copy_" in str(call.target):
            return x
        return call.lock_inputs(f"overwritten by {call.where}")
    value = values[0]
    blank = call.is_blank(target) and not varying_dims(x)  # `zeros_like(h)` is as wide as h
    if copies:
        if blank:
            return join_broadcast(call, value, fixed_labels(())).expand(x.shape)
        return join_broadcast(call, x, value)
    dims = [d - value.ndim for d in varying_dims(value)]
    if len(dims) != 1 or len(values) > 1 or value.ndim > x.ndim + 1 or dims[0] == -x.ndim:
        return call.lock_inputs()
    if x.shape[dims[0]] != value.shape[dims[0]]:
        return call.lock_inputs()
    labels = expand_along(call.labels_along(value, value.ndim + dims[0]), x.ndim + dims[0], tuple(x.shape))
    return labels if blank else join_broadcast(call, x, labels)


def _fill_places(call: OperatorCall, x: Tensor) -> RuleResult:
    """One number written at some places, the same for every channel, as `x[~valid] = 0` does."""
    labels, dim, repeated = x, 0, False
    for index, node, is_mask in zip(call.args[1], call.node.args[1], call.node.meta["masks"], strict=True):
        ndim = len(index.shape) if is_mask else 1
        if is_mask and isinstance(index, Tensor):
            mask, index = index, call.first_of_copies(index, node)
            repeated |= index is not mask
            place = index.reshape([1] * dim + list(index.shape) + [1] * (x.ndim - dim - ndim))
            labels = join_broadcast(call, labels, place)
        elif index is not None and {*range(dim, dim + ndim)} & {*varying_dims(x)}:
            return call.lock_inputs(f"overwritten by {call.where}")
        elif isinstance(index, Tensor):
            call.sets.lock(index, f"read as positions by {call.where}")
        dim += ndim
    if repeated:
        call.add_given_size(labels)
    return labels


def _write_vector(call: OperatorCall, x: Tensor, parameter: ParameterView) -> RuleResult:
    """A parameter with one entry per channel, such as a mask token, written at some positions goes with the channels."""
    labels, moving = call.vector_labels(parameter), varying_dims(x)
    touched = [d for d, index in enumerate(call.args[1]) if index is not None]
    ranks = [len(index.shape) for index in call.args[1] if index is not None]
    last = x.ndim - 1
    if labels is None or moving != [last] or labels.shape[-1] != x.shape[-1] or sum(ranks) > last or last in touched:
        return call.lock_inputs(f"overwritten by {call.where}")
    return join_broadcast(call, x, expand_along(labels.reshape(-1), last, tuple(x.shape)))


@rule_for(aten.as_strided.default)
def rule_as_strided(call: OperatorCall) -> RuleResult:
    """Windows that overlap: run on labels that lie in memory as the value does."""
    x, size, stride = call.args[:3]
    strides = call.node.meta["strides"]
    if not isinstance(x, Tensor) or strides is None or 0 in strides or call.argument("storage_offset"):
        return call.lock_inputs(f"no rule for {call.target} ({call.path or 'the model'})")
    laid_out = torch.empty_strided(x.shape, strides, dtype=torch.long).copy_(x)
    moved = tighten(laid_out.as_strided(size, stride))
    call.add_hard_coded_size(moved)
    return moved
