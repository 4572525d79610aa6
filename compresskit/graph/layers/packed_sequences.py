"""Packed sequences as the padded batches that they were made of, while a model is traced.

A packed sequence has as many rows as its lengths sum up to, which no graph can know. What a recurrent layer computes for a step
does not depend on later ones, so padding behind the end of a row changes nothing before it. The backward direction reads each row
from its end, and last states are looked up where each row ends. torch sorts the rows of what it packs, and puts them back behind;
a padded batch keeps its order.

    Packing                 stands in for torch's functions, called by `graph.recurrent.KeepRecurrent`
    PaddedRows              stands in for the `batch_sizes` of a `PackedSequence`
    check_padded_outputs    compares the graph with its model, where lengths differ
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError
from compresskit.base.task import Inputs, call
from compresskit.graph.differences import without_fills
from compresskit.graph.normalize import aten
from compresskit.graph.surgery import call_unmoved
from compresskit.graph.tracing import first_time
from compresskit.graph.varying.shorter_rows import PACK, PackedLengths, with_shorter_rows

_PAD: Any = torch._VF._pad_packed_sequence  # type: ignore[attr-defined]
#: What torch does with the order of a packed sequence -> which of the arguments that is.
_ORDERING = {Tensor.to: 0, Tensor.cpu: 0, Tensor.__getitem__: 1, Tensor.index_select: 2}
#: Operators that read the size of a tensor, and none of its values.
_OF_SIZES = {aten.sym_size.int, aten.full_like.default, aten.ones_like.default, aten.zeros_like.default}
_OF_SIZES |= {aten.new_full.default, aten.new_ones.default, aten.new_zeros.default}
FAITHFUL = 1e-3  # error of a graph of a padded batch, as a fraction of the largest value of each output


@torch.library.custom_op("compresskit::last_cell_states", mutates_args=())
def last_cell_states(like: Tensor) -> Tensor:
    """Stands for what nothing knows of a packed sequence; `check_cell_states_` refuses to leave it."""
    return torch.full_like(like, torch.nan)


@last_cell_states.register_fake
def _last_cell_states_shape(like: Tensor) -> Tensor:
    return torch.empty_like(like)


@torch.library.custom_op("compresskit::lengths_of_rows", mutates_args=())
def lengths_of_rows(lengths: Tensor) -> Tensor:
    """Marks the lengths of a packed sequence in a trace; `check_padded_outputs` takes it out."""
    return lengths.clone()


@lengths_of_rows.register_fake
def _lengths_of_rows_shape(lengths: Tensor) -> Tensor:
    return torch.empty_like(lengths)


fx.node.has_side_effect(torch.ops.compresskit.lengths_of_rows.default)  # nothing reads it


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
        """Lets torch's functions take one for a tensor, which `Packing` sees before them."""
        _refuse_sizes(getattr(func, "__name__", str(func)))

    def size(self, dim: int = 0) -> Any:
        """Number of steps."""
        return self.steps

    def __getitem__(self, step: int) -> Any:
        """Number of rows, which the first step has: the states of a layer have so many. Of no other step it is known."""
        if step != 0:
            _refuse_sizes(f"[{step}]")
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


def _pooled_as_image(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """Maximum over windows of a length that varies, which torch would take for a constant; None for any other."""
    if return_indices or not isinstance(input.shape[-1], torch.SymInt):
        return None
    given = (kernel_size, stride or kernel_size, padding, dilation)
    kernel, step, pad, apart = (int(v[0] if isinstance(v, Sequence) else v) for v in given)
    image = torch.max_pool2d(input.unsqueeze(-2), (1, kernel), (1, step), (0, pad), (1, apart), ceil_mode)
    return image.squeeze(-2)


def _refuse_sizes(how: str) -> NoReturn:
    raise ModelError(
        f"a packed sequence cannot be captured where its batch_sizes are read ({how}); pass it to recurrent layers and"
        " pad_packed_sequence alone"
    )


@dataclass
class Packing:
    """torch's functions for packed sequences, in one trace.

    zeros: tensors of zeros that were made, of which initial states are recognized, and how often each was written. orders: of
        rows, which are as they were. packs: whether anything was packed.
    """

    zeros: list[tuple[Tensor, int]] = field(default_factory=list)
    orders: list[Tensor] = field(default_factory=list)
    packs: bool = False

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function that is no recurrent layer, or what is in its place."""
        if func in (torch.max_pool1d, F.max_pool1d) and (made := _pooled_as_image(*args, **kwargs)) is not None:
            return made
        if func is PACK:
            self.packs = True
            return _as_padded_batch(*args, **kwargs)
        if func is _PAD and isinstance(args[1], PaddedRows):
            return _with_padding(*args, **kwargs)
        if func is torch.sort and _is_packing():
            order = torch.arange(args[0].shape[0])
            self.orders.append(order)
            return args[0], order
        place = _ORDERING.get(func) if self.orders and func.__hash__ else None
        if place is not None and len(args) > place and self._is_order(args[place]):
            return args[0]
        if func is torch.zeros:
            with torch.inference_mode(False):  # tensors that are made in that mode count no writes
                result = func(*args, **kwargs)
            self.zeros.append((result, result._version))
            return result
        result = func(*args, **kwargs)
        if func is Tensor.scatter_ and len(args) > 2 and self._is_order(args[2]):  # torch inverts an order so
            self.orders.append(args[0])
        return result

    def _is_order(self, value: Any) -> bool:
        return any(value is order for order in self.orders)

    def run_layers(
        self, kind: str, data: Tensor, padded: PaddedRows, state: Any, weights: Any, has_biases: bool, layers: int, *rest: Any
    ) -> tuple[Tensor, ...]:
        """Recurrent layers on a padded batch: outputs, last states, and for an LSTM what stands for its last cell states.

        rest: dropout, whether it trains, and whether there are two directions, as torch's operators take them.
        """
        states, weights = list(state) if kind == "lstm" else [state], list(weights)
        blank = all(any(each is made and each._version == version for made, version in self.zeros) for each in states)
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


def _as_padded_batch(x: Tensor, lengths: Tensor, batch_first: bool = False) -> tuple[Tensor, PaddedRows]:
    """What `pack_padded_sequence` packs, as a padded batch."""
    x = x.transpose(0, 1) if batch_first else x
    torch.ops.compresskit.lengths_of_rows(lengths)
    return x.flatten(0, 1), PaddedRows(lengths, x.shape[0], x.shape[1])


def _with_padding(data: Tensor, padded: PaddedRows, batch_first: bool, value: float, length: int) -> tuple[Tensor, Tensor]:
    """What `pad_packed_sequence` gives, with as many steps as the batch had, also where its longest row has fewer."""
    x = data.reshape(padded.steps, padded.rows, data.shape[-1])
    x = torch.where(padded.inside()[..., None], x, value)
    if length is not padded.steps:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, length - padded.steps), value=value)
    return x.transpose(0, 1) if batch_first else x, padded.lengths


@contextmanager
def unchecked_rows() -> Iterator[None]:
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


def check_cell_states_(graph: fx.Graph) -> None:
    """Take what stands for last cell states out of a graph. Raises ModelError where it is read."""
    unknown = torch.ops.compresskit.last_cell_states.default
    if any(node.target is unknown for node in graph.nodes):
        graph.eliminate_dead_code()  # a layer gives them whether they are read or not
    if any(node.target is unknown for node in graph.nodes):
        raise ModelError(
            "the last cell states of an LSTM on a packed sequence cannot be captured; read its outputs or its last hidden"
            " states, or give the padded batch to the layer"
        )


def check_padded_outputs(model: nn.Module, program: torch.export.ExportedProgram, inputs: Inputs) -> None:
    """Compare what a model gives with what the graph of its padded batch does, as far as both have as many steps.

    Where no row of a packed batch has padding, they are compared for shorter rows, too; of one that has none for any inputs that
    are found is warned. Nothing is compared of a model that draws random numbers, whose runs differ from one another.

    Args:
        model: in eval mode; it is not changed.
        program: its graph; what stands for lengths is taken out.
        inputs: of the sizes that the graph takes.

    Raises ModelError where outputs differ: something was computed of the padding.
    """
    read = _lengths_of_inputs_(program.graph_module.graph)
    graph = program.module()

    def run(inputs: Inputs) -> Any:
        return call_unmoved(model, inputs)[0]

    drawn = torch.get_rng_state()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of projections
        with PackedLengths() as packed:
            wanted = run(inputs)
        if not torch.equal(drawn, torch.get_rng_state()):
            return
        _compare_outputs(wanted, call(graph, inputs), "on the example")
        if not packed.full or not read:
            return
        shorter, padded = with_shorter_rows(model, inputs, packed, run)
        _compare_outputs(run(shorter), call(graph, shorter), "where rows of the example are shorter")
    if not padded and first_time(type(model), "full rows"):
        several = any(len(lengths) > 1 for lengths in packed.lengths)
        wanted = "whose rows have different lengths" if several else "with padding behind its row, and the row's length"
        warnings.warn(
            f"{type(model).__name__} packs a batch of which no row has padding in the example: whether its graph, and a file of"
            f" it, are right for shorter rows was not seen. Give an example {wanted}",
            stacklevel=4,
        )


def _lengths_of_inputs_(graph: fx.Graph) -> bool:
    """Take what stands for lengths out of a graph. Returns whether any are computed of the values of inputs."""
    marks = graph.find_nodes(op="call_function", target=torch.ops.compresskit.lengths_of_rows.default)
    pending = [node for mark in marks for node in mark.all_input_nodes]
    for mark in marks:
        graph.erase_node(mark)
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            return True
        inputs = [] if node.target in _OF_SIZES else [n for n in node.all_input_nodes if n not in seen]
        seen.update(inputs)
        pending += inputs
    return False


def _compare_outputs(wanted: Any, got: Any, where: str) -> None:
    """Raise ModelError where the outputs of a model and of its graph differ, as far as both have as many steps."""
    for a, b in zip(pytree.tree_leaves(wanted), pytree.tree_leaves(got), strict=True):
        if not isinstance(a, Tensor) or not a.is_floating_point():
            continue
        common = tuple(slice(min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
        a, b = without_fills(a[common], b[common])
        if not a.numel():
            continue
        largest = float(a.nan_to_num(0.0, 0.0, 0.0).abs().max())  # a mask writes minus infinity
        if not torch.allclose(a, b, rtol=0.0, atol=FAITHFUL * largest, equal_nan=True):
            error = float((a - b).nan_to_num(0.0, torch.inf).abs().max())  # equal infinities differ by NaN
            raise ModelError(
                f"a packed sequence cannot be captured where padding counts: {where} the graph of the padded batch gives"
                f" other outputs than the model, by {error:.3g}; pad the example to its longest row alone, or"
                " set pad_packed_sequence(total_length=), and compute nothing over several steps of PackedSequence.data"
            )
