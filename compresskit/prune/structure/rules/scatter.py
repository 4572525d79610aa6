"""Rules of operators whose index has an entry for every channel, as where networks over graphs add up neighbours."""

from __future__ import annotations

from torch import Tensor

from compresskit.prune.structure.channel_sets import collapse_expanded, expand_along, varying_dims
from compresskit.prune.structure.rules.arithmetic import join_broadcast
from compresskit.prune.structure.rules.base import OperatorCall, RuleResult, overloads, rule_for


@rule_for(*overloads("gather scatter scatter_add scatter_reduce"))
def rule_scatter(call: OperatorCall) -> RuleResult:
    """Where the index is the same for every channel, each stays itself: the rows of a tensor, or sums of rows, in its place."""
    x, source = call.args[0], None if call.kind == "gather" else call.argument("src")
    if isinstance(call.args[2], Tensor):
        call.sets.lock(call.args[2], f"read as positions by {call.where}")
    values = [v for v in (x, source) if isinstance(v, Tensor) and bool((collapse_expanded(v) > 0).any())]
    if not values:
        return x if isinstance(x, Tensor) and x.shape == call.shape and not varying_dims(x) else call.lock_inputs()
    moving, index = varying_dims(values[0]), call.node.meta["index"]
    followed = isinstance(x, Tensor) and (source is None or isinstance(source, Tensor))  # neither is a parameter
    if not followed or any(varying_dims(v) != moving for v in values):
        return call.lock_inputs(f"overwritten by {call.where}")
    (dim, *others), along = moving, call.args[1] % len(call.shape)
    if others or dim == along or index.shape[dim] != values[0].shape[dim] or not _same_along(index, dim):
        return call.lock_inputs(f"looked up at fixed places by {call.where}")
    labels = [expand_along(call.labels_along(v, dim), dim, call.shape) for v in values]
    if len(labels) == 1 and (call.kind == "gather" or call.is_blank(call.node.args[0])):
        return labels[0]
    return join_broadcast(call, x, labels[-1])


def _same_along(index: Tensor, dim: int) -> bool:
    """Whether an index is the same for every entry of a dimension."""
    return bool((index == index.narrow(dim, 0, 1)).all())
