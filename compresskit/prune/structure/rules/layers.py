"""Rules of layers that make channels: convolution, linear, embedding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx, nn

from compresskit.graph.normalize import aten
from compresskit.prune.structure.channel_sets import expand_along
from compresskit.prune.structure.rules.base import OperatorCall, RuleResult, rule_for, tensor_leaves
from compresskit.prune.structure.rules.parameter_view import ParameterAxis, ParameterView

_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_PADDED_CONVOLUTIONS = (aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)


@rule_for(*_CONVOLUTIONS, *_PADDED_CONVOLUTIONS)
def rule_conv(call: OperatorCall) -> RuleResult:
    """(N, I, ...) with weight (O, I/groups, ...): outputs are new channels; those of a depthwise layer are its inputs."""
    x, weight = call.args[:2]
    if (axes := _matrix_axes(weight)) is None:
        return lock_computed_weight(call)
    groups = call.argument("groups")
    channels = _channel_dim(call, weight)
    inputs = call.labels_along(x, channels)
    outputs, per_group = weight.shape[:2]
    depthwise = groups > 1 and per_group == 1
    if groups == 1:
        call.assign(weight, axes[1], inputs, "in")
        made = call.sets.fresh(outputs)
        call.state.conv_layers.append((call.path, made, inputs))
    elif depthwise:
        made = inputs.repeat_interleave(outputs // groups)
    else:
        call.assign(weight, axes[1], equal_groups(call, inputs, groups)[0], "in")
        made = equal_groups(call, call.sets.fresh(outputs), groups).reshape(-1)
    call.assign(weight, axes[0], made, "with" if depthwise else "out")
    call.assign_bias(made)
    macs = math.prod(call.shape) * math.prod(weight.shape[1:])
    call.add_cost(macs, made, inputs if groups == 1 else None if depthwise else inputs[: len(inputs) // groups])
    result = expand_along(made, channels, call.shape)
    if depthwise and not isinstance(call.module, nn.modules.conv._ConvNd):  # torch's own groups follow their weights
        call.add_given_size(result, "in as many groups as the code says")
    return result


@rule_for("torchvision.deform_conv2d.default")
def rule_deformable_conv(call: OperatorCall) -> RuleResult:
    """(N, I, H, W) with weight (O, I, ...), as a convolution; offsets and masks have channels for the positions of its kernel."""
    x, weight, offset, mask = call.args[:4]
    axes = _matrix_axes(weight)
    if axes is None or call.argument("groups") != 1 or call.argument("offset_groups") != 1:
        return call.lock_inputs(f"{call.where} has groups")
    for value in (offset, mask):
        call.state.lock_value(value, f"read as positions by {call.where}")
    inputs, made = call.labels_along(x, 1), call.sets.fresh(weight.shape[0])
    call.assign(weight, axes[1], inputs, "in")
    call.assign(weight, axes[0], made, "out")
    call.assign_bias(made)
    call.add_cost(math.prod(call.shape) * math.prod(weight.shape[1:]), made, inputs)
    return expand_along(made, 1, call.shape)


@rule_for(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def rule_conv_transpose(call: OperatorCall) -> RuleResult:
    """(N, I, ...) with weight (I, O/groups, ...)."""
    x, weight = call.args[:2]
    groups = call.argument("groups")
    if (axes := _matrix_axes(weight)) is None:
        return lock_computed_weight(call)
    channels = _channel_dim(call, weight)
    inputs = call.labels_along(x, channels)
    per_group = weight.shape[1]
    depthwise = groups == len(inputs) and groups > 1
    if depthwise:
        made, made_per_group = inputs.repeat_interleave(per_group), None
    else:
        equal_groups(call, inputs, groups)
        rows = equal_groups(call, call.sets.fresh(per_group * groups), groups)
        call.assign(weight, axes[1], rows[0], "out")
        made, made_per_group = rows.reshape(-1), rows[0]
    call.assign(weight, axes[0], inputs, "with" if depthwise else "in")
    call.assign_bias(made)
    positions = math.prod(x.shape if isinstance(x, Tensor) else ()) * math.prod(weight.shape[1:])
    call.add_cost(positions, inputs, made_per_group)
    return expand_along(made, channels, call.shape)


@rule_for(aten.linear.default)
def rule_linear(call: OperatorCall) -> RuleResult:
    """(..., I) with weight (O, I)."""
    x, weight = call.args[:2]
    if (axes := _matrix_axes(weight)) is None:
        return lock_computed_weight(call)
    inputs = call.labels_along(x, len(x.shape) - 1)
    call.assign(weight, axes[1], inputs, "in")
    made = call.sets.fresh(weight.shape[0])
    call.assign(weight, axes[0], made, "out")
    call.assign_bias(made)
    call.state.linear_layers.append((call.path, made, inputs))
    call.add_cost(math.prod(call.shape) * weight.shape[1], made, inputs)
    return expand_along(made, len(call.shape) - 1, call.shape)


@rule_for(aten.bilinear.default)
def rule_bilinear(call: OperatorCall) -> RuleResult:
    """(..., I) and (..., J) with weight (O, I, J)."""
    *values, weight = call.args[:3]
    if not isinstance(weight, ParameterView) or weight.moved:
        return lock_computed_weight(call)
    first, second = (call.labels_along(x, len(x.shape) - 1) for x in values)
    made = call.sets.fresh(weight.shape[0])
    for dim, labels in enumerate((made, first, second)):
        call.assign(weight, (dim, torch.arange(len(labels))), labels, "in" if dim else "out")
    call.assign_bias(made)
    call.add_cost(math.prod(call.shape[:-1]) * math.prod(weight.shape), made, first, second)
    return expand_along(made, len(call.shape) - 1, call.shape)


@rule_for(aten.embedding.default, aten.embedding_bag.default, aten._embedding_bag.default)
def rule_embedding(call: OperatorCall) -> RuleResult:
    """Integers with weight (rows, width): the width is new channels; rows stay, since the integers name them."""
    weight = call.args[0]
    if (axes := _matrix_axes(weight)) is None or not call.has_one_result:
        return call.lock_inputs()
    made = call.sets.fresh(weight.shape[1])
    call.assign(weight, axes[1], made, "out")
    call.sets.add_axis(weight.name, axes[0][0], torch.zeros(weight.shape[0], dtype=torch.long), "with")
    return expand_along(made, len(call.shape) - 1, call.shape)


def lock_computed_weight(call: OperatorCall) -> RuleResult:
    """Lock the inputs of a layer whose weight is no parameter, or is read in a way that cannot be followed."""
    reason = f"the weight of {call.where} is computed in the forward pass"
    views = [v for v in tensor_leaves((call.args, call.kwargs)) if isinstance(v, ParameterView)]
    call.state.unfollowed_weights.update(v.name for v in views if len(v.shape) > 1)
    for name in _parameters_behind(call, call.node.args[1]):
        call.state.locked_tensors[name] = reason
        call.state.unfollowed_weights.add(name)
    return call.lock_inputs(reason)


def _parameters_behind(call: OperatorCall, weight: Any) -> set[str]:
    """Parameters of a computed weight's shape that it is computed from, entry by entry."""
    found: set[str] = set()
    todo, shapes = [weight] if isinstance(weight, fx.Node) else [], call.state.shapes
    while todo:
        node = todo.pop()
        if node.op == "get_attr":
            found.add(str(node.target))
        todo += [n for n in node.all_input_nodes if shapes.get(n.name) == shapes.get(weight.name)]
    return found


def equal_groups(call: OperatorCall, labels: Tensor, groups: int) -> Tensor:
    """(groups * n,) to (groups, n), with the same position of every group joined so that groups stay equally large."""
    rows = labels.view(groups, -1)
    return call.sets.join_rows(rows, "a grouped layer needs equal groups, and one of them cannot be cut here")


def _channel_dim(call: OperatorCall, weight: ParameterView) -> int:
    """The channel dimension of a convolution's input and output; a sample may come without a batch."""
    return len(call.shape) - (len(weight.shape) - 2) - 1


def _matrix_axes(weight: Any) -> tuple[ParameterAxis, ParameterAxis] | None:
    """The stored dimensions behind the first two of a weight; None where it is no parameter or they cannot be told apart."""
    if not isinstance(weight, ParameterView):
        return None
    if not weight.moved:
        return (0, torch.arange(weight.shape[0])), (1, torch.arange(weight.shape[1]))
    first, second = weight.axis(0), weight.axis(1)
    if weight.shape[1] == 1 and second is None:
        second = (1, torch.arange(1))
    return None if first is None or second is None or first[0] == second[0] else (first, second)
