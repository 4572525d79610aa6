"""How a ratio is shared out between layers. `(weights, ratio) -> {name: ratio}`; without one, all weights are ranked together.

uniform_ratios     the same in every layer
erk_ratios         layers with few inputs and outputs keep more (Erdos-Renyi-Kernel)
lamp_ratios        what a global ranking by each layer's share of energy would give
measured_ratios    from sensitivity curves: the cheapest loss first
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from compresskit.base.errors import SettingError

Allocation = Callable[[Mapping[str, Tensor], float], dict[str, float]]


def uniform_ratios(weights: Mapping[str, Tensor], ratio: float) -> dict[str, float]:
    """`ratio` in every layer: local pruning."""
    return dict.fromkeys(weights, ratio)


def erk_ratios(weights: Mapping[str, Tensor], ratio: float) -> dict[str, float]:
    """Density proportional to (sum of the dimensions) / (product of them), at most 1 (Evci et al., 1911.11134, section 3.1;
    Mocanu et al., 1707.04780).
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
    """Global ranking by w^2 / (sum of the w^2 of the layer that are not smaller) (LAMP, Lee et al., 2010.07611, eq. 2)."""
    scores = {}
    for name, weight in weights.items():
        energy = weight.detach().double().flatten().square().sort().values
        scores[name] = energy / energy.flip(0).cumsum(0).flip(0).clamp(min=1e-300)
    gone = round(ratio * sum(len(s) for s in scores.values()))
    order = torch.cat([s for _, s in sorted(scores.items())]).argsort(stable=True)[:gone]
    ratios, start = {}, 0
    for name, score in sorted(scores.items()):
        ratios[name] = int(((order >= start) & (order < start + len(score))).sum()) / len(score)
        start += len(score)
    return {name: ratios[name] for name in weights}


def measured_ratios(curves: Mapping[str, Mapping[float, float]]) -> Allocation:
    """Removes next where the measured loss rises least for a weight.

    curves: layer -> ratio -> loss with only that layer sparse, as `sensitivity` gives; 0 is the dense loss. Between two points
    the loss is a straight line, and what rises less further on is taken as one stretch (the lower convex hull).
    """
    for name, curve in curves.items():
        if 0.0 not in curve or len(curve) < 2:
            raise SettingError(f"measured_ratios: the curve of {name} wants the loss at ratio 0 and at least one more")

    def allocate(weights: Mapping[str, Tensor], ratio: float) -> dict[str, float]:
        if missing := sorted(set(weights) - set(curves)):
            raise SettingError(f"measured_ratios: no curve for {missing[0]}; measure it, or protect it")
        stretches = []
        for name, weight in weights.items():
            for (low, start), (high, end) in _hull(curves[name]):
                cost = (end - start) / (high - low) / weight.numel()
                stretches.append((cost, name, low, high))
        left = ratio * sum(w.numel() for w in weights.values())
        found = dict.fromkeys(weights, 0.0)
        for _, name, low, high in sorted(stretches):
            size = weights[name].numel()
            take = min(left, (high - low) * size)
            found[name] += take / size
            left -= take
        if left > 0.5:
            most = 1 - left / sum(w.numel() for w in weights.values()) / ratio
            raise SettingError(f"measured_ratios: the curves end at {ratio * most:.1%} of all weights, wanted {ratio:.1%};"
                               " measure larger ratios")  # fmt: skip
        return found

    return allocate


def _hull(curve: Mapping[float, float]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Stretches of the lower convex hull of a curve that starts at 0 and does not fall."""
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
    """Whole numbers to remove that add up to the rounded total: rounded down, then the largest remainders up."""
    exact = {name: ratios[name] * sizes[name] for name in sorted(sizes)}
    down = {name: math.floor(value + 1e-9) for name, value in exact.items()}
    left = round(sum(exact.values())) - sum(down.values())
    order = sorted(exact, key=lambda name: (down[name] - exact[name], name))
    return {name: down[name] + (name in order[:left]) for name in exact}
