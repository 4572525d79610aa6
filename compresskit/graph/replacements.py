"""Modules that take the place of a user's own: a `Bypass` of a removed block, `Factored` layers of one that was too large.

A record is plain data, `{path: {"kind": "bypass", ...}}`; nothing in it is executed. `replace_recorded_` makes the modules again
in a new model of the same class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypedDict, TypeGuard

import torch
from torch import nn

from compresskit.base.errors import CheckpointError

MOST_OUTPUTS = 64  # of the tuple that a block returns


class Bypass(nn.Module):
    """Stands where a block was removed: returns one of the arguments that the block was called with.

    Args:
        argument: position of the argument, or its name where it is given by name.
        outputs: length of the tuple that the block returned; 0 where it returned a tensor.
        index: place of the argument in that tuple; the other entries become None.
    """

    def __init__(self, argument: int | str = 0, outputs: int = 0, index: int = 0) -> None:
        super().__init__()
        self.argument, self.outputs, self.index = argument, outputs, index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the argument, alone or in a tuple as the block did."""
        value = args[self.argument] if isinstance(self.argument, int) else kwargs[self.argument]
        return tuple(value if i == self.index else None for i in range(self.outputs)) if self.outputs else value

    def extra_repr(self) -> str:
        """The argument, for `print(model)`."""
        return f"argument={self.argument!r}" + (f", outputs={self.outputs}, index={self.index}" if self.outputs else "")

    def record(self) -> dict[str, Any]:
        """The settings as plain data."""
        return {"kind": "bypass", "argument": self.argument, "outputs": self.outputs, "index": self.index}


class Place(TypedDict):
    """Where the tensors of a new layer are, and of which dtype."""

    device: torch.device
    dtype: torch.dtype


class Factored(nn.Sequential):
    """Two or three layers in the place of a linear layer or a convolution: a product of low rank.

    Of a linear layer, and of a convolution of size 1x1: inputs to rank, rank to outputs. Of another convolution, Tucker-2: 1x1 to
    the first rank, the convolution from the first rank to the second, 1x1 to the outputs. The last one has the bias.
    """

    @staticmethod
    def like(layer: nn.Linear | nn.Conv2d, ranks: tuple[int, ...]) -> Factored:
        """Factors of these ranks for a layer; their weights are still to be set.

        Args:
            layer: linear, or a convolution of one group.
            ranks: (rank,), or (inputs, outputs) for a convolution larger than 1x1.
        """
        bias, place = layer.bias is not None, Place(device=layer.weight.device, dtype=layer.weight.dtype)
        outputs, inputs = layer.weight.shape[:2]
        if isinstance(layer, nn.Linear):
            return Factored(nn.Linear(inputs, ranks[0], False, **place), nn.Linear(ranks[0], outputs, bias, **place))
        conv: Any = layer  # torch's stubs take pairs, where the attributes are tuples of any length
        moves = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, 1, False, conv.padding_mode)
        last = nn.Conv2d(ranks[-1], outputs, 1, bias=bias, **place)
        if math.prod(layer.kernel_size) == 1:
            return Factored(nn.Conv2d(inputs, ranks[0], *moves, **place), last)
        first = nn.Conv2d(inputs, ranks[0], 1, bias=False, **place)
        return Factored(first, nn.Conv2d(ranks[0], ranks[1], *moves, **place), last)

    def record(self) -> dict[str, Any]:
        """The present ranks as plain data."""
        return {"kind": "factored", "ranks": [int(layer.get_parameter("weight").shape[0]) for layer in [*self][:-1]]}


def replacements(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The record of every module that took the place of a user's own, by its dotted name."""
    return {path: module.record() for path, module in model.named_modules() if isinstance(module, Bypass | Factored)}


def replace_recorded_(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Put the modules of a record into a model of the same class, which may have some of them already.

    Raises CheckpointError where the record is damaged, or of another model.
    """
    for path, saved in record.items():
        here = _module_at(model, path)
        if isinstance(saved, dict) and saved.get("kind") == "factored":
            _factor_(model, path, here, saved.get("ranks"))
            continue
        made = _made(saved, path)
        if not isinstance(here, Bypass):
            model.set_submodule(path, made.train(here.training))
        elif here.record() != made.record():
            raise CheckpointError(f"{path}: the record says {made}, the model has {here}; it is of another model")


def _factor_(model: nn.Module, path: str, here: nn.Module, ranks: Any) -> None:
    """Put factors of these ranks into the place of a layer that is not factored yet; of others the shapes are set later."""
    if isinstance(here, Factored):
        return
    if not isinstance(here, nn.Linear | nn.Conv2d):
        raise CheckpointError(
            f"{path}: the record says a layer of low rank, the model has {type(here).__name__}; it is of another model"
        )
    outputs, inputs = here.weight.shape[:2]
    tucker = isinstance(here, nn.Conv2d) and math.prod(here.kernel_size) > 1
    most = (inputs, outputs) if tucker else (min(inputs, outputs),)
    fits = isinstance(ranks, list) and len(ranks) == len(most)
    if not fits or not all(_is_count(r) and 1 <= r <= m for r, m in zip(ranks, most, strict=True)):
        raise CheckpointError(f"{path}: wanted a rank up to each of {most}, got {ranks!r}; delete the folder")
    made = Factored.like(here, tuple(ranks)).requires_grad_(here.weight.requires_grad)
    model.set_submodule(path, made.train(here.training))


def _module_at(model: nn.Module, path: Any) -> nn.Module:
    try:
        return model.get_submodule(str(path or "no name"))
    except AttributeError:
        raise CheckpointError(
            f"the record was made of another model: {type(model).__name__} has no module {path!r}; build the model that the run"
            " started from"
        ) from None


def _made(saved: Any, path: str) -> Bypass:
    """The module of a record; CheckpointError where the record is not one that `Bypass.record` writes."""
    if isinstance(saved, dict) and saved.get("kind") == "bypass":
        argument, outputs, index = saved.get("argument"), saved.get("outputs"), saved.get("index")
        if (
            (isinstance(argument, str) or _is_count(argument))
            and (_is_count(outputs) and outputs <= MOST_OUTPUTS)
            and (_is_count(index) and index < max(1, outputs))
        ):
            return Bypass(argument, outputs, index)
    raise CheckpointError(f"{path}: not the record of a replaced module, got {saved!r}; delete the folder")


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0
