"""One optimizer step: check, unscale and clip as one factor; without waiting for the device where the optimizer allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from compresskit.mixed.step.scaler import check_, stored_values, total_norm


class AmpScalingOptimizer(Protocol):
    """An optimizer that may take `grad_scale` and `found_inf`, as torch's `GradScaler` recognises it."""

    _step_supports_amp_scaling: bool


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer takes `grad_scale` and `found_inf` itself and skips on the device, as torch's fused ones do.

    SGD with dampening is left out: it must not get the momentum buffers of `zero_momentum_`, as its first step takes the whole
    gradient.
    """
    try:  # isinstance of a protocol takes longer than a small optimizer's step
        supported = cast(AmpScalingOptimizer, optimizer)._step_supports_amp_scaling
    except AttributeError:
        return False
    return supported and not any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups)


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


class UnscaleAndClip:
    """The one factor that unscales and clips gradients, and the flag that skips the step; both on the device.

    grads: the gradients that the optimizer sees, maybe flat.
    gradients: the gradients parameter by parameter, so that the norm is summed in the same order for flat ones.
    scale: the loss scale; None for gradients that are unscaled already.
    found_inf: set to 1 where a gradient is not finite; None where no step is ever skipped.
    norm: of the unscaled gradients; None where `clip` is None.
    """

    def __init__(
        self,
        grads: list[Tensor],
        scale: Tensor | None,
        found_inf: Tensor | None,
        clip: float | None,
        gradients: list[Tensor],
    ) -> None:
        self.found_inf, self.norm = found_inf, None
        self.grads, self.gradients, self.clip, self.scale = grads, gradients, clip, scale
        if clip is None:
            return
        device = scale.device if scale is not None else grads[0].device if grads else torch.device("cpu")
        norm = total_norm(gradients, device)
        if found_inf is not None:
            # A norm is inf or nan exactly when a gradient is, so that no other check is needed.
            found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(norm)).float()))
        self.norm = norm if scale is None else norm / scale

    def divisor(self) -> Tensor | None:
        """What gradients are to be divided by: scale * max(1, norm / clip); None for 1."""
        if self.clip is None or self.norm is None:
            return self.scale
        excess = torch.clamp((self.norm + 1e-6) / self.clip, min=1.0)
        return excess if self.scale is None else excess * self.scale

    def apply_(self) -> None:
        """Divide the gradients, in place, and complete `found_inf`."""
        divisor = self.divisor()
        # In the dtype of the norm: float64 gradients are not multiplied by a rounded factor.
        inverse = None if divisor is None else divisor.double().reciprocal().to(divisor.dtype)
        if self.found_inf is not None and self.clip is None:
            one = torch.ones((), device=self.found_inf.device)
            check_(self.grads, self.found_inf, one if inverse is None else inverse)
        elif inverse is not None and self.grads:
            torch._foreach_mul_(stored_values(self.grads), inverse)

    def check_(self) -> None:
        """Complete `found_inf` and leave the gradients undivided."""
        if self.found_inf is not None and self.clip is None:
            check_(self.grads, self.found_inf, torch.ones((), device=self.found_inf.device))


def update_(optimizer: Any, unscale: UnscaleAndClip, step: Callable[[], None]) -> bool:
    """Step a torch optimizer.

    Fused optimizers take the factor and the flag, without synchronisation. For any other the gradients are divided and, under a
    loss scale only, the host reads the flag: the only synchronisation of a step.

    Args:
        optimizer: a torch optimizer whose parameters have their gradients.
        unscale: for these gradients.
        step: steps it, with masters in memory; called once, or not at all.

    Returns:
        False where the host knows that the step was skipped.
    """
    if skips_on_device(optimizer):
        unscale.check_()
        if unscale.found_inf is not None:
            zero_momentum_(optimizer)
        divisor = unscale.divisor()
        # The kernels read the factor as fp32, whatever the dtype of the gradients.
        optimizer.grad_scale, optimizer.found_inf = None if divisor is None else divisor.float(), unscale.found_inf
        try:
            step()
        finally:
            optimizer.grad_scale = optimizer.found_inf = None
        return True
    unscale.apply_()
    if unscale.found_inf is not None and bool(unscale.found_inf.item()):
        return False
    step()
    return True
