"""Weights that change while a student is trained: pure functions of how much is done, 0 to 1."""

from __future__ import annotations

from collections.abc import Callable

from compresskit.base.errors import SettingError

#: A number, or `(done in [0, 1]) -> number`.
Weight = float | Callable[[float], float]


def warm_up(done: float, *, over: float = 0.1, to: float = 1.0) -> float:
    """From 0 to `to` in a straight line over the first share `over`: `Term(dkd, weight=partial(warm_up, to=2.0))`.

    Strong terms, such as those of DKD and ReviewKD, disturb a student that knows nothing yet (20 of 240 epochs there).
    """
    return to * min(1.0, done / over) if over > 0 else to


def weight_at(weight: Weight, done: float) -> float:
    """The weight when the share `done` of the training is over."""
    return weight(done) if callable(weight) else weight


def check_weight_setting(where: str, weight: Weight) -> None:
    """Raise `SettingError` for a weight below 0, at the start, half-way or at the end."""
    try:
        values = [weight_at(weight, done) for done in (0.0, 0.5, 1.0)]
    except Exception as error:
        raise SettingError(f"{where}(weight=...): wanted a number or a function of the share done, got {weight!r}") from error
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise SettingError(f"{where}(weight=...): wanted a number >= 0, got {value}{' from its function' * callable(weight)}")
