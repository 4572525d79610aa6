"""Budgets: how much of a model a compression stage keeps or removes.

Prune(budget=keep(macs=0.5))           # half of the multiply-accumulates stay
Prune(budget=remove(channels=0.3))     # 30 % of the channels go
Sparsify(budget=remove(weights=0.9))   # 90 % of the weights go
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, ParamSpec, TypeVar

from compresskit.base.errors import SettingError
from compresskit.base.settings import as_python, refuse_unknown_settings

Quantity = Literal["macs", "parameters", "bytes", "latency", "channels", "weights"]
QUANTITIES: tuple[Quantity, ...] = ("macs", "parameters", "bytes", "latency", "channels", "weights")

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, repr=False)
class Budget:
    """A fraction of one quantity of the model; made by `keep` or `remove`.

    quantity: macs (multiply-accumulates of one sample), parameters, bytes (of the ONNX file), latency (milliseconds of one sample
        in ONNX Runtime on one thread of this machine), channels (of those that can be pruned), or weights (of those that can be
        masked).
    kept, removed: the fractions that stay and go. They add up to 1; both are stored so that neither is rounded twice.
    written: the function that made it, which `repr` repeats.
    """

    quantity: Quantity
    kept: float
    removed: float
    written: Literal["keep", "remove"] = field(compare=False)

    def __repr__(self) -> str:
        return f"{self.written}({self.quantity}={self.kept if self.written == 'keep' else self.removed!r})"


def keep(
    *,
    macs: float | None = None,
    parameters: float | None = None,
    bytes: float | None = None,
    latency: float | None = None,
    channels: float | None = None,
    weights: float | None = None,
) -> Budget:
    """Budget by the fraction of one quantity that stays, in (0, 1]: `keep(macs=0.5)`.

    Raises SettingError unless exactly one quantity is given, within its range. See `Budget` for the quantities.
    """
    given = {"macs": macs, "parameters": parameters, "bytes": bytes, "latency": latency, "channels": channels, "weights": weights}
    quantity, fraction = _single(given, "keep")
    if not (_is_number(fraction) and 0 < fraction <= 1):
        raise SettingError(f"keep({quantity}=...): wanted the fraction that stays, in (0, 1], got {fraction!r}")
    return Budget(quantity=quantity, kept=float(fraction), removed=1 - fraction, written="keep")


def remove(
    *,
    macs: float | None = None,
    parameters: float | None = None,
    bytes: float | None = None,
    latency: float | None = None,
    channels: float | None = None,
    weights: float | None = None,
) -> Budget:
    """Budget by the fraction of one quantity that goes, in [0, 1): `remove(weights=0.9)`.

    Raises SettingError unless exactly one quantity is given, within its range. See `Budget` for the quantities.
    """
    given = {"macs": macs, "parameters": parameters, "bytes": bytes, "latency": latency, "channels": channels, "weights": weights}
    quantity, fraction = _single(given, "remove")
    if not (_is_number(fraction) and 0 <= fraction < 1):
        raise SettingError(f"remove({quantity}=...): wanted the fraction that goes, in [0, 1), got {fraction!r}")
    return Budget(quantity=quantity, kept=1 - fraction, removed=float(fraction), written="remove")


def _single(given: Mapping[Any, Any], function: str) -> tuple[Quantity, Any]:
    chosen = {name: as_python(value) for name, value in given.items() if value is not None}
    if len(chosen) != 1:
        raise SettingError(f"{function}(): wanted exactly one of {', '.join(QUANTITIES)}; got {chosen or 'none'}")
    return next(iter(chosen.items()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_budget(budget: Any, where: str, allowed: tuple[Quantity, ...]) -> Budget:
    """The budget, if it is one whose quantity is among `allowed`; raises SettingError otherwise.

    where: the setting, for the message, such as "Prune(budget=...)".
    """
    if not isinstance(budget, Budget):
        raise SettingError(f"{where}: wanted a budget such as {_example(allowed[0])}, got {budget!r}")
    if budget.quantity not in allowed:
        raise SettingError(f"{where}: wanted a budget of {' or '.join(allowed)}, got {budget!r}")
    return budget


def _example(quantity: Quantity) -> str:
    return "ck.remove(weights=0.9)" if quantity == "weights" else f"ck.keep({quantity}=0.5)"


def _refuse_quantities(where: str, settings: Mapping[str, Any], allowed: tuple[Quantity, ...]) -> None:
    """Raise SettingError for a quantity, or a ratio, that is given as a setting; the message has a budget that is taken."""
    for name in ("ratio", *QUANTITIES):
        if name not in settings:
            continue
        written = next((_example(quantity) for quantity in allowed if quantity == name), _example(allowed[0]))
        if name == "ratio" and "weights" not in allowed:  # a ratio is what goes
            written = f"ck.remove({'channels' if 'channels' in allowed else allowed[0]}=0.5)"
        other = "" if name in ("ratio", *allowed) else f", and a budget here is one of {' or '.join(allowed)}"
        raise SettingError(f"{where}({name}=...): it is not a setting{other}; write budget={written}")


def takes_budget(*allowed: Quantity) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of functions with a `budget`: a quantity given as a keyword of its own gets a message that says what to write.

    allowed: quantities that the budget may be one of.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            _refuse_quantities(function.__name__, kwargs, allowed)
            return function(*args, **kwargs)

        return checked

    return decorated


class Budgeted:
    """Base of settings with a `budget`: the same message where a quantity is given as a setting of its own.

    quantities: those that the budget may be one of.
    """

    quantities: ClassVar[tuple[Quantity, ...]] = QUANTITIES

    def __new__(cls, *args: Any, **settings: Any) -> Budgeted:
        _refuse_quantities(cls.__name__, settings, cls.quantities)
        refuse_unknown_settings(cls, args, settings, {})
        return super().__new__(cls)


def percents(*fractions: float) -> tuple[str, ...]:
    """Fractions in percent, each with as many digits as tell them apart: 50.00% and 50.04%, and not 50.0% twice."""
    texts = [tuple(f"{each:.{digits}%}" for each in fractions) for digits in range(1, 10)]
    return next((found for found in texts if len({*found}) == len({*fractions})), texts[0])
