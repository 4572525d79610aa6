"""Rules of normalisations. Those that mix channels are recorded: after a cut their statistics are over fewer channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compresskit.graph.normalize import aten
from compresskit.prune.structure.channel_sets import expand_along, varying_dims
from compresskit.prune.structure.rules.base import OperatorCall, RuleResult, rule_for
from compresskit.prune.structure.rules.computed_weights import is_computed_weight, normalize_parameter, reduce_parameter
from compresskit.prune.structure.rules.contract import labels_of_sum
from compresskit.prune.structure.rules.layers import equal_groups
from compresskit.prune.structure.rules.parameter_view import ParameterView


@rule_for(aten.batch_norm.default, aten.instance_norm.default)
def rule_channel_norm(call: OperatorCall) -> RuleResult:
    """Each channel by itself, with up to four tensors of one entry per channel."""
    if isinstance(call.args[0], ParameterView):
        if call.target is not aten.batch_norm.default or not is_computed_weight(call, call.args[:1]):
            return call.lock_inputs(f"{call.where} normalises a parameter")
        return normalize_parameter(call, call.args[0], call.args[1:5])
    labels = call.labels_along(call.args[0], 1)
    tensors = [t for t in call.args[1:5] if isinstance(t, ParameterView)]
    for tensor in tensors:
        call.assign_vector(tensor, labels)
    if not tensors:
        call.add_size_attribute("num_features", labels)
    return expand_along(labels, 1, call.shape)


@rule_for(aten.group_norm.default)
def rule_group_norm(call: OperatorCall) -> RuleResult:
    """(N, C, ...) in groups: the same position of every group is one channel set; statistics are over what stays."""
    x, groups = call.args[:2]
    labels = call.labels_along(x, 1)
    call.assign_vector(call.argument("weight"), labels)
    call.assign_vector(call.argument("bias"), labels)
    call.add_size_attribute("num_channels", labels)
    result = expand_along(labels, 1, call.shape)
    if groups == len(labels) > 1:  # each channel by itself, and the number of groups is one more width
        call.add_number_of_groups(result, labels)
        return result
    equal_groups(call, labels, groups)
    call.add_statistic(labels, 1)
    return result


@rule_for(aten.layer_norm.default, aten.rms_norm.default)
def rule_layer_norm(call: OperatorCall) -> RuleResult:
    """Over the last dimensions, one of which may be that of the channels; statistics are over what stays."""
    x, shape = call.args[:2]
    if isinstance(x, ParameterView):  # an embedding of distances, say, whose last dimension has the channels
        x = expand_along(call.labels_along(x, -1), len(x.shape) - 1, x.shape)
    first = x.ndim - len(shape)
    inside = [d for d in varying_dims(x) if d >= first]
    if not inside:
        return x
    if len(inside) > 1:
        return call.lock_inputs(f"{call.where} normalises over several dimensions of channels")
    labels = call.labels_along(x, inside[0])
    call.assign_vector(call.argument("weight"), labels, inside[0] - first)
    call.assign_vector(call.argument("bias"), labels, inside[0] - first)
    call.add_size_attribute("normalized_shape", labels, inside[0] - first)
    call.add_statistic(labels, inside[0])
    result = expand_along(labels, inside[0], call.shape)
    if not isinstance(call.module, nn.LayerNorm | nn.RMSNorm):  # torch's own shapes follow their weights
        call.add_hard_coded_size(result)
    return result


@rule_for(aten.prelu.default)
def rule_prelu(call: OperatorCall) -> RuleResult:
    """One slope for all, or one per channel."""
    x, slope = call.args
    if not isinstance(slope, ParameterView):
        return call.lock_inputs(f"the slope of {call.where} is computed in the forward pass")
    if slope.numel > 1:
        call.assign_vector(slope, call.labels_along(x, 1))
    return x


@rule_for(aten._weight_norm.default)
def rule_weight_norm(call: OperatorCall) -> RuleResult:
    """`g v / |v|`: a weight with the layout of v, whose dimension `dim` is also that of g."""
    v, g = call.args[:2]
    dim = call.args[2] if len(call.args) > 2 else 0
    parameters = all(isinstance(t, ParameterView) and not t.moved for t in (v, g))
    if not parameters or dim < 0 or len(g.shape) != len(v.shape):
        return call.lock_inputs()
    dims_of_g = tuple(d if d == dim else None for d in range(len(v.shape)))
    return ParameterView.of(v.name, v.shape, same_layout=((g.name, dims_of_g),))


@rule_for(aten.linalg_vector_norm.default)
def rule_vector_norm(call: OperatorCall) -> RuleResult:
    """A norm of finite order is a sum: what is removed adds nothing to it."""
    x = call.args[0]
    order, dims = call.argument("ord"), call.argument("dim")
    if isinstance(x, ParameterView) and float(order) > 0 and is_computed_weight(call, [x]):
        rank = len(x.shape)
        dims = list(range(rank)) if dims is None else [d % rank for d in ([dims] if isinstance(dims, int) else dims)]
        return reduce_parameter(call, x, dims, statistic=False)
    if not isinstance(x, Tensor) or dims is None or not 0 < float(order) < float("inf"):
        return call.lock_inputs()
    dims = [d % x.ndim for d in ([dims] if isinstance(dims, int) else dims)]
    result = labels_of_sum(call, x, dims)
    kept = [n for d, n in enumerate(x.shape) if d not in dims]
    return result if len(call.shape) == x.ndim else torch.squeeze(result, dims).reshape(kept)
