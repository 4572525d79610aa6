"""Candidates of a search whose figures come from a formula, for tests of what a search makes of them."""

from __future__ import annotations

from compresskit.search.figures import Figures

SIZES = {"float": 1.0, "dynamic": 0.3, "int8": 0.3, "int4": 0.2}


def figures_by_formula(workshop, candidate, order, folder, dense, stopwatch) -> Figures:
    """In the place of `Workshop._measured`: what removes more is smaller, faster and worse."""
    left, size = candidate.macs * candidate.rank * 0.9**candidate.blocks, SIZES[candidate.bits]
    drop = 0.1 * (1 - left * size)
    faster = 0.9 if candidate.effort == "balanced" else 1.0
    return Figures(
        metric=dense.metric - drop,
        drop=drop,
        latency=dense.latency * left * faster,
        bytes=round(dense.bytes * left * size),
        macs=round(dense.macs * left),
    )
