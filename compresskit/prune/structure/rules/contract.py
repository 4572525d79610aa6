"""Rules of products that sum over a dimension: matmul, einsum, attention. All of them are one einsum of two operands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.spectral_norm import SpectralNorm

from compresskit.graph.normalize import aten
from compresskit.prune.structure.channel_sets import collapse, expand_along, fixed_labels, tighten, varying_dims
from compresskit.prune.structure.rules.arithmetic import join_broadcast, join_parameter
from compresskit.prune.structure.rules.base import OperatorCall, RuleResult, rule_for
from compresskit.prune.structure.rules.parameter_view import ParameterView
from compresskit.prune.structure.rules.width_scaling import add_width_scaling, remember_product


@dataclass(frozen=True)
class EinsumDims:
    """The letters of the dimensions of two operands and of the result, as in an einsum equation."""

    first: str
    second: str
    out: str

    @property
    def all(self) -> str:
        """Every letter once; those that are summed over last."""
        return self.out + "".join(dict.fromkeys(c for c in self.first + self.second if c not in self.out))


def labels_of_sum(call: OperatorCall, x: Tensor, dims: list[int]) -> Tensor:
    """Labels of a sum over dims, kept as size 1: it can be removed where all that it sums can be."""
    moving = varying_dims(x)
    inside = [d for d in moving if d in dims]
    result = x
    if inside and set(inside) == set(moving):
        result = fixed_labels(tuple(x.shape))
    elif inside:
        parts = collapse(x)
        kept = [1 if d in dims else n for d, n in enumerate(parts.shape)]
        # The batch may be part of a dimension (batch * heads): rows that hold the same labels are one.
        order = [d for d in range(parts.ndim) if d not in dims] + [d for d in range(parts.ndim) if d in dims]
        flat = parts.permute(order).reshape(math.prod(kept), -1)
        unique, number = torch.unique(flat, dim=0, return_inverse=True)
        sums = call.sets.fresh(len(unique))[number].view(kept)
        call.add_dependency(parts, sums, f"one for each head of {call.where}; heads get narrower, none goes")
        result = sums.expand([1 if d in dims else n for d, n in enumerate(x.shape)])
    for d in dims:
        result = result.narrow(d, 0, 1) if result.shape[d] else result
    return result


def contract(call: OperatorCall, a: Any, b: Any, letters: EinsumDims) -> RuleResult:
    """Labels of `einsum(f"{first},{second}->{out}", a, b)`, where one of the two may be a parameter."""
    if isinstance(a, ParameterView) and isinstance(b, ParameterView):
        return call.lock_inputs(
            f"{call.where} multiplies parameters, as spectral_norm does: each channel changes all results{_remedy(call)}"
        )
    if isinstance(a, ParameterView):
        return contract(call, b, a, EinsumDims(letters.second, letters.first, letters.out))
    if any(len(set(names)) < len(names) for names in (letters.first, letters.second)):
        return call.lock_inputs()
    if isinstance(b, ParameterView):
        return _contract_parameter(call, a, b, letters)
    return _contract_activations(call, a, b, letters)


def _remedy(call: OperatorCall) -> str:
    """How weights that are computed anew in each run become plain ones; nothing where the user's own code computes them."""
    if "parametrizations" in call.where:
        return "; parametrize.remove_parametrizations makes them plain weights"
    if any(isinstance(hook, SpectralNorm) for hook in call.module._forward_pre_hooks.values()):
        return "; torch.nn.utils.remove_spectral_norm makes them plain weights"
    return ""


def _contract_activations(call: OperatorCall, a: Tensor, b: Tensor, letters: EinsumDims) -> Tensor:
    names = letters.all
    first, second = _aligned(a, letters.first, names), _aligned(b, letters.second, names)
    product = join_broadcast(call, first, second)
    call.add_cost(math.prod(product.shape), collapse(product).flatten())
    dims = [names.index(c) for c in names if c not in letters.out]
    remember_product(call, first, second, [d for d in dims if d in varying_dims(product)])
    result = labels_of_sum(call, product, dims)
    return tighten(result.reshape(result.shape[: len(letters.out)]))


def _aligned(labels: Tensor, letters: str, names: str) -> Tensor:
    """The dimensions of an operand in the order of `names`, with size 1 for those that it lacks."""
    order = [letters.index(c) for c in names if c in letters]
    shape = [labels.shape[letters.index(c)] if c in letters else 1 for c in names]
    return labels.permute(order).reshape(shape)


def _contract_parameter(call: OperatorCall, x: Tensor, parameter: ParameterView, letters: EinsumDims) -> RuleResult:
    """A product with a bare parameter is a linear layer: dimensions that are summed over read channels, others make some."""
    made: list[tuple[int, Tensor]] = []
    inputs: list[Tensor] = []
    read = {d for axis in parameter.axes for d in varying_dims(axis)}
    inner = [c for c, n in zip(letters.second, parameter.shape, strict=True) if c not in letters.first and n > 1][:-1]
    for position, letter in enumerate(letters.second):
        if position not in read:  # of size 1, or copies of one
            continue
        axis = parameter.axis(position) if parameter.moved else (position, torch.arange(parameter.shape[position]))
        if axis is None:
            return call.lock_inputs(f"{call.where} reads the parameter {parameter.name} in an order of its own")
        if letter in letters.first:
            labels = _labels_read(call, x, letters, letter)
            call.assign(parameter, axis, labels, "with" if letter in letters.out else "in")
            inputs.append(labels)
        elif letter in inner:  # (heads, width): heads get narrower, none goes
            call.assign(parameter, axis, torch.zeros(parameter.shape[position], dtype=torch.long), "with")
        else:
            labels = call.sets.fresh(parameter.shape[position])
            call.assign(parameter, axis, labels, "out")
            made.append((letters.out.index(letter), labels))
    first, second = (dict(zip(*pair, strict=True)) for pair in ((letters.first, x.shape), (letters.second, parameter.shape)))
    shape = tuple((second | first)[c] for c in letters.out)
    kept = [
        (letters.out.index(c), call.labels_along(x, d))
        for d, c in enumerate(letters.first)
        if c in letters.out and d in varying_dims(x)
    ]
    call.add_cost(math.prod((first | second).values()), *inputs, *(labels for _, labels in made))
    if len(made) + len(kept) > 1:
        for _, labels in (*made, *kept):
            call.sets.lock(labels, f"{call.where} makes channels of channels")
        return fixed_labels(shape)
    for dim, labels in made or kept:
        return expand_along(labels, dim, shape)
    return fixed_labels(shape)


def _labels_read(call: OperatorCall, x: Tensor, letters: EinsumDims, letter: str) -> Tensor:
    """Labels along a dimension of x that a parameter reads; where it reads several, an index goes where all of it goes."""
    dim = letters.first.index(letter)
    read = [d for d, c in enumerate(letters.first) if c in letters.second and c not in letters.out]
    moving = varying_dims(x)
    if moving and dim not in moving:
        return fixed_labels((x.shape[dim],))
    if dim not in read or moving == [dim] or not {*moving} <= {*read}:
        return call.labels_along(x, dim)
    labels = call.sets.fresh(x.shape[dim])
    shape = [len(labels) if d == dim else 1 for d in range(x.ndim)]
    call.add_dependency(collapse(x), labels.view(shape), f"{call.where} reads them in rows, which get narrower; none goes")
    return labels


@rule_for(aten.cosine_similarity.default, aten.cdist.default)
def rule_similarity(call: OperatorCall) -> RuleResult:
    """A sum over the last dimension, or `dim`, of functions of two values, to which two zeros add nothing."""
    a, b = call.args[:2]
    letters = "abcdefghijkl"[: len(a.shape)]
    if len(a.shape) != len(b.shape):
        return call.lock_inputs()
    if call.target is aten.cdist.default:
        names = EinsumDims(letters, f"{letters[:-2]}z{letters[-1]}", f"{letters[:-1]}z")
    else:
        names = EinsumDims(letters, letters, letters.replace(letters[call.argument("dim")], ""))
    if isinstance(b, ParameterView) and isinstance(a, Tensor):
        a, names = _without_broadcast_dims(a, b, names)
    elif isinstance(a, ParameterView) and isinstance(b, Tensor):
        b, swapped = _without_broadcast_dims(b, a, EinsumDims(names.second, names.first, names.out))
        names = EinsumDims(swapped.second, swapped.first, swapped.out)
    counted = len(call.state.costs)
    result = contract(call, a, b, names)
    del call.state.costs[counted:]  # not a matrix product, and so not among the MACs
    return result.expand(call.shape) if isinstance(result, Tensor) else result


def _without_broadcast_dims(x: Tensor, parameter: ParameterView, names: EinsumDims) -> tuple[Tensor, EinsumDims]:
    """X without the dimensions of size 1 along which the parameter makes channels."""
    sizes = dict(zip(names.second, parameter.shape, strict=True))
    gone = [d for d, c in enumerate(names.first) if x.shape[d] == 1 < sizes.get(c, 1)]
    first = "".join(c for d, c in enumerate(names.first) if d not in gone)
    return torch.squeeze(x, gone), EinsumDims(first, names.second, names.out)


@rule_for(aten.matmul.default, aten.bmm.default, aten.mm.default, aten.mv.default)
def rule_matmul(call: OperatorCall) -> RuleResult:
    """(..., I, K) @ (..., K, J)."""
    return _matmul(call, call.args[0], call.args[1])


def _matmul(call: OperatorCall, a: Any, b: Any) -> RuleResult:
    ranks = len(a.shape), len(b.shape)
    batch = "abcdefgh"[: max(0, *(rank - 2 for rank in ranks))]
    # Batch dimensions are aligned from the right; one of size 1 stands for all.
    first = "k" if ranks[0] == 1 else batch[len(batch) - (ranks[0] - 2) :] + "ik"
    second = "k" if ranks[1] == 1 else batch[len(batch) - (ranks[1] - 2) :] + "kj"
    out = batch + ("i" if ranks[0] > 1 else "") + ("j" if ranks[1] > 1 else "")
    result = contract(call, a, b, EinsumDims(first, second, out))
    return result.expand(call.shape) if isinstance(result, Tensor) and call.has_one_result else result


@rule_for(aten.addmm.default, aten.baddbmm.default)
def rule_addmm(call: OperatorCall) -> RuleResult:
    """`bias + a @ b`."""
    bias, a, b = call.args[:3]
    result = _matmul(call, a, b)
    if not isinstance(result, Tensor):
        return result
    if isinstance(bias, ParameterView):
        moving = varying_dims(result)
        if len(moving) == 1:
            call.assign_vector(bias, call.labels_along(result, moving[0]), len(bias.shape) - 1)
        return result
    return join_broadcast(call, result, bias) if isinstance(bias, Tensor) else result


@rule_for(aten.einsum.default)
def rule_einsum(call: OperatorCall) -> RuleResult:
    """Of two operands, with every letter written out."""
    equation, operands = call.args[0].replace(" ", ""), call.args[1]
    left, arrow, out = equation.partition("->")
    names = left.split(",")
    if not arrow:
        out = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    if len(names) != 2 or "." in equation:
        return call.lock_inputs(f"{call.where}: only einsum of two operands, every letter written, is followed")
    result = contract(call, operands[0], operands[1], EinsumDims(names[0], names[1], out))
    return result.expand(call.shape) if isinstance(result, Tensor) else result


@rule_for(aten.scaled_dot_product_attention.default)
def rule_attention(call: OperatorCall) -> RuleResult:
    """softmax(q k^T / sqrt(width)) v, (..., heads, positions, width); the width under the root shrinks with a cut."""
    q, k, v = call.args[:3]
    if not all(isinstance(t, Tensor) for t in (q, k, v)):
        return call.lock_inputs()
    if call.argument("enable_gqa"):  # a head of keys and values goes with all the heads of queries that read it
        k, v = (tighten(t.repeat_interleave(q.shape[-3] // t.shape[-3], -3)) for t in (k, v))
    batch = "abcdefgh"[: q.ndim - 2]
    scores = _contract_activations(call, q, k, EinsumDims(f"{batch}ik", f"{batch}jk", f"{batch}ij"))
    if call.argument("scale") is None:
        add_width_scaling(call, q, q.ndim - 1)
    mask = call.argument("attn_mask")
    if isinstance(mask, ParameterView):
        scores = join_parameter(call, scores, mask)
    elif mask is not None:
        scores = join_broadcast(call, scores, mask)
    result = _contract_activations(call, scores, v, EinsumDims(f"{batch}ij", f"{batch}jk", f"{batch}ik"))
    return result.expand(call.shape)
