"""Loss scaling: multiply the loss so that small gradients fall into the range of fp16 (Micikevicius et al., 1710.03740)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller

import torch
from torch import Tensor

from compresskit.base.errors import CheckpointError, SettingError
from compresskit.mixed.formats.parallel import full_tensor, is_dtensor
from compresskit.mixed.formats.policy import Policy, is_positive

#: The values of a sparse tensor as they lie in memory; `values()` refuses rows that are held twice.
SPARSE_VALUES: Callable[[Tensor], Tensor] = methodcaller("_values")


class LossScaler:
    """A loss scale, fixed or dynamic, kept on the device of the gradients.

    An inf or nan in any gradient skips the step and multiplies a dynamic scale by `backoff`; `interval` steps in a row without
    one multiply it by `growth`. Unlike with `torch.amp.GradScaler` the scale stays in [floor, ceiling], so that many overflows
    can neither bring it to 0 nor make 1 / scale infinite.

    Args:
        scale: the first scale.
        dynamic: whether the scale changes; see `fixed`.
        growth: factor after `interval` steps without an overflow, > 1.
        backoff: factor after an overflow, in (0, 1).
        interval: number of steps in a row without an overflow after which the scale grows.
        hysteresis: the first `hysteresis - 1` overflows since the scale last grew skip their step and leave the scale
            (Megatron-LM, `DynamicGradScaler`).
        floor, ceiling: bounds of the scale.
        device: of the gradients.

    Raises:
        SettingError: for settings out of range.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        *,
        dynamic: bool = True,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        hysteresis: int = 1,
        floor: float = 1.0,
        ceiling: float = 2.0**24,
        device: torch.device | str = "cpu",
    ) -> None:
        if not (all(map(is_positive, (scale, floor, ceiling))) and floor <= scale <= ceiling):
            raise SettingError(f"LossScaler: wanted 0 < floor <= scale <= ceiling, got {floor}, {scale}, {ceiling}")
        if not (all(map(is_positive, (growth, backoff, interval))) and growth > 1 and backoff < 1 and interval >= 1):
            raise SettingError(
                f"LossScaler: wanted growth > 1, 0 < backoff < 1, interval >= 1, got {growth}, {backoff}, {interval}"
            )
        if not is_positive(hysteresis) or hysteresis < 1:
            raise SettingError(f"LossScaler: wanted hysteresis >= 1, got {hysteresis}")
        self.dynamic, self.growth, self.backoff, self.interval = dynamic, growth, backoff, interval
        self.hysteresis, self.floor, self.ceiling = hysteresis, floor, ceiling
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self.clean = torch.tensor(0, dtype=torch.int32, device=device)
        self.tolerance = torch.tensor(hysteresis, dtype=torch.int32, device=device)
        self.skipped = torch.tensor(0, dtype=torch.int64, device=device)
        self.found_inf = torch.tensor(0.0, dtype=torch.float32, device=device)

    @classmethod
    def fixed(cls, scale: float) -> LossScaler:
        """Make a scaler whose scale never changes; a step whose gradients overflow is skipped all the same."""
        return cls(scale, dynamic=False, floor=scale, ceiling=scale)

    def __repr__(self) -> str:
        kind = f"interval={self.interval}" if self.dynamic else "fixed"
        return f"LossScaler(scale={self.scale.item():g}, {kind}, skipped={self.skipped.item()})"

    def to(self, device: torch.device) -> LossScaler:
        """Move the scaler to a device, in place."""
        for name in ("scale", "clean", "tolerance", "skipped", "found_inf"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def inverse(self) -> Tensor:
        """1 / scale in fp32; computed in float64, so that it is rounded once."""
        return self.scale.double().reciprocal().float()

    def unscale_(self, grads: list[Tensor]) -> None:
        """Divide gradients by the scale, in place, and set `found_inf` to 1 where any is not finite."""
        self.found_inf.zero_()
        check_(grads, self.found_inf, self.inverse())

    def update(self) -> None:
        """Change the scale; to be called once a step, after `unscale_`, so that a step is unscaled by what scaled it."""
        overflow = self.found_inf > 0
        self.skipped += overflow
        if not self.dynamic:
            return
        self.tolerance.sub_(overflow.to(torch.int32))
        self.clean.copy_(torch.where(overflow, 0, self.clean + 1))
        grow = self.clean >= self.interval
        back = overflow & (self.tolerance <= 0)
        factor = torch.where(back, self.backoff, torch.where(grow, self.growth, 1.0))
        self.scale.mul_(factor).clamp_(self.floor, self.ceiling)
        self.clean.copy_(torch.where(grow, 0, self.clean))
        self.tolerance.copy_(torch.where(grow, self.hysteresis, self.tolerance))

    def state_dict(self) -> dict[str, Tensor]:
        """Scale and counters, as tensors."""
        return {name: getattr(self, name).clone() for name in ("scale", "clean", "tolerance", "skipped")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore scale and counters."""
        if unknown := set(state) - {"scale", "clean", "tolerance", "skipped"}:
            raise CheckpointError(f"LossScaler: a state holds scale, clean, tolerance and skipped, got {sorted(unknown)[0]!r}")
        for name, value in state.items():
            getattr(self, name).copy_(value)


def make_scalers(
    policy: Policy, losses: Sequence[str], make: Callable[[], LossScaler] | None, device: torch.device
) -> dict[str, LossScaler]:
    """Make a scaler for every named loss, or one by the name ""; none where the policy has no loss scale."""
    if len(set(losses)) != len(losses) or isinstance(losses, str):
        raise SettingError(f"losses must be different names, such as ('generator', 'critic'), got {losses!r}")
    scale = policy.loss_scale
    if make is not None and scale is None:
        raise SettingError(f"Policy {policy.name} has no loss scale; set loss_scale='dynamic' to use a scaler")
    if make is not None and not callable(make):
        raise SettingError(
            f"scaler: wanted a function that makes a LossScaler, such as partial(LossScaler, interval=500), got {make!r}"
        )
    if scale is None:
        return {}

    def default() -> LossScaler:
        return LossScaler() if scale == "dynamic" else LossScaler.fixed(float(scale))

    return {name: (make or default)().to(device) for name in losses or [""]}


def stored_values(grads: Iterable[Tensor]) -> list[Tensor]:
    """Views of what gradients hold in memory: the values of sparse ones, and complex ones as pairs of real numbers.

    A change of them in place changes the gradients.
    """
    plain = [SPARSE_VALUES(grad) if grad.is_sparse else grad for grad in grads]
    return [torch.view_as_real(g.conj() if g.is_conj() else g) if g.is_complex() else g for g in plain]


def check_(grads: list[Tensor], found_inf: Tensor, factor: Tensor) -> None:
    """Multiply gradients by a factor, in place, and set `found_inf` to 1 where one is not finite; the host does not wait."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in stored_values(grads):
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), group in groups.items():
        flag = found_inf if device == found_inf.device else torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, factor.to(device))
        if flag is not found_inf:
            found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))


def total_norm(grads: list[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of all gradients together, a scalar on `device`.

    In fp32, as in half 2e5 values of 60000 already make inf; in float64 where a gradient is.
    """
    if not grads:
        return torch.zeros((), device=device)
    shards = [grad for grad in grads if is_dtensor(grad)]
    # Rows that a sparse gradient holds more than once are to be added first.
    plain = stored_values(grad.coalesce() if grad.is_sparse else grad for grad in grads if not is_dtensor(grad))
    norms: list[Tensor] = []
    for dtype in (torch.float32, torch.float64):  # torch narrows no values for a norm
        group = [grad for grad in plain if (grad.dtype is torch.float64) is (dtype is torch.float64)]
        norms += torch._foreach_norm(group, 2, dtype=dtype) if group else ()
    if shards:  # FSDP2, in fp32 as they are (torch 2.15 takes no dtype here); one reduction over the ranks for all of them
        norms.append(full_tensor(torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(shards, 2))))))
    widest = torch.float64 if any(norm.dtype is torch.float64 for norm in norms) else torch.float32
    return torch.linalg.vector_norm(torch.stack([norm.to(device, widest) for norm in norms]))
