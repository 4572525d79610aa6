"""Rules of LSTM, GRU and plain recurrent layers: a hidden channel is its row in every gate and its recurrent column."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from compresskit.graph.normalize import aten
from compresskit.prune.structure.channel_sets import expand_along
from compresskit.prune.structure.rules.base import OperatorCall, RuleResult, rule_for
from compresskit.prune.structure.rules.layers import lock_computed_weight
from compresskit.prune.structure.rules.parameter_view import ParameterView

_LAYER_GATES = {aten.lstm.input: 4, aten.gru.input: 3, aten.rnn_tanh.input: 1, aten.rnn_relu.input: 1}
_CELL_GATES = {
    aten.lstm_cell.default: 4,
    aten.gru_cell.default: 3,
    aten.rnn_tanh_cell.default: 1,
    aten.rnn_relu_cell.default: 1,
}


@rule_for(*_LAYER_GATES)
def rule_recurrent(call: OperatorCall) -> RuleResult:
    """(N, T, I) to (N, T, directions * H). All layers and directions share one `hidden_size`, so they get narrower together."""
    x, state, weights, biases, layers, _, _, bidirectional, _ = call.args
    gates, directions = _LAYER_GATES[call.target], 2 if bidirectional else 1
    per_layer = len(weights) // (layers * directions)
    if per_layer != (4 if biases else 2) or not _are_parameters(weights):
        return lock_computed_weight(call)
    hidden = call.sets.fresh(weights[1].shape[1])
    _join_initial_state(call, hidden, state)
    inputs = call.labels_along(x, x.ndim - 1)
    for layer in range(layers):
        for direction in range(directions):
            first = (layer * directions + direction) * per_layer
            _assign_gates(call, weights[first : first + per_layer], gates, hidden, inputs, math.prod(x.shape[:-1]))
        inputs = hidden.repeat(directions)
    outputs, *states = call.part_shapes
    return [expand_along(inputs, -1, outputs), *(expand_along(hidden, -1, shape) for shape in states)]


@rule_for(*_CELL_GATES)
def rule_recurrent_cell(call: OperatorCall) -> RuleResult:
    """One step: (N, I) and states (N, H) to states (N, H)."""
    x, state, *rest = call.args
    weights = [w for w in rest if w is not None]
    if not _are_parameters(weights):
        return lock_computed_weight(call)
    hidden, inputs = call.sets.fresh(weights[1].shape[1]), call.labels_along(x, x.ndim - 1)
    _join_initial_state(call, hidden, state)
    _assign_gates(call, weights, _CELL_GATES[call.target], hidden, inputs, math.prod(x.shape[:-1]))
    return call.expand_along(hidden, -1)


@rule_for(aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data)
def rule_packed_sequence(call: OperatorCall) -> RuleResult:
    """Packed sequences are not cut."""
    return lock_computed_weight(call, f"packed sequences are not followed through {call.where}")


def _are_parameters(weights: list[Any]) -> bool:
    return all(isinstance(w, ParameterView) and not w.moved for w in weights)


def _assign_gates(
    call: OperatorCall, weights: list[ParameterView], gates: int, hidden: Tensor, inputs: Tensor, steps: int
) -> None:
    """Weights (input weight, hidden weight, biases), each with one block of rows per gate."""
    for position, weight in enumerate(weights):
        call.sets.add_axis(weight.name, 0, hidden.repeat(gates), "out" if position == 0 else "with")
    for weight, columns in zip(weights, (inputs, hidden), strict=False):
        call.sets.add_axis(weight.name, 1, columns, "in")
        call.add_cost(steps * gates * len(hidden) * len(columns), hidden, columns)


def _join_initial_state(call: OperatorCall, hidden: Tensor, state: Any) -> None:
    """An initial state that the model makes or is given has the hidden channels; zeros made for the purpose add no constraint."""
    states, nodes = (v if isinstance(v, list | tuple) else [v] for v in (state, call.node.args[1]))
    for value, node in zip(states, nodes, strict=True):
        if isinstance(value, ParameterView):
            call.state.lock_tensor(value.name, f"an initial state of {call.where}")
        if isinstance(value, ParameterView) or not call.is_blank(node):
            labels = call.labels_along(value, len(value.shape) - 1)
            call.sets.join(hidden, labels, f"an initial state of {call.where} cannot be cut")
