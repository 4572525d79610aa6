"""Fingerprints of tensors and JSON-ready descriptions of settings, by which a run recognizes its stages when it is resumed."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def fingerprint(value: Any) -> str:
    """Return a short hash of all tensors in nested data, or in the state dict of a module."""
    digest = hashlib.sha256()
    leaves = value.state_dict().values() if isinstance(value, nn.Module) else pytree.tree_leaves(value)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            digest.update(str((tuple(leaf.shape), leaf.dtype)).encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def describe(value: Any) -> Any:
    """Return a JSON-ready description of settings, without memory addresses.

    Dataclasses are described by their fields, modules by their class and a hash of their state, functions by their name. For
    functions from outside torch and compresskit a hash of the code is added, so that a changed loss is a different setting.

    >>> describe(functools.partial(torch.optim.SGD, lr=0.1))
    {'call': 'torch.optim.sgd.SGD', 'lr': 0.1}
    """
    if is_dataclass(value) and not isinstance(value, type):
        record = {"kind": type(value).__name__}
        return record | {f.name: describe(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, functools.partial):
        record = {"call": describe(value.func)}
        if value.args:
            record["args"] = describe(value.args)
        return record | {key: describe(entry) for key, entry in value.keywords.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        entries = [describe(entry) for entry in value]
        return sorted(entries, key=repr) if isinstance(value, set | frozenset) else entries
    if isinstance(value, nn.Module):
        weights = sum(p.numel() for p in value.parameters())
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        return {"module": name, "parameters": weights, "state": fingerprint(value)}
    if hasattr(value, "__qualname__"):
        name = f"{value.__module__}.{value.__qualname__}"
        value = value.__func__ if isinstance(value, MethodType) else value
        if not isinstance(value, FunctionType) or name.startswith(("torch.", "compresskit.")):
            return name
        return f"{name} {hashlib.sha256(repr(_function_code(value)).encode()).hexdigest()[:8]}"
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _function_code(function: FunctionType) -> list[Any]:
    """The code, defaults and enclosed values of a function, without addresses, line numbers or comments."""
    enclosed = [_constant_record(cell.cell_contents) for cell in function.__closure__ or () if _cell_is_filled(cell)]
    return [
        _code(function.__code__),
        _constant_record(function.__defaults__),
        _constant_record(function.__kwdefaults__),
        enclosed,
    ]


def _code(code: CodeType) -> list[Any]:
    constants = [_code(c) if isinstance(c, CodeType) else _constant_record(c) for c in code.co_consts]
    return [code.co_code.hex(), code.co_names, constants]


def _constant_record(value: Any) -> Any:
    if isinstance(value, frozenset):  # its order changes from process to process
        return sorted(map(repr, value))
    if isinstance(value, tuple):
        return [_constant_record(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(key): _constant_record(entry) for key, entry in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str | bytes) else type(value).__qualname__


def _cell_is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
