"""Rules of LSTM, GRU and plain recurrent layers: a hidden unit is its row in every gate and its recurrent column."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from compresskit.graph.normalize import Node, aten
from compresskit.prune.structure.channel_sets import spread
from compresskit.prune.structure.rules.base import Raw, Rule, rules_of

if TYPE_CHECKING:
    from compresskit.prune.structure.propagate import Walk

RECURRENT: dict[Any, Rule] = {}
rule = rules_of(RECURRENT)

_GATES = {aten.lstm.input: 4, aten.gru.input: 3, aten.rnn_tanh.input: 1, aten.rnn_relu.input: 1}


@rule(*_GATES)
def recurrent(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(N, T, I) to (N, T, directions * H). All layers and directions share one `hidden_size`, so they get narrower together."""
    x, state, weights, biases, layers, _, _, both, _ = args
    gates, directions = _GATES[node.target], 2 if both else 1
    per_layer = len(weights) // (layers * directions)
    if per_layer != (4 if biases else 2) or not all(isinstance(w, Raw) and not w.moved for w in weights):
        return walk.give_up(node, f"{walk.where(node)} has projections, or weights computed in the forward pass")
    hidden = weights[1].shape[1]
    unit = walk.units.fresh(hidden)
    _start(walk, node, unit, state, node.args[1])
    inputs = walk.along(x, x.ndim - 1)
    steps = math.prod(x.shape[:-1])
    for layer in range(layers):
        for direction in range(directions):
            own = weights[(layer * directions + direction) * per_layer :][:per_layer]
            for position, weight in enumerate(own):
                walk.units.member(weight.name, 0, unit.repeat(gates), "out" if position == 0 else "with")
            walk.units.member(own[0].name, 1, inputs, "in")
            walk.units.member(own[1].name, 1, unit, "in")
            walk.cost(steps * gates * hidden * len(inputs), unit, inputs)
            walk.cost(steps * gates * hidden * hidden, unit, unit)
        inputs = unit.repeat(directions)
    shapes = node.meta["parts"]
    return [spread(inputs if i == 0 else unit, len(shape) - 1, shape) for i, shape in enumerate(shapes)]


def _start(walk: Walk, node: Node, unit: Tensor, state: Any, made: Any) -> None:
    """States that the model makes or is given are met unit by unit; zeros made for the purpose hold nothing."""
    states, nodes = (v if isinstance(v, list | tuple) else [v] for v in (state, made))
    for given, source in zip(states, nodes, strict=True):
        if isinstance(given, Raw):
            walk.pin(given.name, f"an initial state of {walk.where(node)}")
        if isinstance(given, Raw) or not walk.is_new(source):
            labels = walk.along(given, len(given.shape) - 1)
            walk.units.join(unit, labels, f"an initial state of {walk.where(node)} cannot be cut")


_CELLS = {aten.lstm_cell.default: 4, aten.gru_cell.default: 3, aten.rnn_tanh_cell.default: 1, aten.rnn_relu_cell.default: 1}


@rule(*_CELLS)
def cell(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One step: (N, I) and states (N, H) to states (N, H)."""
    x, state, *weights = args
    weights = [w for w in weights if w is not None]
    if not all(isinstance(w, Raw) and not w.moved for w in weights):
        return walk.give_up(node, f"the weight of {walk.where(node)} is computed in the forward pass")
    gates, hidden = _CELLS[node.target], weights[1].shape[1]
    unit, inputs = walk.units.fresh(hidden), walk.along(x, x.ndim - 1)
    _start(walk, node, unit, state, node.args[1])
    for position, weight in enumerate(weights):
        walk.units.member(weight.name, 0, unit.repeat(gates), "out" if position == 0 else "with")
    walk.units.member(weights[0].name, 1, inputs, "in")
    walk.units.member(weights[1].name, 1, unit, "in")
    rows = math.prod(x.shape[:-1])
    walk.cost(rows * gates * hidden * len(inputs), unit, inputs)
    walk.cost(rows * gates * hidden * hidden, unit, unit)
    if node.name in walk.shapes:
        return spread(unit, len(walk.shape(node)) - 1, walk.shape(node))
    return [spread(unit, len(shape) - 1, shape) for shape in node.meta["parts"]]


@rule(aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data)
def packed(walk: Walk, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Packed sequences are left whole."""
    return walk.give_up(node, f"packed sequences are not followed through {walk.where(node)}")
