"""Rules of operators that only move values: they are run on the labels themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compresskit.normalize import Node, aten
from compresskit.prune.rules import Raw, Rule, overloads, rules_of
from compresskit.prune.units import compact, nothing, spread, varying

if TYPE_CHECKING:
    from compresskit.prune.walk import Walk

MOVES: dict[Any, Rule] = {}
rule = rules_of(MOVES)


@rule(aten.cat.default)
def concat(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Labels side by side."""
    parts = []
    for value in args[0]:
        if isinstance(value, Raw):
            walk.pin(value.name, f"concatenated by {walk.where(node)}")
        parts.append(nothing(tuple(value.elements.shape)) if isinstance(value, Raw) else value)
    dim = (args[1] if len(args) > 1 else 0) % parts[0].ndim
    common = [all(p.stride(d) == 0 or p.shape[d] == 1 for p in parts) for d in range(parts[0].ndim)]
    for d, same in enumerate(common):
        if same and d != dim:
            parts = [p.narrow(d, 0, 1) for p in parts]
    return torch.cat(list(parts), dim).expand(walk.shape(node))


_MOVES = """reshape view flatten unflatten permute transpose squeeze unsqueeze expand repeat t mT movedim pixel_shuffle
 pixel_unshuffle channel_shuffle flip roll pad constant_pad_nd expand_as tile repeat_interleave view_as swapaxes""".split()


@rule(*(target for name in _MOVES for target in overloads(name)))
def move(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator on the labels themselves."""
    x, *rest = args
    if isinstance(x, Raw):
        return Raw(x.name, node.target(x.elements, *rest, **kwargs), moved=True)  # type: ignore[operator]
    if "pad" in str(node.target):
        mode = rest[1] if len(rest) > 1 and isinstance(rest[1], str) else "constant"
        if mode != "constant":
            # Other paddings repeat positions, never channels.
            return spread(walk.along(x, 1), 1, walk.shape(node))
        rest, kwargs = rest[:1], {}
    before = varying(x)
    try:
        moved = node.target(x, *rest, **kwargs)  # type: ignore[operator]
    except RuntimeError:
        return walk.give_up(node, f"{walk.where(node)} could not be followed")
    after = varying(moved)
    if len(after) > len(before):
        # (N, C) seen as (N, groups, C/groups): the code divides by a number that stays, so groups must stay equal.
        small = compact(moved)
        walk.units.join(small.narrow(after[0], 0, 1), small, f"split into equal parts by {walk.where(node)}")
    walk.suspect(node, x, rest)
    return moved


@rule(aten.chunk.default)
def chunk(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Equal parts: the same position of every part is one unit."""
    x, count, dim = args[0], args[1], args[2] if len(args) > 2 else 0
    parts = torch.chunk(x, count, dim)
    if dim % x.ndim in varying(x):
        for part in parts[1:]:
            if part.shape != parts[0].shape:
                return walk.give_up(node, f"{walk.where(node)} makes unequal parts")
            walk.units.join(compact(parts[0]), compact(part), f"split into equal parts by {walk.where(node)}")
    return parts


_ONE_PART = (aten.slice.Tensor, aten.select.int, aten.narrow.default)
_PARTS = (aten.split.Tensor, aten.split_with_sizes.default)


@rule(*_ONE_PART, *_PARTS, aten.unbind.int)
def constant_cut(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cuts at places written in the code: fine across positions; channels that are cut so cannot change."""
    if isinstance(args[0], Raw):
        if node.target in _ONE_PART:
            return Raw(args[0].name, node.target(args[0].elements, *args[1:], **kwargs), moved=True)  # type: ignore[operator]
        return walk.give_up(node, f"{walk.where(node)} splits a parameter")
    x = args[0]
    at = 2 if node.target in _PARTS else 1
    dim = args[at] if len(args) > at else kwargs.get("dim", 0)
    if dim % x.ndim in varying(x):
        walk.units.lock(x, f"cut at fixed places by {walk.where(node)}")
    return node.target(*args, **kwargs)  # type: ignore[operator]
