"""Grids of weight-only quantization: a scale, and a zero point, for each block of neighbouring inputs of an output channel.

All functions take a weight as a matrix of rows, (channels, inputs), whatever the order of its dimensions in the layer. A row
whose length is no multiple of the block size ends in a shorter block, which is rounded as if it were padded with zeros.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from compresskit.base.errors import SettingError
from compresskit.base.settings import as_python, check_flag
from compresskit.quant.numerics.quantizers import Quantizer
from compresskit.quant.numerics.scheme import Scheme, affine, round_to_grid


@dataclass(frozen=True, kw_only=True)
class BlockScheme:
    """Number format of a weight: its bits, and how many neighbouring inputs share a scale.

    bits: 2 to 8.
    block_size: neighbouring inputs of one output channel that share a scale, a power of two from 16 up; None for one scale per
        output channel.
    symmetric: signed integers with zero point 0; False for unsigned integers with a zero point per block.
    """

    bits: int = 4
    block_size: int | None = 32
    symmetric: bool = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # NumPy's numbers become Python's, which a record can have
            object.__setattr__(self, name, as_python(value))
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise SettingError(f"BlockScheme(bits=...): wanted a whole number of 2..8, got {self.bits!r}")
        size = self.block_size
        if size is not None and (not isinstance(size, int) or size < 16 or size & (size - 1)):
            raise SettingError(f"BlockScheme(block_size=...): wanted 16, 32, 64, 128, ... or None for a whole row, got {size!r}")
        check_flag(self.symmetric, "BlockScheme(symmetric=...)")

    @property
    def grid(self) -> Scheme:
        """The integer grid of one block."""
        return Scheme(bits=self.bits, signed=self.symmetric, symmetric=self.symmetric, per_channel=True, narrow=False)

    def width(self, inputs: int) -> int:
        """How many weights of a row of `inputs` share a scale."""
        return self.block_size or max(1, inputs)

    def split(self, rows: Tensor) -> Tensor:
        """Split rows (channels, inputs) into blocks (channels, blocks, width), padded with zeros."""
        width = self.width(rows.shape[1])
        return F.pad(rows, (0, -rows.shape[1] % width)).unflatten(1, (-1, width))

    def __str__(self) -> str:
        kind = "" if self.symmetric else " asymmetric"
        return f"{self.bits} bits{kind}, {'a scale a row' if self.block_size is None else f'blocks of {self.block_size}'}"


def grid_of(rows: Tensor, scheme: BlockScheme) -> tuple[Tensor, Tensor]:
    """Return scale (fp32) and zero point (int32), each (channels, blocks), from the extremes of each block of `rows`."""
    low, high = torch.aminmax(scheme.split(rows.detach().float()), dim=2)
    return affine(low, high, scheme.grid)


def on_grid(rows: Tensor, scale: Tensor, zero_point: Tensor, scheme: BlockScheme) -> Tensor:
    """Round rows (channels, inputs) to a grid (channels, blocks); gradients pass straight through."""
    rounded = round_to_grid(scheme.split(rows), scale[..., None], zero_point[..., None], scheme.grid)
    return rounded.flatten(1)[:, : rows.shape[1]]


@dataclass(frozen=True)
class WeightMatrix:
    """A weight that is to be rounded: what a `Rounding` is given.

    weight: (channels, inputs).
    scheme: the number format it is rounded to.
    mask: (channels, inputs) bool, False where the weight is pruned and must stay zero; None for a dense weight.
    second_moment: runs the calibration data and returns E[x x^T] of the layer's inputs x, (inputs, inputs) float64.
    """

    weight: Tensor
    scheme: BlockScheme
    mask: Tensor | None
    second_moment: Callable[[], Tensor]


class Rounding(Protocol):
    """A way to round a weight: a function of this signature; `round_to_nearest` and `gptq` are two of them."""

    def __call__(self, matrix: WeightMatrix, /) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rounded weight (channels, inputs), and scale and zero point of its grid, each (channels, blocks)."""
        ...


def round_to_nearest(matrix: WeightMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """Round each weight to the nearest point of its block's grid; needs no calibration data.

    Returns the rounded weight, scale and zero point, as every `Rounding` does.
    """
    scale, zero_point = grid_of(matrix.weight, matrix.scheme)
    return on_grid(matrix.weight, scale, zero_point, matrix.scheme), scale, zero_point


class MatrixQuantizer(Quantizer, ABC):
    """Base of the quantizers of weights as matrices of rows, (channels, inputs).

    scheme: number format of the weight. shape: of the weight.
    axis: the dimension of the weight that holds the inputs; a convolution has all but the first.
    """

    scheme: Any

    def __init__(self, shape: tuple[int, ...], axis: int) -> None:
        super().__init__()
        self.shape, self.axis = shape, axis

    def rows(self, weight: Tensor) -> Tensor:
        """The weight as rows, (channels, inputs)."""
        return weight.flatten(1) if weight.ndim > 2 else weight.movedim(self.axis, 1)

    def weight(self, rows: Tensor) -> Tensor:
        """Rows (channels, inputs) in the weight's own shape."""
        return rows.view(self.shape) if len(self.shape) > 2 else rows.movedim(1, self.axis)

    @abstractmethod
    def keep_nonzero_(self, weight: Tensor, mask: Tensor) -> None:
        """Change, in place, each weight that `mask` keeps but that would be rounded to zero."""


class BlockQuantizer(MatrixQuantizer):
    """Rounds a weight to a fixed grid, so that a weight on the grid passes unchanged.

    scheme: its number format. shape: of the weight.
    axis: the dimension of the weight that holds the inputs; a convolution has all but the first.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, scheme: BlockScheme, shape: tuple[int, ...], axis: int) -> None:
        super().__init__(shape, axis)
        self.scheme: BlockScheme = scheme
        channels, inputs = self.rows(torch.empty(shape, device="meta")).shape
        count = -(-inputs // scheme.width(inputs))
        self.register_buffer("scale", torch.ones(channels, count, dtype=torch.float32))
        self.register_buffer("zero_point", torch.zeros(channels, count, dtype=torch.int32))

    def set_grid_(self, scale: Tensor, zero_point: Tensor) -> None:
        """Set the grid."""
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def integers(self, weight: Tensor) -> Tensor:
        """The integers of the grid, (channels, inputs), int8 or uint8."""
        grid, rows = self.scheme.grid, self.scheme.split(self.rows(weight.detach()).float())
        steps = torch.round(rows / self.scale[..., None]) + self.zero_point[..., None]
        whole = steps.clamp(grid.low, grid.high).to(grid.dtype).flatten(1)
        return whole[:, : self.rows(weight).shape[1]]

    def keep_nonzero_(self, weight: Tensor, mask: Tensor) -> None:
        """Change, in place, each weight that `mask` keeps but the grid rounds to zero into one step of the grid."""
        rows, kept = self.rows(weight), self.rows(mask)
        rounded = on_grid(rows, self.scale, self.zero_point, self.scheme)
        step = self.scale.repeat_interleave(self.scheme.width(rows.shape[1]), 1)[:, : rows.shape[1]]
        # Where the grid ends at zero on one side, the step goes to the other.
        low = (self.scheme.grid.low - self.zero_point).repeat_interleave(self.scheme.width(rows.shape[1]), 1)
        one = torch.where((rows < 0) & (low[:, : rows.shape[1]] < 0), -step, step).to(weight.dtype)
        weight.copy_(self.weight(torch.where(kept & (rounded == 0), one, rows)))

    def forward(self, weight: Tensor) -> Tensor:
        if not self.enabled:
            return weight
        return self.weight(on_grid(self.rows(weight), self.scale, self.zero_point, self.scheme))

    def extra_repr(self) -> str:
        return str(self.scheme)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockQuantizer:
        new = BlockQuantizer(self.scheme, self.shape, self.axis)
        new.scale, new.zero_point = copy.deepcopy(self.scale, memo), copy.deepcopy(self.zero_point, memo)
        new.enabled, new.training = self.enabled, self.training
        memo[id(self)] = new
        return new
