"""Overflows under a loss scale: which scalers a step uses, how many steps were skipped, which gradients are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compresskit.base.errors import SettingError
from compresskit.mixed.step.masters import MasterWeights
from compresskit.mixed.step.scaler import LossScaler

#: `stats` names at most so many parameters.
MOST_NAMES = 5


class DelayedReadback:
    """Values of the device that the host reads one step later, without waiting: a copy in pinned memory and an event."""

    def __init__(self, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.values = torch.zeros(size, pin_memory=cuda)
        self.event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def push(self, values: Tensor) -> None:
        """Start the copy; on a GPU the host does not wait for it."""
        self.values.copy_(values.detach(), non_blocking=True)
        if self.event is not None:
            self.event.record()

    def read(self, *, wait: bool) -> list[float] | None:
        """The values pushed last; None where the copy is not done and `wait` is False."""
        if self.event is not None:
            if not wait and not self.event.query():
                return None
            self.event.synchronize()
        return self.values.numpy().tolist()


class OverflowTracker:
    """The loss scalers of a run, the steps that they skipped, and the parameters whose gradients overflowed.

    scalers: by name of their loss; empty for policies without a loss scale.
    used: the scalers of this step's backward passes.
    skipped: how many steps were skipped, an int64 tensor on the device.
    last: (overflow, whether a scale was at its floor) of the last step, as the host knows it.
    """

    def __init__(self, scalers: dict[str, LossScaler], device: torch.device) -> None:
        self.scalers, self.device = scalers, device
        self.used: dict[str, LossScaler] = {}
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.last = DelayedReadback(2, device)
        self._nonfinite: tuple[list[str], Tensor] | None = None

    def use(self, name: str) -> LossScaler | None:
        """The scaler of a loss, for a backward pass; None without a loss scale.

        Raises:
            SettingError: for a name that was not declared.
        """
        if not self.scalers:
            return None
        if name not in self.scalers:
            declared = ", ".join(key for key in self.scalers if key) or "none; declare them with prepare(losses=...)"
            raise SettingError(f"backward(scaler={name or None!r}): the declared losses are: {declared}")
        scaler = self.scalers[name]
        if name not in self.used:
            self.used[name] = scaler
            scaler.found_inf.zero_()
        return scaler

    def found_inf(self) -> Tensor | None:
        """1 on the device where a gradient of this step is known to be non-finite; None where no scaler is used."""
        return torch.stack([scaler.found_inf for scaler in self.used.values()]).amax() if self.used else None

    def last_overflowed(self) -> bool:
        """Whether the last step overflowed; waits for the device."""
        last = self.last.read(wait=True)
        return last is not None and bool(last[0])

    def update(self, found_inf: Tensor, weights: MasterWeights, *, read: bool, captured: bool) -> None:
        """Count a skipped step and move the scales; at the floor of a scale, note which gradients are not finite.

        Args:
            found_inf: of this step, complete.
            weights: whose gradients are looked at.
            read: whether the host knows already that this step was skipped, and may read the device.
            captured: whether a CUDA graph is being recorded, which allows no reads.
        """
        used = self.used.values()
        at_floor = torch.stack([s.scale <= s.floor for s in used]).any()
        last = None if captured else self.last.read(wait=False)
        stuck = bool(at_floor.item()) if read else last is not None and all(last)
        if stuck and weights.step_gradients:
            self._nonfinite = weights.nonfinite_gradients()
        self.skipped += found_inf > 0
        if not captured:  # the event of a recorded copy cannot be queried; replays update `skipped` and the scale
            self.last.push(torch.stack([found_inf, at_floor.float()]))
        for scaler in used:
            if len(self.scalers) == 1:
                scaler.found_inf.copy_(found_inf)
            scaler.update()

    def stats(self) -> dict[str, Any]:
        """Scales, skipped steps and, at the floor of a scale, the parameters with non-finite gradients; reads the device."""
        stats: dict[str, Any] = {}
        for name, scaler in self.scalers.items():
            suffix = f".{name}" if name else ""
            stats |= {f"scale{suffix}": scaler.scale.item(), f"skipped{suffix}": scaler.skipped.item()}
        stuck = any((s.scale <= s.floor) & (s.found_inf > 0) for s in self.scalers.values())
        if stuck and self._nonfinite is not None:
            names, bad = self._nonfinite
            stats["nonfinite"] = [name for name, is_bad in zip(names, bad.tolist(), strict=True) if is_bad][:MOST_NAMES]
        return stats

    def state_dict(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The scalers' state by name, the number of skipped steps, and the last step's flags; `keep` detaches or copies."""
        return {
            "scalers": {name: scaler.state_dict() for name, scaler in self.scalers.items()},
            "skipped": keep(self.skipped),
            "last_step": list(self.last.read(wait=True) or []),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; scalers that the state does not have keep their scale."""
        for name, scaler in self.scalers.items():
            if name in state["scalers"]:
                scaler.load_state_dict(state["scalers"][name])
        self.skipped.copy_(state["skipped"])
        if state["last_step"]:
            self.last.push(torch.tensor(state["last_step"], device=self.device))
