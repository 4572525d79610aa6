"""Settings are checked where they are made: what kind of value a field may hold, by its annotation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from compresskit.base.errors import SettingError

#: What a field of settings may hold, by its annotation; other annotations are looked at by the settings themselves.
KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "None": (type(None),)}

WORDS = {"int": "a whole number", "float": "a number", "bool": "True or False", "str": "a text"}


def check_kinds(settings: Any) -> None:
    """Raise `SettingError` where a field of a dataclass that is annotated as a number, text or a flag holds something else."""
    for field in fields(settings):
        names = [part.strip() for part in str(field.type).split("|")]
        value = getattr(settings, field.name)
        if str(field.type).startswith("Mapping["):
            right = isinstance(value, Mapping)
        elif field.type == "tuple[str, ...]":
            right = isinstance(value, tuple | list) and all(isinstance(entry, str) for entry in value)
        elif not set(names) <= KINDS.keys():
            continue
        else:
            kinds = tuple(kind for name in names for kind in KINDS[name])
            right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            right = right and not (isinstance(value, float) and not math.isfinite(value))
        if not right:
            wanted = " or ".join(WORDS.get(name, name) for name in names)
            raise SettingError(f"{type(settings).__name__}({field.name}=...): wanted {wanted}, got {value!r}")
