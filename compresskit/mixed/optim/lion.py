"""The Lion optimizer, which torch does not have: steps by the sign of an interpolated momentum (Chen et al., 2302.06675)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compresskit.base.errors import SettingError


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2302.06675, algorithm 2), with the interface of a torch optimizer.

        update = sign(beta1 * m + (1 - beta1) * g)
        w <- w - lr * (update + weight_decay * w)
        m <- beta2 * m + (1 - beta2) * g

    It keeps one momentum, so it needs 4 bytes a parameter less than AdamW.

    Args:
        params: parameters or param groups.
        lr: learning rate; the paper takes it 3-10 times smaller than AdamW's.
        betas: of the update and of the momentum, each in [0, 1).
        weight_decay: the paper takes it 3-10 times larger than AdamW's.

    Raises:
        SettingError: for settings out of range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise SettingError(f"Lion: wanted lr >= 0, betas in [0, 1), weight_decay >= 0, got {lr}, {betas}, {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step; a closure, where given, is evaluated first and its value returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads = [p.grad for p in params if p.grad is not None]
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            averages = [self.state[p]["exp_avg"] for p in params]
            beta1, beta2 = group["betas"]
            updates = torch._foreach_mul(averages, beta1)
            torch._foreach_add_(updates, grads, alpha=1 - beta1)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, torch._foreach_sign(updates), alpha=-group["lr"])
            torch._foreach_mul_(averages, beta2)
            torch._foreach_add_(averages, grads, alpha=1 - beta2)
        return loss
