"""Schedules: how much is removed at each point of a training. `(done in [0, 1], *, end) -> ratio`, pure functions.

constant      the whole ratio from the first step
linear        in a straight line
cubic         fast while there is much to choose from, slow at the end (AGP)
exponential   the same share of what is left in equal times
cyclic        removes and lets grow again, several times
"""

from __future__ import annotations

from collections.abc import Callable

#: `(done, *, end) -> ratio`: `done` is the share of the time for removing that has passed, `end` the ratio that is asked for.
MaskSchedule = Callable[..., float]


def constant(done: float, *, end: float) -> float:
    """`end` all along: with regrowth, the schedule of RigL (Evci et al., 1911.11134)."""
    return end


def linear(done: float, *, end: float, start: float = 0.0) -> float:
    """From `start` to `end` in a straight line."""
    return start + (end - start) * done


def cubic(done: float, *, end: float, start: float = 0.0) -> float:
    """`end + (start - end) * (1 - done)^3`: automated gradual pruning (Zhu & Gupta, 1710.01878, eq. 1)."""
    return end + (start - end) * (1 - done) ** 3


def exponential(done: float, *, end: float, start: float = 0.0) -> float:
    """What is left falls by equal factors in equal times: 1 - (1 - start) * ((1 - end) / (1 - start))^done."""
    return 1 - (1 - start) * ((1 - end) / (1 - start)) ** done


def cyclic(done: float, *, end: float, start: float = 0.0, cycles: int = 3) -> float:
    """`cubic` from `start` to `end`, `cycles` times (cyclical pruning, Srinivas et al., 2202.01290); between two cycles
    weights grow again, those with the largest gradients first.
    """
    if done >= 1:
        return end
    return cubic(done * cycles % 1, end=end, start=start)
