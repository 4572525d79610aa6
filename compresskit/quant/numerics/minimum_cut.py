"""Minimum cut of a graph with real capacities (Edmonds and Karp, 1972); the graphs here have some hundred nodes."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from typing import TypeVar

N = TypeVar("N", bound=Hashable)

LEAST_ROOM = 1e-12  # fraction of the largest finite capacity below which an edge counts as full


def minimum_cut(edges: Mapping[tuple[N, N], float], source: N, sink: N) -> frozenset[N]:
    """The nodes on the source's side of the cheapest cut that parts a source from a sink.

    edges: (from, to) -> capacity, at least 0; it may be infinite, if there is a cut without such edges.
    """
    room: dict[N, dict[N, float]] = defaultdict(lambda: defaultdict(float))
    for (start, end), capacity in edges.items():
        if start != end:
            room[start][end] += capacity
    least = LEAST_ROOM * max((c for c in edges.values() if math.isfinite(c)), default=0.0)
    while sink in (before := _reached(room, source, least)):
        path = [sink]
        while path[-1] != source:
            path.append(before[path[-1]])
        steps = list(zip(path[1:], path, strict=False))
        flow = min(room[a][b] for a, b in steps)
        for a, b in steps:
            room[a][b] -= flow
            room[b][a] += flow
    return frozenset(before)


def _reached(room: Mapping[N, Mapping[N, float]], source: N, least: float) -> dict[N, N]:
    """Every node that flow can still reach -> the node before it, breadth first."""
    before, waiting = {source: source}, deque([source])
    while waiting:
        node = waiting.popleft()
        for after, left in room[node].items():
            if left > least and after not in before:
                before[after] = node
                waiting.append(after)
    return before
