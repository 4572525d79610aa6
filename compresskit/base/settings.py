"""Check settings: that the fields of a dataclass hold values of their types, and single ones by what they are for or name."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from compresskit.base.errors import SettingError

#: Metadata of a field that does not change the result of what the settings do: `field(metadata=NO_EFFECT)`. It is no part of
#: what a run recognizes a stage by.
NO_EFFECT: Mapping[str, bool] = {"compresskit_no_effect": True}
#: How messages name a type. Fields annotated with other types are checked by the settings themselves.
TYPE_WORDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    NoneType: "None",
}


def check_field_types(settings: Any, where: str = "") -> None:
    """Check the fields of a dataclass instance that are annotated as numbers, flags, text, mappings or tuples of text.

    A whole number passes for a float; True and False do not pass for numbers, nor do nan and infinity.

    Args:
        settings: are checked.
        where: the function that was called with them, none of which is recorded: NumPy's numbers and sets of text pass, too.
            "" for settings that a run records: messages then name their class.

    Raises:
        SettingError: a field holds a value of another type; the message names the field.
    """
    types = _annotations(type(settings))  # type: ignore[arg-type]  # types are hashable
    for field in fields(settings):
        value, annotation = getattr(settings, field.name), types.get(field.name)
        if (expected := _mismatch_with(annotation, as_python(value) if where else value)) is not None:
            raise SettingError(f"{where or type(settings).__name__}({field.name}=...): wanted {expected}, got {value!r}")


def stands_in(path: str, names: Iterable[str]) -> bool:
    """Whether what has a dotted name is one of the modules, layers or tensors that a setting names, or stands in one of them."""
    return any(f"{path}.".startswith(f"{name}.") for name in names)


def check_whole_number(value: Any, where: str, least: int = 1) -> None:
    """Raise `SettingError`, which begins with `where`, unless a value is a whole number of at least `least`."""
    number = as_python(value)
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise SettingError(f"{where}: wanted a whole number >= {least}, got {value!r}")


def check_flag(value: Any, where: str) -> None:
    """Raise `SettingError`, which begins with `where`, unless a value is True or False, or a 1 or 0 in their place.

    Any text, such as "no", counts as True in a condition.
    """
    number = as_python(value)
    if not isinstance(number, int | float) or number not in (0, 1):
        raise SettingError(f"{where}: wanted True or False, got {value!r}")


def check_timing(threads: Any, seconds: Any, where: str) -> None:
    """Raise `SettingError`, which begins with `where`, unless files can be timed on so many threads for so many seconds."""
    count, time = as_python(threads), as_python(seconds)
    if not isinstance(count, int) or count < 1 or not isinstance(time, int | float) or not 0 < time < math.inf:
        raise SettingError(f"{where}: wanted threads >= 1 and seconds > 0, got {threads!r} and {seconds!r}")


def check_loader(loader: Any, where: str) -> None:
    """Raise `SettingError`, which begins with `where`, for no iterable of batches, or one that is read only once."""
    if loader is None:
        return
    kind = type(loader).__name__
    if not isinstance(loader, Iterable):
        dataset = "; write DataLoader(dataset, batch_size=...)" if isinstance(loader, Dataset) else ""
        raise SettingError(f"{where}: wanted a loader of batches, got {kind}{dataset}")
    if isinstance(loader, Iterator):
        raise SettingError(
            f"{where}: wanted a loader that can be read many times, got a one-pass {kind}; pass a DataLoader, or list(...) of it"
        )
    if isinstance(loader, str | bytes | dict):  # iterable, but letters and keys are no batches
        remedy = "give a list of batches, [batch]" if isinstance(loader, dict) else "read the data, and give a DataLoader"
        raise SettingError(f"{where}: wanted a loader of batches, got {kind}; {remedy}")


def check_device(device: Any, where: str) -> None:
    """Raise `SettingError`, which begins with `where`, for what names no device; None leaves tensors where they are."""
    if device is None:
        return
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SettingError(f'{where}: wanted a device of torch, such as "cpu", "cuda" or "cuda:1", got {device!r}') from error


def refuse_unknown_settings(
    cls: type, args: Sequence[Any], settings: Mapping[str, Any], hints: Mapping[str, str], where: str = ""
) -> None:
    """Raise `SettingError` for a setting that a class does not have, or that is given without its name.

    Args:
        cls: the class that is made.
        args, settings: of the call.
        hints: what to write in the place of names that users know from elsewhere.
        where: the function that was called with them; "" for the class, which messages then name.
    """
    where = where or cls.__name__
    parameters = dict(list(inspect.signature(cls.__init__).parameters.items())[1:])  # type: ignore[misc]
    kinds = {parameter.kind for parameter in parameters.values()}
    by_position = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(args) > len(by_position) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise SettingError(f"{where}({args[len(by_position)]!r:.60}): settings are given by name: {', '.join(parameters)}")
    unknown = [name for name in settings if name not in parameters]
    if not unknown or inspect.Parameter.VAR_KEYWORD in kinds:
        return
    name = unknown[0]
    close = difflib.get_close_matches(name, parameters, n=1)
    instead = hints.get(name) or (f"{close[0]}=" if close else f"one of {', '.join(parameters)}")
    raise SettingError(f"{where}({name}=...): there is no such setting; write {instead}")


@cache
def _annotations(cls: type) -> dict[str, Any]:
    types: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        with suppress(NameError):  # a class inside a function, whose annotations name other local classes
            types |= get_type_hints(base)
    return types


def as_python(value: Any) -> Any:
    """The Python number of a NumPy or torch value that holds one, a tuple of a set; anything else as it is."""
    if isinstance(value, np.generic | np.ndarray | Tensor) and math.prod(value.shape) == 1:
        return value.item()
    return tuple(value) if isinstance(value, Set) else value


def as_python_dims(dynamic: Any) -> Any:
    """Dimensions that vary, with Python's numbers, in a tuple or a dict, which JSON and a written recipe can have.

    They may be given with NumPy's numbers, as a range, a list, a set or an array. What names no dimensions is returned as it is,
    for `check_dynamic` to refuse.
    """
    if isinstance(dynamic, Mapping):
        return {
            name: {as_python(d): each for d, each in dims.items()} if isinstance(dims, Mapping) else as_python(dims)
            for name, dims in dynamic.items()
        }
    if isinstance(dynamic, np.ndarray | Tensor) and dynamic.ndim == 0:  # a Collection that cannot be iterated
        return dynamic.item()
    return tuple(map(as_python, dynamic)) if isinstance(dynamic, Collection) and not isinstance(dynamic, str) else dynamic


def _mismatch_with(annotation: Any, value: Any) -> str | None:
    """Describe the annotated type where a value is not of it; None where it is, or where the type is not checked."""
    if get_origin(annotation) is Mapping:
        return None if isinstance(value, Mapping) else "a mapping"
    if annotation == tuple[str, ...]:
        texts = isinstance(value, tuple | list) and all(isinstance(entry, str) for entry in value)
        return None if texts else "a tuple of texts"
    types = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if not set(types) <= TYPE_WORDS.keys():
        return None
    accepted = types + ((int,) if float in types else ())
    plain = bool in types or not isinstance(value, bool)
    finite = not isinstance(value, float) or math.isfinite(value)
    return None if isinstance(value, accepted) and plain and finite else " or ".join(TYPE_WORDS[kind] for kind in types)
