"""Activation-aware scaling: inputs that are large on average get finer weights (AWQ, Lin et al., 2306.00978, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from compresskit.quant.calibration.statistics import Moments
from compresskit.quant.numerics.block_grid import Blocks, grid_of, on_grid

WORTH = 0.9  # of the error before: a scaling that has to be multiplied in at run time must gain more than this


def scaling(weights: list[tuple[Tensor, Blocks]], seen: Moments, *, tries: int = 20) -> tuple[Tensor, float]:
    """The factor s (inputs,) for which rounding s W and dividing by s again changes the outputs of the layers least.

    Args:
        weights: rows (channels, inputs) of every layer that reads the value, and how they are rounded.
        seen: of the value. s = E|x|^a, for the best a in [0, 1]; a = 0 is 1 for every input.
        tries: how many steps of a.

    Returns s and its error as a share of that of s = 1; (ones, 1.0) where nothing is better.
    """
    mean = seen.mean.double()
    typical = mean[mean > 0].log().mean().exp() if bool((mean > 0).any()) else torch.ones((), dtype=torch.float64)
    best, least, plain = torch.ones_like(mean), torch.inf, torch.inf
    for i in range(tries):
        factor = torch.where(mean > 0, (mean / typical).clamp(1e-4, 1e4) ** (i / tries), torch.ones_like(mean))
        error = sum(_error(rows, blocks, factor, seen.second) for rows, blocks in weights)
        if i == 0:
            plain = error
        if error < least:
            best, least = factor, error
    return best.float(), float(least / plain) if plain > 0 else 1.0


def _error(rows: Tensor, blocks: Blocks, factor: Tensor, second: Tensor) -> float:
    """E |W x - Q(W s) x / s|^2 = tr(D H D^T), D the change of the weight."""
    scaled = (rows.double() * factor).float()
    change = (on_grid(scaled, *grid_of(scaled, blocks), blocks).double() / factor) - rows.double()
    return float(((change @ second) * change).sum())
