"""The optimizer's part of a checkpoint: fp32, by parameter name, whatever the policy and the layout of masters.

A resume under the same policy is bit-exact; under another one the optimizer's state is converted through fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import CheckpointError
from compresskit.mixed.formats.policy import HALVES
from compresskit.mixed.step.flat import FlatMasters
from compresskit.mixed.step.masters import MasterWeights

STATE_VERSION = 1
#: Settings of a param group that say how torch computes and not what; a run keeps its own.
HOW_TO_COMPUTE = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


class OptimizerState:
    """Reads and writes an optimizer's state by the names of the model's parameters, whatever tensors the optimizer has."""

    def __init__(self, optimizer: torch.optim.Optimizer, weights: MasterWeights, flat: FlatMasters | None) -> None:
        self.optimizer, self.weights, self.flat = optimizer, weights, flat

    def state_dict(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Class of the optimizer, state by parameter name, and param groups; `keep` detaches or copies a tensor."""

        def kept(values: dict[str, Any]) -> Any:
            return pytree.tree_map(lambda value: keep(value) if isinstance(value, Tensor) else value, values)

        check_no_inner_optimizer(self.optimizer)
        names, parameters = self.weights.names, self._parameters()
        states = {parameters[owned]: state for owned, state in self.optimizer.state.items() if owned in parameters}
        if self.flat is not None:
            states |= self.flat.states()
        groups = []
        for group in self.optimizer.param_groups:
            settings = kept({k: v for k, v in group.items() if k not in HOW_TO_COMPUTE and _belongs_in_state(v)})
            groups.append(settings | {"params": self._names(group)})
        return {
            "kind": type(self.optimizer).__name__,
            "state": {names[parameter]: kept(state) for parameter, state in states.items()},
            "groups": groups,
        }

    def check(self, saved: dict[str, Any]) -> None:
        """Refuse the state of another optimizer, or of one over other parameters."""
        check_no_inner_optimizer(self.optimizer)
        kind = type(self.optimizer).__name__
        if saved["kind"] != kind:
            raise CheckpointError(
                f"load_state_dict: the state is of optimizer {saved['kind']}, this run has {kind}; make it alike"
            )
        if [self._names(group) for group in self.optimizer.param_groups] != [group["params"] for group in saved["groups"]]:
            raise CheckpointError("load_state_dict: the optimizer's param groups hold other parameters than the state's")
        self._check_shapes(saved["state"])

    def load_state_dict(self, saved: dict[str, Any], *, same_policy: bool) -> None:
        """Restore what `state_dict` returned, of another policy or layout too; `check` comes first.

        same_policy: whether the state is of this policy, so that its tensors keep the dtypes that the optimizer gave them.
        """
        masters = {parameter: owned for owned, parameter in self._parameters().items() if owned is not parameter}
        states: dict[nn.Parameter, dict[str, Any]] = {}
        self.optimizer.state.clear()
        for group, settings in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            group.update(_tensors_copied({k: v for k, v in settings.items() if k != "params"}))
            on_device = bool(group.get("fused") or group.get("capturable"))
            for parameter in self._parameters_of(group):
                if (entry := saved["state"].get(self.weights.names[parameter])) is not None:
                    states[parameter] = {
                        k: self._placed(k, v, parameter, on_device=on_device, same_policy=same_policy) for k, v in entry.items()
                    }
        if self.flat is not None:
            self.flat.load_states(states)
        flattened = set() if self.flat is None else self.flat.members
        for parameter, state in states.items():
            if parameter not in flattened:
                self.optimizer.state[masters.get(parameter, parameter)] = state

    def _parameters(self) -> dict[Any, nn.Parameter]:
        """The parameter of every separate tensor that the optimizer may have."""
        return {half.master: half.parameter for half in self.weights.halves} | {p: p for p in self.weights.names}

    def _parameters_of(self, group: dict[str, Any]) -> list[nn.Parameter]:
        """The parameters of a group in the order of its tensors, those inside flat ones included."""
        parameters = self._parameters()
        return [p for owned in group["params"] for p in (self.flat and self.flat.members_of(owned)) or [parameters[owned]]]

    def _names(self, group: dict[str, Any]) -> list[str]:
        return sorted(self.weights.names[p] for p in self._parameters_of(group))

    def _placed(self, key: str, value: Any, parameter: nn.Parameter, *, on_device: bool, same_policy: bool) -> Any:
        """A value of the state in the device and dtype that the optimizer expects; step counters as torch keeps them."""
        if not isinstance(value, Tensor):
            return _tensors_copied(value)  # such as the lists of earlier steps of LBFGS
        if key == "step":
            return value.detach().clone().to(parameter.device if on_device else "cpu", torch.float32)
        pure = self.weights.policy.pure
        dtype = torch.float32 if parameter.dtype in HALVES and not pure else parameter.dtype
        dtype = dtype if value.is_floating_point() and not same_policy else value.dtype
        placed = value.detach().clone().to(parameter.device, dtype)
        if type(placed) is Tensor and type(parameter.data) is Tensor and placed.shape == parameter.shape:
            # torch's fused optimizers on a CPU take a state as it lies in memory, and files hold it in another order.
            placed = torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(placed)
        return placed

    def _check_shapes(self, saved: dict[str, Any]) -> None:
        """Each tensor is a number, or broadcasts to its parameter; known of torch's optimizers and of ours only."""
        kind = type(self.optimizer)
        # Not all of compresskit: a user's file that the command line runs is a module beneath it.
        if not kind.__module__.startswith(("torch.optim", "compresskit.mixed.")) or kind is torch.optim.LBFGS:
            return
        shapes = {name: p.shape for p, name in self.weights.names.items()}
        for name, entry in saved.items():
            for key, value in entry.items():
                if not isinstance(value, Tensor) or (value.numel() == 1 and value.ndim <= 1):
                    continue
                shape = shapes.get(name, torch.Size())
                fits = value.ndim == len(shape) and all(n in (1, size) for n, size in zip(value.shape, shape, strict=True))
                if key == "step" or not fits:
                    raise CheckpointError(
                        f"load_state_dict: {key} of {name} is {tuple(value.shape)}, the parameter {tuple(shape)}"
                    )


def check_form_of_state(state: Any, *, schedules: int, emas: int) -> None:
    """Refuse what is no state of a run, or of one with another number of schedules or averages."""
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        got = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"load_state_dict: wanted the state of a Run, version {STATE_VERSION}, got {got}")
    for kind, count in (("schedules", schedules), ("emas", emas)):
        if len(state[kind]) != count:
            raise CheckpointError(
                f"load_state_dict: the state has {len(state[kind])} {kind}, this run {count}; make it alike first"
            )


def check_no_inner_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to save or restore an optimizer that wraps another, whose state is in places that only the wrapper knows."""
    for attribute, value in vars(optimizer).items():
        leaves = value if isinstance(value, list | tuple | set) else value.values() if isinstance(value, dict) else [value]
        if inner := next((leaf for leaf in leaves if isinstance(leaf, torch.optim.Optimizer)), None):
            raise CheckpointError(
                f"state_dict: {type(optimizer).__name__} wraps {type(inner).__name__} in its attribute {attribute}, and a run"
                " cannot find all of its state; train without checkpoints, or with the optimizer inside"
            )


def _tensors_copied(value: Any) -> Any:
    """A value of a state whose tensors, lists and dicts are its own, so that going on does not change what was loaded."""
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def _belongs_in_state(value: Any) -> bool:
    """Whether a checkpoint holds a setting; a dtype or a function is as the optimizer was made, and a run keeps its own."""
    if isinstance(value, list | tuple):
        return all(map(_belongs_in_state, value))
    if isinstance(value, dict):
        return all(map(_belongs_in_state, value.values()))
    return value is None or isinstance(value, Tensor | str | int | float)
