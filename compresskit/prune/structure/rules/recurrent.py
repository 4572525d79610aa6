"""Rules of LSTM, GRU and plain recurrent layers: a hidden channel is its row in every gate and its recurrent column."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from compresskit.graph.normalize import aten
from compresskit.prune.structure.channel_sets import expand_along, fixed_labels
from compresskit.prune.structure.rules.base import OperatorCall, RuleResult, rule_for
from compresskit.prune.structure.rules.layers import lock_computed_weight
from compresskit.prune.structure.rules.parameter_view import ParameterView

_LAYER_GATES = {aten.lstm.input: 4, aten.gru.input: 3, aten.rnn_tanh.input: 1, aten.rnn_relu.input: 1}
_PACKED_GATES = {aten.lstm.data: 4, aten.gru.data: 3, aten.rnn_tanh.data: 1, aten.rnn_relu.data: 1}
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
    return _stacked_layers(call, gates, x, (state, call.node.args[1]), weights, (biases, layers, directions))


@rule_for(*_PACKED_GATES)
def rule_packed_recurrent(call: OperatorCall) -> RuleResult:
    """The same for a packed sequence, (sum of lengths, I) to (sum of lengths, directions * H)."""
    x, _, state, weights, biases, layers, _, _, bidirectional = call.args
    gates, directions = _PACKED_GATES[call.target], 2 if bidirectional else 1
    return _stacked_layers(call, gates, x, (state, call.node.args[2]), weights, (biases, layers, directions))


@rule_for(aten._pack_padded_sequence.default, aten._pad_packed_sequence.default)
def rule_pack(call: OperatorCall) -> RuleResult:
    """(N, T, I) to (sum of lengths, I), or back, and the sizes that this takes."""
    x, shapes = call.args[0], call.part_shapes
    return [expand_along(call.labels_along(x, x.ndim - 1), -1, shapes[0]), fixed_labels(shapes[1])]


def _stacked_layers(
    call: OperatorCall, gates: int, x: Tensor, states: tuple[Any, Any], weights: list[Any], form: tuple[bool, int, int]
) -> RuleResult:
    """Of all layers. states: the initial ones and their nodes. form: biases or none, numbers of layers and of directions."""
    biases, layers, directions = form
    per_layer, expected = len(weights) // (layers * directions), 4 if biases else 2
    if not _are_parameters(weights):
        return lock_computed_weight(call)
    cells = hidden = call.sets.fresh(weights[0].shape[0] // gates)
    if per_layer > expected:  # a projection of the cells is what the layer gives and reads
        hidden = _projected(call, cells, weights[1].shape[1])
    _join_initial_state(call, (hidden, cells), *states)
    inputs, steps = call.labels_along(x, x.ndim - 1), math.prod(x.shape[:-1])
    for layer in range(layers):
        for direction in range(directions):
            first = (layer * directions + direction) * per_layer
            _assign_gates(call, weights[first : first + expected], gates, cells, (inputs, hidden), steps)
            for projection in weights[first + expected : first + per_layer]:
                call.sets.add_axis(projection.name, 0, hidden, "out")
                call.sets.add_axis(projection.name, 1, cells, "in")
                call.add_cost(steps * len(hidden) * len(cells), hidden, cells)
        inputs = hidden.repeat(directions)
    outputs, *last = call.part_shapes
    return [
        expand_along(inputs, -1, outputs),
        *(expand_along(v, -1, shape) for v, shape in zip((hidden, cells), last, strict=False)),
    ]


@rule_for(*_CELL_GATES)
def rule_recurrent_cell(call: OperatorCall) -> RuleResult:
    """One step: (N, I) and states (N, H) to states (N, H)."""
    x, state, *rest = call.args
    weights = [w for w in rest if w is not None]
    if not _are_parameters(weights):
        return lock_computed_weight(call)
    hidden, inputs = call.sets.fresh(weights[1].shape[1]), call.labels_along(x, x.ndim - 1)
    _join_initial_state(call, (hidden, hidden), state, call.node.args[1])
    _assign_gates(call, weights, _CELL_GATES[call.target], hidden, (inputs, hidden), math.prod(x.shape[:-1]))
    return call.expand_along(hidden, -1)


def _projected(call: OperatorCall, cells: Tensor, size: int) -> Tensor:
    """Labels of a projection; torch takes one as wide as the cells for none, so that both get narrower in one proportion."""
    hidden = call.sets.fresh(size)
    if len(cells) % size:
        for labels in (cells, hidden):
            call.sets.lock(labels, f"{call.where} projects {len(cells)} cells to {size}, which is no divisor of their number")
    else:
        call.sets.join(hidden[:, None], cells.view(size, -1), f"a projection of {call.where} that cannot be cut")
    return hidden


def _are_parameters(weights: list[Any]) -> bool:
    return all(isinstance(w, ParameterView) and not w.moved for w in weights)


def _assign_gates(
    call: OperatorCall, weights: list[ParameterView], gates: int, cells: Tensor, read: tuple[Tensor, Tensor], steps: int
) -> None:
    """Weights (input weight, hidden weight, biases), each with one block of rows per gate; `read`: inputs, hidden channels."""
    for position, weight in enumerate(weights):
        call.sets.add_axis(weight.name, 0, cells.repeat(gates), "out" if position == 0 else "with")
    for weight, columns in zip(weights, read, strict=False):
        call.sets.add_axis(weight.name, 1, columns, "in")
        call.add_cost(steps * gates * len(cells) * len(columns), cells, columns)


def _join_initial_state(call: OperatorCall, channels: tuple[Tensor, Tensor], state: Any, node: Any) -> None:
    """An initial state that the model makes, learns or is given has the hidden channels; the second one those of the cells.

    Zeros made for the purpose follow the code that gives their size.
    """
    states, nodes = (v if isinstance(v, list | tuple) else [v] for v in (state, node))
    for own, value, node in zip(channels, states, nodes, strict=False):
        last = len(value.shape) - 1
        if (made := call.blank_behind(node)) is not None:
            call.add_size_of_blank(made, expand_along(own, last, tuple(value.shape)))
            continue
        learned = call.parameter_labels(value, last) if isinstance(value, ParameterView) else None
        call.sets.join(
            own,
            call.labels_along(value if learned is None else learned, last),
            f"an initial state of {call.where} cannot be cut",
        )
