"""GPTQ: round the columns of a weight in turn, and correct the remaining columns for each rounding error (2210.17323)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compresskit.base.errors import SettingError
from compresskit.quant.numerics.block_grid import WeightMatrix, grid_of
from compresskit.quant.numerics.error_feedback import USUAL_DAMPING, rounded_in_turn


def gptq(
    matrix: WeightMatrix, *, damping: float = USUAL_DAMPING, ordered: bool = True, columns: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight W so that the layer's outputs, E |W x - Q x|^2, change least (Frantar et al., 2210.17323, algorithm 1).

    Args:
        matrix: the weight, its number format, and the second moment H of its inputs. Weights that a mask keeps at zero stay zero.
        damping: fraction of the mean of H's diagonal that is added to the diagonal, so that H can be inverted.
        ordered: begin with the inputs of the largest second moments ("act-order"); the grids are then those of the original
            weight. False rounds the inputs in their order, and finds each block's grid when it is reached.
        columns: how many inputs are rounded before the rest of the weight is updated.

    Returns the rounded weight (channels, inputs), and scale and zero point (channels, blocks) of its grid.
    Raises SettingError for settings out of range.
    """
    if damping <= 0 or columns < 1:
        raise SettingError(f"gptq: wanted damping > 0 and columns >= 1, got {damping} and {columns}")
    moment = matrix.second_moment().double()
    width, grid = matrix.scheme.width(matrix.weight.shape[1]), matrix.scheme.grid
    scale, zero_point = (v.clone() for v in grid_of(matrix.weight, matrix.scheme))

    def round_input(index: int, ahead: Callable[[int], Tensor]) -> Tensor:
        block = index // width
        if not ordered and index % width == 0:
            scale[:, block : block + 1], zero_point[:, block : block + 1] = grid_of(ahead(width), matrix.scheme)
        step, zero = scale[:, block].double(), zero_point[:, block]
        whole = (ahead(1)[:, 0] / step).round().add(zero).clamp(grid.low, grid.high) - zero
        return whole * step if matrix.mask is None else torch.where(matrix.mask[:, index], whole * step, 0.0)

    order = torch.argsort(moment.diagonal(), descending=True) if ordered else None
    rounded = rounded_in_turn(matrix.weight, moment, round_input, order=order, damping=damping, columns=columns)
    return rounded.to(matrix.weight.dtype), scale, zero_point
