"""Gradients of several backward passes, summed in fp32.

Half gradients lose small addends: 1000 micro-batches that should sum to 1 come to 0.50 in bf16 (pytorch#106395).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from compresskit.mixed.step.scaler import LossScaler, check_


class Sums:
    """fp32 sums beside the parameters; `.grad` holds only what came after the last `hold`."""

    def __init__(self) -> None:
        self.held: dict[nn.Parameter, Tensor] = {}

    def hold(self, parameters: Iterable[nn.Parameter], scaler: LossScaler | None = None) -> None:
        """Take the gradients away into the sums, divided by the scaler's scale first; its `found_inf` notes what overflowed."""
        fresh = {p: p.grad.float() for p in parameters if p.grad is not None}
        for parameter in fresh:
            parameter.grad = None
        if scaler is not None:
            check_(list(fresh.values()), scaler.found_inf, scaler.inverse())
        for parameter, grad in fresh.items():
            if parameter in self.held:
                self.held[parameter].add_(grad)
            else:
                self.held[parameter] = grad

    def settle(self) -> dict[nn.Parameter, Tensor]:
        """The fp32 gradient of every parameter that was held, `.grad` included; starts anew."""
        for parameter, total in self.held.items():
            if parameter.grad is not None:
                total.add_(parameter.grad)
                parameter.grad = None
        held, self.held = self.held, {}
        return held
