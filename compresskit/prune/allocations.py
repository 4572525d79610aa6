"""Allocations: distribute a ratio over layers, `(weights, ratio) -> {name: ratio}`. Without one, all weights are ranked together.

uniform_ratios     the same in every layer
erk_ratios         layers with few inputs and outputs keep more (Erdos-Renyi-Kernel)
lamp_ratios        the ratios that a global ranking by LAMP scores gives
measured_ratios    from measured sensitivity curves: the smallest rise of the loss first
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from compresskit.base.errors import SettingError

Allocation = Callable[[Mapping[str, Tensor], float], dict[str, float]]


def check_allocation(allocation: Any, where: str) -> None:
    """Raise `SettingError`, which begins with `where`, for what is no function, no ratios by name and not None."""
    if allocation is None or isinstance(allocation, Mapping) or (callable(allocation) and not isinstance(allocation, type)):
        return
    named = f"{str(allocation).removesuffix('_ratios')}_ratios"
    known = named if named in (uniform_ratios.__name__, erk_ratios.__name__, lamp_ratios.__name__) else erk_ratios.__name__
    raise SettingError(
        f"{where}(allocation=...): wanted a function such as prune.allocations.{known}, or {{name: ratio}}, got {allocation!r}"
    )


def uniform_ratios(weights: Mapping[str, Tensor], ratio: float) -> dict[str, float]:
    """Return `ratio` for every layer: local pruning."""
    return dict.fromkeys(weights, ratio)


def erk_ratios(weights: Mapping[str, Tensor], ratio: float) -> dict[str, float]:
    """Return ratios with a density proportional to (sum of the dimensions) / (product of them), at most 1 (ERK).

    Evci et al., 1911.11134, section 3.1; Mocanu et al., 1707.04780.
    """
    raw = {name: sum(w.shape) / math.prod(w.shape) for name, w in weights.items()}
    dense: set[str] = set()
    while True:
        rest = {name: w.numel() for name, w in weights.items() if name not in dense}
        keep = (1 - ratio) * sum(w.numel() for w in weights.values()) - sum(weights[name].numel() for name in dense)
        factor = keep / sum(raw[name] * count for name, count in rest.items()) if rest else 0.0
        full = {name for name in rest if factor * raw[name] > 1}
        if not full:
            return {name: 0.0 if name in dense else 1 - factor * raw[name] for name in weights}
        dense |= full


def lamp_ratios(weights: Mapping[str, Tensor], ratio: float) -> dict[str, float]:
    """Return the ratios of a global ranking by w^2 / (sum of the layer's w^2 that are not smaller): LAMP (Lee et al.,
    2010.07611, eq. 2).
    """
    scores = {}
    for name, weight in weights.items():
        energy = weight.detach().double().flatten().square().sort().values
        scores[name] = energy / energy.flip(0).cumsum(0).flip(0).clamp(min=1e-300)
    removed = round(ratio * sum(len(s) for s in scores.values()))
    order = torch.cat([s for _, s in sorted(scores.items())]).argsort(stable=True)[:removed]
    ratios, start = {}, 0
    for name, score in sorted(scores.items()):
        ratios[name] = int(((order >= start) & (order < start + len(score))).sum()) / len(score)
        start += len(score)
    return {name: ratios[name] for name in weights}


def measured_ratios(curves: Mapping[str, Mapping[float, float]]) -> Allocation:
    """Make an allocation from measured losses: weights go first where the loss rises least for each weight removed.

    Args:
        curves: layer -> ratio -> loss with only that layer sparse, as `mask_sensitivity` measures; ratio 0 is the dense loss. The
            loss is interpolated linearly on the lower convex hull of each curve.

    Raises: SettingError, here for a curve without ratio 0 or with one point only; when the allocation is called, for a layer
        without a curve and for a ratio larger than the curves reach.
    """
    for name, curve in curves.items():
        if 0.0 not in curve or len(curve) < 2:
            raise SettingError(f"measured_ratios: the curve of {name} wants the loss at ratio 0 and at least one more")

    def allocate(weights: Mapping[str, Tensor], ratio: float) -> dict[str, float]:
        if missing := sorted(set(weights) - set(curves)):
            raise SettingError(f"measured_ratios: no curve for {missing[0]}; measure it, or protect it")
        segments = []
        for name, weight in weights.items():
            for (low, start), (high, end) in _hull(curves[name]):
                cost = (end - start) / (high - low) / weight.numel()
                segments.append((cost, name, low, high))
        total = sum(w.numel() for w in weights.values())
        remaining = ratio * total
        ratios = dict.fromkeys(weights, 0.0)
        for _, name, low, high in sorted(segments):
            size = weights[name].numel()
            count = min(remaining, (high - low) * size)
            ratios[name] += count / size
            remaining -= count
        if remaining > 0.5:
            raise SettingError(
                f"measured_ratios: the curves end at {ratio - remaining / total:.1%} of all weights, wanted {ratio:.1%}; measure"
                " larger ratios"
            )
        return ratios

    return allocate


def _hull(curve: Mapping[float, float]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Segments of the lower convex hull of a curve that starts at 0 and does not fall."""
    hull: list[tuple[float, float]] = []
    lowest = curve[0.0]
    for x in sorted(curve):
        point = (x, max(curve[x], lowest))
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    return list(itertools.pairwise(hull))


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def counts(ratios: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, int]:
    """Round ratio * size of every layer to whole numbers that add up to the rounded total (largest remainder method)."""
    exact = {name: ratios[name] * sizes[name] for name in sorted(sizes)}
    down = {name: math.floor(value + 1e-9) for name, value in exact.items()}
    missing = round(sum(exact.values())) - sum(down.values())
    order = sorted(exact, key=lambda name: (down[name] - exact[name], name))
    return {name: down[name] + (name in order[:missing]) for name in exact}
