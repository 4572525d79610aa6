"""Weights in blocks: a scale, and a zero point, for each `block` neighbours along the inputs of every output channel.

A weight is seen as *rows*, (channels, inputs), whatever its layer calls its dimensions; a row whose length is no multiple of the
block ends in a shorter one, which is rounded as if it were filled up with zeros.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compresskit.base.errors import SettingError
from compresskit.quant.numerics.quantizers import Quantizer
from compresskit.quant.numerics.scheme import Scheme, affine, round_to_grid


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How weights become integers.

    bits: 2 to 8. block: neighbouring inputs that share a scale, a power of two from 16 up; None for all inputs of a channel.
    symmetric: signed with zero point 0, else unsigned with a zero point for each block.
    """

    bits: int = 4
    block: int | None = 32
    symmetric: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise SettingError(f"Blocks(bits=...): wanted 2..8, got {self.bits}")
        if self.block is not None and (self.block < 16 or self.block & (self.block - 1)):
            raise SettingError(f"Blocks(block=...): wanted 16, 32, 64, 128, ... or None for a whole row, got {self.block}")

    @property
    def scheme(self) -> Scheme:
        """The grid of one block."""
        return Scheme(bits=self.bits, signed=self.symmetric, symmetric=self.symmetric, per_channel=True, narrow=False)

    def width(self, inputs: int) -> int:
        """Weights of a row that share a scale."""
        return self.block or max(1, inputs)

    def cut(self, rows: Tensor) -> Tensor:
        """(channels, inputs) to (channels, blocks, width), filled up with zeros."""
        width = self.width(rows.shape[1])
        return F.pad(rows, (0, -rows.shape[1] % width)).unflatten(1, (-1, width))

    def __str__(self) -> str:
        kind = "" if self.symmetric else " asymmetric"
        return f"{self.bits} bits{kind}, {'a scale a row' if self.block is None else f'blocks of {self.block}'}"


def grid_of(rows: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """(scale fp32, zero_point int32) of rows (channels, inputs), each (channels, blocks), from the extremes of each block."""
    low, high = torch.aminmax(blocks.cut(rows.detach().float()), dim=2)
    return affine(low, high, blocks.scheme)


def on_grid(rows: Tensor, scale: Tensor, zero_point: Tensor, blocks: Blocks) -> Tensor:
    """Rows (channels, inputs) rounded to a grid (channels, blocks); gradients pass straight through."""
    rounded = round_to_grid(blocks.cut(rows), scale[..., None], zero_point[..., None], blocks.scheme)
    return rounded.flatten(1)[:, : rows.shape[1]]


@dataclass(frozen=True)
class Rows:
    """What a rounding is given.

    weight: (channels, inputs). blocks: how to round it. mask: True where a weight stays that is not pruned, or None.
    moment: a function that looks at the calibration data and gives E[x x^T] of the layer's inputs x, (inputs, inputs) float64.
    """

    weight: Tensor
    blocks: Blocks
    mask: Tensor | None
    moment: Callable[[], Tensor]


#: What rounds a weight: `Rows` to (rounded rows, scale, zero_point). Write a function of this form to add another.
Rounding = Callable[[Rows], tuple[Tensor, Tensor, Tensor]]


def nearest(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Round each weight to the nearest point of its block's grid; needs no data."""
    scale, zero_point = grid_of(rows.weight, rows.blocks)
    return on_grid(rows.weight, scale, zero_point, rows.blocks), scale, zero_point


class BlockQuantizer(Quantizer):
    """Stands behind a weight and rounds it to a grid that is given once, so that a weight on the grid passes unchanged.

    axis: the dimension of the weight that holds the inputs; a convolution has all but the first.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, blocks: Blocks, shape: tuple[int, ...], axis: int) -> None:
        super().__init__()
        self.blocks, self.shape, self.axis = blocks, shape, axis
        channels, inputs = self.rows(torch.empty(shape, device="meta")).shape
        count = -(-inputs // blocks.width(inputs))
        self.register_buffer("scale", torch.ones(channels, count))
        self.register_buffer("zero_point", torch.zeros(channels, count, dtype=torch.int32))

    def rows(self, weight: Tensor) -> Tensor:
        """The weight as (channels, inputs)."""
        return weight.flatten(1) if weight.ndim > 2 else weight.movedim(self.axis, 1)

    def weight(self, rows: Tensor) -> Tensor:
        """Rows in the weight's own shape."""
        return rows.view(self.shape) if len(self.shape) > 2 else rows.movedim(1, self.axis)

    def set_(self, scale: Tensor, zero_point: Tensor) -> None:
        """The grid from now on."""
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def integers(self, weight: Tensor) -> Tensor:
        """The integers of the grid, (channels, inputs), int8 or uint8."""
        scheme, rows = self.blocks.scheme, self.blocks.cut(self.rows(weight.detach()).float())
        steps = torch.round(rows / self.scale[..., None]) + self.zero_point[..., None]
        whole = steps.clamp(scheme.low, scheme.high).to(scheme.dtype).flatten(1)
        return whole[:, : self.rows(weight).shape[1]]

    def keep_nonzero_(self, weight: Tensor, mask: Tensor) -> None:
        """Make what `mask` keeps and the grid rounds to zero one step of the grid instead, in place."""
        rows, kept = self.rows(weight), self.rows(mask)
        rounded = on_grid(rows, self.scale, self.zero_point, self.blocks)
        step = self.scale.repeat_interleave(self.blocks.width(rows.shape[1]), 1)[:, : rows.shape[1]]
        # Where the grid ends at zero on one side, the step goes to the other.
        low = (self.blocks.scheme.low - self.zero_point).repeat_interleave(self.blocks.width(rows.shape[1]), 1)
        one = torch.where((rows < 0) & (low[:, : rows.shape[1]] < 0), -step, step).to(weight.dtype)
        weight.copy_(self.weight(torch.where(kept & (rounded == 0), one, rows)))

    def forward(self, weight: Tensor) -> Tensor:
        if not self.enabled:
            return weight
        return self.weight(on_grid(self.rows(weight), self.scale, self.zero_point, self.blocks))

    def extra_repr(self) -> str:
        return str(self.blocks)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockQuantizer:
        new = BlockQuantizer(self.blocks, self.shape, self.axis)
        new.scale, new.zero_point = copy.deepcopy(self.scale, memo), copy.deepcopy(self.zero_point, memo)
        new.enabled, new.training = self.enabled, self.training
        memo[id(self)] = new
        return new
