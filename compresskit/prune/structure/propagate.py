"""Propagate channel labels through a trace: run the rule of every operator on the labels of its inputs."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from compresskit.graph.normalize import Node, aten, usual_operator
from compresskit.prune.structure.channel_sets import fixed_labels, varying_dims
from compresskit.prune.structure.rules import PROPAGATION_RULES
from compresskit.prune.structure.rules.arithmetic import join_broadcast, rule_elementwise
from compresskit.prune.structure.rules.base import ChannelPropagation, OperatorCall, RuleResult, operator_name, tensor_leaves
from compresskit.prune.structure.rules.parameter_view import ParameterView
from compresskit.prune.structure.trace import Trace, names_without_values

log = logging.getLogger(__name__)

#: Operators that run whatever the width of what they read: of no value, of all of them, or of the first ones.
_ANY_WIDTH = frozenset("slice detach clone alias contiguous squeeze unsqueeze flatten permute transpose".split())

#: What a rule raises where an operator is called in a way that it does not know. A mistake in a rule raises the same.
RULE_FAILURES: tuple[type[Exception], ...] = (RuntimeError, LookupError, TypeError, ValueError, AttributeError)


def propagate(trace: Trace) -> ChannelPropagation:
    """Channel sets of a traced model, and the constraints on them, from its run in eval mode and the other runs it has."""
    state = ChannelPropagation(trace)
    without_values = names_without_values((trace, *trace.other_runs))
    _propagate_run(state, trace, without_values)
    for run in trace.other_runs:
        state.shapes, state.main_run = run.shapes, False
        _propagate_run(state, run, without_values)
    state.drop_axes_without_channels()
    for axis in [*state.sets.axes]:
        for copy in (name for name, read in trace.copies.items() if read == axis.tensor):
            state.sets.add_axis(copy, axis.dim, axis.labels, axis.role)
    for axis in state.sets.axes:
        if axis.tensor in state.locked_tensors:
            state.sets.lock(axis.labels, state.locked_tensors[axis.tensor])
    return state


def _propagate_run(state: ChannelPropagation, run: Trace, without_values: set[str]) -> None:
    values: dict[Node, Any] = {}
    unread, idle = _unread_widths(state.trace), _idle_nodes(run.graph)
    last_use = {a: node for node in run.graph.nodes for a in node.all_input_nodes}
    for node in run.graph.nodes:
        if node in idle:
            state.calls[node.target] += 1  # cuts are found again by the number of their call
            value = None
        elif run.is_empty(node) and _shows_nothing(node, values, without_values):
            state.calls[node.target] += 1
            value = fixed_labels(state.shapes[node.name]) if node.name in state.shapes else None
        else:
            value = _propagate_node(state, node, values)
        values[node] = value
        if node.op == "get_attr" or (node.op == "call_function" and state.data_free.issuperset(node.all_input_nodes)):
            state.data_free.add(node)
        if unread and isinstance(value, Tensor):
            _lock_widths(state, value, unread)
        for used in node.all_input_nodes:
            if last_use[used] is node:
                del values[used]


def _idle_nodes(graph: fx.Graph) -> set[Node]:
    """Nodes that no other node reads, and that run at any width: the code takes the shape of `x[:, :, -1]`, and no value of it.

    Others that are not read stay: their weights are cut with the channels, and the sizes that their code gives follow.
    """
    idle: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and _runs_at_any_width(node) and idle.issuperset(node.users):
            idle.add(node)
    return idle


def _runs_at_any_width(node: Node) -> bool:
    if node.target is aten.select.int:
        return node.args[2] in (0, -1)
    return operator_name(node.target) in _ANY_WIDTH


def _shows_nothing(node: Node, values: Mapping[Node, Any], without_values: set[str]) -> bool:
    """Whether an operator on no rows can be passed over: its parameters meet values elsewhere, which say what their channels are.

    Those that meet none are locked by the rule: nothing says what they belong to.
    """
    read = tensor_leaves([values[n] for n in node.all_input_nodes])
    return node.op == "call_function" and not any(isinstance(v, ParameterView) and v.name in without_values for v in read)


def _unread_widths(trace: Trace) -> dict[tuple[int, bool], str]:
    """(size, whether positions count, too) of tensors that no run has read -> a name; a matrix may read both at once."""
    widths: dict[tuple[int, bool], str] = {}
    for name, shape in reversed(trace.unread.items()):
        widths |= {(size, False): name for size in shape if size > 1}
        if len(shape) == 2:
            widths[shape[1], True] = name
    return widths


def _lock_widths(state: ChannelPropagation, value: Tensor, unread: Mapping[tuple[int, bool], str]) -> None:
    """Lock channels that are as many as a tensor has entries that no run has read, alone or with the positions behind them: other
    inputs may bring the two together.
    """
    for dim in varying_dims(value):
        sizes = (value.shape[dim], False), (math.prod(value.shape[dim:]), True), (math.prod(value.shape[1:]), True)
        if (name := next((unread[size] for size in sizes if size in unread), None)) is not None:
            state.sets.lock(
                value,
                f"as wide as {state.trace.name_prefix}{name}, which the model does not read on the example"
                " (give an example for which it does, or delete what is never used)",
            )


def _propagate_node(state: ChannelPropagation, node: Node, values: dict[Node, Any]) -> Any:
    if node.op == "placeholder":
        return fixed_labels(state.shapes[node.name])
    if node.op == "get_attr":
        return ParameterView.of(str(node.target), state.shapes[node.name])
    args: Any = fx.map_arg(node.args, lambda n: values[n])
    kwargs: Any = fx.map_arg(node.kwargs, lambda n: values[n])
    if node.op == "output":
        for value in tensor_leaves(args):
            state.lock_value(value, "an output of the model")
        return None
    if node.target is operator.getitem:
        return args[0][args[1]] if args[0] is not None else fixed_labels(state.shapes[node.name])
    state.calls[node.target] += 1
    return _run_rule(OperatorCall(state, node, args, kwargs))


def _run_rule(call: OperatorCall) -> RuleResult:
    usual = usual_operator(call.target)
    rule = PROPAGATION_RULES.get(usual) or PROPAGATION_RULES.get(str(usual))
    if rule is None and isinstance(usual, OpOverload) and torch.Tag.pointwise in usual.tags:
        rule = rule_elementwise  # as torch says itself
    if rule is None:
        return call.lock_inputs(f"no rule for {call.target} ({call.path or 'the model'})")
    try:
        result = rule(call)
    except RULE_FAILURES as error:  # an operator called in a way that its rule does not know is one without a rule
        log.debug("the rule of %s (%s) failed: %s: %s", call.target, call.path or "the model", type(error).__name__, error)
        return call.lock_inputs()
    if _has_wrong_shape(call, result):
        return call.lock_inputs()
    if call.node.meta.get("aliased") and isinstance(result, Tensor) and isinstance(call.args[0], Tensor):
        # Other tensors share the memory: what was written is joined with what stood there.
        result = join_broadcast(call, call.args[0], result.expand(call.args[0].shape))
    return result


def _has_wrong_shape(call: OperatorCall, result: RuleResult) -> bool:
    """Whether labels do not have the shape of the value, which no rule may return."""
    if "parts" in call.node.meta:
        return not isinstance(result, list | tuple) or len(result) != len(call.part_shapes)
    return isinstance(result, Tensor | ParameterView) and call.has_one_result and tuple(result.shape) != call.shape
