"""The step as one compiled pass: unscale, update, skip and half copy read and write every value once (torch.compile).

For AdamW and SGD of torch and for `Lion`. Bytes per parameter and step of AdamW with bf16 weights: 30, against 46 for fp32
gradients, check, write-back and copy one after another; a bare fused fp32 AdamW has 28.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import SettingError
from compresskit.mixed.formats.policy import Policy
from compresskit.mixed.optim.lion import Lion
from compresskit.mixed.step.masters import Weights
from compresskit.mixed.step.scaler import total_norm
from compresskit.mixed.step.update import Divisor

Rule = Callable[[Tensor, Tensor, list[Tensor], Tensor, dict[str, Any]], tuple[Tensor, list[Tensor]]]


def adamw(w: Tensor, g: Tensor, state: list[Tensor], rate: Tensor, group: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """AdamW (Loshchilov & Hutter, 1711.05101); rate is (lr, lr / (1 - beta1^t), sqrt(1 - beta2^t))."""
    beta1, beta2 = group["betas"]
    m, v = state
    m = m + (1 - beta1) * (g - m)
    v = v * beta2 + (1 - beta2) * g * g
    w = w * (1 - rate[0] * group["weight_decay"])
    return w - rate[1] * m / (v.sqrt() / rate[2] + group["eps"]), [m, v]


def sgd(w: Tensor, g: Tensor, state: list[Tensor], rate: Tensor, group: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """SGD with momentum, as torch writes it (Sutskever et al., 2013); its buffer starts from zeros."""
    g = g + group["weight_decay"] * w
    if state:
        buffer = group["momentum"] * state[0] + g
        state, g = [buffer], g + group["momentum"] * buffer if group["nesterov"] else buffer
    return w - rate[0] * g, state


def lion(w: Tensor, g: Tensor, state: list[Tensor], rate: Tensor, group: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Lion (Chen et al., 2302.06675)."""
    beta1, beta2 = group["betas"]
    (m,) = state
    update = torch.sign(m * beta1 + (1 - beta1) * g)
    return w * (1 - rate[0] * group["weight_decay"]) - rate[0] * update, [m * beta2 + (1 - beta2) * g]


RULES: dict[type, tuple[Rule, tuple[str, ...]]] = {
    torch.optim.AdamW: (adamw, ("exp_avg", "exp_avg_sq")),
    torch.optim.SGD: (sgd, ("momentum_buffer",)),
    Lion: (lion, ("exp_avg",)),
}


def has_compiler(device: torch.device) -> bool:
    """Whether torch.compile can build code for a device here: Triton for CUDA, a C++ compiler for the CPU."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return bool(has_triton())
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        return bool(get_cpp_compiler())
    except Exception:  # torch's own class for it moved between versions; whatever it is, nothing can be built
        return False


def check_compiled(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what the one pass does not cover."""
    kind = type(optimizer).__name__
    if type(optimizer) not in RULES:
        known = ", ".join(known.__name__ for known in RULES)
        raise SettingError(f"backend='compiled': there are kernels for {known}, got {kind}; use backend='foreach'")
    for group in optimizer.param_groups:
        for setting in ("amsgrad", "maximize", "dampening", "differentiable"):
            if group.get(setting):
                raise SettingError(
                    f"backend='compiled': {kind}({setting}={group[setting]}) is not covered; use backend='foreach'"
                )
    if policy.pure:
        raise SettingError(f"backend='compiled': {policy.name} has no fp32 to update; use backend='foreach'")


class Compiled:
    """Steps the groups of an optimizer, each by a kernel of its own; its state stays where torch's optimizer keeps it."""

    def __init__(self, weights: Weights, optimizer: torch.optim.Optimizer) -> None:
        self.weights, self.optimizer = weights, optimizer
        self.rule, self.keys = RULES[type(optimizer)]
        self.slots = {slot.master: slot for slot in weights.slots}
        self.kernels: dict[int, Callable[..., None]] = {}

    def update(self, divisor: Divisor, grads: Mapping[nn.Parameter, Tensor]) -> None:
        """One step of all groups, given raw gradients by parameter; where `found_inf` is set, nothing moves."""
        found, device = divisor.found_inf, self.weights.clock.device
        if found is not None and divisor.clip is None:
            found.copy_(torch.maximum(found, (~torch.isfinite(total_norm(divisor.parts, device))).float()))
        number = divisor.number()
        inverse = torch.ones((), device=device) if number is None else number.double().reciprocal().float()
        ok = torch.ones((), dtype=torch.bool, device=device) if found is None else found == 0
        self.weights.clock += 1
        for index, group in enumerate(self.optimizer.param_groups):
            if index not in self.kernels:
                self.kernels[index] = _compiled(_pass)
            owned = [p for p in group["params"] if self._parameter(p) in grads]
            if owned:
                self._group(self.kernels[index], group, owned, grads, inverse, ok)

    def _parameter(self, owned: Any) -> nn.Parameter:
        return self.slots[owned].parameter if owned in self.slots else owned

    def _group(self, kernel: Any, group: dict[str, Any], owned: list[Any], grads: Any, inverse: Tensor, ok: Tensor) -> None:
        states = [self._state(p, group) for p in owned]
        rates = self._rates(group, owned, ok)
        slots = [self.slots.get(p) for p in owned]
        # Where fp32 exists only inside the step, the master has no memory and the kernel makes do without it.
        masters = [p.detach() if slot is None or self.weights.live else None for p, slot in zip(owned, slots, strict=True)]
        halves = [None if slot is None else slot.parameter.data for slot in slots]
        rests = [None if slot is None else slot.rest for slot in slots]
        starts = [0 if slot is None else slot.start for slot in slots]
        settings = {k: group[k] for k in ("betas", "eps", "weight_decay", "momentum", "nesterov") if k in group}
        policy = (self.weights.policy.digits, self.weights.policy.seed)
        raw = [grads[self._parameter(p)] for p in owned]
        with torch.no_grad():
            kernel(
                self.rule, settings, policy, masters, halves, rests, starts, raw, states, rates, inverse, ok, self.weights.clock
            )

    def _state(self, owned: Any, group: dict[str, Any]) -> list[Tensor]:
        if "momentum" in group and not group["momentum"]:
            return []
        state = self.optimizer.state[owned]
        for key in self.keys:
            if state.get(key) is None:
                state[key] = torch.zeros_like(owned)
        return [state[key] for key in self.keys]

    def _rates(self, group: dict[str, Any], owned: list[Any], ok: Tensor) -> list[Tensor]:
        """(lr, and AdamW's two corrections) of every tensor, in float64 until they are done; counts the step where it is ok."""
        lr = torch.as_tensor(group["lr"], dtype=torch.float64, device=ok.device)
        if "exp_avg_sq" not in self.keys:
            return [lr.float().reshape(1)] * len(owned)
        states = [self.optimizer.state[p] for p in owned]
        for state in states:
            step = state.get("step", torch.zeros(()))
            state["step"] = torch.as_tensor(step, dtype=torch.float32).to(ok.device)
        steps = [state["step"] for state in states]
        t = torch.stack(steps).double() + 1
        beta1, beta2 = group["betas"]
        table = torch.stack([lr.expand_as(t), lr / (1 - beta1**t), (1 - beta2**t).sqrt()], dim=1).float()
        torch._foreach_add_(steps, ok.float())
        return list(table.unbind())

    def finish(self) -> None:
        """Step counters where torch's optimizer expects them."""
        for group in self.optimizer.param_groups:
            for owned in group["params"]:
                state = self.optimizer.state.get(owned, {})
                if "step" in state and not (group.get("fused") or group.get("capturable")):
                    state["step"] = state["step"].cpu()


def _pass(
    rule: Rule,
    settings: dict[str, Any],
    policy: tuple[str | None, int],
    masters: list[Tensor | None],
    halves: list[Tensor | None],
    rests: list[Tensor | None],
    starts: list[int],
    grads: list[Tensor],
    states: list[list[Tensor]],
    rates: list[Tensor],
    inverse: Tensor,
    ok: Tensor,
    clock: Tensor,
) -> None:
    for i, grad in enumerate(grads):
        master, half, rest = masters[i], halves[i], rests[i]
        if master is not None:
            old = master
        else:
            assert half is not None, "a weight is in fp32, or half"
            old = Weights.widen(half, rest, policy[0])
        new, state = rule(old, grad.float() * inverse, states[i], rates[i], settings)
        new = torch.where(ok, new, old)
        for kept, value in zip(states[i], state, strict=True):
            kept.copy_(torch.where(ok, value, kept))
        if master is not None:
            master.copy_(new)
        if half is not None:
            narrow, left = Weights.narrow(new, half, rest, policy[0], policy[1], clock, starts[i])
            half.copy_(narrow)
            if rest is not None and left is not None:
                rest.copy_(left)


def _compiled(function: Any) -> Any:
    # torch counts recompilations per code object and runs eagerly, without a word, beyond the eighth: each group of each run
    # gets a code object of its own.
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, dynamic=False)
