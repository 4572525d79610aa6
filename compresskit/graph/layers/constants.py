"""Fold scales and shifts by constants into the layers beside them, on a captured graph.

(conv(x; W, b)) * s + t   ->  conv(x; W s, b s + t)             also through a permutation of dimensions
conv(x * s; W, b)         ->  conv(x; W s, b)                   s for each input channel
conv(x * s + t; W, b)     ->  conv(x; W s, b + W t)             without padding
                          ->  conv(x + t / s; W s, b)           with zeros around x * s + t, which stay zeros
(x * s1 + t1) * s2 + t2   ->  x * (s1 s2) + (t1 s2 + t2)        where no layer is near
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from compresskit.graph.capture import parameter_name
from compresskit.graph.layers.channel_affine import ChannelAffine, affine_of
from compresskit.graph.layers.merging import Merging, geometry_of, is_stored_layer, layer_axis, node_rank
from compresskit.graph.layers.stored import (
    LAYOUT_OPERATORS,
    TRANSPOSED_CONVS,
    bias_of,
    fold_affine_,
    replace_weights_,
    scaled_inputs,
    stored_value,
    sum_over_inputs,
)
from compresskit.graph.normalize import Node, aten, give_output_of_, read_input_of_
from compresskit.graph.surgery import free_name, get_tensor


def fold_constants_(merging: Merging) -> bool:
    """Fold scales and shifts behind and before layers, in place; returns whether any were."""
    before = len(merging.done)
    for node in merging.nodes():
        affine = affine_of(merging.module, node, merging.constants)
        layer = None if affine is None else _layer_behind(merging, affine)
        if affine is not None and layer is not None and _may_fold(merging, "after", layer, [node], affine):
            _fold_after(merging, layer, node, affine)
    for layer in merging.nodes():
        if is_stored_layer(merging.module, layer):
            _fold_before(merging, layer)
    return len(merging.done) > before


def _may_fold(merging: Merging, rule: str, layer: Node, steps: list[Node], affine: ChannelAffine) -> bool:
    if not all(merging.may_join(rule, layer, step, layer=False) for step in steps):
        return False
    if merging.replays:
        return True
    finite = bool(affine.scale.isfinite().all()) and bool(affine.shift.isfinite().all())
    return finite and (merging.trains(layer) or not affine.trains) and not merging.has_levels(layer)


def _layer_behind(merging: Merging, affine: ChannelAffine) -> Node | None:
    """The layer whose channels a scale and shift meets, where nothing else reads it; permutations lie between."""
    value, axis = affine.x, affine.axis
    while value.op == "call_function" and len(value.users) == 1:
        if is_stored_layer(merging.module, value) or _is_transposed(merging, value):
            return value if axis in (None, layer_axis(value)) and merging.is_alone(value) else None
        if value.target is aten.permute.default:
            axis = None if axis is None else value.args[1][axis] % node_rank(value)
        elif value.target is aten.transpose.int and axis is not None:
            a, b = (d % node_rank(value) for d in value.args[1:3])
            axis = b if axis == a else a if axis == b else axis
        elif axis is not None or value.target not in LAYOUT_OPERATORS:
            return None
        value = value.args[0]
    return None


def _is_transposed(merging: Merging, node: Node) -> bool:
    """Whether a node is a transposed convolution of one group, over a batch, with stored weights."""
    if node.target not in TRANSPOSED_CONVS or (*node.args, *[1] * 7)[6] != 1 or node.kwargs:
        return False
    weight, bias = stored_value(merging.module, node.args[1]), bias_of(node)
    stored = weight is not None and (bias is None or stored_value(merging.module, bias) is not None)
    return stored and node.meta["val"].dtype in (torch.float32, torch.float64) and weight.ndim == node_rank(node)  # type: ignore[union-attr]


def _fold_after(merging: Merging, layer: Node, node: Node, affine: ChannelAffine) -> None:
    weight, axis = merging.weight(layer), 1 if layer.target in TRANSPOSED_CONVS else 0
    scale, shift = affine.expanded(weight.shape[axis])
    gain = _trained_scale(merging, node) if affine.trains else None
    merging.scaled_(layer, lambda scales: scales.after(scale, shift if affine.shifts else None, gain))
    if affine.shifts or bias_of(layer) is not None:
        fold_affine_(merging.module, layer, scale, torch.zeros_like(scale), shift)
    else:
        shape = [1] * weight.ndim
        shape[axis] = -1
        replace_weights_(merging.module, layer, weight * scale.view(shape), None)
    merging.joined("after", layer, [node])
    value = affine.x
    while value is not layer:  # operators that move what the layer computes
        give_output_of_(value, node)
        value = value.args[0]
    give_output_of_(layer, node)
    node.replace_all_uses_with(affine.x)
    merging.module.graph.erase_node(node)


def _trained_scale(merging: Merging, node: Node) -> tuple[str, Tensor] | None:
    """Name and values of the parameter that a product multiplies by, as the layer scale of a ConvNeXt; None for others."""
    if node.target is not aten.mul.Tensor:
        return None
    name = next((name for operand in node.args if (name := parameter_name(operand)) is not None), None)
    return None if name is None else (name, get_tensor(merging.module, name).detach())


def _steps_before(merging: Merging, layer: Node) -> tuple[list[Node], ChannelAffine] | None:
    """The operators that scale and shift what a layer alone reads, the last one first, and what they do together."""
    whole: ChannelAffine | None = None
    steps: list[Node] = []
    value = layer.args[0]
    while len(value.users) == 1 and (affine := affine_of(merging.module, value, merging.constants)) is not None:
        longer = affine if whole is None else affine.then(whole)
        if longer is None or longer.axis not in (None, layer_axis(layer)):
            break
        if not _may_fold(merging, "before", layer, [value], longer):
            break
        steps.append(value)
        whole, value = longer, affine.x
    return None if whole is None else (steps, whole)


def _fold_before(merging: Merging, layer: Node) -> None:
    found = _steps_before(merging, layer)
    if found is None or not merging.is_alone(layer):
        return
    steps, affine = found
    geometry, weight = geometry_of(merging.module, layer), merging.weight(layer)
    scale, shift = affine.expanded(geometry.inputs)
    rest = shift / scale if affine.shifts and any(geometry.padding) else None
    if rest is not None and len(steps) < 2:
        return  # an addition would take the place of one operator
    if not merging.replays:
        if rest is not None and not bool(rest.isfinite().all()):
            return
        rounds = merging.rules.rounds
        if rounds is not None and not rounds(layer, affine, rest):
            return
    shifts = affine.shifts and rest is None
    merging.scaled_(layer, lambda scales: scales.before(scale, shift if shifts else None))
    bias = merging.value(bias_of(layer))
    if shifts:
        bias = sum_over_inputs(weight, shift, geometry.groups) + (0 if bias is None else bias)
    replace_weights_(merging.module, layer, scaled_inputs(weight, scale, geometry.groups), bias)
    x = affine.x if rest is None else _insert_constant(merging, layer, affine.x, aten.add.Tensor, rest, layer_axis(layer))
    layer.args = (x, *layer.args[1:])
    merging.joined("before", layer, steps)
    read_input_of_(layer, steps[-1])
    for step in steps:
        merging.module.graph.erase_node(step)


def _insert_constant(merging: Merging, before: Node, x: Node, target: object, values: Tensor, axis: int | None) -> Node:
    """Insert an operator of a value and a constant, stored as a buffer, before a node."""
    module, dtype = merging.module, x.meta["val"].dtype
    name = free_name(module, f"constant_of_{before.name}")
    shape = [1] * node_rank(x)
    if axis is not None:
        shape[axis] = -1
    module.register_buffer(name, values.to(dtype).reshape(shape if axis is not None else ()))
    with module.graph.inserting_before(before):
        constant = module.graph.get_attr(name)
        new = module.graph.call_function(target, (x, constant))  # type: ignore[arg-type]
    merging.constants.add(constant)
    constant.meta = {"val": x.meta["val"].new_empty(module.get_buffer(name).shape)}
    new.meta = dict(x.meta if x.op != "placeholder" else before.meta) | {"val": x.meta["val"]}
    return new


def join_chains_(merging: Merging) -> bool:
    """Replace chains of scales and shifts that no layer is beside by fewer operators, in place; returns whether any were."""
    before = len(merging.done)
    for last in reversed(merging.nodes()):
        if last.users and last.op == "call_function" and last.target is not aten.batch_norm.default:
            _join_chain(merging, last)
    return len(merging.done) > before


def _join_chain(merging: Merging, last: Node) -> None:
    found = affine_of(merging.module, last, merging.constants)
    if found is None or not _may_be_joined(merging, found):
        return
    steps, parts = [last], [found]
    while len((value := parts[0].x).users) == 1 and value.target is not aten.batch_norm.default:
        affine = affine_of(merging.module, value, merging.constants)
        whole = None if affine is None else affine.then(reduce(_both, parts))
        if affine is None or whole is None or not _may_be_joined(merging, whole):
            break
        if not merging.may_join("chain", last, value, layer=False):
            break
        parts, steps = [affine, *parts], [value, *steps]
    whole = reduce(_both, parts)
    if len(steps) <= whole.scales + whole.shifts:
        return
    value = whole.x
    if whole.scales:
        value = _insert_constant(merging, last, value, aten.mul.Tensor, whole.scale, whole.axis)
    if whole.shifts:
        value = _insert_constant(merging, last, value, aten.add.Tensor, whole.shift, whole.axis)
    merging.joined("chain", last, steps[:-1])
    last.replace_all_uses_with(value)
    for step in reversed(steps):
        merging.module.graph.erase_node(step)


def _may_be_joined(merging: Merging, affine: ChannelAffine) -> bool:
    finite = bool(affine.scale.isfinite().all()) and bool(affine.shift.isfinite().all())
    return merging.replays or (finite and not affine.trains)


def _both(first: ChannelAffine, after: ChannelAffine) -> ChannelAffine:
    whole = first.then(after)
    assert whole is not None
    return whole
