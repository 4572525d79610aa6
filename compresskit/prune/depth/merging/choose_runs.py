"""Choose which runs to merge: the least importance in all that saves enough, no two of the same layers. An integer program."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compresskit.prune.depth.merging.merge_runs import ConvolutionRun

LEAST_IMPORTANCE = 1e-6  # of the largest: each merge counts as losing something, so that none is in vain


def least_important(
    runs: Mapping[str, ConvolutionRun],
    importance: Mapping[str, float],
    saved: Mapping[str, float],
    *,
    needed: float | None = None,
    count: int | None = None,
) -> tuple[str, ...] | None:
    """Names of the runs with the least sum of importances; None where too little can be saved, or there are too few.

    Importances are taken to add up; negative ones count as 0. The choice is exact for that sum (scipy's `milp`).

    Args:
        runs: to choose from, by name.
        importance, saved: of each run.
        needed: least sum of what is saved; None with `count`, or for as much as can be saved.
        count: how many to choose.
    """
    if not runs:
        return None
    from scipy.optimize import Bounds, LinearConstraint, milp  # heavy, and only this needs it

    names = list(runs)
    layers = sorted({path for run in runs.values() for path in run.layers})
    once = np.array([[float(path in runs[name].layers) for name in names] for path in layers])
    constraints = [LinearConstraint(once, -np.inf, 1)]
    saving = np.array([saved[name] for name in names])
    scale = max(float(np.abs(saving).max()), 1e-300)
    price = np.array([max(importance[name], 0.0) for name in names])
    price = 1e4 * (price / max(float(price.max()), 1e-300) + LEAST_IMPORTANCE)  # the solver stops at an absolute gap of 1e-6
    if count is not None:
        constraints.append(LinearConstraint(np.ones((1, len(names))), count, count))
    elif needed is not None:
        constraints.append(LinearConstraint(saving[None] / scale, needed * (1 - 1e-9) / scale, np.inf))
    else:
        price = -saving / scale
    found = milp(
        price,
        integrality=np.ones(len(names)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 1e-6},
    )
    return None if found.x is None else tuple(name for name, taken in zip(names, found.x, strict=True) if taken > 0.5)
