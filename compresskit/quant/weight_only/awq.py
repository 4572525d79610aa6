"""AWQ: scale inputs before rounding, so that those with large activations get finer weights (Lin et al., 2306.00978)."""

from __future__ import annotations

import torch
from torch import Tensor

from compresskit.quant.calibration.activation_statistics import InputMoments
from compresskit.quant.numerics.block_grid import BlockScheme, grid_of, on_grid

MAX_RUNTIME_ERROR = 0.9  # a scaling that costs a multiplication at run time must bring the error below this fraction


def awq_scaling(weights: list[tuple[Tensor, BlockScheme]], inputs: InputMoments, *, tries: int = 20) -> tuple[Tensor, float]:
    """Find the factors s (inputs,) for which rounding s W and dividing by s changes the outputs of the layers least.

    The candidates are s = E|x|^a for a in [0, 1); a = 0 is no scaling.

    Args:
        weights: weight (channels, inputs) and number format of every layer that reads the value x.
        inputs: moments of x over the calibration data.
        tries: how many values of a are tried.

    Returns s, and its squared error as a fraction of the error without scaling; (ones, 1.0) where no scaling is better.
    """
    mean = inputs.mean.double()
    typical = mean[mean > 0].log().mean().exp() if bool((mean > 0).any()) else torch.ones((), dtype=torch.float64)
    best, least, plain = torch.ones_like(mean), torch.inf, torch.inf
    for i in range(tries):
        factor = torch.where(mean > 0, (mean / typical).clamp(1e-4, 1e4) ** (i / tries), torch.ones_like(mean))
        error = sum(_scaled_error(rows, scheme, factor, inputs.second) for rows, scheme in weights)
        if i == 0:
            plain = error
        if error < least:
            best, least = factor, error
    return best.float(), float(least / plain) if plain > 0 else 1.0


def _scaled_error(rows: Tensor, scheme: BlockScheme, factor: Tensor, second: Tensor) -> float:
    """E |W x - Q(W s) x / s|^2 = tr(D H D^T), with D the change of the weight and H the second moment of x."""
    scaled = (rows.double() * factor).float()
    change = (on_grid(scaled, *grid_of(scaled, scheme), scheme).double() / factor) - rows.double()
    return float(((change @ second) * change).sum())
