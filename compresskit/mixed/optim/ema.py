"""An exponential moving average of the masters: in half it would stand still (at 1.0 where the masters' reaches 1.114)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compresskit.base.errors import SettingError


class Average:
    """fp32 averages of a model's weights, `average <- decay * average + (1 - decay) * master` (Polyak & Juditsky, 1992).

    A skipped step weighs nothing. Buffers are not averaged: those of the model stand.
    """

    def __init__(self, masters: dict[str, Tensor], decay: float) -> None:
        if not 0 <= decay < 1:
            raise SettingError(f"average: decay must be in [0, 1), got {decay}")
        self.decay = decay
        self.values: dict[str, Tensor] = {}
        self.admit(masters)

    def admit(self, masters: dict[str, Tensor]) -> None:
        """Take in weights that are not averaged yet, from the values they have."""
        fresh = {name: master for name, master in masters.items() if name not in self.values}
        self.values |= {name: master.detach().float().clone() for name, master in fresh.items()}

    def update(self, masters: dict[str, Tensor], found_inf: Tensor | None) -> None:
        """Take one step in; `found_inf` is 1 on the device where the step was skipped."""
        values = list(self.values.values())
        apart = torch._foreach_sub([masters[name].detach().float() for name in self.values], values)
        weight = 1 - self.decay
        torch._foreach_mul_(apart, weight if found_inf is None else weight * (found_inf == 0))
        torch._foreach_add_(values, apart)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model with the averages for weights, in their own dtype; its own come back at the end of the block."""
        own = {name: p.data for name, p in model.named_parameters() if name in self.values}
        try:
            for name, data in own.items():
                model.get_parameter(name).data = self.values[name].to(data.dtype)
            yield model
        finally:
            for name, data in own.items():
                model.get_parameter(name).data = data
