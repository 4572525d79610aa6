"""Casts of inputs and outputs: around a half model, and around modules inside it that stay in fp32."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError
from compresskit.mixed.formats.policy import BATCH_NORMS, HALVES, Policy

log = logging.getLogger(__name__)


@runtime_checkable
class HasTo(Protocol):
    """A value with a method `to(dtype)`, such as a batch object of another library."""

    def to(self, dtype: torch.dtype) -> Any: ...


@runtime_checkable
class KeepsFP32(Protocol):
    """A module that stays in fp32 under every policy where its attribute `keeps_fp32` is true, such as a quantizer."""

    keeps_fp32: bool


@runtime_checkable
class OfFloatModel(Protocol):
    """A module that computes what the modules of a float model did without calling them, such as a quantized graph in training.

    float_modules: dotted name of each module of the float model -> its class. float_tensors: names of its parameters and buffers.
    """

    float_modules: Mapping[str, type[nn.Module]]
    float_tensors: Collection[str]

    def float_names(self) -> Mapping[str, str]:
        """Name of each parameter and buffer here -> the name that the float model has it under."""

    def keep_fp32_(self, modules: Collection[str], half: torch.dtype) -> HasRemove:
        """Let the operators of these modules compute in fp32 beside half ones, until `remove()`."""


class HasRemove(Protocol):
    """What takes something out of a model again, such as the handle of a hook."""

    def remove(self) -> None:
        """Take it out."""


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
    """The modules, parameters and ids of buffers that stay in fp32: by class, by name, or by `keeps_fp32`.

    In quantization-aware training classes and names are those of the float model. Raises ModelError for a name of nothing.
    """
    parts = _float_parts(model)
    kinds, names = _kinds_and_names(policy, parts)
    kept: set[Any] = {m for m in model.modules() if isinstance(m, KeepsFP32) and m.keeps_fp32}
    for module in model.modules():
        if isinstance(module, kinds):
            kept |= _kept_with(module)
    tensors: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= {name: id(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}
    modules = {name: m for name, m in model.named_modules() if not _lies_in(name, parts)}
    for path, part in parts.items():
        own = {_dotted(path, there): tensors[_dotted(path, here)] for here, there in part.float_names().items()}
        tensors |= own
        for chosen in _modules_kept(part, path, kinds, names):
            kept |= {tensor for name, tensor in own.items() if not chosen or name.startswith(f"{_dotted(path, chosen)}.")}
        known = {_dotted(path, name) for name in part.float_tensors}
        gone = known - own.keys() - {name for name in known if name.endswith(".num_batches_tracked")}
        for name in sorted(names & {*gone, *(_dotted(path, name) for name in part.float_modules)}):
            _warn_of_merged(name, gone, own, policy)
            names.remove(name)
    for name in sorted(names):
        if name in tensors:
            kept.add(tensors[name])
        elif name in modules:
            kept |= set(modules[name].modules()) | set(modules[name].parameters())
        else:
            own_modules = [_dotted(path, own) for path, part in parts.items() for own in part.float_modules]
            near = [known for known in dict.fromkeys([*modules, *own_modules, *tensors]) if name in known][:3]
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise ModelError(f"Policy {policy.name}: keep_fp32 names {name!r}, which the model does not have{hint}")
    return kept


def _kept_with(module: nn.Module) -> set[nn.Module]:
    """A module of a class that stays in fp32, and the modules inside it.

    A batch norm has no casts around it, so that what is inside it gets half values: of these modules, only those that compute its
    own weights stay in fp32 with it.
    """
    inside = [m for name, m in module.named_children() if name == "parametrizations" or not isinstance(module, BATCH_NORMS)]
    return {module, *(inner for child in inside for inner in child.modules())}


def _kinds_and_names(policy: Policy, parts: Mapping[str, OfFloatModel]) -> tuple[tuple[type[nn.Module], ...], set[str]]:
    """The classes and names that a policy keeps in fp32, of modules in a graph (`body.0`) the name in the float model (`0`)."""
    kept = policy.keep_fp32
    names = {name for name in kept if isinstance(name, str)}
    for path, part in parts.items():
        leads = {_dotted(path, here.removesuffix(there)) for here, there in part.float_names().items() if here.endswith(there)}
        users = {_dotted(path, name) for name in part.float_modules}
        for name, lead in ((name, lead) for name in names - users for lead in leads if lead and name.startswith(lead)):
            if (own := _dotted(path, name.removeprefix(lead))) in users:
                names = names - {name} | {own}
    return tuple(kind for kind in kept if isinstance(kind, type)), names


def _float_parts(model: nn.Module) -> dict[str, OfFloatModel]:
    return {path: module for path, module in model.named_modules() if isinstance(module, OfFloatModel)}


def _lies_in(name: str, paths: Collection[str]) -> bool:
    """Whether a dotted name is that of something inside one of the modules, but not the module itself."""
    return any(name != path and (not path or name.startswith(f"{path}.")) for path in paths)


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _modules_kept(part: OfFloatModel, path: str, kinds: tuple[type[nn.Module], ...], names: Collection[str]) -> set[str]:
    """The modules of a float model, by their names in it, that a policy keeps in fp32. path: of the part in the whole model."""
    return {name for name, kind in part.float_modules.items() if issubclass(kind, kinds) or _dotted(path, name) in names}


def _warn_of_merged(name: str, gone: Collection[str], own: Collection[str], policy: Policy) -> None:
    """Log a warning where nothing of a name of the float model is left in the graph that is trained."""
    lost, left = ([n for n in found if n == name or n.startswith(f"{name}.")] for found in (gone, own))
    if lost and not left:
        log.warning(
            "Policy %s: keep_fp32 names %r, whose weights are merged into those of another layer, or computed from others, in the"
            " graph that is trained; nothing is kept in fp32 for it",
            policy.name,
            name,
        )


def add_cast_hooks_(model: nn.Module, policy: Policy, hooked: set[nn.Module]) -> list[HasRemove]:
    """Add hooks to modules kept in fp32 inside a half model that cast their inputs to fp32 and their outputs to half.

    Batch norms need none, as their kernels take half inputs beside fp32 weights; nor do modules with `keeps_fp32`. A graph in
    which modules are not called gets casts around their operators.

    Args:
        model: the half model.
        policy: its `keep_fp32` says which modules.
        hooked: modules that have their hooks already; those that get them here are added.

    Returns:
        What removes the hooks.
    """
    half = policy.param_dtype
    assert half is not None
    parts = _float_parts(model)
    every, names = _kinds_and_names(policy, parts)
    kinds = tuple(kind for kind in every if not issubclass(kind, BATCH_NORMS))
    outermost: list[str] = []
    handles: list[HasRemove] = []
    listed: set[nn.Module] = set()  # parts of a ModuleList or ModuleDict, which is not called itself
    for name, module in model.named_modules():
        inside = _lies_in(name, [*outermost, *parts])
        is_kept = name in names or isinstance(module, kinds) or module in listed
        if inside or not is_kept or isinstance(module, BATCH_NORMS):
            continue
        if type(module).forward is nn.Module.forward:
            listed.update(module.children())
            continue
        outermost.append(name)
        if module in hooked:
            continue
        hooked.add(module)
        handles.append(module.register_forward_pre_hook(_into_fp32, with_kwargs=True))
        handles.append(module.register_forward_hook(lambda _module, _args, output: cast_floating(output, half)))
    for path, part in parts.items():
        whole = model.get_submodule(path)
        if whole not in hooked and not _lies_in(path, outermost) and (chosen := _modules_kept(part, path, every, names)):
            hooked.add(whole)
            handles.append(part.keep_fp32_(chosen, half))
    return handles


def _into_fp32(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)
