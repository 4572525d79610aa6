"""Signal-to-noise ratios in decibels."""

from __future__ import annotations

import math


def decibels(signal: float, noise: float, *, most: float = math.inf) -> float:
    """10 log10(signal / noise), of two powers; `most` where there is no noise, and at most that."""
    if noise <= 0:
        return most
    return min(most, 10 * math.log10(max(signal, 1e-300) / noise))
