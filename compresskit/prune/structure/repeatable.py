"""Run a model twice in the same way, on values that hide nothing: what a proof by comparison needs.

Noise would differ between two runs, and a counter in a buffer would move. A branch whose last layer is all zeros, or inputs that
are all zeros, would make the outputs equal whatever is removed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compresskit.base.task import Inputs
from compresskit.graph.surgery import no_attention_fastpath, state_kept, unset_buffers_kept

#: Operators whose result is noise -> the value that takes its place. It is the same for every width.
_NOISE = dict.fromkeys(
    ("randn", "randn_like", "rand", "rand_like", "normal", "uniform", "exponential", "log_normal", "cauchy"), 0.5
)
_NOISE |= dict.fromkeys(("bernoulli", "geometric"), 1.0)
#: Arguments that say how much is dropped at random.
_DROPPED_FRACTIONS = ("p", "dropout", "dropout_p")
_NOISE_SEED = 0
_VARIATION = 0.1  # standard deviation of what is added to constant parameters
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


def _is_constant(values: Tensor) -> bool:
    if values.numel() < 2:
        return False
    low, high = values.detach().aminmax()
    return bool(low == high)


def _is_closed(values: Tensor) -> bool:
    return float(values.detach().abs().max()) <= _CLOSED
