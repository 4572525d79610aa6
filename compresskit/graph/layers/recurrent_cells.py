"""Single steps of recurrent layers (`nn.LSTMCell`, `nn.GRUCell`, `nn.RNNCell`) as the products that they are made of.

Decoders and layers written by hand call them in a loop. Torch has an operator for each, whose products no quantization sees; as
linear layers they are rounded and counted like any other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from compresskit.graph.normalize import Node, aten, insert_call


def write_cells_(module: fx.GraphModule) -> None:
    """Replace the steps of recurrent layers by linear layers and what follows them, in place."""
    for node in [node for node in module.graph.nodes if node.target in _CELLS]:
        with module.graph.inserting_before(node):
            made = _CELLS[node.target](node)
        if isinstance(made, tuple):
            for user in list(node.users):
                user.replace_all_uses_with(made[user.args[1]])
                module.graph.erase_node(user)
        else:
            node.replace_all_uses_with(made)
        module.graph.erase_node(node)


def _gate_products(node: Node, state: Node) -> tuple[Node, Node]:
    """(N, gates * H) of the input, and of the state."""
    x, _, input_weight, state_weight, *biases = node.args
    input_bias, state_bias = biases or (None, None)
    return (
        insert_call(node, aten.linear.default, x, input_weight, input_bias),
        insert_call(node, aten.linear.default, state, state_weight, state_bias),
    )


def _gate_parts(node: Node, whole: Node, count: int) -> list[Node]:
    parts = insert_call(node, aten.split.Tensor, whole, whole.meta["val"].shape[-1] // count, -1)
    return [insert_call(node, operator.getitem, parts, i) for i in range(count)]


def _lstm_step(node: Node) -> tuple[Node, Node]:
    """One step: c' = sigmoid(f) c + sigmoid(i) tanh(g), h' = sigmoid(o) tanh(c')."""
    state, cells = node.args[1]
    gates = insert_call(node, aten.add.Tensor, *_gate_products(node, state))
    i, f, g, o = _gate_parts(node, gates, 4)
    kept = insert_call(node, aten.mul.Tensor, insert_call(node, aten.sigmoid.default, f), cells)
    new = insert_call(node, aten.tanh.default, g)
    new = insert_call(node, aten.mul.Tensor, insert_call(node, aten.sigmoid.default, i), new)
    cells = insert_call(node, aten.add.Tensor, kept, new)
    shown = insert_call(node, aten.tanh.default, cells)
    return insert_call(node, aten.mul.Tensor, insert_call(node, aten.sigmoid.default, o), shown), cells


def _gru_step(node: Node) -> Node:
    """One step: n = tanh(x_n + sigmoid(r) h_n), h' = n + sigmoid(z) (h - n)."""
    state = node.args[1]
    (x_r, x_z, x_n), (h_r, h_z, h_n) = (_gate_parts(node, product, 3) for product in _gate_products(node, state))
    reset = insert_call(node, aten.sigmoid.default, insert_call(node, aten.add.Tensor, x_r, h_r))
    update = insert_call(node, aten.sigmoid.default, insert_call(node, aten.add.Tensor, x_z, h_z))
    new = insert_call(node, aten.add.Tensor, x_n, insert_call(node, aten.mul.Tensor, reset, h_n))
    new = insert_call(node, aten.tanh.default, new)
    kept = insert_call(node, aten.mul.Tensor, update, insert_call(node, aten.sub.Tensor, state, new))
    return insert_call(node, aten.add.Tensor, new, kept)


def _plain_step(activation: Any) -> Callable[[Node], Node]:
    def written(node: Node) -> Node:
        return insert_call(node, activation, insert_call(node, aten.add.Tensor, *_gate_products(node, node.args[1])))

    return written


_CELLS: dict[Any, Callable[[Node], Any]] = {
    aten.lstm_cell.default: _lstm_step,
    aten.gru_cell.default: _gru_step,
    aten.rnn_tanh_cell.default: _plain_step(aten.tanh.default),
    aten.rnn_relu_cell.default: _plain_step(aten.relu.default),
}
