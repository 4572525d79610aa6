"""A torch operator that computes an LSTM as ONNX Runtime's `DynamicQuantizeLSTM` does.

Both matrices of a cell are int8. The inputs of all steps are rounded together and the state before each step, each to a grid over
its current range (`round_dynamically`); sums, gates and states are fp32.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from compresskit.export.ops.quantize import round_dynamically
from compresskit.graph.recurrent import Cell, recurrent_cells


def unprojected(state: Tensor, projection: Tensor | None) -> Tensor:
    """A state of full width, (N, H), whose projection by (P, H) is the given state, (N, P)."""
    return state if projection is None else state @ torch.linalg.pinv(projection).T


def simulate_dynamic_lstm(
    x: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    has_biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
    floating: Collection[int] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, last hidden states and last cell states of an LSTM; gradients pass straight through the rounding.

    weights: as torch's operator takes them, rounded already; the recurrent ones of a projected LSTM times the projection,
    (4 H, H), as the file has them. floating: layers whose activations are not rounded.
    """
    x = x.transpose(0, 1) if batch_first else x
    last_h, last_c = [], []
    for i, layer in enumerate(recurrent_cells(weights, has_biases, layers, bidirectional)):
        enabled = i not in floating
        given = round_dynamically(x) if enabled else x
        outputs = []
        for direction, cell in enumerate(layer):
            place = i * len(layer) + direction
            y, h, c = _direction(given, state[0][place], state[1][place], cell, backward=direction == 1, enabled=enabled)
            outputs.append(y)
            last_h.append(h)
            last_c.append(c)
        x = torch.cat(outputs, 2)
    return (x.transpose(0, 1) if batch_first else x), torch.stack(last_h), torch.stack(last_c)


def _direction(x: Tensor, h: Tensor, c: Tensor, cell: Cell, *, backward: bool, enabled: bool) -> tuple[Tensor, Tensor, Tensor]:
    h = unprojected(h, cell.projection)
    inputs = F.linear(x, cell.input, cell.biases[0] + cell.biases[1] if cell.biases else None)
    states: list[Tensor] = []
    for step in reversed(inputs.unbind(0)) if backward else inputs.unbind(0):
        i, f, g, o = (step + F.linear(round_dynamically(h) if enabled else h, cell.recurrent)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        states.append(h)
    y = torch.stack(states[::-1] if backward else states)
    if cell.projection is not None:
        y, h = F.linear(y, cell.projection), F.linear(h, cell.projection)
    return y, h, c


@torch.library.custom_op("compresskit::dynamic_lstm", mutates_args=())
def dynamic_lstm(
    x: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    has_biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
    floating: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """`simulate` as one operator, which becomes `DynamicQuantizeLSTM` in a file, and `LSTM` for the layers in `floating`."""
    y, h, c = simulate_dynamic_lstm(x, state, weights, has_biases, layers, bidirectional, batch_first, floating)
    return y.contiguous(), h, c


@dynamic_lstm.register_fake
def _dynamic_lstm_shape(
    x: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    has_biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
    floating: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    width = state[0].shape[-1] * (2 if bidirectional else 1)
    return x.new_empty(x.shape[0], x.shape[1], width), torch.empty_like(state[0]), torch.empty_like(state[1])
