"""One scale for what several calls of one module compute at the same place.

Networks that call one encoder on several inputs (Siamese networks, triplets, two views of a picture, the frames of a clip) have
values of their own in each call. With scales of their own, whose ranges come from other data, one picture has another embedding
in each call, and its distance to itself is not 0. Where the ranges are alike, as far as calibration data can show, such values
share a scale, which all of the data sets. The maps of a detector's pyramid, whose ranges differ, keep their own; so do the steps
of a recurrence, each of which reads what the one before it computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from compresskit.base.distributed import on_rank_zero
from compresskit.graph.capture import Captured
from compresskit.graph.normalize import Node
from compresskit.quant.measured_placement.shown_ranges import Range, ShownRanges, union_of, width_of
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.passes.placement import Placement

ALIKE = 1.5  # how much wider the joint range may be than the narrowest: 3.5 dB are lost there at most


class SharedScales:
    """Joins the groups of a placement that calls of one module make, see the top of this file; called with each placement.

    Of several processes the first decides for all.
    """

    def __init__(self, shown: ShownRanges) -> None:
        self._shown = shown

    def __call__(self, captured: Captured, placement: Placement, scheme: Scheme) -> Placement:
        """scheme: format of activations."""
        places = list(_same_places(captured.module.graph, placement))
        if not places:
            return placement
        return placement.with_groups(on_rank_zero(lambda: self._groups(captured, placement, scheme, places)))

    def _groups(self, captured: Captured, placement: Placement, scheme: Scheme, places: Sequence[set[str]]) -> dict[str, int]:
        """The new group of each point."""
        ranges = self._shown.of(captured, placement)
        group = {point.node: point.group for point in placement.points}
        anchors = {point.group: (point.anchor, point.saturates) for point in placement.points}
        ends: dict[int, Range] = {}
        for point in placement.points:
            known = [found for found in (ends.get(point.group), ranges.get(point.node)) if found is not None]
            ends |= {point.group: union_of(known)} if known else {}
        joined = {number: number for number in anchors}
        for place in places:
            numbers = sorted({joined[group[name]] for name in place})
            widths = [width_of(ends[number], scheme) for number in numbers if number in ends]
            if len(widths) < len(numbers) or len({anchors[number] for number in numbers}) > 1:
                continue
            whole = union_of([ends[number] for number in numbers])
            if width_of(whole, scheme) <= ALIKE * min(widths):
                ends[numbers[0]] = whole
                joined = {number: numbers[0] if to in numbers else to for number, to in joined.items()}
        return {point.node: joined[point.group] for point in placement.points}


def _same_places(graph: fx.Graph, placement: Placement) -> Iterator[set[str]]:
    """Names of rounded values, each set of one place in the calls of a module: what it computes there, or reads from outside."""
    points = {point.node for point in placement.points}
    for calls in _repeated_calls(graph, placement):
        inside = [set(call) for call in calls]
        for nodes in zip(*calls, strict=True):
            if {node.name for node in nodes} <= points:
                yield {node.name for node in nodes}
            reads = [node.all_input_nodes for node in nodes]
            if len({len(read) for read in reads}) > 1:
                continue  # one input in two places, in one of the calls
            for read in zip(*reads, strict=True):
                outer = {source.name for source, own in zip(read, inside, strict=True) if source not in own}
                if len(outer) > 1 and outer <= points:
                    yield outer


def _repeated_calls(graph: fx.Graph, placement: Placement) -> Iterator[list[list[Node]]]:
    """The nodes of the calls of each module with weights that is called several times, where none reads the result of another."""
    found: dict[str, dict[str, list[Node]]] = {}
    for node in graph.nodes:
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items() if node.op == "call_function" else ():
            found.setdefault(path, {}).setdefault(key, []).append(node)
    repeated = {path: list(calls.values()) for path, calls in found.items() if path and len(calls) > 1}
    for path, calls in repeated.items():
        forms = {tuple(str(node.target) for node in call) for call in calls}
        layers = any(placement.integer.get(node.name) in ("conv", "linear") for node in calls[0])
        inner = any(path.startswith(f"{outer}.") for outer in repeated)  # a part of what is called several times
        if layers and not inner and len(forms) == 1 and _are_independent(graph, calls):
            yield calls


def _are_independent(graph: fx.Graph, calls: Sequence[Sequence[Node]]) -> bool:
    """Whether no call reads anything that depends on another."""
    own = {node: number for number, call in enumerate(calls) for node in call}
    behind: dict[Any, frozenset[int]] = {}
    for node in graph.nodes:
        seen = frozenset[int]().union(*(behind[source] for source in node.all_input_nodes))
        if node in own and seen - {own[node]}:
            return False
        behind[node] = seen | {own[node]} if node in own else seen
    return True
