"""Rules of elementwise operators, reductions and pooling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compresskit.graph.normalize import Node
from compresskit.prune.structure.channel_sets import (
    UNCONSTRAINED,
    collapse,
    collapse_expanded,
    fixed_labels,
    varying_dims,
)
from compresskit.prune.structure.rules.base import IDENTITY_OPERATORS, OperatorCall, RuleResult, overloads, rule_for
from compresskit.prune.structure.rules.computed_weights import (
    combine_parameters,
    is_computed_weight,
    is_scaled_table,
    reduce_parameter,
)
from compresskit.prune.structure.rules.parameter_view import ParameterView
from compresskit.prune.structure.rules.width_scaling import add_scaling_factor


@rule_for(*overloads(IDENTITY_OPERATORS))
def rule_identity(call: OperatorCall) -> RuleResult:
    """The same values, as far as channels are concerned."""
    call.take_copies(call.state.copies.get(call.node.args[0], ()))
    return call.args[0]


_UNARY_OPERATORS = """relu relu6 hardtanh hardswish hardsigmoid silu gelu sigmoid tanh elu celu selu leaky_relu mish softplus abs
 exp log log1p log2 sqrt rsqrt neg square sin cos erf reciprocal clamp clamp_min clamp_max round floor ceil sign softsign
 logsigmoid hardshrink softshrink threshold masked_fill nan_to_num expm1 log_sigmoid logit rrelu bernoulli trunc isnan isinf
 isfinite logical_not bitwise_not zeros_like ones_like full_like empty_like rand_like randn_like fill zero"""
_BINARY_OPERATORS = """add sub mul div maximum minimum pow where rsub atan2 fmod remainder lerp addcmul addcdiv true_divide
 multiply subtract divide floor_divide eq ne gt ge lt le logical_and logical_or bitwise_and bitwise_or __and__ __or__
 masked_scatter squared_difference hypot xlogy floor_divide complex polar"""


@rule_for(*overloads(_UNARY_OPERATORS, _BINARY_OPERATORS))
def rule_elementwise(call: OperatorCall) -> RuleResult:
    """Channels that meet in one element are joined."""
    values = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Tensor | ParameterView)]
    if is_computed_weight(call, values) or is_scaled_table(call, values):
        return combine_parameters(call, values)
    states, repeated = _initial_states(call), False
    result: Tensor | None = None
    for given, node in _values_and_nodes(call):
        labels = fixed_labels((1,) * given.ndim) if id(given) in states else call.first_of_copies(given, node)
        repeated |= id(given) not in states and labels is not given
        result = labels if result is None else join_broadcast(call, result, labels)
    result = fixed_labels(call.shape) if result is None else result.expand(call.shape)
    if repeated:
        call.add_given_size(result)
    _take_copies_of_all(call)
    for value in values:
        if isinstance(value, ParameterView):
            result = join_parameter(call, result, value)
    for made in states.values():
        call.add_size_beside_blank(made, result)
    add_scaling_factor(call, result)
    return result


def _values_and_nodes(call: OperatorCall) -> list[tuple[Tensor, Any]]:
    """The labels of the activations among the arguments, and who made them."""
    given = zip((*call.args, *call.kwargs.values()), (*call.node.args, *call.node.kwargs.values()), strict=True)
    return [(value, node) for value, node in given if isinstance(value, Tensor)]


def _take_copies_of_all(call: OperatorCall) -> None:
    """The result repeats itself where all arguments do, or have one entry, as blank tensors do everywhere."""
    if any(isinstance(value, ParameterView) and value.numel > 1 for value in (*call.args, *call.kwargs.values())):
        return
    rank = len(call.shape)
    dims = {d for d, size in enumerate(call.shape) if size > 1}
    for value, node in _values_and_nodes(call):
        before, copied = rank - value.ndim, call.state.copies.get(node, ())
        if call.blank_behind(node) is None:
            dims &= {d for d in range(rank) if d < before or value.shape[d - before] == 1 or d - before in copied}
    call.take_copies(dims)


def _initial_states(call: OperatorCall) -> dict[int, Node]:
    """Who made zeros or ones that meet channels, by the id of their labels: they take any width, as a first state does."""
    pairs = [(v, n) for v, n in zip(call.args, call.node.args, strict=True) if isinstance(v, Tensor)]
    if not any(bool((collapse_expanded(v) > 0).any()) for v, _ in pairs):
        return {}
    return {
        id(v): made for v, n in pairs if (made := call.blank_behind(n)) is not None and bool((collapse_expanded(v) == 0).all())
    }


def join_broadcast(call: OperatorCall, a: Tensor, b: Tensor) -> Tensor:
    """Labels of a value computed from two that broadcast against one another."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    a, b = (v.reshape([1] * (len(shape) - v.ndim) + list(v.shape)) for v in (a, b))
    dims_a, dims_b = varying_dims(a), varying_dims(b)
    if set(dims_b) < set(dims_a):
        a, b, dims_a, dims_b = b, a, dims_b, dims_a
    small, large = collapse(a), collapse(b)
    reason = f"added to or multiplied with values that cannot be cut, by {call.where}"
    if a.numel() == 1 and bool((small <= 0).all()):
        return large.expand(shape)
    if dims_a == dims_b:
        return call.sets.join(small, large, reason).expand(shape)
    if set(dims_a) < set(dims_b):
        if bool((small == 0).any()) and (dims_a or any(a.shape[d] > 1 for d in dims_b)):
            # A value of exactly that size which is not made of channels.
            call.sets.lock(torch.where(small == 0, large, 0), reason)
        if bool((small > 0).any()):
            call.add_dependency(large, small, f"broadcast over other channels by {call.where}")
        return large.expand(shape)
    for labels, others in ((small, large), (large, small)):
        if call.sets.all_locked(labels):
            return others.expand(shape)  # what cannot be cut is no other channels
    # Of an outer product the channels of one factor can be cut; those of the other, the one of fewer values, stay.
    labels, others = (small, large) if small.numel() < large.numel() else (large, small)
    call.sets.lock(labels, f"broadcast over other channels by {call.where}")
    return others.expand(shape)


def join_parameter(call: OperatorCall, labels: Tensor, parameter: ParameterView) -> Tensor:
    """A bare parameter (layer scale, position embedding) in an elementwise operator goes with the channels that it meets."""
    if parameter.numel == 1:
        return labels
    padded = parameter.map(lambda a: a.expand(labels.shape))
    moving = varying_dims(labels)
    if not moving:
        # It meets no channels yet, but may do so later: (weight * rsqrt(variance)) of a frozen BatchNorm.
        vector = call.vector_labels(parameter)
        if vector is not None and not bool((labels > 0).any()):
            unconstrained = labels.new_full((1,) * labels.ndim, UNCONSTRAINED)
            return join_broadcast(call, unconstrained, vector).expand(labels.shape)
        call.sets.lock(labels, f"met by the parameter {parameter.name} in {call.where}")
        call.state.lock_tensor(parameter.name, f"used by {call.where}")
        return labels
    met = [d for d in moving if d in varying_dims(_value_numbers(padded))]
    if not met:
        return labels
    if len(met) == 1 and (met_labels := call.parameter_labels(padded, met[0])) is not None:
        return join_broadcast(call, labels, met_labels).expand(labels.shape)
    call.sets.lock(labels, f"met by the parameter {parameter.name} in an order of its own")
    call.state.lock_tensor(parameter.name, f"used by {call.where}")
    return labels


def _value_numbers(parameter: ParameterView) -> Tensor:
    """A number for each value read; equal where the same stored value is read."""
    number = torch.zeros((), dtype=torch.long)
    for axis in parameter.axes:
        small = collapse_expanded(axis)
        number = number * (int(small.max()) + 1) + small
    return number.expand(parameter.shape)


_SPATIAL_OPERATORS = """avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
 adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool1d_with_indices max_pool2d_with_indices
 max_pool3d_with_indices upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
 upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_bilinear2d_aa grid_sampler
 grid_sampler_2d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d lp_pool2d"""


@rule_for(*overloads(_SPATIAL_OPERATORS), "torchvision.roi_align.default", "torchvision.roi_pool.default")
def rule_spatial(call: OperatorCall) -> RuleResult:
    """(N, C, ...) to (N or regions, C, other positions): channels are not mixed; tensors of positions have none."""
    x = call.args[0]
    for other in (*call.args[1:], *call.kwargs.values()):
        if isinstance(other, Tensor):
            call.sets.lock(other, f"read as positions by {call.where}")
    channels = 0 if call.has_one_result and "1d" in str(call.target) and len(x.shape) <= 2 else 1
    return call.expand_along(call.labels_along(x, channels), channels)


@rule_for(*overloads("max_unpool2d max_unpool3d"))
def rule_unpool(call: OperatorCall) -> RuleResult:
    """(N, C, ...) and the indices of a max pooling to (N, C, more positions): they are positions within a channel."""
    x, indices = call.args[:2]
    channels = len(x.shape) - (4 if call.kind == "max_unpool3d" else 3)
    of_values, of_indices = (call.labels_along(v, channels) for v in (x, indices))
    reason = f"{call.where} reads values and indices of them, and those of one cannot be cut"
    return call.expand_along(call.sets.join(of_values, of_indices, reason), channels)


_SUMS = ("sum", "norm")
_MEANS = ("mean",)
_MIXING_REDUCTIONS = ("amax", "amin", "max", "min", "var", "std", "prod", "logsumexp", "any", "all", "argmax", "argmin", "median")
_DEVIATIONS = ("var_mean", "std_mean")


@rule_for(*overloads(*_SUMS, *_MEANS, *_MIXING_REDUCTIONS, *_DEVIATIONS))
def rule_reduction(call: OperatorCall) -> RuleResult:
    """Over positions anything may be reduced. A sum over channels reads them; a mean is over those that stay; others mix them."""
    x = call.args[0]
    if len(call.args) > 1 and isinstance(call.args[1], Tensor):
        return rule_elementwise(call)  # torch.max(a, b)
    rank = len(x.shape)
    dims = call.argument("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    dims = sorted({d % max(rank, 1) for d in dims})
    if isinstance(x, ParameterView):
        if call.kind.startswith("arg") or not is_computed_weight(call, [x]):
            return call.lock_inputs(f"{call.where} works on a parameter")
        return reduce_parameter(call, x, dims, statistic=call.kind not in _SUMS)
    moving = varying_dims(x)
    reduced = [d for d in moving if d in dims]
    if reduced and set(reduced) == set(moving):
        if call.kind not in (*_SUMS, *_MEANS) or len(reduced) > 1:
            return call.lock_inputs(f"reduced over channels by {call.where}")
        if call.kind in _MEANS:
            call.add_statistic(call.labels_along(x, reduced[0]), reduced[0])
        x = fixed_labels(tuple(x.shape))
    elif reduced:
        first = collapse(x)
        for d in reduced:
            first = first.narrow(d, 0, 1)
        x = call.sets.join(first, collapse(x), f"{call.where} takes several of them together").expand(x.shape)
    for dim in dims:
        x = x.narrow(dim, 0, 1) if x.shape[dim] else x
    if call.has_one_result and (copies := call.state.copies.get(call.node.args[0])):
        left = [d for d in range(rank) if d not in dims] if len(call.shape) < rank else [*range(rank)]
        call.take_copies(left.index(d) for d in copies if d not in dims)
    kept = [n for d, n in enumerate(call.args[0].shape) if d not in dims]
    if call.has_one_result:
        return _reduced_labels(x, kept, call.shape)
    return [_reduced_labels(x, kept, shape) for shape in call.part_shapes]


def _reduced_labels(x: Tensor, kept: list[int], shape: tuple[int, ...]) -> Tensor:
    """Labels of a reduction in the shape of its result, from labels with size 1 along what was reduced."""
    if len(shape) == x.ndim:
        return x.expand(shape)
    if kept:
        return x.reshape(kept).expand(shape)
    return collapse(x).flatten()[:1].view([1] * len(shape)).expand(shape) if x.numel() else fixed_labels(shape)


@rule_for(*overloads("softmax log_softmax cumsum cumprod _softmax logcumsumexp sort argsort flip"))
def rule_over_one_dim(call: OperatorCall) -> RuleResult:
    """Mixes the values along one dimension: channels that lie along it go together, where others lie along another dimension."""
    x = call.args[0]
    if not isinstance(x, Tensor):
        return call.lock_inputs(f"{call.where} works on a parameter")
    dims = call.argument("dim", call.argument("dims", -1))
    dims = [dims] if isinstance(dims, int) else list(dims)
    moving = varying_dims(x)
    mixed = [d for d in moving if d in {dim % max(x.ndim, 1) for dim in dims}]
    if mixed == moving != []:
        return call.lock_inputs(f"{call.where} mixes the channels")
    if mixed:
        # (N, branches, C) over the branches: a channel goes with its weights in all branches.
        first = collapse(x)
        for d in mixed:
            first = first.narrow(d, 0, 1)
        x = call.sets.join(first, collapse(x), f"{call.where} takes several of them together").expand(x.shape)
    return x if call.has_one_result else [x for _ in call.part_shapes]


_FACTORIES = """zeros ones full empty arange rand randn randint randperm linspace new_zeros new_ones new_full new_empty eye
 scalar_tensor empty_strided new_empty_strided tensor tril triu tril_indices normal uniform random"""


@rule_for(*overloads(_FACTORIES))
def rule_factory(call: OperatorCall) -> RuleResult:
    """New values of a size that the code gives."""
    return fixed_labels(call.shape)
