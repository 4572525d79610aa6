"""Check that the fields of a dataclass of settings hold values of the types they are annotated with."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from torch import Tensor

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


def refuse_unknown_settings(cls: type, args: Sequence[Any], settings: Mapping[str, Any], hints: Mapping[str, str]) -> None:
    """Raise `SettingError` for a setting that a class does not have, or that is given without its name.

    Args:
        cls: the class that is made.
        args, settings: of the call.
        hints: what to write in the place of names that users know from elsewhere.
    """
    parameters = dict(list(inspect.signature(cls.__init__).parameters.items())[1:])  # type: ignore[misc]
    kinds = {parameter.kind for parameter in parameters.values()}
    by_position = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(args) > len(by_position) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise SettingError(f"{cls.__name__}({args[len(by_position)]!r:.60}): settings are given by name: {', '.join(parameters)}")
    unknown = [name for name in settings if name not in parameters]
    if not unknown or inspect.Parameter.VAR_KEYWORD in kinds:
        return
    name = unknown[0]
    close = difflib.get_close_matches(name, parameters, n=1)
    instead = hints.get(name) or (f"{close[0]}=" if close else f"one of {', '.join(parameters)}")
    raise SettingError(f"{cls.__name__}({name}=...): there is no such setting; write {instead}")


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
