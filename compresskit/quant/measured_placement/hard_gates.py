"""Give a hard sigmoid another form where its bounds as integers of its input would leave a value that it gates too few steps.

A hard sigmoid that reads the integers of its input needs no arithmetic, but 3 and -3, where it bends, must be integers of its
input, so that the range of that input holds both. The input of a hard-swish is also multiplied by the result: where it keeps far
below 3, as behind a BatchNorm of small weights, it would have a few of the 255 steps. The input then has the scale of its own
values, and the hard sigmoid is an addition that its own rounding clips. Where that form cannot be, the hard sigmoid and this
product are computed in float. A gate whose input nothing else reads stays: its own result is exact enough, and faster.
"""

from __future__ import annotations

from compresskit.base.distributed import on_rank_zero
from compresskit.graph.capture import Captured
from compresskit.graph.normalize import Node
from compresskit.quant.measured_placement.shown_ranges import ShownRanges, union_of, width_of
from compresskit.quant.numerics.operators import OPERATOR_KINDS
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.passes.placement import UNANCHORED, Placement

MOST_WIDENED = 2.0  # how much wider than its values the range of such an input may be: one bit is lost there at most


class HardGates:
    """Names such hard sigmoids, each with the reason, and products that stay float; called with a captured graph and a placement.

    Of several processes the first decides for all.
    """

    def __init__(self, shown: ShownRanges, *, floats: bool = True) -> None:
        """floats: whether operators may be left float."""
        self._shown, self._floats = shown, floats

    def __call__(self, captured: Captured, placement: Placement, scheme: Scheme) -> dict[str, str]:
        """scheme: format of activations."""
        saturating = {point.node for point in placement.points if point.saturates}
        gates = [node for node in captured.module.graph.nodes if placement.integer.get(node.name) == "hardsigmoid"]
        gates = [gate for gate in gates if gate.name not in saturating]
        gated = {gate: gate.args[0] for gate in gates if len(gate.args[0].users) > 1}  # what stands directly before it
        return on_rank_zero(lambda: self._found(captured, placement, scheme, gated)) if gated else {}

    def _found(self, captured: Captured, placement: Placement, scheme: Scheme, gated: dict[Node, Node]) -> dict[str, str]:
        ranges = self._shown.of(captured, placement)
        points = {point.node: point for point in placement.points}
        found: dict[str, str] = {}
        for gate, value in gated.items():
            point = points.get(value.name)
            if point is None or point.anchor is None:
                continue
            group = [other.node for other in placement.points if other.group == point.group]
            low, high = union_of([ranges[name] for name in group if name in ranges])
            own, held = width_of((low, high), scheme), width_of((min(low, -point.anchor), max(high, point.anchor)), scheme)
            if 0 < own * MOST_WIDENED < held:
                steps = (scheme.high - scheme.low) * own / held
                reason = f"-{point.anchor:g} and {point.anchor:g} as integers would leave {value.name} {steps:.0f} steps"
                if _can_saturate(gate, placement, scheme):
                    found[gate.name] = f"{UNANCHORED}: {reason}"
                elif self._floats:
                    found |= {node.name: reason for node in (gate, *_gated_products(gate, value))}
        return found


def _can_saturate(gate: Node, placement: Placement, scheme: Scheme) -> bool:
    """Whether the rounding of a hard sigmoid can clip it: its smallest integer can stand for 0, no reader wants another scale,
    and there are integer kernels.
    """
    products = all(placement.integer.get(user.name) == "mul" for user in gate.users)
    return products and not scheme.symmetric and scheme.bits <= 8


def _gated_products(gate: Node, value: Node) -> list[Node]:
    """The products of a hard sigmoid with the value that it gates."""
    return [user for user in gate.users if OPERATOR_KINDS.get(user.target) == "mul" and {*user.all_input_nodes} == {gate, value}]
