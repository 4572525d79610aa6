"""The state of a run, as tensors and plain values: in fp32, by parameter name, whatever the policy and the layout of masters.

A resume under the same policy is bit-exact; under another one weights and optimizer state convert through fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import CheckpointError
from compresskit.mixed.formats.policy import HALVES

if TYPE_CHECKING:
    from compresskit.mixed.run import Run

VERSION = 1
#: Settings of a param group that say how torch computes, not what; a run keeps its own.
HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


def state_of(run: Run, *, copy: bool = True) -> dict[str, Any]:
    """Weights, buffers, optimizer, scalers, counters, schedules and averages of a run.

    copy: False for what is written at once; the tensors are then those in use.
    """
    keep = _copied if copy else Tensor.detach
    weights = run._weights
    if any(p.grad is not None for p in weights.names) or run._passes:
        raise CheckpointError("state_dict: gradients wait for their step and would be lost; call it after step()")
    return {
        "version": VERSION,
        "policy": run.policy.name,
        "digits": run.policy.digits,
        "weights": {weights.names[p]: keep(_single(v)) for p, v in weights.full().items()},
        "compensation": {s.name: keep(s.rest) for s in weights.slots if s.rest is not None and run.policy.digits == "kahan"},
        "buffers": {name: keep(_single(b)) for name, b in weights.model.named_buffers()},
        "clock": keep(weights.clock),
        "optimizer": _optimizer_state(run, keep),
        "scalers": {name: scaler.state_dict() for name, scaler in run.scalers.items()},
        "skipped": keep(run._skips),
        "late": list(run._late.read(wait=True) or []),
        "schedules": [dict(scheduled.scheduler.state_dict()) for scheduled in run._schedules],
        "averages": [{name: keep(value) for name, value in average.values.items()} for average in run._averages],
    }


def load_state(run: Run, state: dict[str, Any]) -> None:
    """Put a state into a run; everything is checked before anything is changed."""
    weights = run._weights
    _check(run, state)
    by_name = {name: p for p, name in weights.names.items()}
    slots = {slot.name: slot for slot in weights.slots}
    kahan = state["compensation"] if run.policy.digits == "kahan" else {}
    with torch.no_grad():
        for name, value in state["weights"].items():
            if name not in slots:
                by_name[name].data.copy_(value)
            elif name in kahan:
                # The half weight as it was: rounding the sum anew could fall on the other side of a tie.
                slots[name].parameter.data.copy_(value - kahan[name].float().to(value.device))
                weights.put_rest(slots[name], kahan[name])
            else:
                weights.put(slots[name], value)
        for name, buffer in weights.model.named_buffers():
            buffer.copy_(state["buffers"][name])
    weights.clock.copy_(state["clock"])
    _load_optimizer(run, state["optimizer"], by_name)
    for name, scaler in run.scalers.items():
        if name in state["scalers"]:
            scaler.load_state_dict(state["scalers"][name])
    run._skips.copy_(state["skipped"])
    if state["late"]:
        run._late.push(torch.tensor(state["late"], device=run.device))
    for scheduled, saved in zip(run._schedules, state["schedules"], strict=True):
        scheduled.scheduler.load_state_dict(saved)
    for average, values in zip(run._averages, state["averages"], strict=True):
        for name, value in values.items():
            average.values[name].copy_(value)


def _copied(value: Tensor) -> Tensor:
    return value.detach().clone()


def _single(value: Tensor) -> Tensor:
    return value.float() if value.dtype in HALVES else value


def _owners(run: Run) -> dict[Any, nn.Parameter]:
    return {slot.master: slot.parameter for slot in run._weights.slots} | {p: p for p in run._weights.names}


def _members(run: Run, group: dict[str, Any]) -> list[nn.Parameter]:
    """The parameters of a group in the order of its tensors, flat ones unfolded."""
    owners = _owners(run)
    flat = {id(b.value): b.members for b in run._flat.buffers} if run._flat else {}
    return [parameter for owned in group["params"] for parameter in flat.get(id(owned)) or [owners[owned]]]


def _optimizer_state(run: Run, keep: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    names, owners = run._weights.names, _owners(run)
    states = {owners[owned]: state for owned, state in run.optimizer.state.items() if owned in owners}
    if run._flat is not None:
        states |= run._flat.states()
    groups = []
    for group in run.optimizer.param_groups:
        settings = {key: keep(v) if isinstance(v, Tensor) else v for key, v in group.items() if key not in HOW}
        groups.append(settings | {"params": sorted(names[p] for p in _members(run, group))})
    return {
        "kind": type(run.optimizer).__name__,
        "state": {names[p]: {k: keep(v) if isinstance(v, Tensor) else v for k, v in s.items()} for p, s in states.items()},
        "groups": groups,
    }


def _load_optimizer(run: Run, saved: dict[str, Any], by_name: dict[str, nn.Parameter]) -> None:
    owned = {parameter: key for key, parameter in _owners(run).items() if key is not parameter}
    states: dict[nn.Parameter, dict[str, Any]] = {}
    run.optimizer.state.clear()
    for group, settings in zip(run.optimizer.param_groups, saved["groups"], strict=True):
        members = _members(run, group)
        group.update({k: v for k, v in settings.items() if k != "params"})
        on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in members:
            if run._weights.names[parameter] in saved["state"]:
                entry = saved["state"][run._weights.names[parameter]]
                states[parameter] = {k: _placed(k, v, parameter, run, on_device=on_device) for k, v in entry.items()}
    if run._flat is not None:
        run._flat.load_states(states)
    for parameter, state in states.items():
        run.optimizer.state[owned.get(parameter, parameter)] = state


def _placed(key: str, value: Any, parameter: nn.Parameter, run: Run, *, on_device: bool) -> Any:
    """A value of an optimizer's state where and in what the optimizer wants it; step counters as torch keeps them."""
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        return value.detach().clone().to(parameter.device if on_device else "cpu", torch.float32)
    dtype = torch.float32 if parameter.dtype in HALVES and not run.policy.pure else parameter.dtype
    return value.detach().clone().to(parameter.device, dtype if value.is_floating_point() else None)


def _check(run: Run, state: dict[str, Any]) -> None:
    if not isinstance(state, dict) or state.get("version") != VERSION:
        found = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"load_state_dict: wanted the state of a Run, version {VERSION}, got {found}")
    shapes = {name: p.shape for p, name in run._weights.names.items()}
    buffers = {name: b.shape for name, b in run._weights.model.named_buffers()}
    for kind, own, saved in (("parameter", shapes, state["weights"]), ("buffer", buffers, state["buffers"])):
        if other := sorted(set(own) ^ set(saved)):
            side = "is not in the state" if other[0] in own else "is only in the state"
            raise CheckpointError(f"load_state_dict: another model: {kind} {other[0]} {side}")
        for name, shape in own.items():
            if shape != saved[name].shape:
                got = tuple(saved[name].shape)
                raise CheckpointError(f"load_state_dict: another model: {kind} {name} is {tuple(shape)} here, {got} in the state")
    if state["optimizer"]["kind"] != type(run.optimizer).__name__:
        kinds = state["optimizer"]["kind"], type(run.optimizer).__name__
        raise CheckpointError(f"load_state_dict: the state is of optimizer {kinds[0]}, this run has {kinds[1]}; make it alike")
    names = run._weights.names
    own_groups = [sorted(names[p] for p in _members(run, group)) for group in run.optimizer.param_groups]
    if own_groups != [group["params"] for group in state["optimizer"]["groups"]]:
        raise CheckpointError("load_state_dict: the optimizer's param groups hold other parameters than the state's")
    _check_shapes(run, state["optimizer"]["state"], {name: p.shape for p, name in names.items()})
    for kind, count in (("schedules", len(run._schedules)), ("averages", len(run._averages))):
        if len(state[kind]) != count:
            raise CheckpointError(
                f"load_state_dict: the state has {len(state[kind])} {kind}, this run {count}; make it alike first"
            )


def _check_shapes(run: Run, saved: dict[str, Any], shapes: dict[str, torch.Size]) -> None:
    """Each tensor of the state is a number, or spreads over its parameter; of optimizers of torch's and of ours that is known."""
    kind = type(run.optimizer)
    if not kind.__module__.startswith(("torch.optim", "compresskit")) or kind is torch.optim.LBFGS:
        return
    for name, entry in saved.items():
        for key, value in entry.items():
            if not isinstance(value, Tensor) or (value.numel() == 1 and value.ndim <= 1):
                continue
            wanted = shapes.get(name, torch.Size())
            fits = value.ndim == len(wanted) and all(n in (1, w) for n, w in zip(value.shape, wanted, strict=True))
            if key == "step" or not fits:
                raise CheckpointError(f"load_state_dict: {key} of {name} is {tuple(value.shape)}, the parameter {tuple(wanted)}")
