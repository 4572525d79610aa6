"""The optimizer step as one compiled pass: unscale, update, skip and copy to half read and write every value once.

For AdamW and SGD of torch and for `Lion`. By torch.compile, or on a CPU by `native.py` where that covers the tensors. Bytes per
parameter and step of AdamW with bf16 weights: 30, against 46 for fp32 gradients, check, write-back and copy one after another;
a bare fused fp32 AdamW has 28.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compresskit.base.errors import SettingError
from compresskit.mixed.formats import bf16_formats
from compresskit.mixed.formats.policy import Bf16Format, Policy
from compresskit.mixed.optim.lion import Lion
from compresskit.mixed.step.masters import MasterWeights
from compresskit.mixed.step.native import NativeGroup, laid_as
from compresskit.mixed.step.scaler import total_norm
from compresskit.mixed.step.update import UnscaleAndClip

#: (weight, gradient, state, rates, settings of the param group) -> (new weight, new state), all in fp32.
UpdateRule = Callable[[Tensor, Tensor, list[Tensor], Tensor, dict[str, Any]], tuple[Tensor, list[Tensor]]]


def adamw(w: Tensor, g: Tensor, state: list[Tensor], rate: Tensor, group: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Update by AdamW (Loshchilov & Hutter, 1711.05101); rate is (lr, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t))."""
    beta1, beta2 = group["betas"]
    m, v = state
    m = m + (1 - beta1) * (g - m)
    v = v * beta2 + (1 - beta2) * g * g
    w = w * (1 - rate[0] * group["weight_decay"])
    return w - rate[1] * m / (v.sqrt() * rate[2] + group["eps"]), [m, v]  # one division: it is what a CPU waits for


def sgd(w: Tensor, g: Tensor, state: list[Tensor], rate: Tensor, group: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Update by SGD with momentum in torch's form (Sutskever et al., 2013); its buffer starts from zeros."""
    if group["weight_decay"]:  # 0 times inf is nan
        g = g + group["weight_decay"] * w
    if state:
        buffer = group["momentum"] * state[0] + g
        state, g = [buffer], g + group["momentum"] * buffer if group["nesterov"] else buffer
    return w - rate[0] * g, state


def lion(w: Tensor, g: Tensor, state: list[Tensor], rate: Tensor, group: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Update by Lion (Chen et al., 2302.06675)."""
    beta1, beta2 = group["betas"]
    (m,) = state
    update = torch.sign(m * beta1 + (1 - beta1) * g)
    return w * (1 - rate[0] * group["weight_decay"]) - rate[0] * update, [m * beta2 + (1 - beta2) * g]


#: By optimizer: the update of one tensor, and the names of its state.
UPDATE_RULES: dict[type, tuple[UpdateRule, tuple[str, ...]]] = {
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
    """Refuse optimizers, settings and policies that the compiled step does not cover."""
    kind = type(optimizer).__name__
    if type(optimizer) not in UPDATE_RULES:
        known = ", ".join(known.__name__ for known in UPDATE_RULES)
        raise SettingError(f"backend='compiled': there are kernels for {known}, got {kind}; use backend='foreach'")
    for group in optimizer.param_groups:
        for setting in ("amsgrad", "maximize", "dampening", "differentiable"):
            if group.get(setting):
                raise SettingError(
                    f"backend='compiled': {kind}({setting}={group[setting]}) is not covered; use backend='foreach'"
                )
    if policy.pure:
        raise SettingError(f"backend='compiled': {policy.name} has no fp32 to update; use backend='foreach'")


class StepTensors(NamedTuple):
    """The tensors of one param group, one entry per parameter in every list; None for what a parameter does not have."""

    masters: list[Tensor | None]
    halves: list[Tensor | None]
    remainders: list[Tensor | None]
    offsets: list[int]
    grads: list[Tensor]
    states: list[list[Tensor]]

    def detached(self) -> StepTensors:
        """The same without what autograd knows of the weights."""
        masters, halves = ([None if p is None else p.data for p in own] for own in (self.masters, self.halves))
        return StepTensors(masters, halves, *self[2:])

    def of_each(self) -> list[list[Tensor | None]]:
        """The tensors of each parameter together."""
        lists = (self.masters, self.halves, self.remainders, self.grads, self.states)
        return [[*own, *state] for *own, state in zip(*lists, strict=True)]


class CompiledStep:
    """Steps the param groups of an optimizer, each by a kernel of its own; the state stays where torch's optimizer keeps it."""

    def __init__(self, weights: MasterWeights, optimizer: torch.optim.Optimizer) -> None:
        self.weights, self.optimizer = weights, optimizer
        self.rule, self.keys = UPDATE_RULES[type(optimizer)]
        self.kernels: dict[int, Callable[..., None]] = {}
        self.native: dict[int, NativeGroup] = {}
        self.find_masters()

    def find_masters(self) -> None:
        """Look up the half weight of every master; to be called again when there are new ones."""
        self.half_of = {half.master: half for half in self.weights.halves}

    def update(self, unscale: UnscaleAndClip, grads: Mapping[nn.Parameter, Tensor]) -> None:
        """Make one step of all groups; where `unscale.found_inf` is set on the device, nothing changes.

        grads: raw gradients by parameter, half or fp32, scaled.
        """
        found_inf, device = unscale.found_inf, self.weights.steps.device
        if found_inf is not None and unscale.clip is None:
            found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(total_norm(unscale.gradients, device))).float()))
        divisor = unscale.divisor()
        inverse = None if divisor is None else divisor.double().reciprocal().float()
        ok = None if found_inf is None else found_inf == 0
        self.weights.steps += 1
        for index, group in enumerate(self.optimizer.param_groups):
            owned = [p for p in group["params"] if self._parameter(p) in grads]
            if owned:
                self._step_group(index, group, owned, grads, inverse, ok)

    def _parameter(self, owned: Any) -> nn.Parameter:
        return self.half_of[owned].parameter if owned in self.half_of else owned

    def _step_group(
        self,
        index: int,
        group: dict[str, Any],
        owned: list[Any],
        grads: Mapping[nn.Parameter, Tensor],
        inverse: Tensor | None,
        ok: Tensor | None,
    ) -> None:
        states, counters = [self._state(p, group) for p in owned], self._counters(owned)
        halves = [self.half_of.get(p) for p in owned]
        in_memory, policy = self.weights.masters_in_memory, self.weights.policy
        tensors = StepTensors(
            # Masters that exist only around the step have no memory here; the kernel works on half weight and remainder.
            masters=[p if h is None or in_memory else None for p, h in zip(owned, halves, strict=True)],
            halves=[None if h is None else h.parameter for h in halves],
            remainders=[None if h is None else h.remainder for h in halves],
            offsets=[0 if h is None else h.offset for h in halves],
            grads=[laid_as(grads[self._parameter(p)], p) for p in owned],
            states=states,
        )
        settings: dict[str, Any] = {k: group[k] for k in ("betas", "eps", "weight_decay", "momentum", "nesterov") if k in group}
        native = self.native.setdefault(index, NativeGroup())
        if self.weights.steps.device.type == "cpu" and native.take(tensors, counters, policy.bf16_format):
            if ok is None or bool(ok):
                rule = "momentum" if self.rule is sgd and states[0] else self.rule.__name__
                native.update(rule, settings | {"lr": group["lr"]}, policy.seed, inverse, self.weights.steps)
            return
        rates, formats = self._rates(group, counters, len(owned), ok), (policy.bf16_format, policy.seed)
        if index not in self.kernels:
            self.kernels[index] = _compile_copy(_step_tensors)
        with torch.no_grad():
            free = tensors.detached()
            self.kernels[index](self.rule, settings, formats, free, list(rates.unbind()), inverse, ok, self.weights.steps)

    def _state(self, owned: Any, group: dict[str, Any]) -> list[Tensor]:
        if "momentum" in group and not group["momentum"]:
            return []
        state = self.optimizer.state[owned]
        for key in self.keys:
            if state.get(key) is None:
                state[key] = torch.zeros_like(owned)
        return [state[key] for key in self.keys]

    def _counters(self, owned: list[Any]) -> list[Tensor]:
        """AdamW's counters of steps, fp32 where the step is; none for other rules."""
        if "exp_avg_sq" not in self.keys:
            return []
        device, counters = self.weights.steps.device, []
        for p in owned:
            state = self.optimizer.state[p]
            step = state.get("step", 0.0)
            if not isinstance(step, Tensor) or step.device != device or step.dtype != torch.float32:
                step = state["step"] = torch.as_tensor(step, dtype=torch.float32).to(device)
            counters.append(step)
        return counters

    def _rates(self, group: dict[str, Any], counters: list[Tensor], count: int, ok: Tensor | None) -> Tensor:
        """A row for every tensor, (lr, and AdamW's two corrections), in float64 until done; counts the step where it is ok."""
        lr = torch.as_tensor(group["lr"], dtype=torch.float64, device=self.weights.steps.device)
        if not counters:
            return lr.float().expand(count, 1)
        t = torch.stack(counters).double() + 1
        beta1, beta2 = group["betas"]
        table = torch.stack([lr.expand_as(t), lr / (1 - beta1**t), (1 - beta2**t).rsqrt()], dim=1).float()
        torch._foreach_add_(counters, 1.0 if ok is None else ok.float())
        return table

    def finish(self) -> None:
        """Move step counters to where torch's optimizer expects them."""
        for group in self.optimizer.param_groups:
            for owned in group["params"]:
                state = self.optimizer.state.get(owned, {})
                if "step" in state and not (group.get("fused") or group.get("capturable")):
                    state["step"] = state["step"].cpu()


def _step_tensors(
    rule: UpdateRule,
    settings: dict[str, Any],
    policy: tuple[Bf16Format | None, int],
    tensors: StepTensors,
    rates: list[Tensor],
    inverse: Tensor | None,
    ok: Tensor | None,
    steps: Tensor,
) -> None:
    """One kernel for all tensors of a group. inverse: factor of the gradients, None for 1; ok: whether anything changes."""
    bf16_format, seed = policy
    for i, grad in enumerate(tensors.grads):
        master, half, remainder = tensors.masters[i], tensors.halves[i], tensors.remainders[i]
        if master is not None:
            old = master
        else:
            assert half is not None, "a weight is in fp32, or half"
            old = bf16_formats.to_fp32(half, remainder, bf16_format)
        grad = grad.float() if inverse is None else grad.float() * inverse
        new, new_states = rule(old, grad, tensors.states[i], rates[i], settings)
        new = new if ok is None else torch.where(ok, new, old)
        for state, value in zip(tensors.states[i], new_states, strict=True):
            state.copy_(value if ok is None else torch.where(ok, value, state))
        if master is not None:
            master.copy_(new)
        if half is not None:
            new_half, new_remainder = bf16_formats.from_fp32(new, half, remainder, bf16_format, seed, steps, tensors.offsets[i])
            half.copy_(new_half)
            if remainder is not None and new_remainder is not None:
                remainder.copy_(new_remainder)


def _compile_copy(function: Any) -> Any:
    # torch counts recompilations per code object and runs eagerly, without a message, beyond the eighth: each group of each run
    # gets a code object of its own.
    copy = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(copy, dynamic=False)
