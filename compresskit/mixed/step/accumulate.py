"""Accumulation of the gradients of several backward passes in fp32.

In half, small addends are lost: 1000 micro-batches that should sum to 1 come to 0.50 in bf16 (pytorch#106395).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from compresskit.mixed.formats.casts import in_fp32
from compresskit.mixed.step.scaler import LossScaler, check_


class GradientAccumulator:
    """fp32 sums of gradients by parameter; `.grad` holds only what came after the last `take`."""

    def __init__(self) -> None:
        self.totals: dict[nn.Parameter, Tensor] = {}

    def take(self, parameters: Iterable[nn.Parameter], scaler: LossScaler | None = None) -> None:
        """Move the gradients from `.grad` to the sums.

        scaler: divides them by its scale first, and notes in `found_inf` whether one is not finite.
        """
        fresh = {p: in_fp32(p.grad) for p in parameters if p.grad is not None}
        for parameter in fresh:
            parameter.grad = None
        if scaler is not None:
            check_(list(fresh.values()), scaler.found_inf, scaler.inverse())
        for parameter, grad in fresh.items():
            if parameter in self.totals:
                self.totals[parameter].add_(grad)
            else:
                self.totals[parameter] = grad

    def collect(self) -> dict[nn.Parameter, Tensor]:
        """The fp32 gradient of every parameter that has a sum, what is left in `.grad` included; starts anew."""
        for parameter, total in self.totals.items():
            if parameter.grad is not None:
                total.add_(parameter.grad)
                parameter.grad = None
        totals, self.totals = self.totals, {}
        return totals
