"""Rules of operators that only move values: they are run on the labels themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compresskit.graph.normalize import Node, aten
from compresskit.prune.structure.channel_sets import ANY, compact, nothing, spread, tight, varying
from compresskit.prune.structure.rules.arithmetic import meet
from compresskit.prune.structure.rules.base import Raw, Rule, argument, overloads, rules_of

if TYPE_CHECKING:
    from compresskit.prune.structure.propagate import Walk

MOVES: dict[Any, Rule] = {}
rule = rules_of(MOVES)


@rule(aten.cat.default, aten.concat.default, aten.stack.default, aten.hstack.default, aten.vstack.default)
def concat(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Labels side by side."""
    function = node.target
    dim = argument(node, args, kwargs, "dim", 0)
    given = [v for v in args[0] if not (v.shape == (0,) and len(args[0]) > 1)]
    if function is aten.stack.default:
        dim %= len(given[0].shape) + 1
        given = [v.map(lambda a: a.unsqueeze(dim)) if isinstance(v, Raw) else v.unsqueeze(dim) for v in given]
    if "stack.default" in str(function) and function is not aten.stack.default:
        return walk.give_up(node, f"no rule for {function}")
    dim %= len(given[0].shape)
    moving = sorted({d for v in given if isinstance(v, Tensor) for d in varying(v)} | {dim})
    parts = [_labels_of(walk, node, v, moving) for v in given]
    if len({tuple(varying(p)) for p in parts}) == 1 and dim not in varying(parts[0]) and varying(parts[0]):
        # Tokens behind one another: whoever reads them reads the same channels of all.
        first = compact(tight(parts[0]))
        for other in parts[1:]:
            reason = f"put behind values that cannot be cut by {walk.where(node)}"
            first = walk.units.join(first, compact(tight(other)), reason)
        return first.expand(walk.shape(node))
    for d in range(parts[0].ndim):
        if d != dim and d not in {d for v in parts for d in varying(v)}:
            parts = [p.narrow(d, 0, 1) if p.shape[d] else p for p in parts]
    joined = torch.cat([*parts], dim)
    return tight(joined.expand(walk.shape(node)))


def _labels_of(walk: Walk, node: Node, value: Any, moving: list[int]) -> Tensor:
    """A parameter beside activations (class token): labels along the dimension in which those vary."""
    if isinstance(value, Tensor):
        return value
    own = [d for d in moving if d in {d for a in value.axes for d in varying(a)}]
    if len(own) == 1 and (labels := walk.labelled(value, own[0])) is not None:
        return labels
    walk.pin(value.name, f"concatenated by {walk.where(node)}")
    return nothing(value.shape)


_MOVES = """reshape view flatten unflatten permute transpose squeeze unsqueeze expand repeat t mT movedim moveaxis
 pixel_unshuffle roll expand_as tile repeat_interleave view_as reshape_as swapaxes swapdims numpy_T atleast_2d _unsafe_view
 adjoint unfold ravel"""


@rule(*overloads(_MOVES))
def move(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator on the labels themselves."""
    x, *rest = args
    if (
        "roll" in str(node.target)
        and isinstance(x, Tensor)
        and len(rest) > 1
        and not {d % x.ndim for d in rest[1]} & {*varying(x)}
    ):
        return x
    function = _functional(node.target)
    try:
        if isinstance(x, Raw):
            return x.map(lambda a: function(a, *rest, **kwargs))
        moved = tight(function(x, *rest, **kwargs))
    except (RuntimeError, TypeError):
        return walk.give_up(node, f"{walk.where(node)} could not be followed")
    if "expand" in str(node.target) or "repeat" in str(node.target):
        moved = _copies(x, moved)
    if len(varying(moved)) > len(varying(x)):
        # (N, C) seen as (N, heads, C / heads): which of the two numbers stays is known once everything has been seen.
        walk.split(node, x, moved)
    walk.suspect(node, moved)
    walk.product_moved(node)
    return moved


def _functional(target: Any) -> Any:
    if str(target).startswith("aten.view_as") or not target._schema.is_mutable:
        return aten.reshape.default if target is aten.view.default else target
    return getattr(getattr(aten, target.overloadpacket.__name__.removesuffix("_")), target._overloadname)


def _copies(x: Tensor, moved: Tensor) -> Tensor:
    """Copies of a value that is no channel take any width."""
    if x.ndim and moved.ndim == x.ndim and bool((compact(x) == 0).all()):
        grown = [d for d in range(x.ndim) if moved.shape[d] > 1 == x.shape[d]]
        if grown and all(x.shape[d] == 1 or d in grown for d in range(1, x.ndim)):
            return torch.full((), ANY).expand(moved.shape)
    return moved


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(N, C r^2, H, W) to (N, C, H r, W r): the r^2 channels that make one are one unit."""
    x, r = args
    if not isinstance(x, Tensor):
        return walk.give_up(node, f"{walk.where(node)} works on a parameter")
    blocks = walk.along(x, 1).view(-1, r * r)
    walk.units.join(blocks[:, :1], blocks, f"one of the channels that {walk.where(node)} puts together cannot be cut")
    return spread(blocks.amax(1), 1, walk.shape(node))


@rule(aten.channel_shuffle.default)
def channel_shuffle(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number of groups stays, so groups get narrower together."""
    x, groups = args
    rows = walk.along(x, 1).view(groups, -1)
    walk.units.join(rows[:1], rows, f"{walk.where(node)} needs equal groups, and one of them cannot be cut")
    return spread(rows.T.reshape(-1), 1, walk.shape(node))


@rule(aten.pad.default, aten.constant_pad_nd.default)
def pad(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros around: across positions they hold nothing; beside channels they are channels that stay."""
    x, sizes = args[:2]
    if not isinstance(x, Tensor):
        return walk.give_up(node, f"{walk.where(node)} works on a parameter")
    shape, moving = walk.shape(node), varying(x)
    around = list(sizes)
    for d in range(len(around) // 2):
        if x.ndim - 1 - d not in moving:
            around[2 * d : 2 * d + 2] = [0, 0]
    if any(around) and argument(node, args, kwargs, "mode", "constant") != "constant":
        return walk.give_up(node, f"{walk.where(node)} repeats channels")
    small = compact(tight(x))
    if any(around):
        small = torch.nn.functional.pad(small, around)
    return small.expand(shape)


@rule(aten.chunk.default, aten.tensor_split.sections)
def chunk(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Equal parts: the same position of every part is one unit."""
    x, count = args[:2]
    dim = argument(node, args, kwargs, "dim", 0)
    if isinstance(x, Raw):
        columns = zip(*(torch.chunk(a, count, dim) for a in x.axes), strict=True)
        return [Raw(x.name, tuple(axes), moved=True, also=x.also) for axes in columns]
    parts = torch.chunk(x, count, dim)
    if dim % x.ndim in varying(x):
        for part in parts[1:]:
            if part.shape != parts[0].shape:
                return walk.give_up(node, f"{walk.where(node)} makes unequal parts")
        walk.equal(node, torch.stack([compact(tight(p)) for p in parts]))
    return [tight(part) for part in parts]


@rule(aten.glu.default)
def glu(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`a * sigmoid(b)` of two halves: channels i and i + C/2 are one unit."""
    dim = args[1] if len(args) > 1 else -1
    if not isinstance(args[0], Tensor):
        return walk.give_up(node, f"{walk.where(node)} works on a parameter")
    first, second = torch.chunk(args[0], 2, dim)
    return meet(walk, node, first, second).expand(walk.shape(node))


_ONE_PART = (aten.slice.Tensor, aten.select.int, aten.narrow.default)
_PARTS = (aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.tensor_split.indices)


@rule(*_ONE_PART, *_PARTS, aten.unbind.int)
def constant_cut(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cuts at places written in the code: fine across positions; channels that are cut so cannot change."""
    x = args[0]
    if isinstance(x, Raw):
        if node.target in _ONE_PART:
            return x.map(lambda a: node.target(a, *args[1:], **kwargs))
        columns = zip(*(node.target(a, *args[1:], **kwargs) for a in x.axes), strict=True)
        return [Raw(x.name, tuple(axes), moved=True, also=x.also) for axes in columns]
    dim = argument(node, args, kwargs, "dim", 0) % max(x.ndim, 1)
    result = node.target(*args, **kwargs)
    if dim in varying(x):
        if node.target in (aten.unbind.int, aten.select.int) and len(varying(x)) > 1:
            walk.equal(node, compact(tight(x)).movedim(dim, 0))  # (3, heads, width) taken apart into q, k and v
        elif node.target is not aten.slice.Tensor or result.shape[dim] != x.shape[dim]:
            walk.units.lock(x, f"cut at fixed places by {walk.where(node)}")
    return tight(result) if isinstance(result, Tensor) else [tight(r) for r in result]


@rule(aten.index.Tensor, aten.index_select.default)
def look_up(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x[numbers]: tables are followed place by place; rows of activations keep their channels."""
    x, where = args[0], node.meta["indices"]
    if isinstance(x, Raw):
        return x.map(lambda a: node.target(a, *(_on_cpu(where))))
    if node.target is aten.index_select.default:
        touched = [where[0] % x.ndim]
    else:
        touched = [d for d, index in enumerate(where[0]) if index is not None]
        # A mask of several dimensions takes as many.
        if any(v is not None and v.dtype == torch.bool and v.ndim > 1 for v in where[0]):
            touched = list(range(sum(v.ndim if v is not None and v.dtype == torch.bool else 1 for v in where[0])))
    for index in args[1] if isinstance(args[1], list | tuple) else args[1:]:
        if isinstance(index, Tensor):
            walk.units.lock(index, f"read as positions by {walk.where(node)}")
    if any(d in varying(x) for d in touched):
        return walk.give_up(node, f"looked up at fixed places by {walk.where(node)}")
    shape = walk.shape(node)
    moving = varying(x)
    if not moving:
        value = compact(tight(x)).flatten()[:1]
        return value.view([1] * len(shape)).expand(shape) if len(value) and shape else nothing(shape)
    if max(touched) > min(moving) or 0 in shape:
        try:
            return tight(node.target(x.contiguous(), *_on_cpu(where)))
        except (RuntimeError, IndexError):
            return walk.give_up(node, f"{walk.where(node)} could not be followed")
    # The looked-up dimensions stand before the channels, which keep their places counted from the end.
    tail = x.shape[min(moving) :]
    small = compact(tight(x)).flatten(0, min(moving) - 1)[0] if min(moving) else compact(tight(x))
    return small.expand(tail).expand(shape)


def _on_cpu(where: Any) -> Any:
    return [w.cpu() if isinstance(w, Tensor) else [v if v is None else v.cpu() for v in w] if isinstance(w, list) else w
            for w in where]  # fmt: skip


@rule(*overloads("index_put index_copy index_add copy index_fill slice_scatter select_scatter"))
def write(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Values written into a tensor: one made for the purpose takes their labels, another one must agree with them."""
    x = args[0]
    values = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, Tensor) and bool((compact(v) > 0).any())]
    if not isinstance(x, Tensor):
        return walk.give_up(node, f"{walk.where(node)} writes into a parameter")
    if len(args) > 2 and isinstance(args[2], Tensor) and args[2].numel() == 0:
        if walk.is_new(node.args[0]):
            walk.new.add(node)  # nothing was written yet
        return x
    if not values:
        return x if not varying(x) or "copy_" in str(node.target) else walk.give_up(node, f"overwritten by {walk.where(node)}")
    value = values[0]
    dims = [d - value.ndim for d in varying(value)]
    if "copy" in str(node.target):
        return meet(walk, node, value, nothing(())).expand(x.shape) if walk.is_new(node.args[0]) else meet(walk, node, x, value)
    if len(dims) != 1 or value.ndim > x.ndim + 1 or len(values) > 1 or x.shape[dims[0]] != value.shape[dims[0]] \
            or dims[0] == -x.ndim:  # fmt: skip
        return walk.give_up(node, f"{walk.where(node)} could not be followed")
    labels = spread(walk.along(value, value.ndim + dims[0]), x.ndim + dims[0], tuple(x.shape))
    return labels if walk.is_new(node.args[0]) else meet(walk, node, x, labels)
