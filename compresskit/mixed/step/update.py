"""One update: check, unscale and clip as one number, the optimizer's step, nothing read back where the optimizer allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compresskit.mixed.step.scaler import check_, total_norm


class Late:
    """What the step before reported, read without waiting for the device: a copy in pinned memory, behind an event."""

    def __init__(self, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.values = torch.zeros(size, pin_memory=cuda)
        self.event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def push(self, values: Tensor) -> None:
        """Start the copy; on a GPU the host goes on."""
        self.values.copy_(values.detach(), non_blocking=True)
        if self.event is not None:
            self.event.record()

    def read(self, *, wait: bool) -> list[float] | None:
        """The values pushed last; None where they are still on their way and `wait` is False."""
        if self.event is not None:
            if not wait and not self.event.query():
                return None
            self.event.synchronize()
        return self.values.numpy().tolist()


def hands_over(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer takes `grad_scale` and `found_inf` itself and skips on the device, as torch's fused ones do.

    SGD with dampening is left out: it must not see the zero momentum buffers that `dirty_momentum` asks for, as its first
    step takes the whole gradient.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return not any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups)


def zero_momentum_(optimizer: torch.optim.Optimizer) -> None:
    """Give fused SGD momentum buffers of zeros before a first step that may be skipped.

    Its kernel allocates them without values and returns early on an overflow, so that the next step reads garbage (torch
    2.15: -inf, or off by 2e19). From zeros the first step is exact: buffer = momentum * 0 + gradient.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if group["momentum"] and p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


class Divisor:
    """What gradients are still to be divided by, and whether a step must be skipped; both on the device."""

    def __init__(
        self,
        grads: list[Tensor],
        scale: Tensor | None,
        found_inf: Tensor | None,
        clip: float | None,
        parts: list[Tensor],
    ) -> None:
        """`scale` is None for gradients that are unscaled already; `found_inf` is None where nothing is ever skipped.

        `parts` are the gradients parameter by parameter: `grads` may be flat, and a norm is summed in the same order for both.
        """
        self.found_inf, self.norm = found_inf, None
        self.grads, self.parts, self.clip, self.scale = grads, parts, clip, scale
        if clip is None:
            return
        device = scale.device if scale is not None else grads[0].device if grads else torch.device("cpu")
        norm = total_norm(parts, device)
        if found_inf is not None:
            # A norm is inf or nan exactly when a gradient is, so that clipping pays for the check.
            found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(norm)).float()))
        self.norm = norm if scale is None else norm / scale

    def number(self) -> Tensor | None:
        """What to divide by: scale * max(1, norm / clip), or None for 1."""
        if self.clip is None or self.norm is None:
            return self.scale
        excess = torch.clamp((self.norm + 1e-6) / self.clip, min=1.0)
        return excess if self.scale is None else excess * self.scale

    def apply_(self) -> None:
        """Divide the gradients, in place, and finish `found_inf`."""
        number = self.number()
        inverse = None if number is None else number.double().reciprocal().float()
        if self.found_inf is not None and self.clip is None:
            one = torch.ones((), device=self.found_inf.device)
            check_(self.grads, self.found_inf, one if inverse is None else inverse)
        elif inverse is not None and self.grads:
            torch._foreach_mul_(self.grads, inverse)

    def check_(self) -> None:
        """Finish `found_inf` and leave the gradients undivided."""
        if self.found_inf is not None and self.clip is None:
            check_(self.grads, self.found_inf, torch.ones((), device=self.found_inf.device))


def update_(optimizer: Any, divisor: Divisor, load: Callable[[], None]) -> bool:
    """Step a torch optimizer. False where the host knows that the step was skipped.

    Fused optimizers are handed the number and the flag: no synchronisation. Any other one has its gradients divided and, under
    a loss scale only, the flag is read back: the one host synchronisation of a step.
    """
    if hands_over(optimizer):
        divisor.check_()
        load()
        if divisor.found_inf is not None:
            zero_momentum_(optimizer)
        optimizer.grad_scale, optimizer.found_inf = divisor.number(), divisor.found_inf
        try:
            optimizer.step()
        finally:
            optimizer.grad_scale = optimizer.found_inf = None
        return True
    divisor.apply_()
    if divisor.found_inf is not None and bool(divisor.found_inf.item()):
        return False
    load()
    optimizer.step()
    return True
