"""GPTQ: each column of a weight is rounded in turn, and those behind it make up for what its rounding did (2210.17323)."""

from __future__ import annotations

import torch
from torch import Tensor

from compresskit.base.errors import SettingError
from compresskit.quant.numerics.block_grid import Rows, grid_of


def gptq(rows: Rows, *, damping: float = 0.01, ordered: bool = True, columns: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight W so that the layer's outputs, E |W x - Q x|^2, change least (Frantar et al., 2210.17323, algorithm 1).

    Args:
        rows: the weight, how to round it, and its inputs' second moment H. Weights that a mask holds at zero stay there.
        damping: share of H's mean diagonal that is added to the diagonal, so that H can be inverted.
        ordered: begin with the inputs of the largest moments ("act-order"); the grids are then those of the weight as it came,
            else each block's is found when its turn comes.
        columns: of this many inputs the updates are collected before the rest of the weight sees them.

    Raises DataError where there is no calibration data, SettingError for settings out of range.
    """
    if damping <= 0 or columns < 1:
        raise SettingError(f"gptq: wanted damping > 0 and columns >= 1, got {damping} and {columns}")
    moment = rows.moment().double()
    width, scheme = rows.blocks.width(rows.weight.shape[1]), rows.blocks.scheme
    weight = rows.weight.detach().double().clone()
    scale, zero_point = (v.clone() for v in grid_of(rows.weight, rows.blocks))
    inputs = weight.shape[1]
    order = torch.argsort(moment.diagonal(), descending=True) if ordered else torch.arange(inputs)
    weight = weight[:, order]
    upper = _inverse_factor(moment[order][:, order], damping)
    mask = None if rows.mask is None else rows.mask[:, order]
    result = torch.empty_like(weight)
    for start in range(0, inputs, columns):
        stop = min(start + columns, inputs)
        errors = torch.zeros(len(weight), stop - start, dtype=weight.dtype)
        for j in range(start, stop):
            block = int(order[j]) // width
            if not ordered and j % width == 0:
                end = min(j + width, inputs)
                # What the updates of this stretch still owe the columns behind it is in its grid, too.
                ahead = weight[:, j:end].clone()
                ahead[:, max(0, stop - j) :] -= errors @ upper[start:stop, max(stop, j) : end]
                scale[:, block : block + 1], zero_point[:, block : block + 1] = grid_of(ahead, rows.blocks)
            step, zero = scale[:, block].double(), zero_point[:, block]
            whole = (weight[:, j] / step).round().add(zero).clamp(scheme.low, scheme.high) - zero
            result[:, j] = whole * step if mask is None else torch.where(mask[:, j], whole * step, 0.0)
            error = (weight[:, j] - result[:, j]) / upper[j, j]
            errors[:, j - start] = error
            weight[:, j:stop] -= error[:, None] * upper[j, j:stop]
        weight[:, stop:] -= errors @ upper[start:stop, stop:]
    rounded = torch.empty_like(result)
    rounded[:, order] = result
    return rounded.to(rows.weight.dtype), scale, zero_point


def _inverse_factor(moment: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped moment; an input that is always zero counts as independent."""
    diagonal = moment.diagonal()
    typical = diagonal.mean().clamp(min=1e-30)
    moment = moment + torch.diag(torch.where(diagonal > 0, damping * typical, typical))
    while True:
        factor, failed = torch.linalg.cholesky_ex(moment)
        if not failed:
            return torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
        moment = moment + torch.diag(torch.full_like(diagonal, float(damping * typical)))
        damping *= 2
