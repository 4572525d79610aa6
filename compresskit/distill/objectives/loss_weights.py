"""Weights of losses that change during training: numbers, or functions of the fraction of the training that is done."""

from __future__ import annotations

from collections.abc import Callable

from compresskit.base.errors import SettingError

#: A number, or a function `(done in [0, 1]) -> number`.
LossWeight = float | Callable[[float], float]


def linear_warmup(done: float, *, over: float = 0.1, to: float = 1.0) -> float:
    """Rise linearly from 0 to `to`, for a loss that disturbs an untrained student: `Term(losses.dkd, weight=linear_warmup)`.

    DKD (2203.08679) and ReviewKD (2104.09044) warm up over 20 of 240 epochs.

    Args:
        done: fraction of the training that is done, in [0, 1].
        over: fraction of the training after which the weight stays at `to`.
        to: the final weight; set both with `functools.partial(linear_warmup, over=0.2, to=2.0)`.
    """
    return to * min(1.0, done / over) if over > 0 else to


def weight_at(weight: LossWeight, done: float) -> float:
    """Return the weight when the fraction `done` of the training is over."""
    return weight(done) if callable(weight) else weight


def check_loss_weight(where: str, weight: LossWeight) -> None:
    """Raise `SettingError` for a weight that is below 0 or no number at the start, half-way or at the end of the training."""
    try:
        values = [weight_at(weight, done) for done in (0.0, 0.5, 1.0)]
    except Exception as error:
        raise SettingError(f"{where}(weight=...): wanted a number or a function of the share done, got {weight!r}") from error
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise SettingError(f"{where}(weight=...): wanted a number >= 0, got {value}{' from its function' * callable(weight)}")
