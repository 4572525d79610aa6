"""Settings and tensors as short records that can be compared: what tells one stage of a run from another."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def fingerprint(value: Any) -> str:
    """A short hash of all tensors in nested data, or of a module's state."""
    digest = hashlib.sha256()
    leaves = value.state_dict().values() if isinstance(value, nn.Module) else pytree.tree_leaves(value)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            digest.update(str((tuple(leaf.shape), leaf.dtype)).encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def describe(value: Any) -> Any:
    """A JSON-ready record of settings: dataclasses by field, never a memory address. Functions by name, those of the user also by
    what they do: a loss that is written otherwise is another loss.

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
        value = getattr(value, "__func__", value)  # of a method
        if not isinstance(value, FunctionType) or name.startswith(("torch.", "compresskit.")):
            return name
        return f"{name} {hashlib.sha256(repr(_body(value)).encode()).hexdigest()[:8]}"
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _body(function: FunctionType) -> list[Any]:
    """What a function does, as data without addresses, line numbers or comments: its code, defaults and enclosed numbers."""
    enclosed = [_plain(cell.cell_contents) for cell in function.__closure__ or () if _is_filled(cell)]
    return [_code(function.__code__), _plain(function.__defaults__), _plain(function.__kwdefaults__), enclosed]


def _code(code: CodeType) -> list[Any]:
    constants = [_code(c) if isinstance(c, CodeType) else _plain(c) for c in code.co_consts]
    return [code.co_code.hex(), code.co_names, constants]


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):  # its order changes from process to process
        return sorted(map(repr, value))
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str | bytes) else type(value).__qualname__


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
