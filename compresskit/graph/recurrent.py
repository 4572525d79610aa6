"""LSTM, GRU and RNN layers as single operators of a graph.

`torch.export` unrolls them: one copy of the cell for each time step of the example, which fixes the sequence length. While a
model is traced, `KeepRecurrent` therefore replaces them by one custom operator, whatever the length. In the captured graph
torch's own operator takes its place again, so that the graph can be trained, cast and copied as any other.

    while tracing:  torch.lstm, aten.lstm.input  ->  compresskit::recurrent      (`KeepRecurrent`)
    in the graph:   compresskit::recurrent       ->  aten.lstm.input             (`restore_recurrent_`)
    in the file:    compresskit::recurrent       ->  LSTM, GRU, RNN of ONNX      (`export.rewrite.recurrent`)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from compresskit.graph.layers.packed_sequences import Packing, PaddedRows, unchecked_rows

#: Kind -> the operator that computes it, and how many gates a cell has.
OPERATORS = {
    "lstm": torch.ops.aten.lstm.input,
    "gru": torch.ops.aten.gru.input,
    "rnn_tanh": torch.ops.aten.rnn_tanh.input,
    "rnn_relu": torch.ops.aten.rnn_relu.input,
}
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_FUNCTIONS: dict[Any, str] = {operator: kind for kind, operator in OPERATORS.items()}
_FUNCTIONS |= {getattr(torch._VF, kind): kind for kind in OPERATORS}  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The weights of one layer in one direction, with G gates, input width I and state width H.

    Attributes:
        input: (G H, I).
        recurrent: (G H, H), or (G H, P) with a projection.
        biases: two of (G H,), or none.
        projection: (P, H), or None.
    """

    input: Any
    recurrent: Any
    biases: tuple[Any, ...] = ()
    projection: Any = None


def recurrent_cells(weights: Sequence[Any], has_biases: bool, layers: int, bidirectional: bool) -> list[list[Cell]]:
    """Sort the flat list of weights that torch's operators take: for each layer, a list of one cell for each direction."""
    directions = 2 if bidirectional else 1
    size = len(weights) // (layers * directions)
    rows = [list(weights[i : i + size]) for i in range(0, len(weights), size)]
    cells = []
    for row in rows:
        biases = tuple(row[2:4]) if has_biases else ()
        projection = row[-1] if size % 2 else None
        cells.append(Cell(input=row[0], recurrent=row[1], biases=biases, projection=projection))
    return [cells[i : i + directions] for i in range(0, len(cells), directions)]


@torch.library.custom_op("compresskit::recurrent", mutates_args=())
def recurrent(
    x: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    kind: str,
    has_biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run torch's operator of a kind in eval mode: outputs, last states, last cell states (empty for all but an LSTM)."""
    given: Any = state if kind == "lstm" else state[0]
    results = OPERATORS[kind](x, given, weights, has_biases, layers, 0.0, False, bidirectional, batch_first)
    return results[0].clone(), results[1].clone(), results[2].clone() if kind == "lstm" else x.new_empty(0)


@recurrent.register_fake
def _recurrent_shapes(
    x: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    kind: str,
    has_biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    width = state[0].shape[-1] * (2 if bidirectional else 1)
    cell = torch.empty_like(state[1]) if kind == "lstm" else x.new_empty(0)
    return x.new_empty(x.shape[0], x.shape[1], width), torch.empty_like(state[0]), cell


class KeepRecurrent(TorchFunctionMode):
    """Trace LSTM, GRU and RNN layers as one operator each, `compresskit::recurrent`, inside the block.

    On a packed sequence each direction of each layer is an operator of its own, see `graph.layers.packed_sequences`.

    Raises ModelError for what no graph knows of a packed sequence.
    """

    @property
    def packs(self) -> bool:
        """Whether a sequence was packed in the last trace."""
        return self._packing.packs

    def __enter__(self) -> Self:
        self._block, self._packing = ExitStack(), Packing()
        self._block.enter_context(unchecked_rows())
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._block.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _FUNCTIONS.get(func) if func.__hash__ else None
        if kind is None:
            return self._packing.call(func, args, kwargs or {})
        if isinstance(args[1], PaddedRows):
            return self._packing.run_layers(kind, *args)
        x, state, weights, has_biases, layers, _, _, bidirectional, batch_first = args
        states = list(state) if kind == "lstm" else [state]
        results = torch.ops.compresskit.recurrent(x, states, list(weights), kind, has_biases, layers, bidirectional, batch_first)
        return results if kind == "lstm" else results[:2]


def restore_recurrent_(graph: fx.Graph) -> None:
    """Replace `compresskit::recurrent` by torch's own operators."""
    for node in graph.nodes:
        if node.target is torch.ops.compresskit.recurrent.default:
            x, state, weights, kind, has_biases, layers, bidirectional, batch_first = node.args
            node.target = OPERATORS[kind]
            given = state if kind == "lstm" else state[0]
            node.args = (x, given, weights, has_biases, layers, 0.0, False, bidirectional, batch_first)
