"""Run a model twice in the same way, on values that hide nothing: what a proof by comparison needs.

Noise would differ between two runs, and a counter in a buffer would move. A branch whose last layer is all zeros, or inputs that
are all zeros, would make the outputs equal whatever is removed.

Fewer rows than the example has are as good where the model does for each row what it does for the others: `alike_rows` and
`timed_rows` find out. The first dimension may be the positions of a sequence, of which two are another workload.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compresskit.base.randomness import generators_kept
from compresskit.base.task import Inputs, RowDims, batch_size, first_rows, repeated_rows
from compresskit.graph.surgery import no_attention_fastpath, state_kept, unset_buffers_kept
from compresskit.measure import count_macs

#: Operators whose result is noise -> the value that takes its place. It is the same for every width.
_NOISE = dict.fromkeys(
    ("randn", "randn_like", "rand", "rand_like", "normal", "uniform", "exponential", "log_normal", "cauchy"), 0.5
)
_NOISE |= dict.fromkeys(("bernoulli", "geometric"), 1.0)
#: Arguments that say how much is dropped at random.
_DROPPED_FRACTIONS = ("p", "dropout", "dropout_p")
_NOISE_SEED = 0
_VARIATION = 0.1  # standard deviation of what is added to constant parameters
_SMALL_PART = 0.01  # of MACs: it hardly changes what layers are worth
_ROUNDED_MACS = 8
_SAME_ROW = 1e-3  # of the range of an output: how far two equal rows may lie from each other
_ROUNDED_OUTPUT, _ROUNDED_STEPS = 1e-4, 16  # and of its largest value, the second times the precision of its type
_CLOSED = 1e-6  # the largest size of a gate of one entry that lets next to nothing through


@contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Put the buffers and plain attributes of a model back after the block: what is there, and the values of tensors.

    A table that is made when it is needed is a buffer, and an attribute that says how long it is: they go back together.
    Buffers are always written back: a write that goes past torch, such as one to `.data`, does not show.
    """
    before = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with state_kept(model, buffers=False), unset_buffers_kept(model):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in before:
                module._buffers[name] = buffer
                buffer.copy_(values)


@contextmanager
def repeatable(model: nn.Module) -> Iterator[None]:
    """Every run in such a block has the same noise, for whatever width, runs all inner layers, and leaves the model as it was."""
    torch.manual_seed(_NOISE_SEED)  # for what `_FixedNoise` does not know
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  models draw from the global state
    random.seed(_NOISE_SEED)
    np.random.seed(_NOISE_SEED)  # noqa: NPY002  spans that are masked in training
    try:
        with state_restored(model), no_attention_fastpath(), _FixedNoise():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002


class _FixedNoise(TorchDispatchMode):
    """Gives a constant where the model asks for noise, and drops nothing at random."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _random_kind(func)
        if kind is None:
            return func(*args, **kwargs)
        if kind == "normal" and not func._schema.is_mutable and any(isinstance(v, Tensor) for v in args[:2]):
            mean, deviation = (*args, 0.0, 1.0)[:2] if len(args) > 1 else (args[0], 1.0)
            return mean + _NOISE["normal"] * deviation
        if kind in _NOISE:
            return func(*args, **kwargs).fill_(_NOISE[kind])
        args, kwargs = _without_dropping(func, args, kwargs)
        return func(*args, **kwargs)


@cache
def _random_kind(func: Any) -> str | None:
    """The name of an operator that draws random numbers; None for all others."""
    kind: str = func.overloadpacket.__name__.rstrip("_")
    known = kind in _NOISE or "dropout" in kind or kind in ("scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu")
    return kind if known else None


def _without_dropping(func: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with the fraction that is dropped at random set to 0."""
    args, kwargs = list(args), dict(kwargs)
    for position, argument in enumerate(func._schema.arguments):
        if argument.name not in _DROPPED_FRACTIONS:
            continue
        if position < len(args):
            args[position] = 0.0
        elif argument.name in kwargs:
            kwargs[argument.name] = 0.0
    return args, kwargs


def vary_constants_(model: nn.Module) -> None:
    """Give parameters whose values are all the same different ones: what stands behind zeros would not reach the outputs.

    So for gates of one entry that is 0, as ReZero has them, and for buffers of zeros.
    """
    noise = torch.Generator().manual_seed(_NOISE_SEED)
    with torch.no_grad():
        for values in (*model.parameters(), *model.buffers()):
            if not values.is_floating_point() or not values.numel():
                continue
            is_buffer = not isinstance(values, nn.Parameter)
            if not (_is_closed(values) if is_buffer or values.numel() == 1 else _is_constant(values)):
                continue
            added = torch.randn(values.shape, generator=noise, dtype=values.dtype)
            # Of buffers the code may take the root: they stay positive.
            values.add_((added.abs() if is_buffer else added).to(values.device), alpha=_VARIATION)


def varied_inputs(example: Inputs) -> Inputs:
    """The example with values from c to c + 1 in the place of tensors whose values are all c; itself where there are none."""
    noise = torch.Generator().manual_seed(_NOISE_SEED)

    def is_blind(value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and _is_constant(value)

    if not any(map(is_blind, pytree.tree_leaves(example))):
        return example

    def varied(value: Any) -> Any:
        if is_blind(value):
            return value + torch.rand(value.shape, generator=noise, dtype=value.dtype).to(value.device)
        return value

    inputs: Inputs = pytree.tree_map(varied, example)
    return inputs


def alike_rows(model: nn.Module, inputs: Inputs, count: int, dims: RowDims | None = None) -> Inputs:
    """The first `count` rows of inputs where MACs grow with the rows, and the inputs as they are where that does not show.

    Attention over a first dimension of positions takes more for each where there are more; of two inputs with other numbers of
    rows one alone would be cut, and so would the layers before a mean over the first dimension: fewer rows are another workload
    there, in which other layers are dear. MACs of what is computed from parameters alone, such as a table of positions, are no
    sign of that. The model is left as it was, and so are the generators of random numbers.

    dims: where the rows of each input are, where that is known.
    """
    with suppress(Exception):  # inputs without rows
        if (held := batch_size(inputs, dims)) <= count:
            return inputs
        for least in range(1, 1 + count):  # some take pairs of rows alone, or lose the dimension of a lone one
            growth = _growth_with_rows(model, inputs, least, dims)
            if growth is not None and growth.is_even(held):
                return first_rows(inputs, count, dims)
    return inputs


def timed_rows(model: nn.Module, inputs: Inputs, dims: RowDims | None = None) -> Inputs:
    """What a model is timed on: the first row of inputs where rows are samples, and the inputs as they are where they are not.

    They are where MACs grow with the rows, see `alike_rows`, and so do outputs, of which two equal rows give the same: the steps
    that a recurrent network takes along the first dimension do not. The model is not changed.

    dims: where the rows of each input are, where that is known.
    """
    with suppress(Exception):  # inputs without rows
        if (held := batch_size(inputs, dims)) <= 1:
            return inputs
        growth = _growth_with_rows(model, inputs, 1, dims)
        if growth is not None and growth.is_even(held) and growth.of_samples:
            return first_rows(inputs, 1, dims)
    return inputs


@dataclass(frozen=True, kw_only=True)
class _Growth:
    """How MACs and outputs of a model grow with the rows of its inputs.

    least: rows that it takes. macs: of so many equal rows, of twice, and of three times as many where those do not say all.
    of_rows: whether all inputs have rows, and outputs grow with them.
    of_samples: whether outputs grow with rows, equal rows give the same, and MACs do not grow with the square of them.
    """

    least: int
    macs: list[int]
    of_rows: bool
    of_samples: bool

    def is_even(self, held: int) -> bool:
        """Whether few of so many rows cost what they cost among all, but for a small part, or what parameters alone cost."""
        if len(self.macs) < 3:
            return True
        square = _bend(self.macs) / 2
        each = self.macs[1] - self.macs[0] - 3 * square
        shared, times = self.macs[0] - each - square, held / self.least
        bent = abs(square) * times**2 > _SMALL_PART * (shared + each * times + square * times**2)
        return not bent and (self.of_rows or abs(shared) <= _SMALL_PART * self.macs[0])


def _growth_with_rows(model: nn.Module, inputs: Inputs, least: int, dims: RowDims | None) -> _Growth | None:
    """See `_Growth`; None where the model does not run on so few rows, as on graphs, of which a part is no graph."""
    with suppress(Exception):
        many = repeated_rows(inputs, 3 * least, dims)
        one, two, three = (_equal_rows(many, times * least, dims) for times in (1, 2, 3))
        macs, outputs = map(list, zip(*(_counted(model, rows, dims) for rows in (one, two)), strict=True))
        grow = not outputs[0] or [v.shape for v in outputs[0]] != [v.shape for v in outputs[1]]
        sizes = zip(pytree.tree_leaves(one), pytree.tree_leaves(two), strict=True)
        cut = all(a.shape != b.shape for a, b in sizes if isinstance(a, Tensor) and a.ndim)
        if not (cut and grow) or abs(macs[1] - 2 * macs[0]) >= 2 * least:  # those of a sample are rounded down
            macs.append(_counted(model, three, dims)[0])
        same = len(outputs[0]) != len(outputs[1]) or all(map(_is_twice_the_same, *outputs))
        return _Growth(least=least, macs=macs, of_rows=cut and grow, of_samples=grow and same and not _bend(macs))
    return None


def _bend(macs: list[int]) -> int:
    """Twice what grows with the square of the rows, of MACs of as many, of twice, and of three times as many; 0 for rounding."""
    bend = macs[2] - 2 * macs[1] + macs[0] if len(macs) > 2 else 0
    return bend if abs(bend) > _ROUNDED_MACS else 0


def _equal_rows(inputs: Inputs, count: int, dims: RowDims | None) -> Inputs:
    """The first row so many times: experts that rows choose, say, are the same ones for all."""
    one, many = first_rows(inputs, 1, dims), first_rows(inputs, count, dims)
    equal: Inputs = pytree.tree_map(lambda a, b: a.expand_as(b).clone() if isinstance(a, Tensor) else a, one, many)
    return equal


def _counted(model: nn.Module, inputs: Inputs, dims: RowDims | None) -> tuple[int, list[Tensor]]:
    """MACs of all rows, and the tensors that the model gives."""
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        with generators_kept(), repeatable(model):
            macs = batch_size(inputs, dims) * count_macs(model, inputs, dims=dims)
    finally:
        handle.remove()
    return macs, [value for value in pytree.tree_leaves(outputs) if isinstance(value, Tensor)]


def _is_twice_the_same(one: Tensor, two: Tensor) -> bool:
    """Whether an output of two equal rows has the same for both, one after the other or in turn. one: that of a single row."""
    dim = next((d for d in range(min(one.ndim, two.ndim)) if two.shape[d] == 2 * one.shape[d]), None)
    if dim is None or not two.is_floating_point() or not two.numel():
        return True
    values = two.detach().nan_to_num(0.0, 0.0, 0.0)
    low, high = (float(v) for v in values.aminmax())
    rounded = max(_ROUNDED_OUTPUT, _ROUNDED_STEPS * torch.finfo(values.dtype).eps)
    most = _SAME_ROW * (high - low) + rounded * max(abs(low), abs(high))
    pairs = values.unflatten(dim, (2, -1)).unbind(dim), values.unflatten(dim, (-1, 2)).unbind(dim + 1)
    return any(float((a - b).abs().max()) <= most for a, b in pairs)


def _is_constant(values: Tensor) -> bool:
    if values.numel() < 2:
        return False
    low, high = values.detach().aminmax()
    return bool(low == high)


def _is_closed(values: Tensor) -> bool:
    return float(values.detach().abs().max()) <= _CLOSED
