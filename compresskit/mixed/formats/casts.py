"""Casts of inputs and outputs: around a half model, and around modules inside it that stay in fp32."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from compresskit.base.errors import ModelError
from compresskit.mixed.formats.policy import BATCH_NORMS, HALVES, Policy


@runtime_checkable
class HasTo(Protocol):
    """A value with a method `to(dtype)`, such as a batch object of another library."""

    def to(self, dtype: torch.dtype) -> Any: ...


@runtime_checkable
class KeepsFP32(Protocol):
    """A module that stays in fp32 under every policy where its attribute `keeps_fp32` is true, such as a quantizer."""

    keeps_fp32: bool


def in_fp32(value: Tensor) -> Tensor:
    """A half tensor in fp32, any other as it is."""
    return value.float() if value.dtype in HALVES else value


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating tensors, and objects with `to(dtype)`, in any nest of tuples, lists, dicts, dataclasses; leave the rest."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, type):
            return value
        if isinstance(value, HasTo):
            return value.to(dtype)
        return _cast_fields(value, dtype) if is_dataclass(value) else value

    return pytree.tree_map(leaf, value)


def _cast_fields(value: Any, dtype: torch.dtype) -> Any:
    """A dataclass with its fields cast; the same object where none is."""
    old = {field.name: value.__dict__[field.name] for field in fields(value) if field.name in vars(value)}
    new = {name: cast_floating(item, dtype) for name, item in old.items()}
    tensors = zip(pytree.tree_leaves(list(old.values())), pytree.tree_leaves(list(new.values())), strict=True)
    if all(before is after for before, after in tensors):
        return value
    result = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(result, name, item)  # a frozen one too
    return result


def kept_fp32(model: nn.Module, policy: Policy) -> set[Any]:
    """The modules, parameters and ids of buffers that stay in fp32: by class, by name, or by `keeps_fp32`."""
    kinds = tuple(kind for kind in policy.keep_fp32 if isinstance(kind, type))
    kept: set[Any] = {m for m in model.modules() if isinstance(m, kinds) or (isinstance(m, KeepsFP32) and m.keeps_fp32)}
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name in (name for name in policy.keep_fp32 if isinstance(name, str)):
        if name in parameters:
            kept.add(parameters[name])
        elif name in buffers:
            kept.add(id(buffers[name]))
        elif name in modules:
            kept |= set(modules[name].modules()) | set(modules[name].parameters())
        else:
            near = [known for known in (*modules, *parameters) if name in known][:3]
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise ModelError(f"Policy {policy.name}: keep_fp32 names {name!r}, which the model does not have{hint}")
    return kept


def add_cast_hooks_(model: nn.Module, policy: Policy, hooked: set[nn.Module]) -> list[RemovableHandle]:
    """Add hooks to modules kept in fp32 inside a half model that cast their inputs to fp32 and their outputs to half.

    Batch norms need none, as their kernels take half inputs beside fp32 weights; nor do modules with `keeps_fp32`.

    Args:
        model: the half model.
        policy: its `keep_fp32` says which modules.
        hooked: modules that have their hooks already; those that get them here are added.

    Returns:
        The handles that remove the hooks.
    """
    half = policy.param_dtype
    assert half is not None
    kinds = tuple(kind for kind in policy.keep_fp32 if isinstance(kind, type) and not issubclass(kind, BATCH_NORMS))
    names = {name for name in policy.keep_fp32 if isinstance(name, str)}
    outermost: list[str] = []
    handles: list[RemovableHandle] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in outermost)
        if inside or not (name in names or isinstance(module, kinds)) or isinstance(module, BATCH_NORMS):
            continue
        outermost.append(name)
        if module in hooked:
            continue
        hooked.add(module)
        handles.append(module.register_forward_pre_hook(_into_fp32, with_kwargs=True))
        handles.append(module.register_forward_hook(lambda _module, _args, output: cast_floating(output, half)))
    return handles


def _into_fp32(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)
