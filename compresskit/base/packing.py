"""State of a training as plain data: nested dicts, lists and tuples of tensors and numbers, and their form in a checkpoint.

{"step": 3, "sums": {"a": tensor}}   <->   {"sums/a": tensor} and {"step": 3, "sums": {"a": {"$tensor": "sums/a"}}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from compresskit.base.errors import CheckpointError


@runtime_checkable
class Resumable(Protocol):
    """An object with state of its own that a checkpoint stores: an objective, a loss, a module, a hook."""

    def resume_state(self) -> Any:
        """Return the state as tensors and plain values, nested in dicts, lists and tuples."""

    def resume_from_(self, state: Any) -> None:
        """Take over a state that `resume_state` returned."""


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Return nested state as JSON-ready data, in which each tensor is replaced by its path.

    Args:
        value: tensors, numbers, text and None, nested in dicts, lists and tuples.
        tensors: the tensors are entered here by their path.
        path: of `value` in the whole state.

    Raises:
        CheckpointError: `value` holds something else.
    """
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
    """Return the state that `pack` was given.

    Raises:
        KeyError, TypeError, ValueError: the record was not made by `pack`, or a tensor is missing.
    """
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


def module_states(model: nn.Module) -> dict[str, Any]:
    """Return the states of the modules that have one besides their tensors (`Resumable`), by name."""
    return {name: module.resume_state() for name, module in model.named_modules() if isinstance(module, Resumable)}


def restore_module_states_(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Restore the states that `module_states` returned."""
    for name, state in states.items():
        model.get_submodule(name).resume_from_(state)  # type: ignore[operator]


def attribute_state(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object, and of the objects among them, as a state that `pack` takes."""
    return {name: _attribute(value) for name, value in vars(thing).items()}


def _attribute(value: Any) -> Any:
    plain = value is None or isinstance(value, Tensor | bool | int | float | str | tuple | list | Mapping)
    return value if plain else {"$object": attribute_state(value)}


def set_attribute_state_(thing: Any, saved: Mapping[str, Any]) -> None:
    """Set the attributes of an object of the same class to those that `attribute_state` returned."""
    for name, value in saved.items():
        if isinstance(value, dict) and set(value) == {"$object"}:
            set_attribute_state_(getattr(thing, name), value["$object"])
        else:
            setattr(thing, name, value)
