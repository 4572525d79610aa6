"""GPTQ: round the columns of a weight in turn, and correct the remaining columns for each rounding error (2210.17323)."""

from __future__ import annotations

import torch
from torch import Tensor

from compresskit.base.errors import SettingError
from compresskit.quant.numerics.block_grid import WeightMatrix, grid_of


def gptq(
    matrix: WeightMatrix, *, damping: float = 0.01, ordered: bool = True, columns: int = 128
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
    weight = matrix.weight.detach().double().clone()
    scale, zero_point = (v.clone() for v in grid_of(matrix.weight, matrix.scheme))
    inputs = weight.shape[1]
    order = torch.argsort(moment.diagonal(), descending=True) if ordered else torch.arange(inputs)
    weight = weight[:, order]
    upper = _inverse_factor(moment[order][:, order], damping)
    mask = None if matrix.mask is None else matrix.mask[:, order]
    result = torch.empty_like(weight)
    for start in range(0, inputs, columns):
        stop = min(start + columns, inputs)
        errors = torch.zeros(len(weight), stop - start, dtype=weight.dtype)
        for j in range(start, stop):
            block = int(order[j]) // width
            if not ordered and j % width == 0:
                end = min(j + width, inputs)
                # The grid includes the updates that later columns have not received yet.
                ahead = weight[:, j:end].clone()
                ahead[:, max(0, stop - j) :] -= errors @ upper[start:stop, max(stop, j) : end]
                scale[:, block : block + 1], zero_point[:, block : block + 1] = grid_of(ahead, matrix.scheme)
            step, zero = scale[:, block].double(), zero_point[:, block]
            whole = (weight[:, j] / step).round().add(zero).clamp(grid.low, grid.high) - zero
            result[:, j] = whole * step if mask is None else torch.where(mask[:, j], whole * step, 0.0)
            error = (weight[:, j] - result[:, j]) / upper[j, j]
            errors[:, j - start] = error
            weight[:, j:stop] -= error[:, None] * upper[j, j:stop]
        weight[:, stop:] -= errors @ upper[start:stop, stop:]
    rounded = torch.empty_like(result)
    rounded[:, order] = result
    return rounded.to(matrix.weight.dtype), scale, zero_point


def _inverse_factor(moment: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped moment; an input that is always zero is treated as independent."""
    diagonal = moment.diagonal()
    typical = diagonal.mean().clamp(min=1e-30)
    moment = moment + torch.diag(torch.where(diagonal > 0, damping * typical, typical))
    while True:
        factor, failed = torch.linalg.cholesky_ex(moment)
        if not failed:
            return torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
        moment = moment + torch.diag(torch.full_like(diagonal, float(damping * typical)))
        damping *= 2
