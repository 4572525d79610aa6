"""Loss scaling: a factor that lifts small gradients into the range of fp16 (Micikevicius et al., 1710.03740)."""

from __future__ import annotations

import torch
from torch import Tensor

from compresskit.errors import SettingError


class LossScaler:
    """A loss scale, fixed or dynamic, that lives on the device of the gradients.

    Dynamic: an inf or nan in any gradient multiplies the scale by `backoff` and the step is skipped; `interval` clean
    steps in a row multiply it by `growth`. Unlike `torch.amp.GradScaler` the scale stays in [floor, ceiling], so a run of
    overflows can neither reach 0 nor make 1/scale infinite.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        *,
        dynamic: bool = True,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        floor: float = 1.0,
        ceiling: float = 2.0**24,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 < floor <= scale <= ceiling:
            raise SettingError(f"LossScaler: wanted 0 < floor <= scale <= ceiling, got {floor}, {scale}, {ceiling}")
        if not (growth > 1 and 0 < backoff < 1 and interval >= 1):
            raise SettingError(
                f"LossScaler: wanted growth > 1, 0 < backoff < 1, interval >= 1, got {growth}, {backoff}, {interval}"
            )
        self.dynamic, self.growth, self.backoff, self.interval = dynamic, growth, backoff, interval
        self.floor, self.ceiling = floor, ceiling
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self.clean = torch.tensor(0, dtype=torch.int32, device=device)
        self.skipped = torch.tensor(0, dtype=torch.int64, device=device)
        self.found_inf = torch.tensor(0.0, dtype=torch.float32, device=device)

    def unscale_(self, grads: list[Tensor]) -> None:
        """Divide fp32 gradients by the scale, in place, and note in `found_inf` whether any is not finite."""
        self.found_inf.zero_()
        if grads:
            inverse = self.scale.double().reciprocal().float()
            torch._amp_foreach_non_finite_check_and_unscale_(grads, self.found_inf, inverse)

    def update(self) -> None:
        """Move the scale; called once a step, after `unscale_`, so that a step is unscaled by what scaled it."""
        overflow = self.found_inf > 0
        self.skipped += overflow
        if not self.dynamic:
            return
        self.clean.copy_(torch.where(overflow, 0, self.clean + 1))
        grow = self.clean >= self.interval
        factor = torch.where(overflow, self.backoff, torch.where(grow, self.growth, 1.0))
        self.scale.mul_(factor).clamp_(self.floor, self.ceiling)
        self.clean.copy_(torch.where(grow, 0, self.clean))

    def state_dict(self) -> dict[str, Tensor]:
        """Scale and counters, as tensors."""
        return {"scale": self.scale.clone(), "clean": self.clean.clone(), "skipped": self.skipped.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over scale and counters."""
        for name, value in state.items():
            getattr(self, name).copy_(value)
