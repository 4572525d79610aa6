"""Settings and tensors as short records that can be compared: what tells one stage of a run from another."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
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
    """A JSON-ready record of settings: dataclasses by field, functions by name, never a memory address.

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
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"
