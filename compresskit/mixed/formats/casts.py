"""Casts around a half model: its inputs and outputs, and the modules inside it that stay in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from compresskit.base.errors import ModelError
from compresskit.mixed.formats.policy import BATCH_NORMS, Policy


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in any nest of tuples, lists and dicts, or objects with `.to(dtype)`, to a dtype; the rest untouched."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        to = getattr(value, "to", None)
        return to(dtype) if callable(to) and not isinstance(value, type) else value

    return pytree.tree_map(leaf, value)


def kept_fp32(model: nn.Module, policy: Policy) -> set[Any]:
    """Modules and parameters that stay in fp32 (and ids of buffers): by kind, by name, or because a module asks for it."""
    kinds = tuple(kind for kind in policy.keep_fp32 if isinstance(kind, type))
    kept: set[Any] = {m for m in model.modules() if isinstance(m, kinds) or getattr(m, "keeps_fp32", False)}
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


def surround(model: nn.Module, policy: Policy, known: set[nn.Module]) -> list[RemovableHandle]:
    """Let modules kept in fp32 take and give half: cast what goes in to fp32 and what comes out to the half dtype.

    Batch norms need none of it, their kernels take half inputs beside fp32 weights; the same holds for modules that ask to be
    kept with `keeps_fp32`. `known` are modules that have theirs already; new ones are added.
    """
    half = policy.param_dtype
    assert half is not None
    kinds = tuple(kind for kind in policy.keep_fp32 if isinstance(kind, type) and not issubclass(kind, BATCH_NORMS))
    names = {name for name in policy.keep_fp32 if isinstance(name, str)}
    found: list[str] = []
    handles: list[RemovableHandle] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if inside or not (name in names or isinstance(module, kinds)) or isinstance(module, BATCH_NORMS):
            continue
        found.append(name)
        if module in known:
            continue
        known.add(module)
        handles.append(module.register_forward_pre_hook(_into_fp32, with_kwargs=True))
        handles.append(module.register_forward_hook(lambda _module, _args, output: cast(output, half)))
    return handles


def _into_fp32(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return cast(args, torch.float32), cast(kwargs, torch.float32)
