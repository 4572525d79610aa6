"""Flat masters: one fp32 tensor per param group, of which every master is a view.

One tensor to all-reduce, to save, and for an optimizer's loop to visit. An elementwise optimizer cannot tell: it is bit-equal to
separate masters (torch's fused Adam on a CPU up to the last bit of values behind a multiple of its vector width, which it rounds
by other instructions). One that looks at a tensor as a whole (its norm, its rows) would see another tensor, and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import SettingError, TrainingError
from compresskit.mixed.formats.policy import Policy
from compresskit.mixed.optim.lion import Lion
from compresskit.mixed.step.masters import Weights

#: Optimizers whose update of a value depends on this value's own gradient and state alone.
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, Lion)


@dataclass(eq=False)
class Buffer:
    """The flat tensor of one group; `places` says where which parameter lies, and how it is laid out there."""

    value: Tensor
    grad: Tensor
    members: list[nn.Parameter]
    places: list[tuple[int, torch.Size, tuple[int, ...]]]
    group: dict[str, Any]

    def views(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor as the parameters of the group, channels_last ones included."""
        return [flat.as_strided(size, stride, start) for start, size, stride in self.places]


class Flat:
    """Puts the masters of a run into flat tensors, and takes them out again."""

    def __init__(self, weights: Weights, optimizer: torch.optim.Optimizer) -> None:
        self.weights, self.optimizer = weights, optimizer
        self.order: list[list[Tensor]] = []
        self.first: dict[Tensor, nn.Parameter] = {}  # of the separate masters, which come back at the end
        self.buffers: list[Buffer] = []
        for group in optimizer.param_groups:
            self.add(group)

    def add(self, group: dict[str, Any]) -> None:
        """Lay the masters of one more group flat."""
        self.owner = {slot.master: slot.parameter for slot in self.weights.slots}
        self.slots = {slot.parameter: slot for slot in self.weights.slots}
        self.order.append(list(group["params"]))
        self.first |= {owned: self.owner[owned] for owned in group["params"] if owned in self.owner}
        kinds: dict[torch.device, list[Tensor]] = {}
        for owned in group["params"]:
            # Frozen ones have no gradient and stay as they are, beside the buffer.
            if self.owner.get(owned, owned).requires_grad and owned.dtype == torch.float32:
                kinds.setdefault(owned.device, []).append(owned)
        for members in kinds.values():
            self.buffers.append(self._flatten(group, members))

    def _flatten(self, group: dict[str, Any], owned: list[Tensor]) -> Buffer:
        value = torch.empty(sum(p.numel() for p in owned), device=owned[0].device)
        places, start = [], 0
        for p in owned:
            strides = p.stride() if _dense(p) else torch.empty(p.shape, device="meta").stride()
            places.append((start, p.shape, strides))
            start += p.numel()
        members = [self.owner.get(p, p) for p in owned]
        buffer = Buffer(value, torch.empty_like(value), [m for m in members if isinstance(m, nn.Parameter)], places, group)
        for p, view in zip(owned, buffer.views(value), strict=True):
            view.copy_(p.detach())
        self._join_states(buffer, [self.optimizer.state.pop(p, {}) for p in owned])
        gone = {id(p) for p in owned}
        group["params"] = [value, *(p for p in group["params"] if id(p) not in gone)]
        for parameter, view in zip(buffer.members, buffer.views(value), strict=True):
            if parameter in self.slots:
                self.slots[parameter].master = view
            else:
                parameter.data = view
        return buffer

    def _join_states(self, buffer: Buffer, states: list[dict[str, Any]]) -> None:
        if not any(states):
            return
        if len({tuple(sorted(state)) for state in states}) > 1:
            raise SettingError("flat=True: the optimizer has stepped some parameters of a group and not others; start it afresh")
        joined: dict[str, Any] = {}
        for key, first in states[0].items():
            if isinstance(first, Tensor) and first.shape == buffer.places[0][1] and key != "step":
                joined[key] = torch.empty_like(buffer.value)
                for view, state in zip(buffer.views(joined[key]), states, strict=True):
                    view.copy_(state[key])
            else:
                if any(bool(state[key] != first) for state in states):
                    raise SettingError(f"flat=True: {key!r} differs between parameters of a group; use separate masters")
                joined[key] = first
        self.optimizer.state[buffer.value] = joined

    def states(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The optimizer's state of every flat parameter, as it would be without flat masters; its tensors are views."""
        result: dict[nn.Parameter, dict[str, Any]] = {}
        for buffer in self.buffers:
            state = self.optimizer.state.get(buffer.value, {})
            for index, parameter in enumerate(buffer.members):
                if state:
                    result[parameter] = {k: buffer.views(v)[index] if _whole(v, buffer) else v for k, v in state.items()}
        return result

    def load_states(self, states: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Take over such states."""
        for buffer in self.buffers:
            self._join_states(buffer, [states.pop(p, {}) for p in buffer.members])

    def gather(self) -> None:
        """The gradients of the members into the flat gradient."""
        for buffer in self.buffers:
            grads = []
            for parameter in buffer.members:
                owned = self.slots[parameter].master if parameter in self.slots else parameter
                if owned.grad is None:
                    # Zeros in its place would let momentum and decay go on, which separate masters do not.
                    raise TrainingError(
                        f"flat=True: {self.weights.names[parameter]} has no gradient in this step; freeze it before prepare, "
                        "or use separate masters"
                    )
                grads.append(owned.grad)
            torch._foreach_copy_(buffer.views(buffer.grad), grads)
            buffer.value.grad = buffer.grad

    def finish(self) -> None:
        """Separate tensors again, each with its own memory, in the optimizer's old order."""
        states = self.states()
        for group, order in zip(self.optimizer.param_groups, self.order, strict=True):
            group["params"] = order
        for buffer in self.buffers:
            self.optimizer.state.pop(buffer.value, None)
        owned = {p: (self.slots[p].master if p in self.slots else p) for b in self.buffers for p in b.members}
        previous = {self.first.get(p, p): p for order in self.order for p in order}
        for parameter, view in owned.items():
            if parameter in self.slots:
                master = previous[parameter]
                master.copy_(view)
                self.slots[parameter].master = master
            else:
                parameter.data = view.detach().clone()
            if parameter in states:
                kept = {k: v.clone() if isinstance(v, Tensor) else v for k, v in states[parameter].items()}
                self.optimizer.state[previous[parameter]] = kept
        self.buffers = []


def _whole(value: Any, buffer: Buffer) -> bool:
    return isinstance(value, Tensor) and value.shape == buffer.value.shape


def _dense(tensor: Tensor) -> bool:
    """Whether the values fill their memory without gaps or overlaps, in any order of dimensions."""
    wanted = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1:
            if stride != wanted:
                return False
            wanted *= size
    return True


def check_flat(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what would not equal separate masters."""
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise SettingError(
            f"flat=True: {type(optimizer).__name__} is not known to be elementwise and could see other tensors than it should;"
            f" use one of {names}, or separate masters"
        )
    if policy.param_dtype is not None and not policy.master:
        raise SettingError(f"flat=True: {policy.name} has no masters to lay flat; use MASTER_BF16, MASTER_FP16 or an fp32 policy")
