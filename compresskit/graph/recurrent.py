"""LSTM, GRU and RNN layers as single operators of a graph.

`torch.export` unrolls them: one copy of the cell for each time step of the example, which fixes the sequence length. While a
model is traced, `KeepRecurrent` therefore replaces them by one custom operator, whatever the length. In the captured graph
torch's own operator takes its place again, so that the graph can be trained, cast and copied as any other.

    while tracing:  torch.lstm, aten.lstm.input  ->  compresskit::recurrent      (`KeepRecurrent`)
    in the graph:   compresskit::recurrent       ->  aten.lstm.input             (`restore_recurrent_`)
    in the file:    compresskit::recurrent       ->  LSTM, GRU, RNN of ONNX      (`export.rewrite.recurrent`)

A packed sequence has as many rows as its lengths sum up to, which no graph can know. It is traced as the padded batch that it was
made of, with its lengths: what a step computes does not depend on later ones, so padding behind the end of a row changes nothing
before it. The backward direction reads each row from its end, and last states are looked up where each row ends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode

from compresskit.base.errors import ModelError

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
_PACK: Any = torch._VF._pack_padded_sequence  # type: ignore[attr-defined]
_PAD: Any = torch._VF._pad_packed_sequence  # type: ignore[attr-defined]
#: What torch does with the order of a packed sequence -> which of the arguments that is.
_ORDERING = {Tensor.to: 0, Tensor.cpu: 0, Tensor.__getitem__: 1, Tensor.index_select: 2}


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


@torch.library.custom_op("compresskit::last_cell_states", mutates_args=())
def last_cell_states(like: Tensor) -> Tensor:
    """Stands for what nothing knows of a packed sequence while a model is traced; `restore_recurrent_` refuses to leave it."""
    return torch.full_like(like, torch.nan)


@last_cell_states.register_fake
def _last_cell_states_shape(like: Tensor) -> Tensor:
    return torch.empty_like(like)


@dataclass(frozen=True)
class PaddedRows:
    """In the place of the `batch_sizes` of a packed sequence: the sequence is a padded batch, (steps * rows, width).

    lengths: (rows,) int64. steps, rows: sizes of the batch.
    """

    lengths: Tensor
    steps: Any
    rows: Any
    device = torch.device("cpu")  # where `PackedSequence` wants them

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets torch's functions take one for a tensor, which `KeepRecurrent` sees before them."""
        raise ModelError(
            f"a packed sequence cannot be captured where its batch_sizes are read ({getattr(func, '__name__', func)}); pass it to"
            " recurrent layers and pad_packed_sequence alone"
        )

    def size(self, dim: int = 0) -> Any:
        """Number of steps."""
        return self.steps

    def __getitem__(self, step: int) -> Any:
        """Number of rows: the states of a layer have so many."""
        return self.rows

    def inside(self) -> Tensor:
        """(steps, rows) bool: where no padding is."""
        return torch.arange(self.steps)[:, None] < self.lengths

    def reversed(self, x: Tensor) -> Tensor:
        """(steps, rows, width) with the steps of each row backwards, and its padding where it was."""
        step = torch.arange(self.steps)[:, None]
        return x[torch.where(self.inside(), self.lengths - 1 - step, step), torch.arange(self.rows)]

    def last(self, x: Tensor) -> Tensor:
        """(1, rows, width): the last step of each row."""
        return x[self.lengths - 1, torch.arange(self.rows)][None]


class KeepRecurrent(TorchFunctionMode):
    """Trace LSTM, GRU and RNN layers as one operator each, `compresskit::recurrent`, inside the block.

    Packed sequences are padded ones there, see `PaddedRows`; each direction of each layer is an operator of its own then. torch
    sorts the rows of what it packs, and puts them back behind; a padded batch keeps its order.

    Raises ModelError for packed sequences that `pack_padded_sequence` did not make.
    """

    def __enter__(self) -> Self:
        self._block, self._zeros, self._orders = ExitStack(), list[Tensor](), list[Tensor]()
        self._block.enter_context(_unchecked_rows())
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._block.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _FUNCTIONS.get(func) if func.__hash__ else None
        if func is _PACK:
            return _as_padded_batch(*args, **(kwargs or {}))
        if func is _PAD and isinstance(args[1], PaddedRows):
            return _with_padding(*args, **(kwargs or {}))
        if kind is None:
            return self._other(func, args, kwargs or {})
        if isinstance(args[1], PaddedRows):
            return self._run_padded(kind, *args)
        x, state, weights, has_biases, layers, _, _, bidirectional, batch_first = args
        states = list(state) if kind == "lstm" else [state]
        results = torch.ops.compresskit.recurrent(x, states, list(weights), kind, has_biases, layers, bidirectional, batch_first)
        return results if kind == "lstm" else results[:2]

    def _other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function that is no recurrent layer: of those that order the rows of a packed sequence, what it is given."""
        if func is torch.sort and _is_packing():
            order = torch.arange(args[0].shape[0])
            self._orders.append(order)
            return args[0], order
        place = _ORDERING.get(func) if self._orders and func.__hash__ else None
        if place is not None and len(args) > place and self._is_order(args[place]):
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.zeros:
            self._zeros.append(result)
        elif func is Tensor.scatter_ and len(args) > 2 and self._is_order(args[2]):  # torch inverts an order so
            self._orders.append(args[0])
        return result

    def _is_order(self, value: Any) -> bool:
        return any(value is order for order in self._orders)

    def _run_padded(
        self, kind: str, data: Tensor, padded: PaddedRows, state: Any, weights: Any, has_biases: bool, layers: int, *rest: Any
    ) -> tuple[Tensor, ...]:
        """A layer on a padded batch, one direction at a time: outputs, last states, and for an LSTM last cell states."""
        states, weights = list(state) if kind == "lstm" else [state], list(weights)
        blank = all(any(each is made for made in self._zeros) for each in states)
        directions = 2 if rest[-1] else 1
        count = len(weights) // (layers * directions)
        x, ends = data.reshape(padded.steps, padded.rows, data.shape[-1]), []
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                k = layer * directions + direction
                first = [x.new_zeros(1, padded.rows, s.shape[-1]) if blank else s[k : k + 1] for s in states]
                given = padded.reversed(x) if direction else x
                cell = weights[k * count : (k + 1) * count]
                y = torch.ops.compresskit.recurrent(given, first, cell, kind, has_biases, 1, False, False)[0]
                ends.append(padded.last(y))
                outputs.append(padded.reversed(y) if direction else y)
            x = torch.cat(outputs, 2) if directions == 2 else outputs[0]
        cells = [torch.ops.compresskit.last_cell_states(states[1])] if kind == "lstm" else []
        return x.flatten(0, 1), torch.cat(ends), *cells


def _is_packing() -> bool:
    """Whether `pack_padded_sequence` calls, through the modes of tracing."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not pack_padded_sequence.__code__:
        frame = frame.f_back
    return frame.f_code is pack_padded_sequence.__code__


@contextmanager
def _unchecked_rows() -> Iterator[None]:
    """Let torch compare the number of rows of a padded batch with nothing: it does so as an int, which would fix it."""
    before = {layer: layer.check_forward_args for layer in (nn.RNNBase, nn.LSTM)}
    try:
        for layer, check in before.items():
            layer.check_forward_args = _unless_padded(check)  # type: ignore[method-assign]
        yield
    finally:
        for layer, check in before.items():
            layer.check_forward_args = check  # type: ignore[method-assign]


def _unless_padded(check: Any) -> Any:
    """The check that torch makes of the arguments of a layer, of all but padded batches."""

    def checked(layer: nn.RNNBase, x: Tensor, hidden: Any, batch_sizes: Any) -> None:
        if batch_sizes is None:
            check(layer, x, hidden, batch_sizes)
        elif not isinstance(batch_sizes, PaddedRows):
            raise ModelError(
                "a packed sequence that the model does not make by pack_padded_sequence cannot be captured; give it the padded"
                " batch and the lengths"
            )

    return checked


def _as_padded_batch(x: Tensor, lengths: Tensor, batch_first: bool = False) -> tuple[Tensor, PaddedRows]:
    """What `pack_padded_sequence` packs, as a padded batch."""
    x = x.transpose(0, 1) if batch_first else x
    return x.flatten(0, 1), PaddedRows(lengths, x.shape[0], x.shape[1])


def _with_padding(data: Tensor, padded: PaddedRows, batch_first: bool, value: float, length: int) -> tuple[Tensor, Tensor]:
    """What `pad_packed_sequence` gives, with as many steps as the batch had, also where its longest row has fewer."""
    x = data.reshape(padded.steps, padded.rows, data.shape[-1])
    x = torch.where(padded.inside()[..., None], x, value)
    if length is not padded.steps:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, length - padded.steps), value=value)
    return x.transpose(0, 1) if batch_first else x, padded.lengths


def restore_recurrent_(graph: fx.Graph) -> None:
    """Replace `compresskit::recurrent` by torch's own operators.

    Raises ModelError where the last cell states of a packed sequence are read.
    """
    unknown = torch.ops.compresskit.last_cell_states.default
    if any(node.target is unknown for node in graph.nodes):
        graph.eliminate_dead_code()  # a layer gives them whether they are read or not
    for node in graph.nodes:
        if node.target is unknown:
            raise ModelError(
                "the last cell states of an LSTM on a packed sequence cannot be captured; read its outputs or its last hidden"
                " states, or give the padded batch to the layer"
            )
        if node.target is torch.ops.compresskit.recurrent.default:
            x, state, weights, kind, has_biases, layers, bidirectional, batch_first = node.args
            node.target = OPERATORS[kind]
            given = state if kind == "lstm" else state[0]
            node.args = (x, given, weights, has_biases, layers, 0.0, False, bidirectional, batch_first)
