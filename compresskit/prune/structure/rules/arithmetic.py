"""Rules of elementwise operators, reductions and pooling."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compresskit.graph.normalize import Node
from compresskit.prune.structure.channel_sets import compact, nothing, spread, tight, varying
from compresskit.prune.structure.rules.base import Raw, Rule, argument, overloads, rules_of

if TYPE_CHECKING:
    from compresskit.prune.structure.propagate import Walk

ARITHMETIC: dict[Any, Rule] = {}
rule = rules_of(ARITHMETIC)

_IDENTITIES = """dropout feature_dropout alpha_dropout feature_alpha_dropout contiguous clone alias detach lift_fresh
 lift_fresh_copy to _to_copy type_as"""


@rule(*overloads(_IDENTITIES))
def identity(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same values, as far as channels go."""
    return args[0]


_SAME = """relu relu6 hardtanh hardswish hardsigmoid silu gelu sigmoid tanh elu celu selu leaky_relu mish softplus abs exp log
 log1p log2 sqrt rsqrt neg square sin cos erf reciprocal clamp clamp_min clamp_max round floor ceil sign softsign logsigmoid
 hardshrink softshrink threshold masked_fill nan_to_num expm1 log_sigmoid logit rrelu bernoulli trunc isnan isinf isfinite
 logical_not bitwise_not zeros_like ones_like full_like empty_like rand_like randn_like fill zero"""
_BINARY = """add sub mul div maximum minimum pow where rsub atan2 fmod remainder lerp addcmul addcdiv true_divide multiply
 subtract divide floor_divide eq ne gt ge lt le logical_and logical_or bitwise_and bitwise_or __and__ __or__ masked_scatter
 squared_difference hypot xlogy floor_divide"""


@rule(*overloads(_SAME, _BINARY))
def elementwise(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Values that meet in one element live and die together."""
    shape = walk.shape(node)
    values = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor | Raw)]
    result: Tensor | None = None
    for value in values:
        if isinstance(value, Tensor):
            result = value if result is None else meet(walk, node, result, value)
    result = nothing(shape) if result is None else result.expand(shape)
    for value in values:
        if isinstance(value, Raw):
            result = _meet_parameter(walk, node, result, value)
    walk.scaling(node, args, result)
    return result


def meet(walk: Walk, node: Node, a: Tensor, b: Tensor) -> Tensor:
    """Labels of a value made of two that broadcast against one another."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    a, b = (v.reshape([1] * (len(shape) - v.ndim) + list(v.shape)) for v in (a, b))
    va, vb = varying(a), varying(b)
    if set(vb) < set(va):
        a, b, va, vb = b, a, vb, va
    small, large = compact(tight(a)), compact(tight(b))
    reason = f"added to or multiplied with values that cannot be cut, by {walk.where(node)}"
    if a.numel() == 1 and bool((small <= 0).all()):
        return large.expand(shape)
    if va == vb:
        return walk.units.join(small, large, reason).expand(shape)
    if set(va) < set(vb):
        if bool((small == 0).any()) and (va or any(a.shape[d] > 1 for d in vb)):
            # A value of that very size which is not made of channels.
            walk.units.lock(torch.where(small == 0, large, 0), reason)
        if bool((small > 0).any()):
            walk.total(large, small, f"broadcast over other channels by {walk.where(node)}")
        return large.expand(shape)
    for value in (small, large):
        walk.units.lock(value, f"broadcast over other channels by {walk.where(node)}")
    return nothing(shape)


def _meet_parameter(walk: Walk, node: Node, labels: Tensor, raw: Raw) -> Tensor:
    """A bare parameter (layer scale, position embedding) in an elementwise operator vanishes with the channels it meets."""
    if raw.numel == 1:
        return labels
    padded = raw.map(lambda a: a.expand(labels.shape))
    moving = varying(labels)
    if not moving:
        # One that meets no channels yet may be on its way to some: (weight * rsqrt(variance)) of a frozen BatchNorm.
        own = walk.one_axis(raw)
        if own is not None and not bool((labels > 0).any()):
            return meet(walk, node, _unsized(labels), own).expand(labels.shape)
        walk.units.lock(labels, f"met by the parameter {raw.name} in {walk.where(node)}")
        walk.pin(raw.name, f"used by {walk.where(node)}")
        return labels
    met = [d for d in moving if d in varying(_numbers(padded))]
    if not met:
        return labels
    if len(met) == 1 and (own := walk.labelled(padded, met[0])) is not None:
        return meet(walk, node, labels, own).expand(labels.shape)
    walk.units.lock(labels, f"met by the parameter {raw.name} in an order of its own")
    walk.pin(raw.name, f"used by {walk.where(node)}")
    return labels


def _unsized(labels: Tensor) -> Tensor:
    return labels.new_full((1,) * labels.ndim, -1)


def _numbers(raw: Raw) -> Tensor:
    """A number for each value read: equal where the value is."""
    number = torch.zeros((), dtype=torch.long)
    for axis in raw.axes:
        number = number * (int(compact(axis).max()) + 1) + compact(axis)
    return number.expand(raw.shape)


_SPATIAL = """avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
 adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices max_pool3d_with_indices
 upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
 upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_bilinear2d_aa grid_sampler grid_sampler_2d
 reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d lp_pool2d max_unpool2d"""
_ROI = [getattr(torch.ops.torchvision, n, None) for n in ("roi_align", "roi_pool")] if hasattr(torch.ops, "torchvision") else []


@rule(*overloads(_SPATIAL))
def spatial(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(N, C, ...) to (N, C, other positions): channels keep to themselves; the positions given beside hold none."""
    x = args[0]
    if not isinstance(x, Tensor):
        return walk.give_up(node, f"{walk.where(node)} works on a parameter")
    for other in (*args[1:], *kwargs.values()):
        if isinstance(other, Tensor):
            walk.units.lock(other, f"read as positions by {walk.where(node)}")
    if node.name in walk.shapes:
        shape = walk.shape(node)
        channels = 1 if "1d" not in str(node.target) or x.ndim > 2 else 0
        return spread(walk.along(x, channels), channels, shape)
    vector = walk.along(x, 1)
    return [spread(vector, 1, shape) for shape in node.meta["parts"]]


def region_pooling(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Torchvision's roi_align and roi_pool: (N, C, H, W) and boxes to (K, C, h, w)."""
    return spatial(walk, node, args, kwargs)


_SUMS = ("sum", "norm")
_MEANS = ("mean",)
_OTHERS = ("amax", "amin", "max", "min", "var", "std", "prod", "logsumexp", "any", "all", "argmax", "argmin", "median")


@rule(*overloads(*_SUMS, *_MEANS, *_OTHERS))
def reduction(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fine over positions. A sum over channels reads them; a mean is over those that stay; other ways mix them."""
    x = args[0]
    kind = str(node.target).removeprefix("aten.").split(".")[0]
    if len(args) > 1 and isinstance(args[1], Tensor):
        return elementwise(walk, node, args, kwargs)  # torch.max(a, b)
    if not isinstance(x, Tensor):
        return walk.give_up(node, f"{walk.where(node)} works on a parameter")
    dims = argument(node, args, kwargs, "dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(x.ndim))
    dims = sorted({d % max(x.ndim, 1) for d in dims})
    moving = varying(x)
    mixed = [d for d in moving if d in dims]
    if mixed and set(mixed) == set(moving):
        if kind not in (*_SUMS, *_MEANS) or len(mixed) > 1:
            return walk.give_up(node, f"reduced over channels by {walk.where(node)}")
        if kind in _MEANS:
            walk.statistic(node, walk.along(x, mixed[0]), mixed[0])
        x = nothing(tuple(x.shape))
    elif mixed:
        first = compact(tight(x))
        for d in mixed:
            first = first.narrow(d, 0, 1)
        x = walk.units.join(first, compact(tight(x)), f"{walk.where(node)} takes several of them together").expand(x.shape)
    for dim in dims:
        x = x.narrow(dim, 0, 1) if x.shape[dim] else x
    kept = [n for d, n in enumerate(args[0].shape) if d not in dims]
    shapes = [walk.shape(node)] if node.name in walk.shapes else node.meta["parts"]
    out = []
    for shape in shapes:
        if len(shape) == x.ndim:
            out.append(x.expand(shape))
        elif kept:
            out.append(x.reshape(kept).expand(shape))
        else:
            out.append(compact(tight(x)).flatten()[:1].view([1] * len(shape)).expand(shape) if x.numel() else nothing(shape))
    return out[0] if node.name in walk.shapes else out


@rule(*overloads("softmax log_softmax cumsum cumprod _softmax logcumsumexp sort argsort flip"))
def over_one_dim(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Mixes the values along one dimension, which must not be that of the channels."""
    x = args[0]
    if not isinstance(x, Tensor):
        return walk.give_up(node, f"{walk.where(node)} works on a parameter")
    dims = argument(node, args, kwargs, "dim", argument(node, args, kwargs, "dims", -1))
    dims = [dims] if isinstance(dims, int) else list(dims)
    if any(d % max(x.ndim, 1) in varying(x) for d in dims):
        return walk.give_up(node, f"{walk.where(node)} mixes the channels")
    return x if node.name in walk.shapes else [x for _ in node.meta["parts"]]


_FACTORIES = """zeros ones full empty arange rand randn randint randperm linspace new_zeros new_ones new_full new_empty eye
 scalar_tensor empty_strided new_empty_strided tensor tril triu tril_indices normal uniform random"""


@rule(*overloads(_FACTORIES))
def factory(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """New values of a size that the code gives."""
    return nothing(walk.shape(node)) if math.prod(walk.shape(node)) >= 0 else None
