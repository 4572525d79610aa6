"""Flat masters: one fp32 tensor per param group, of which every master is a view.

One tensor to all-reduce, to save, and for an optimizer's loop to visit. For an elementwise optimizer the result is bit-equal to
separate masters (except that torch's fused Adam on a CPU rounds the values behind a multiple of its vector width by other
instructions, to the last bit). Optimizers that use a tensor as a whole (its norm, its rows) would see another tensor, and are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import SettingError, TrainingError
from compresskit.mixed.formats.bf16_in_pieces import is_dense
from compresskit.mixed.formats.policy import Policy
from compresskit.mixed.optim.lion import Lion
from compresskit.mixed.step.masters import MasterWeights

#: Optimizers whose update of a value depends on this value's own gradient and state alone.
ELEMENTWISE_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, Lion)


@dataclass(eq=False)
class FlatBuffer:
    """The flat tensor of one param group.

    value, grad: (values of all members,), fp32.
    members: the parameters of the model that it holds, in order.
    layouts: (offset, size, strides) of each member in the flat tensor.
    """

    value: Tensor
    grad: Tensor
    members: list[nn.Parameter]
    layouts: list[tuple[int, torch.Size, tuple[int, ...]]]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor in the shapes and memory formats of the members."""
        return [flat.as_strided(size, stride, offset) for offset, size, stride in self.layouts]

    def is_flat(self, value: Any) -> bool:
        """Whether a value of the optimizer's state is one flat tensor of all members."""
        return isinstance(value, Tensor) and value.shape == self.value.shape


class FlatMasters:
    """Moves the masters of a run into flat tensors, and back out at the end."""

    def __init__(self, weights: MasterWeights, optimizer: torch.optim.Optimizer) -> None:
        self.weights, self.optimizer = weights, optimizer
        self.original_params: list[list[Tensor]] = []  # of each group, which come back at the end
        self.separate_masters: dict[Tensor, nn.Parameter] = {}  # the same
        self.buffers: list[FlatBuffer] = []
        for group in optimizer.param_groups:
            self.add_group(group)

    def add_group(self, group: dict[str, Any]) -> None:
        """Flatten the masters of one more param group."""
        self.parameter_of = {half.master: half.parameter for half in self.weights.halves}
        self.half_of = {half.parameter: half for half in self.weights.halves}
        self.original_params.append(list(group["params"]))
        self.separate_masters |= {p: self.parameter_of[p] for p in group["params"] if p in self.parameter_of}
        by_device: dict[torch.device, list[Tensor]] = {}
        for p in group["params"]:
            # Frozen ones have no gradient and stay beside the buffer.
            if self.parameter_of.get(p, p).requires_grad and p.dtype == torch.float32:
                by_device.setdefault(p.device, []).append(p)
        for masters in by_device.values():
            self.buffers.append(self._flatten(group, masters))

    def _flatten(self, group: dict[str, Any], masters: list[Tensor]) -> FlatBuffer:
        value = torch.empty(sum(p.numel() for p in masters), device=masters[0].device)
        layouts, offset = [], 0
        for p in masters:
            strides = p.stride() if is_dense(p) else torch.empty(p.shape, device="meta").stride()
            layouts.append((offset, p.shape, strides))
            offset += p.numel()
        members = [self.parameter_of.get(p, p) for p in masters]
        buffer = FlatBuffer(value, torch.empty_like(value), [m for m in members if isinstance(m, nn.Parameter)], layouts)
        for p, view in zip(masters, buffer.views(value), strict=True):
            view.copy_(p.detach())
        self._flatten_states(buffer, [self.optimizer.state.pop(p, {}) for p in masters])
        flattened = {id(p) for p in masters}
        group["params"] = [value, *(p for p in group["params"] if id(p) not in flattened)]
        for parameter, view in zip(buffer.members, buffer.views(value), strict=True):
            if parameter in self.half_of:
                self.half_of[parameter].master = view
            else:
                parameter.data = view
        return buffer

    def _flatten_states(self, buffer: FlatBuffer, states: list[dict[str, Any]]) -> None:
        if not any(states):
            return
        if len({tuple(sorted(state)) for state in states}) > 1:
            raise SettingError("flat=True: the optimizer has stepped some parameters of a group and not others; start it afresh")
        joined: dict[str, Any] = {}
        for key, first in states[0].items():
            if isinstance(first, Tensor) and first.shape == buffer.layouts[0][1] and key != "step":
                joined[key] = torch.empty_like(buffer.value)
                for view, state in zip(buffer.views(joined[key]), states, strict=True):
                    view.copy_(state[key])
            else:
                if any(bool(state[key] != first) for state in states):
                    raise SettingError(f"flat=True: {key!r} differs between parameters of a group; use separate masters")
                joined[key] = first
        self.optimizer.state[buffer.value] = joined

    @property
    def members(self) -> set[nn.Parameter]:
        """All parameters that lie in a flat tensor."""
        return {parameter for buffer in self.buffers for parameter in buffer.members}

    def members_of(self, owned: Tensor) -> list[nn.Parameter]:
        """The parameters inside a flat tensor of the optimizer; none for any other tensor."""
        return next((buffer.members for buffer in self.buffers if buffer.value is owned), [])

    def states(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The optimizer's state by parameter, as with separate masters; its tensors are views of the flat ones."""
        result: dict[nn.Parameter, dict[str, Any]] = {}
        for buffer in self.buffers:
            state = self.optimizer.state.get(buffer.value, {})
            for index, parameter in enumerate(buffer.members):
                if state:
                    result[parameter] = {k: buffer.views(v)[index] if buffer.is_flat(v) else v for k, v in state.items()}
        return result

    def load_states(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Restore the optimizer's state by parameter, see `states`."""
        for buffer in self.buffers:
            self._flatten_states(buffer, [states.get(p, {}) for p in buffer.members])

    def gather_gradients(self) -> None:
        """Copy the gradients of the members into the flat gradients."""
        for buffer in self.buffers:
            grads = []
            for parameter in buffer.members:
                owned = self.half_of[parameter].master if parameter in self.half_of else parameter
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
        """Restore separate tensors with their own memory, in the optimizer's original order."""
        states = self.states()
        for group, params in zip(self.optimizer.param_groups, self.original_params, strict=True):
            group["params"] = params
        for buffer in self.buffers:
            self.optimizer.state.pop(buffer.value, None)
        views = {p: (self.half_of[p].master if p in self.half_of else p) for b in self.buffers for p in b.members}
        separate = {self.separate_masters.get(p, p): p for params in self.original_params for p in params}
        for parameter, view in views.items():
            if parameter in self.half_of:
                master = separate[parameter]
                master.copy_(view)
                self.half_of[parameter].master = master
            else:
                parameter.data = view.detach().clone()
            if parameter in states:
                copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in states[parameter].items()}
                self.optimizer.state[separate[parameter]] = copied
        self.buffers = []


def check_flat(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers and policies for which flat masters are not the same as separate ones."""
    if type(optimizer) not in ELEMENTWISE_OPTIMIZERS:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE_OPTIMIZERS)
        raise SettingError(
            f"flat=True: {type(optimizer).__name__} is not known to be elementwise and could see other tensors than it should;"
            f" use one of {names}, or separate masters"
        )
    if policy.param_dtype is not None and not policy.master:
        raise SettingError(f"flat=True: {policy.name} has no masters to lay flat; use MASTER_BF16, MASTER_FP16 or an fp32 policy")
