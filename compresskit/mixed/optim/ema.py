"""An exponential moving average of fp32 masters; of half weights it would not move (1.0 where that of the masters is 1.114)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compresskit.base.errors import SettingError


class WeightEMA:
    """fp32 averages of a model's weights, `average <- decay * average + (1 - decay) * master` (Polyak & Juditsky, 1992).

    A skipped step does not change them. Buffers are not averaged.

    values: fp32 averages by name of the parameter.
    in_use: whether the averages are the model's weights at the moment, see `applied`.
    """

    def __init__(self, masters: dict[str, Tensor], decay: float) -> None:
        if not 0 <= decay < 1:
            raise SettingError(f"ema: decay must be in [0, 1), got {decay}")
        self.decay, self.in_use = decay, False
        self.values: dict[str, Tensor] = {}
        self.add_new(masters)

    def __repr__(self) -> str:
        return f"WeightEMA(decay={self.decay}, {len(self.values)} weights)"

    def add_new(self, masters: dict[str, Tensor]) -> None:
        """Start averages of weights that have none, at their present values."""
        fresh = {name: master for name, master in masters.items() if name not in self.values}
        self.values |= {name: master.detach().float().clone() for name, master in fresh.items()}

    def forget(self, names: Iterable[str]) -> None:
        """End the averages of weights that the model no longer has."""
        for name in names:
            self.values.pop(name, None)

    def update(self, masters: dict[str, Tensor], found_inf: Tensor | None) -> None:
        """Add one step to the averages; `found_inf` is 1 on the device where the step was skipped."""
        values = list(self.values.values())
        differences = torch._foreach_sub([masters[name].detach().float() for name in self.values], values)
        weight = 1 - self.decay
        torch._foreach_mul_(differences, weight if found_inf is None else weight * (found_inf == 0))
        torch._foreach_add_(values, differences)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """Use the averages as the model's weights inside the block, in the weights' dtype; restore the weights after it."""
        weights = {name: p.data for name, p in model.named_parameters() if name in self.values}
        self.in_use = True
        try:
            for name, data in weights.items():
                model.get_parameter(name).data = self.values[name].to(data.dtype)
            yield model
        finally:
            for name, data in weights.items():
                model.get_parameter(name).data = data
            self.in_use = False
