"""How the labels of an operator's inputs reach its output: one rule for each kind of operator.

A rule is `(walk, node, args, kwargs) -> labels of the output`. Operators that only move values are run *on the labels*:
whatever a view, a permutation, a pad or a channel shuffle does to the values it does to their labels. An operator without a
rule locks every channel that reaches it: never wrong, at worst less pruned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compresskit.normalize import Node, aten
from compresskit.prune.units import compact, nothing, spread, varying

if TYPE_CHECKING:
    from compresskit.prune.walk import Walk

Rule = Callable[["Walk", Node, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Raw:
    """A parameter or buffer as the graph reads it; `elements` numbers its values and follows them through moves."""

    name: str
    elements: Tensor
    moved: bool = False


def rules_of(table: dict[Any, Rule]) -> Callable[..., Callable[[Rule], Rule]]:
    """A decorator that enters a function into a table as the rule of some operators."""

    def of(*targets: Any) -> Callable[[Rule], Rule]:
        def enter(function: Rule) -> Rule:
            table.update(dict.fromkeys(targets, function))
            return function

        return enter

    return of


ARITHMETIC: dict[Any, Rule] = {}
rule = rules_of(ARITHMETIC)


def _whole(raw: Any) -> bool:
    return isinstance(raw, Raw) and not raw.moved


@rule(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def conv(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """(N, I, ...) with weight (O, I/groups, ...): outputs are new units; a depthwise output belongs to its input."""
    x, weight, *rest = args
    if not _whole(weight):
        return walk.give_up(node, "a convolution whose weight is computed in the forward pass")
    bias, groups = rest[0] if rest else None, rest[4] if len(rest) > 4 else 1
    inputs = walk.along(x, 1)
    outputs, per_group = weight.elements.shape[:2]
    if groups == 1:
        walk.units.member(weight.name, 1, inputs, "in")
        made = walk.units.fresh(outputs)
    elif per_group == 1:
        made = inputs.repeat_interleave(outputs // groups)
    else:
        walk.units.member(weight.name, 1, _uniform(walk, inputs, groups)[0], "in")
        made = _uniform(walk, walk.units.fresh(outputs), groups).reshape(-1)
    walk.units.member(weight.name, 0, made, "with" if groups > 1 and per_group == 1 else "out")
    walk.bias(bias, made, node)
    return spread(made, 1, walk.shape(node))


def _uniform(walk: Walk, labels: Tensor, groups: int) -> Tensor:
    """(groups * n,) to (groups, n) with the same position of every group made one unit, so that groups stay equal."""
    rows = labels.view(groups, -1)
    walk.units.join(rows[:1], rows, "a grouped convolution needs equal groups, and one of them cannot be cut here")
    return rows


@rule(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def conv_transpose(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """(N, I, ...) with weight (I, O/groups, ...)."""
    x, weight, *rest = args
    groups = rest[4] if len(rest) > 4 else 1
    if not _whole(weight):
        return walk.give_up(node, "a convolution whose weight is computed in the forward pass")
    inputs = walk.along(x, 1)
    per_group = weight.elements.shape[1]
    if groups == len(inputs) and groups > 1:
        made = inputs.repeat_interleave(per_group)
    else:
        _uniform(walk, inputs, groups)
        rows = _uniform(walk, walk.units.fresh(per_group * groups), groups)
        walk.units.member(weight.name, 1, rows[0], "out")
        made = rows.reshape(-1)
    walk.units.member(weight.name, 0, inputs, "in")
    walk.bias(rest[0] if rest else None, made, node)
    return spread(made, 1, walk.shape(node))


@rule(aten.linear.default)
def linear(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """(..., I) with weight (O, I)."""
    x, weight, *rest = args
    if not _whole(weight):
        return walk.give_up(node, "a linear layer whose weight is computed in the forward pass")
    walk.units.member(weight.name, 1, walk.along(x, -1), "in")
    made = walk.units.fresh(weight.elements.shape[0])
    walk.units.member(weight.name, 0, made, "out")
    walk.bias(rest[0] if rest else None, made, node)
    return spread(made, len(walk.shape(node)) - 1, walk.shape(node))


@rule(aten.embedding.default)
def embedding(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Whole numbers with weight (rows, width): the width is made of new units, rows stay."""
    weight = args[0]
    if not _whole(weight):
        return walk.give_up(node, "an embedding whose weight is computed in the forward pass")
    made = walk.units.fresh(weight.elements.shape[1])
    walk.units.member(weight.name, 1, made, "out")
    return spread(made, len(walk.shape(node)) - 1, walk.shape(node))


@rule(aten.batch_norm.default, aten.instance_norm.default)
def channel_norm(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Each channel by itself, with up to four tensors of one entry a channel."""
    labels = walk.along(args[0], 1)
    for tensor in args[1:5]:
        if isinstance(tensor, Raw):
            walk.units.member(tensor.name, 0, labels, "with")
    return spread(labels, 1, walk.shape(node))


@rule(aten.prelu.default)
def prelu(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """One slope for all, or one a channel."""
    x, slope = args
    if not _whole(slope):
        return walk.give_up(node, "a PReLU whose slope is computed in the forward pass")
    if slope.elements.numel() > 1:
        walk.units.member(slope.name, 0, walk.along(x, 1), "with")
    return x  # type: ignore[no-any-return]


_SAME = """relu relu6 hardtanh hardswish hardsigmoid silu gelu sigmoid tanh elu celu selu leaky_relu mish softplus abs exp log
 log1p sqrt rsqrt neg square sin cos erf reciprocal clamp clamp_min clamp_max round floor ceil sign _to_copy to softsign
 logsigmoid hardshrink softshrink threshold masked_fill nan_to_num type_as expm1 log_sigmoid logit""".split()
_BINARY = "add sub mul div maximum minimum pow where rsub atan2 fmod remainder lerp addcmul".split()


def overloads(name: str) -> list[Any]:
    """All overloads of an ATen operator that this torch has."""
    packet = getattr(aten, name, None)
    return [] if packet is None else [getattr(packet, o) for o in packet.overloads()]


@rule(*(target for name in (*_SAME, *_BINARY) for target in overloads(name)))
def elementwise(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Values that meet in one element live and die together."""
    shape = walk.shape(node)
    result: Tensor | None = None
    for value in (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)):
        result = value if result is None else _meet(walk, node, result, value)
    if result is None:
        return nothing(shape)
    result = result.expand(shape)
    for value in (*args, *kwargs.values()):
        if isinstance(value, Raw):
            _meet_parameter(walk, node, result, value)
    return result


def _meet(walk: Walk, node: Node, a: Tensor, b: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(a.shape, b.shape)
    for one, other in ((a, b), (b, a)):
        if _broadcast_over(one, other) and bool((one > 0).any()):
            # A single channel that acts on many stays, and does not tie them together.
            walk.units.lock(one, f"broadcast over other channels by {walk.where(node)}")
            return other.expand(shape)
    reason = f"added to or multiplied with values that cannot be cut, by {walk.where(node)}"
    return walk.units.join(compact(a.expand(shape)), compact(b.expand(shape)), reason).expand(shape)


def _broadcast_over(one: Tensor, other: Tensor) -> bool:
    """Whether a dimension of size 1 of `one` meets different labels of `other`."""
    shift = one.ndim - other.ndim
    return any(d + shift < 0 or one.shape[d + shift] == 1 for d in varying(other))


def _meet_parameter(walk: Walk, node: Node, labels: Tensor, raw: Raw) -> None:
    """A bare parameter (layer scale, position embedding) in an elementwise operator vanishes with the channels it meets."""
    own = raw.elements.expand(walk.shape(node))
    moving = [d for d in varying(labels) if compact(own).shape[d] > 1]
    if not moving:
        if bool((labels > 0).any()) and raw.elements.numel() > 1 and not varying(labels):
            walk.units.lock(labels, f"met by the parameter {raw.name} in {walk.where(node)}")
        return
    if len(moving) > 1:
        walk.units.lock(labels, f"met along several dimensions by the parameter {raw.name}")
        return
    vector, numbers = walk.along(labels, moving[0]), own.movedim(moving[0], 0).flatten(1)
    shape = walk.tensor_shape(raw.name)
    for dim, size in enumerate(shape):
        stride = int(torch.tensor(shape[dim + 1 :]).prod()) if dim + 1 < len(shape) else 1
        index = numbers // stride % size
        if size == len(vector) and bool((index == torch.arange(size)[:, None]).all()):
            walk.units.member(raw.name, dim, vector, "with")
            return
    walk.units.lock(labels, f"met by the parameter {raw.name} in an order of its own")


_SPATIAL = """avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
 adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
 upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d""".split()


@rule(*(target for name in _SPATIAL for target in overloads(name)))
def spatial(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(N, C, ...) to (N, C, other positions): channels keep to themselves."""
    if node.name not in walk.shapes:
        return walk.give_up(node, f"{walk.where(node)} gives indices")
    return spread(walk.along(args[0], 1), 1, walk.shape(node))


_REDUCTIONS = (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.var.correction)


@rule(*_REDUCTIONS, aten.linalg_vector_norm.default)
def reduction(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Fine over positions; over channels it mixes them."""
    x = args[0]
    before, after = tuple(x.shape), walk.shape(node)
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else kwargs.get("dim") or list(range(x.ndim))
    dims = {d % x.ndim for d in dims}
    if dims & set(varying(x)):
        return walk.give_up(node, f"reduced over channels by {walk.where(node)}")
    for dim in dims:
        x = x.narrow(dim, 0, 1)
    kept = [n for d, n in enumerate(before) if d not in dims]
    return (x if len(after) == len(before) else x.reshape(kept)).expand(after)


@rule(aten.softmax.int, aten.log_softmax.int, aten.cumsum.default)
def over_one_dim(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Mixes the values along one dimension, which must not be that of the channels."""
    x, dim = args[0], args[1]
    if dim % x.ndim in varying(x):
        return walk.give_up(node, f"{walk.where(node)} mixes the channels")
    return x  # type: ignore[no-any-return]
