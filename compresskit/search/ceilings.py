"""`at_most`: what a compressed model may cost, in any of several quantities at once."""

from __future__ import annotations

import math
import numbers
import re
from dataclasses import dataclass, field, fields
from typing import Any

from compresskit.base.errors import SettingError
from compresskit.base.settings import as_python
from compresskit.search.figures import Figures

#: Factor of each unit, by quantity; milliseconds, bytes, multiply-accumulates, the metric's own unit, minutes.
UNITS: dict[str, dict[str, float]] = {
    "latency": {"": 1.0, "ms": 1.0, "us": 1e-3, "s": 1e3},
    "bytes": {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30},
    "macs": {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9},
    "drop": {"": 1.0, "%": 0.01, "pt": 0.01},
    "minutes": {"": 1.0, "min": 1.0, "h": 60.0, "s": 1 / 60},
}
EXAMPLES_OF = {
    "latency": '"5ms", 5 (milliseconds), or "0.4x" of the uncompressed file\'s',
    "bytes": '"1MB", 1000000, or "0.1x" of the uncompressed file\'s',
    "macs": '"10M", 10000000, or "0.5x" of the uncompressed model\'s',
    "drop": '0.005 (in the unit of the metric) or "0.5pt" (hundredths)',
    "minutes": '30, "30min" or "2h"',
}
MEASURED = ("latency", "bytes", "macs")  # quantities that do not depend on the weights
LARGEST_PLAUSIBLE_DROP = 0.3


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The largest value that a quantity may have: `value` in its unit, or, if `relative`, times that of the uncompressed file.

    as_text: whether it was given as text, whose unit somebody thought of.
    """

    value: float
    relative: bool = False
    as_text: bool = field(default=False, compare=False)

    @property
    def implausible(self) -> bool:
        """Whether, as a drop of an accuracy, it may be in points, where a fraction is wanted."""
        return self.value > LARGEST_PLAUSIBLE_DROP and not self.as_text


@dataclass(frozen=True, kw_only=True, repr=False)
class Ceilings:
    """The budget of a search; made by `at_most`, which explains the settings. None: no ceiling."""

    latency: Ceiling | None = None
    bytes: Ceiling | None = None
    macs: Ceiling | None = None
    drop: Ceiling | None = None
    minutes: Ceiling | None = None
    threads: int = 1
    batch: int = 1

    def __repr__(self) -> str:
        found = []
        for each in fields(self):
            value = vars(self)[each.name]
            if isinstance(value, Ceiling):
                quoted = each.name == "drop" and value.as_text and value.value > LARGEST_PLAUSIBLE_DROP
                text = f'"{value.value:g}x"' if value.relative else f'"{value.value!r}"' if quoted else f"{value.value!r}"
                found.append(f"{each.name}={text}")
            elif value is not None and value != each.default:
                found.append(f"{each.name}={value!r}")
        return f"at_most({', '.join(found)})"

    def absolute(self, dense: Figures) -> dict[str, float]:
        """The ceilings of what is measured of a file, by quantity, in milliseconds, bytes, MACs and the metric's unit."""
        given = {name: vars(self)[name] for name in (*MEASURED, "drop") if vars(self)[name] is not None}
        return {name: c.value * dense.get(name) if c.relative else c.value for name, c in given.items()}


def at_most(
    *,
    latency: float | str | None = None,
    bytes: float | str | None = None,
    macs: float | str | None = None,
    drop: float | str | None = None,
    minutes: float | str | None = None,
    threads: int = 1,
    batch: int = 1,
) -> Ceilings:
    """A budget for `compress`: what the compressed model may cost. What is not given is minimised.

    at_most(latency="5ms", bytes="1MB")     the best metric within both
    at_most(drop=0.005)                     the fastest file that loses at most half a point of accuracy
    at_most(latency="0.3x", drop="1pt")     the smallest file within both

    Args:
        latency: milliseconds of one call of the exported file, "5ms", or "0.4x" of the uncompressed file's.
        bytes: of the exported file: "1MB", "300KiB", or "0.1x" of the uncompressed file's.
        macs: multiply-accumulates of one sample, the first of the validation data: "10M", or "0.5x".
        drop: how much worse the metric may be, in its own unit: 0.005 is half a point of accuracy. "0.5pt" is the same.
        minutes: how long may be trained in all.
        threads, batch: of the calls whose latency counts.

    Raises SettingError for values out of range, and where no quantity is given.
    """
    given = {"latency": latency, "bytes": bytes, "macs": macs, "drop": drop, "minutes": minutes}
    parsed = {name: None if value is None else parse_ceiling(name, as_python(value)) for name, value in given.items()}
    if not any(parsed[name] for name in (*MEASURED, "drop")):
        got = "none" if minutes is None else "minutes= alone, which is how long may be trained"
        raise SettingError(
            f"at_most(): wanted at least one of latency=, bytes=, macs= and drop=, got {got}; such as latency='5ms'"
        )
    threads, batch = as_python(threads), as_python(batch)
    for name, value in (("threads", threads), ("batch", batch)):
        if type(value) is not int or value < 1:
            raise SettingError(f"at_most({name}=...): wanted a whole number >= 1, got {value!r}")
    return Ceilings(**parsed, threads=threads, batch=batch)


def parse_ceiling(name: str, value: Any) -> Ceiling:
    """A ceiling from a number in the unit of its quantity, or from a text with a unit. Raises SettingError for anything else."""
    if isinstance(value, numbers.Real):
        try:
            float(value)
        except OverflowError:
            value = math.inf  # that is what it is among floats
    refusal = SettingError(f"at_most({name}=...): wanted {EXAMPLES_OF[name]}; got {value!r}")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z%]*)\s*", value)
        if match is None:
            raise refusal
        number, unit = float(match[1]), match[2].lower()
        if unit == "x" and name in MEASURED:
            result = Ceiling(value=number, relative=True)
        elif unit in UNITS[name]:
            result = Ceiling(value=number * UNITS[name][unit], as_text=True)
        else:
            raise refusal
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        result = Ceiling(value=float(value))
    else:
        raise refusal
    least_is_zero = name == "drop"
    if not math.isfinite(result.value) or result.value < 0 or (result.value == 0 and not least_is_zero):
        raise refusal
    if name in ("bytes", "macs") and not result.relative and result.value < 1:
        raise SettingError(f'{refusal}; for a share of the uncompressed one write "{result.value:g}x"')
    return result
