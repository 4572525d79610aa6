"""Operators of a graph that scale and shift a value by constants: numbers, stored tensors, or BatchNorm in eval mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from compresskit.graph.capture import parameter_name
from compresskit.graph.layers.stored import evaluate_constant, stored_sources, stored_value
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor

_SCALES = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})
_DIVISIONS = frozenset({aten.div.Tensor, aten.div.Scalar})
_SHIFTS = frozenset({aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar})
_ADDITIONS = frozenset({aten.add.Tensor, aten.add.Scalar})
_REVERSED = frozenset({aten.rsub.Tensor, aten.rsub.Scalar})
ARITHMETIC = _SCALES | _SHIFTS | {aten.neg.default}


@dataclass(frozen=True, kw_only=True)
class ChannelAffine:
    """What a node computes: `x * scale + shift`, with a number for each index of one dimension of x.

    scale, shift: (channels,), or (1,) for one number, in float64. axis: the dimension; None where both are numbers.
    scales, shifts: whether the operators can do that at all, whatever their numbers are now.
    trains: whether a parameter among the constants requires a gradient.
    """

    x: Node
    scale: Tensor
    shift: Tensor
    axis: int | None = None
    scales: bool = False
    shifts: bool = False
    trains: bool = False

    def then(self, after: ChannelAffine) -> ChannelAffine | None:
        """Both in one; None where they have numbers for different dimensions."""
        if None not in (self.axis, after.axis) and self.axis != after.axis:
            return None
        return ChannelAffine(
            x=self.x,
            scale=self.scale * after.scale,
            shift=self.shift * after.scale + after.shift,
            axis=self.axis if after.axis is None else after.axis,
            scales=self.scales or after.scales,
            shifts=self.shifts or after.shifts,
            trains=self.trains or after.trains,
        )

    def expanded(self, channels: int) -> tuple[Tensor, Tensor]:
        """Scale and shift of each channel, (channels,)."""
        return self.scale.expand(channels), self.shift.expand(channels)


def constant_nodes(graph: fx.Graph) -> set[Node]:
    """The nodes of a graph that read stored tensors, or compute with nothing else."""
    found: set[Node] = set()
    for node in graph.nodes:
        read = node.all_input_nodes
        if node.op == "get_attr" or (node.op == "call_function" and read and found.issuperset(read)):
            found.add(node)
    return found


def affine_of(module: fx.GraphModule, node: Node, constants: set[Node]) -> ChannelAffine | None:
    """The scale and shift that a node computes, or None for other nodes. A value keeps its shape and its dtype.

    constants: the `constant_nodes` of the graph.
    """
    if node.op != "call_function" or node.kwargs or node in constants:
        return None
    if node.target is aten.batch_norm.default:
        return _of_batch_norm(module, node)
    if node.target is aten.neg.default:
        return _affine(node.args[0], node, scale=torch.tensor([-1.0], dtype=torch.float64))
    if node.target not in ARITHMETIC or len(node.args) != 2:
        return None
    first, second = node.args
    x, other = (second, first) if _is_constant_operand(first, constants) else (first, second)
    if _is_constant_operand(x, constants) or not _is_constant_operand(other, constants):
        return None
    if node.target in _DIVISIONS and x is second:
        return None
    found = _channel_values(module, x, other)
    if found is None:
        return None
    values, axis, trains = found
    if node.target in _SCALES:
        scale = 1 / values if node.target in _DIVISIONS else values
        return _affine(x, node, scale=scale, axis=axis, trains=trains)
    swapped = (x is second) != (node.target in _REVERSED)  # constant - x
    if node.target in _ADDITIONS:
        return _affine(x, node, shift=values, axis=axis, trains=trains)
    if swapped:
        return _affine(x, node, scale=torch.full_like(values, -1), shift=values, axis=axis, trains=trains)
    return _affine(x, node, shift=-values, axis=axis, trains=trains)


def _affine(
    x: Node,
    node: Node,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    axis: int | None = None,
    trains: bool = False,
) -> ChannelAffine | None:
    given, result = x.meta.get("val"), node.meta.get("val")
    if not isinstance(given, Tensor) or not isinstance(result, Tensor) or given.dtype != result.dtype:
        return None
    if given.dtype not in (torch.float32, torch.float64):
        return None
    like = scale if scale is not None else shift
    assert like is not None
    return ChannelAffine(
        x=x,
        scale=torch.ones_like(like) if scale is None else scale,
        shift=torch.zeros_like(like) if shift is None else shift,
        axis=axis,
        scales=scale is not None,
        shifts=shift is not None,
        trains=trains,
    )


def _of_batch_norm(module: fx.GraphModule, node: Node) -> ChannelAffine | None:
    x, gamma, beta, mean, var, training = node.args[:6]
    names = [parameter_name(n) for n in (gamma, beta, mean, var) if n is not None]
    if training or mean is None or None in names:
        return None
    factor, average = (stored_value(module, n) for n in (var, mean))
    assert factor is not None
    assert average is not None
    scale = torch.rsqrt(factor.double() + node.args[7])
    weight, bias = stored_value(module, gamma), stored_value(module, beta)
    scale = scale if weight is None else scale * weight.double()
    shift = -average.double() * scale + (0 if bias is None else bias.double())
    trains = any(get_tensor(module, str(name)).requires_grad for name in names)
    return _affine(x, node, scale=scale, shift=shift, axis=1, trains=trains)


def _is_constant_operand(value: Any, constants: set[Node]) -> bool:
    return value in constants if isinstance(value, fx.Node) else isinstance(value, int | float) and not isinstance(value, bool)


def _channel_values(module: fx.GraphModule, x: Node, other: Any) -> tuple[Tensor, int | None, bool] | None:
    """(values, (channels,) or (1,) in float64; their dimension of x; whether they train); None for other constants."""
    like = x.meta.get("val")
    if not isinstance(like, Tensor):
        return None
    if not isinstance(other, fx.Node):
        return torch.tensor([float(other)], dtype=torch.float64, device=like.device), None, False
    sources = stored_sources(other) or [other]
    size = other.meta["val"].shape if "val" in other.meta else get_tensor(module, str(other.target)).shape
    if len(size) > like.ndim or sum(n != 1 for n in size) > 1:
        return None
    shape = [1] * (like.ndim - len(size)) + list(size)
    axis = next((i for i, n in enumerate(shape) if n != 1), None)
    if axis is not None and (not isinstance(like.shape[axis], int) or like.shape[axis] != shape[axis]):
        return None
    value = evaluate_constant(module, other) if other.op == "call_function" else get_tensor(module, str(other.target)).detach()
    if value.dtype is torch.bool or value.is_complex():
        return None
    trains = any(get_tensor(module, str(parameter_name(source))).requires_grad for source in sources)
    return value.double().reshape(-1), axis, trains
