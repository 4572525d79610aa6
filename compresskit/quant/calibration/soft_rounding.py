"""The soft choice of AdaRound: whether each weight is rounded up or down, as a number between 0 and 1 that is learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compresskit.quant.numerics.quantizers import WeightQuantizer
from compresskit.quant.numerics.scheme import channelwise

LEAST_FRACTION = 0.01  # distance of the first choice from 0 and 1, where it has no gradient


class SoftRounding(nn.Module):
    """A weight between its two grid points: (floor(w / s) + h) s, h = clamp(1.2 sigmoid(v) - 0.1, 0, 1) (2004.10568, eq. 23).

    choice: v, of the shape of the weight. scale: s, (channels,) or a scalar. Both are parameters.
    """

    base: Tensor
    mask: Tensor | None

    def __init__(self, weight: Tensor, quantizer: WeightQuantizer, mask: Tensor | None = None) -> None:
        """mask: False where the weight is zero and stays so."""
        super().__init__()
        self.scheme, self.axis = quantizer.scheme, quantizer.axis
        scale = quantizer.qparams(weight)[0].detach()
        steps = weight.detach() / channelwise(scale, weight, self.axis)
        self.register_buffer("base", steps.floor())
        self.register_buffer("mask", None if mask is None else mask.to(weight.dtype))
        fraction = (steps - self.base).clamp(LEAST_FRACTION, 1 - LEAST_FRACTION)
        self.choice = nn.Parameter(torch.logit((fraction + 0.1) / 1.2))
        self.scale = nn.Parameter(scale.clone())

    def share_up(self) -> Tensor:
        """The choice h of each weight, from 0 (down) to 1 (up)."""
        return (torch.sigmoid(self.choice) * 1.2 - 0.1).clamp(0, 1)

    def forward(self, *, hard: bool = False) -> Tensor:
        """The weight between its grid points, or, where `hard`, on the nearer one."""
        share = self.share_up()
        steps = (self.base + ((share >= 0.5).to(share) if hard else share)).clamp(self.scheme.low, self.scheme.high)
        steps = steps if self.mask is None else steps * self.mask
        return steps * channelwise(self.scale, steps, self.axis)

    def undecided(self, power: float) -> Tensor:
        """Mean of 1 - |2 h - 1|^power: 0 where every weight is on a grid point."""
        return 1 - (2 * self.share_up() - 1).abs().pow(power).mean()


def fit_scale_(weight: Tensor, quantizer: WeightQuantizer, tries: int = 80) -> None:
    """Fix the scale of each channel at the one, at most that of the extremes, of least squared error of the weight."""
    quantizer.forget_correction_()
    full = quantizer.qparams(weight)[0]
    best, least = full, torch.full_like(full, torch.inf)
    axes = [d for d in range(weight.ndim) if d != quantizer.axis] if full.ndim else list(range(weight.ndim))
    for i in range(tries + 1):
        scale = full * (1 - 0.8 * i / tries)
        error = (quantizer.steps(weight, scale) * channelwise(scale, weight, quantizer.axis) - weight).square().sum(axes)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    quantizer.fix_scale_(best)
