"""Nested state as tensors and JSON, and back: what a checkpoint writes down. Nothing but plain data comes out of it.

{"step": 3, "sums": {"a": tensor}}   <->   {"sums/a": tensor} and {"step": 3, "sums": {"a": {"$tensor": "sums/a"}}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from compresskit.base.errors import CheckpointError


@runtime_checkable
class Resumable(Protocol):
    """An object with state of its own that a checkpoint stores: an objective, a loss, a module, a hook."""

    def resume_state(self) -> Any:
        """Return the state as tensors and plain values, nested in dicts, lists and tuples."""

    def resume_from_(self, state: Any) -> None:
        """Take over a state that `resume_state` returned."""


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """JSON-ready data; its tensors go into `tensors` by their path. CheckpointError for what is neither."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"$tensor": path}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Mapping):
        return {"$dict": [[_key(key, path), pack(v, tensors, f"{path}/{key}" if path else str(key))] for key, v in value.items()]}
    if isinstance(value, tuple | list):
        items = [pack(v, tensors, f"{path}/{i}" if path else str(i)) for i, v in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    raise CheckpointError(f"{path or 'state'}: wanted tensors, numbers, text, lists and dicts, got {type(value).__name__}")


def _key(key: Any, path: str) -> str | int | float:
    if isinstance(key, str | int | float):
        return key
    raise CheckpointError(f"{path or 'state'}: wanted keys of text or numbers, got {type(key).__name__}")


def unpack(record: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `pack` was given. KeyError, TypeError or ValueError where the record is not one of its own."""
    if isinstance(record, list):
        return [unpack(item, tensors) for item in record]
    if not isinstance(record, dict):
        return record
    ((kind, inside),) = record.items()
    if kind == "$tensor":
        return tensors[inside]
    if kind == "$float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[inside]
    if kind == "$tuple":
        return tuple(unpack(item, tensors) for item in inside)
    if kind == "$dict":
        return {key: unpack(item, tensors) for key, item in inside}
    raise ValueError(f"unknown mark {kind!r}")


def attributes(thing: Any) -> dict[str, Any]:
    """What an object holds in its attributes, those of objects inside it included: for observers, whose class is known."""
    return {name: _held(value) for name, value in vars(thing).items()}


def _held(value: Any) -> Any:
    plain = value is None or isinstance(value, Tensor | bool | int | float | str | tuple | list | Mapping)
    return value if plain else {"$object": attributes(value)}


def set_attributes_(thing: Any, saved: Mapping[str, Any]) -> None:
    """Give an object of the same class what `attributes` read."""
    for name, value in saved.items():
        if isinstance(value, dict) and set(value) == {"$object"}:
            set_attributes_(getattr(thing, name), value["$object"])
        else:
            setattr(thing, name, value)
