"""An exponential moving average of fp32 masters; of half weights it would not move (1.0 where that of the masters is 1.114)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compresskit.base.errors import ModelError, SettingError

#: What torch.compile puts before the names of the model inside.
COMPILED = "_orig_mod."


class WeightEMA:
    """Averages of a model's weights, `average <- decay * average + (1 - decay) * master` (Polyak & Juditsky, 1992).

    A skipped step does not change them. Buffers are not averaged.

    values: averages by name of the parameter, in fp32; of float64 and complex weights in their own dtype.
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
        self.values |= {name: widened(master).clone() for name, master in fresh.items()}

    def forget(self, names: Iterable[str]) -> None:
        """End the averages of weights that the model no longer has."""
        for name in names:
            self.values.pop(name, None)

    def load_(self, values: dict[str, Tensor]) -> None:
        """Set the averages to those of a state."""
        for name, value in values.items():
            self.values[name].copy_(value)

    def update(self, masters: dict[str, Tensor], found_inf: Tensor | None) -> None:
        """Add one step to the averages; `found_inf` is 1 on the device where the step was skipped."""
        values = list(self.values.values())
        differences = torch._foreach_sub([widened(masters[name]) for name in self.values], values)
        weight = 1 - self.decay
        torch._foreach_mul_(differences, weight if found_inf is None else weight * (found_inf == 0))
        torch._foreach_add_(values, differences)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """Use the averages as the model's weights inside the block, in the weights' dtype; restore the weights after it.

        model: the prepared one, a copy of it, or either under torch.compile, DistributedDataParallel or DataParallel.

        Raises:
            ModelError: for a model that lacks a weight of the averages, or has it in another shape.
        """
        weights = self._weights_of(model)
        before = [(weight, weight.data) for weight, _ in weights]
        self.in_use = True
        try:
            for weight, average in weights:
                weight.data = average.to(weight.dtype)
            yield model
        finally:
            for weight, data in before:
                weight.data = data
            self.in_use = False

    def _weights_of(self, model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        """The model's weights, each with its average."""
        parameters = names_inside(model)
        pairs = []
        for name, average in self.values.items():
            weight = parameters.get(name.replace(COMPILED, ""))
            if weight is None or weight.shape != average.shape:
                got = (
                    "is missing there"
                    if weight is None
                    else f"is {tuple(weight.shape)} there, its average {tuple(average.shape)}"
                )
                raise ModelError(
                    f"ema.applied: {type(model).__name__} is not the model that was averaged: {name} {got}; give run.model, or a"
                    " copy of it"
                )
            pairs.append((weight, average))
        return pairs


def names_inside(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model by their names without its wrappers: torch.compile, at any depth, and those for processes."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get(COMPILED.rstrip(".")), nn.Module):
            model = inner
        else:
            break
    return {name.replace(COMPILED, ""): p for name, p in model.named_parameters(remove_duplicate=False)}


def widened(value: Tensor) -> Tensor:
    """A weight in the dtype of its average: as it is where that is float64 or complex, in fp32 otherwise."""
    value = value.detach()
    return value if value.dtype is torch.float64 or value.is_complex() else value.float()
