"""The weights of a run: half in the model, fp32 for the optimizer, and the ways between them.

masters (MASTER_*)          fp32 stays beside the half weight
digits (SPLIT, KAHAN, SR)   fp32 exists only from `load` to `save`, around the optimizer's step
pure                        the optimizer updates the half weight itself
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compresskit.base.errors import SettingError
from compresskit.mixed.formats import bf16_formats as digits
from compresskit.mixed.formats.casts import kept_fp32, surround
from compresskit.mixed.formats.parallel import whole
from compresskit.mixed.formats.policy import Policy


@dataclass(eq=False, kw_only=True)
class Slot:
    """One half weight and what the optimizer updates in its place; `start` is the global index of its first value."""

    name: str
    parameter: nn.Parameter
    master: Tensor
    rest: Tensor | None = None
    start: int = 0


class Weights:
    """Casts a model under a policy and lets the optimizer own fp32 tensors in the place of half weights."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, policy: Policy, device: torch.device) -> None:
        self.model, self.optimizer, self.policy = model, optimizer, policy
        self.names: dict[nn.Parameter, str] = {}
        held = {p for group in optimizer.param_groups for p in group["params"]}
        self.owned: dict[nn.Parameter, str] = {}
        self.size = 0  # values that have a global index so far
        self.shelter: set[nn.Module] = set()  # modules inside which casts are off
        self.slots: list[Slot] = []
        self.casted: list[nn.Parameter] = []
        self.buffers: list[tuple[nn.Module, str, Tensor]] = []
        self.handles: list[RemovableHandle] = []
        self.clock = torch.zeros((), dtype=torch.int64, device=device)  # steps so far: a counter of the stochastic rounding
        self.live, self.fp32_grads = policy.digits is None, True
        self.graded: list[tuple[str, Tensor]] = []
        if policy.param_dtype is not None:
            _check_closed(optimizer, {parameter: name for name, parameter in model.named_parameters()})
        self.admit()
        self.own(held)
        swap(optimizer, {slot.parameter: slot.master for slot in self.slots})

    def admit(self) -> None:
        """Take in what the model holds and this does not know yet, cast as the policy says."""
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}
        if self.policy.param_dtype is not None:
            kept = kept_fp32(self.model, self.policy)
            self.handles += surround(self.model, self.policy, self.shelter)
            self._to_half(self.policy.param_dtype, kept)

    def own(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note which parameters the optimizer has, in the model's order."""
        held = {*self.owned, *parameters}
        self.owned = {p: name for p, name in self.names.items() if p in held}

    def _to_half(self, dtype: torch.dtype, kept: set[Any]) -> None:
        # Masters and remainders are taken before the cast, so that nothing is lost; buffers are cast too.
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.dtype != torch.float32 or parameter in kept or module in kept:
                    continue
                self._cast(parameter, dtype, self.size)
                self.size += parameter.numel()
            if module in kept:
                continue
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.dtype == torch.float32 and id(buffer) not in kept:
                    module._buffers[name] = buffer.to(dtype)
                    self.buffers.append((module, name, buffer))
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()

    def _cast(self, parameter: nn.Parameter, dtype: torch.dtype, start: int) -> None:
        full = parameter.detach().clone()
        self.casted.append(parameter)
        parameter.data = full.to(dtype)
        parameter.grad = None
        if self.policy.pure:
            return
        slot = Slot(name=self.names[parameter], parameter=parameter, master=full, start=start)
        self.slots.append(slot)
        if self.policy.digits == "split":
            half, slot.rest = digits.split(full)
            parameter.data.copy_(half)
        elif self.policy.digits == "kahan":
            slot.rest = (full - parameter.data.float()).bfloat16()
        if not self.live:
            full.untyped_storage().resize_(0)

    def fp32_grads_(self, *, on: bool) -> None:
        """Let half weights take fp32 gradients, which saves the copy and sums in fp32 (`Tensor.grad_dtype`, pytorch#170648)."""
        self.fp32_grads = not self.casted
        if not hasattr(torch.Tensor, "grad_dtype") or self.policy.pure:
            return
        for slot in self.slots:
            slot.parameter.grad_dtype = torch.float32 if on else None
        self.fp32_grads = on or not self.slots

    def gather(self, held: dict[nn.Parameter, Tensor], into: Callable[[], None] | None = None) -> list[Tensor]:
        """Give every tensor of the optimizer its gradient, in fp32 for masters; `held` replaces `.grad`.

        A parameter without a gradient leaves its master without one; `into` moves them on into flat masters. Returns the
        gradients that the optimizer will see.
        """
        for parameter, total in held.items():
            parameter.grad = total if self.fp32_grads else total.to(parameter.dtype)
        for slot in self.slots:
            grad = held.get(slot.parameter, slot.parameter.grad)
            slot.master.grad = None if grad is None else grad.float()
        grads_of = {slot.parameter: slot.master.grad for slot in self.slots}
        self.graded = [(name, g) for p, name in self.owned.items() if (g := grads_of.get(p, p.grad)) is not None]
        if into is not None:
            into()
        return [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def nonfinite(self) -> tuple[list[str], Tensor]:
        """Names of the parameters that have a gradient in this step, and on the device which are not finite."""
        norms = torch._foreach_norm([grad for _, grad in self.graded], float("inf"))
        return [name for name, _ in self.graded], ~torch.isfinite(
            torch.stack([whole(norm).to(self.clock.device) for norm in norms])
        )

    def raw(self, held: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Gradients by parameter as they are, half or fp32, for a step that widens them itself."""
        every = {p: held.get(p, p.grad) for p in self.owned}
        grads = {p: grad for p, grad in every.items() if grad is not None}
        self.graded = [(self.owned[p], grad) for p, grad in grads.items()]
        return grads

    def zero_(self) -> None:
        """Drop all gradients."""
        self.graded = []
        for parameter in self.names:
            parameter.grad = None
        for slot in self.slots:
            slot.master.grad = None

    def widened(self, slot: Slot) -> Tensor:
        """The fp32 value of one weight: its master, or a fresh tensor made of half and remainder."""
        return slot.master if self.live else self.widen(slot.parameter.data, slot.rest, self.policy.digits)

    @staticmethod
    def widen(half: Tensor, rest: Tensor | None, kind: str | None) -> Tensor:
        """The fp32 value that a half weight and its remainder stand for."""
        if rest is None:
            return half.float()
        return digits.join(half, rest) if kind == "split" else half.float() + rest.float()

    @staticmethod
    def narrow(
        value: Tensor, half: Tensor, rest: Tensor | None, kind: str | None, seed: int, clock: Tensor, start: int
    ) -> tuple[Tensor, Tensor | None]:
        """Half weight and remainder of an fp32 value; `half` and `rest` are what they were before the step."""
        if kind == "split":
            return digits.split(value)
        if kind == "kahan" and rest is not None:
            return digits.compensate(value, half, rest)
        if kind == "stochastic":
            return digits.stochastic(value, digits.noise(seed, clock, start, value)), None
        return value.to(half.dtype), None

    def load(self) -> None:
        """Give transient masters their memory and values; the optimizer may step after it."""
        if self.live:
            return
        values = [self.widened(slot) for slot in self.slots]
        for slot, value in zip(self.slots, values, strict=True):
            slot.master.untyped_storage().resize_(value.numel() * 4)
            slot.master.copy_(value)
        self.live = True

    def save(self, *, count: bool = True) -> None:
        """Masters to half weights; transient masters give their memory back. `count` is False for a second time in one step."""
        self.clock += count
        if self.policy.digits is None:
            if self.slots:
                torch._foreach_copy_([slot.parameter.data for slot in self.slots], [slot.master for slot in self.slots])
            return
        for slot in self.slots:
            data, kind, seed = slot.parameter.data, self.policy.digits, self.policy.seed
            half, rest = self.narrow(slot.master, data, slot.rest, kind, seed, self.clock, slot.start)
            data.copy_(half)
            if slot.rest is not None and rest is not None:
                slot.rest.copy_(rest)  # in place: a CUDA graph goes on reading where it was
            slot.master.untyped_storage().resize_(0)
        self.live = False

    def put(self, slot: Slot, value: Tensor) -> None:
        """Set one weight to an fp32 value, exactly where the policy can hold it."""
        slot.parameter.data.copy_(value)
        if self.policy.digits is None:
            slot.master.copy_(value)
        elif self.policy.digits == "split":
            half, rest = digits.split(value.to(slot.parameter.device))
            slot.parameter.data.copy_(half)
            self.put_rest(slot, rest)
        elif self.policy.digits == "kahan":
            self.put_rest(slot, value.to(slot.parameter.device) - slot.parameter.data.float())

    def put_rest(self, slot: Slot, rest: Tensor) -> None:
        """Set the remainder of one weight."""
        assert slot.rest is not None
        slot.rest.copy_(rest)

    def full(self) -> dict[nn.Parameter, Tensor]:
        """Every parameter's fp32 value."""
        values = {parameter: parameter.data for parameter in self.names}
        return values | {slot.parameter: self.widened(slot) for slot in self.slots}

    def finish(self) -> None:
        """An fp32 model again, its optimizer on its own parameters."""
        for slot in self.slots:
            slot.parameter.data = self.widened(slot)
        for parameter in self.casted:
            parameter.data = parameter.data.float()
            parameter.grad = None
            if self.policy.pure:
                _float_state(self.optimizer.state.get(parameter, {}))
        for module, name, full in self.buffers:
            half = module.get_buffer(name)
            # A constant, such as a mean that inputs are normalised by, gets the digits back that half dropped.
            module._buffers[name] = full if torch.equal(full.to(half.dtype), half) else half.float()
        for handle in self.handles:
            handle.remove()
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
        swap(self.optimizer, {slot.master: slot.parameter for slot in self.slots})
        self.slots, self.casted, self.buffers, self.shelter = [], [], [], set()


def swap(optimizer: torch.optim.Optimizer, new: dict[Any, Any]) -> None:
    """Let the optimizer own `new[p]` in the place of p, with p's state."""
    for group in optimizer.param_groups:
        group["params"] = [new.get(p, p) for p in group["params"]]
    for old, replacement in new.items():
        if old in optimizer.state:
            optimizer.state[replacement] = optimizer.state.pop(old)


def _float_state(state: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            state[key] = value.float()


def _check_closed(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> None:
    for attribute, value in vars(optimizer).items():
        if attribute in ("param_groups", "state", "defaults"):
            continue
        leaves = value if isinstance(value, list | tuple | set) else [value]
        if found := [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and leaf in names]:
            raise SettingError(
                f"prepare: {type(optimizer).__name__} holds {names[found[0]]} in its attribute {attribute}, outside its"
                " param_groups, and would go on updating the half weight; use FP32 or AMP_BF16 with this optimizer"
            )
