"""Rules of products that sum over a dimension: matmul, einsum, attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compresskit.graph.normalize import Node, aten
from compresskit.prune.structure.channel_sets import compact, nothing, spread, tight, varying
from compresskit.prune.structure.rules.arithmetic import meet
from compresskit.prune.structure.rules.base import Raw, Rule, argument, rules_of

if TYPE_CHECKING:
    from compresskit.prune.structure.propagate import Walk

CONTRACTIONS: dict[Any, Rule] = {}
rule = rules_of(CONTRACTIONS)


@dataclass(frozen=True)
class Letters:
    """How the dimensions of two operands are called in an einsum, and those of the result."""

    first: str
    second: str
    out: str

    @property
    def all(self) -> str:
        """Every letter once; those that are summed over last."""
        return self.out + "".join(dict.fromkeys(c for c in self.first + self.second if c not in self.out))


def summed(walk: Walk, x: Tensor, dims: list[int], node: Node) -> Tensor:
    """Labels of a sum over dims, kept as size 1: it reads what it sums, and vanishes where all of that does."""
    moving = varying(x)
    inside = [d for d in moving if d in dims]
    result = x
    if inside and set(inside) == set(moving):
        result = nothing(tuple(x.shape))
    elif inside:
        rows = compact(tight(x))
        kept = [1 if d in dims else n for d, n in enumerate(rows.shape)]
        # The batch may be part of a dimension (batch * heads): rows that hold the same labels are one.
        order = [d for d in range(rows.ndim) if d not in dims] + [d for d in range(rows.ndim) if d in dims]
        flat = rows.permute(order).reshape(math.prod(kept), -1)
        unique, number = torch.unique(flat, dim=0, return_inverse=True)
        totals = walk.units.fresh(len(unique))[number].view(kept)
        walk.total(rows, totals, f"one for each head of {walk.where(node)}; heads get narrower, none goes")
        result = totals.expand([1 if d in dims else n for d, n in enumerate(x.shape)])
    for d in dims:
        result = result.narrow(d, 0, 1) if result.shape[d] else result
    return result


def contract(walk: Walk, node: Node, a: Any, b: Any, letters: Letters) -> Any:
    """Labels of `einsum(f"{first},{second}->{out}", a, b)`."""
    if isinstance(a, Raw) and isinstance(b, Raw):
        return walk.give_up(node, f"{walk.where(node)} works on parameters only")
    if isinstance(a, Raw):
        return contract(walk, node, b, a, Letters(letters.second, letters.first, letters.out))
    if any(len(set(names)) < len(names) for names in (letters.first, letters.second)):
        return walk.give_up(node, f"{walk.where(node)} could not be followed")
    if isinstance(b, Raw):
        return _by_parameter(walk, node, a, b, letters)
    names = letters.all
    one, other = _aligned(a, letters.first, names), _aligned(b, letters.second, names)
    product = meet(walk, node, one, other)
    walk.cost(math.prod(product.shape), compact(tight(product)).flatten())
    dims = [names.index(c) for c in names if c not in letters.out]
    walk.product(node, one, other, [d for d in dims if d in varying(product)])
    result = summed(walk, product, dims, node)
    return tight(result.reshape(result.shape[: len(letters.out)]))


def _aligned(labels: Tensor, own: str, names: str) -> Tensor:
    order = [own.index(c) for c in names if c in own]
    shape = [labels.shape[own.index(c)] if c in own else 1 for c in names]
    return labels.permute(order).reshape(shape)


def _by_parameter(walk: Walk, node: Node, x: Tensor, raw: Raw, letters: Letters) -> Any:
    """A product with a bare parameter is a linear layer: rows that are summed over read, others make channels."""
    made: list[tuple[int, Tensor]] = []
    reads: list[Tensor] = []
    for position, letter in enumerate(letters.second):
        if raw.shape[position] == 1:
            continue
        own = raw.axis(position) if raw.moved else (position, torch.arange(raw.shape[position]))
        if own is None:
            return walk.give_up(node, f"{walk.where(node)} reads the parameter {raw.name} in an order of its own")
        if letter in letters.first:
            labels = walk.along(x, letters.first.index(letter))
            walk.reads(raw, own, labels, "with" if letter in letters.out else "in")
            reads.append(labels)
        else:
            labels = walk.units.fresh(raw.shape[position])
            walk.reads(raw, own, labels, "out")
            made.append((letters.out.index(letter), labels))
    shape = walk.product_shape(x, letters.first, raw.shape, letters.second, letters.out)
    kept = [(letters.out.index(c), walk.along(x, d)) for d, c in enumerate(letters.first)
            if c in letters.out and d in varying(x)]  # fmt: skip
    sizes = dict(zip(letters.first, x.shape, strict=True)) | dict(zip(letters.second, raw.shape, strict=True))
    walk.cost(math.prod(sizes.values()), *reads, *(labels for _, labels in made))
    if len(made) + len(kept) > 1:
        for _, labels in (*made, *kept):
            walk.units.lock(labels, f"{walk.where(node)} makes channels of channels")
        return nothing(shape)
    return spread((made or kept)[0][1], (made or kept)[0][0], shape) if made or kept else nothing(shape)


_MATMULS = (aten.matmul.default, aten.bmm.default, aten.mm.default, aten.mv.default)


@rule(*_MATMULS)
def matmul(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(..., I, K) @ (..., K, J)."""
    return _matmul(walk, node, args[0], args[1])


def _matmul(walk: Walk, node: Node, a: Any, b: Any) -> Any:
    batch = "abcdefgh"
    ranks = len(a.shape), len(b.shape)
    first = "k" if ranks[0] == 1 else batch[: ranks[0] - 2] + "ik"
    second = "k" if ranks[1] == 1 else batch[: ranks[1] - 2] + "kj"
    wide = max(ranks[0], ranks[1]) - 2
    # Batch dimensions are aligned from the right; one of size 1 stands for all.
    first = first if ranks[0] < 2 else batch[wide - (ranks[0] - 2) : wide] + "ik"
    second = second if ranks[1] < 2 else batch[wide - (ranks[1] - 2) : wide] + "kj"
    out = batch[: max(wide, 0)] + ("i" if ranks[0] > 1 else "") + ("j" if ranks[1] > 1 else "")
    result = contract(walk, node, a, b, Letters(first, second, out))
    return result.expand(walk.shape(node)) if isinstance(result, Tensor) and node.name in walk.shapes else result


@rule(aten.addmm.default, aten.baddbmm.default)
def addmm(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`bias + a @ b`."""
    bias, a, b = args[:3]
    result = _matmul(walk, node, a, b)
    if isinstance(bias, Raw) and isinstance(result, Tensor):
        moving = varying(result)
        if len(moving) == 1:
            walk.vector(bias, walk.along(result, moving[0]), node, len(bias.shape) - 1)
        return result
    return meet(walk, node, result, bias) if isinstance(bias, Tensor) else result


@rule(aten.einsum.default)
def einsum(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of two operands, with every letter written out."""
    equation, operands = args[0].replace(" ", ""), args[1]
    left, arrow, out = equation.partition("->")
    names = left.split(",")
    if not arrow:
        out = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    if len(names) != 2 or "." in equation:
        return walk.give_up(node, f"{walk.where(node)}: only einsum of two operands, every letter written, is followed")
    result = contract(walk, node, operands[0], operands[1], Letters(names[0], names[1], out))
    return result.expand(walk.shape(node)) if isinstance(result, Tensor) else result


@rule(aten.scaled_dot_product_attention.default)
def attention(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """softmax(q k^T / sqrt(width)) v, (..., heads, positions, width); the width under the root shrinks with a cut."""
    q, k, v = args[:3]
    if not all(isinstance(t, Tensor) for t in (q, k, v)) or argument(node, args, kwargs, "enable_gqa"):
        return walk.give_up(node, f"{walk.where(node)} could not be followed")
    batch = "abcdefgh"[: q.ndim - 2]
    scores = contract(walk, node, q, k, Letters(f"{batch}ik", f"{batch}jk", f"{batch}ij"))
    if argument(node, args, kwargs, "scale") is None:
        walk.scaled(node, q, q.ndim - 1, stored=False)
    mask = argument(node, args, kwargs, "attn_mask")
    if isinstance(mask, Raw):
        walk.pin(mask.name, f"the mask of {walk.where(node)}")
    elif mask is not None:
        scores = meet(walk, node, scores, mask)
    result = contract(walk, node, scores, v, Letters(f"{batch}ij", f"{batch}jk", f"{batch}ik"))
    return result.expand(walk.shape(node))
