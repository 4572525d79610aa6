"""Keep in float what one scale would destroy: values of very different ranges that are joined in one tensor.

A detector that joins boxes in pixels and scores in 0..1 would have a step of some pixels for both: every score becomes 0, and no
measure of the whole tensor shows it. Joined values share one scale wherever a concatenation runs in integers, and wherever an
operator in integers reads what a float one joins. What batches show of the ranges decides:

* a concatenation that leaves an operand few steps stays float, and so do sums, products, pooling and the like behind it, where
  they end at an output or at an operator in float. Its operands then have a scale each, and what it joins is not rounded again.
* where only layers in integers read it, they need one scale for it in any case, and it stays in integers, unless another reader
  of such an operand would suffer from that scale.
* such a layer stays float where the one scale leaves too little of its result, and a scale for each operand would not.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.distributed import on_rank_zero
from compresskit.base.task import Inputs
from compresskit.graph.capture import Captured
from compresskit.graph.interpreter import ValueOf, execute, run_graph
from compresskit.graph.normalize import Node
from compresskit.metrics import decibels
from compresskit.quant.calibration.rows import row_count, take_rows
from compresskit.quant.measured_placement.shown_ranges import Range, ShownRanges, union_of, width_of
from compresskit.quant.numerics.operators import OPERATOR_KINDS, is_float_tensor, moved_inputs
from compresskit.quant.numerics.scheme import Scheme, affine, fake_quantize
from compresskit.quant.passes.placement import JOINED, Placement

#: Steps of the joint scale below which an operand is narrow: a value that has all 255 keeps some 40 dB, one with 32 some 22 dB,
#: as if it had five bits. Where a format has few steps itself, an operand is narrow with less than an eighth of them.
NARROW_STEPS, NARROW_SHARE = 32, 1 / 8
#: dB of a layer's result below which the one scale of what it reads has lost too much: a hundredth of its power; and where an
#: operand is lost as a whole, a thousandth, which is more noise than all other roundings of such a layer make.
LOW_RESULT, LOW_RESULT_OF_NOTHING = 20.0, 30.0
LEAST_GAINED = 6.0  # dB that a scale for each operand would gain there, or the one scale is not to blame
#: Steps below which nothing is left of an operand: most of its values become one number.
NO_STEPS = 4
#: Of a layer's result, in power, that such an operand must make where the layer reads what comes to it in float, as features in
#: units of their own do, and embeddings: what belongs to the large ones is no measure of it, and no conversion is saved.
LEAST_PART = 1e-8
NOISE_ROWS = 16  # that show what a layer loses

#: Operators whose results are made of one value each, or of a mean: they hand on what is joined, channel by channel.
_HANDED_ON = frozenset({"move", "concat", "clamp", "add", "mul", "avg_pool", "mean", "sigmoid", "hardsigmoid", "leaky_relu"})


@dataclass
class _Reached:
    """What reads a value, after operators that hand it on.

    layers: in integers. handed: operators in integers by which something else is reached. other: whether something else reads it:
    an output, or an operator in float.
    """

    layers: list[Node] = field(default_factory=list)
    handed: list[Node] = field(default_factory=list)
    other: bool = False


@dataclass(frozen=True)
class _Joined:
    """A concatenation that leaves some operands few steps.

    node: the concatenation. leaves: what it joins, through other concatenations, and its range. narrow: the leaves with few
    steps, and how many. joint: the range that its one scale holds.
    """

    node: Node
    leaves: dict[Node, Range]
    narrow: dict[Node, float]
    joint: Range

    @property
    def fewest(self) -> str:
        """The leaf with the fewest steps, in words."""
        leaf = min(self.narrow, key=self.narrow.__getitem__)
        return f"one scale for all would leave {leaf.name} {self.narrow[leaf]:.1f} steps"


class SeparateScales:
    """Names the operators that stay float since one scale for joined values would destroy some of them, each with the reason.

    Called with a captured graph and a placement, again after each change of that, until it names nothing more. Of several
    processes the first decides for all.
    """

    def __init__(self, shown: ShownRanges, *, layers: bool = True) -> None:
        """layers: whether layers with weights may be left float, too."""
        self._shown, self._layers = shown, layers
        self._ranges: dict[str, Range] = {}
        self._rows: Inputs = ()
        self._losses: dict[Any, tuple[float, float, float]] = {}

    def __call__(self, captured: Captured, placement: Placement, scheme: Scheme) -> dict[str, str]:
        """scheme: format of activations."""
        concats = [node for node in captured.module.graph.nodes if _is_concat(node) and len(_leaves(node)) > 1]
        if not concats:
            return {}
        return on_rank_zero(partial(self._found, captured, placement, scheme, concats))

    def _found(self, captured: Captured, placement: Placement, scheme: Scheme, concats: list[Node]) -> dict[str, str]:
        self._ranges, self._rows = self._shown.of(captured, placement), self._shown.rows(captured, placement)[0]
        for groups in (None, self._groups(placement)):
            # Operands that a concatenation itself joins first; then those that share their scale by way of others.
            found: dict[str, str] = {}
            for node in concats:
                joined = self._joined(node, groups if node.name in placement.carried else None, scheme)
                if joined is not None:
                    found |= self._apart(captured, placement, scheme, joined)
            if found:
                return found
        return {}

    def _groups(self, placement: Placement) -> dict[str, Range]:
        """The range of the scale that each rounded value shares with others."""
        groups: dict[int, list[str]] = {}
        for point in placement.points:
            groups.setdefault(point.group, []).append(point.node)
        return {
            name: union_of([self._ranges[other] for other in names if other in self._ranges])
            for names in groups.values()
            for name in names
        }

    def _joined(self, node: Node, groups: Mapping[str, Range] | None, scheme: Scheme) -> _Joined | None:
        """What a concatenation joins, where that leaves some of it few steps; None elsewhere.

        groups: ranges of the scales that values share; None for those of the operands alone.
        """
        leaves = {leaf: self._ranges[leaf.name] for leaf in _leaves(node) if leaf.name in self._ranges}
        more = [groups[source.name] for leaf in leaves for source in _makers_of(leaf) if source.name in groups] if groups else []
        joint = union_of([*leaves.values(), *more])
        width, steps = width_of(joint, scheme), scheme.high - scheme.low
        narrow = {
            leaf: steps * own / width
            for leaf, ends in leaves.items()
            if 0 < (own := width_of(ends, scheme)) < NARROW_SHARE * width and steps * own / width < NARROW_STEPS
        }
        return _Joined(node, leaves, narrow, joint) if narrow and math.isfinite(width) else None

    def _apart(self, captured: Captured, placement: Placement, scheme: Scheme, joined: _Joined) -> dict[str, str]:
        """The operators that stay float because of one concatenation."""
        node, found = joined.node, dict[str, str]()
        reached = _reached_from(node, placement)
        if reached.other:
            found |= {n.name: f"it reads what {node.name} joins: {joined.fewest}" for n in reached.handed}
        shares = node.name in placement.carried or node.name in placement.integer
        if shares and (reached.other or self._is_read_beside(captured, placement, scheme, joined)):
            found[node.name] = f"{JOINED}: {joined.fewest}"
        layers = {n.name for n in captured.module.graph.nodes if placement.integer.get(n.name) in ("conv", "linear")}
        floats = not shares and not placement.floating.get(node.name, "").startswith(JOINED)
        layers_read = reached.layers if self._layers else []
        lost = {n.name: why for n in layers_read if (why := self._lost(captured, scheme, joined, n, floats=floats))}
        return found | (lost if layers - lost.keys() else {})  # a model without a layer in integers is no quantized one

    def _is_read_beside(self, captured: Captured, placement: Placement, scheme: Scheme, joined: _Joined) -> bool:
        """Whether something besides concatenations reads a narrow operand, and would suffer from the one scale."""
        everywhere = {point.node for point in placement.points if point.everywhere}
        for maker in {source for leaf in joined.narrow for source in _makers_of(leaf)}:
            reached = _reached_from(maker, placement, joins=False)
            if reached.other and maker.name in everywhere:
                return True
            beside = {maker: self._ranges.get(maker.name, joined.joint)}
            if any(self._lost(captured, scheme, joined, layer, beside) for layer in reached.layers):
                return True
        return False

    def _lost(
        self,
        captured: Captured,
        scheme: Scheme,
        joined: _Joined,
        layer: Node,
        beside: Mapping[Node, Range] | None = None,
        *,
        floats: bool = False,
    ) -> str:
        """Why the one scale loses too much of a layer's result; "" where it does not.

        beside: as in `_losses`. floats: whether the operands come in float.
        """
        key = (layer.name, joined.node.name, *(node.name for node in beside or ()), joined.joint)
        if key not in self._losses:
            self._losses[key] = _losses(captured, self._rows, scheme, joined, layer, beside or {})
        one, each, part = self._losses[key]
        nothing = min(joined.narrow.values()) < NO_STEPS
        poor = one < (LOW_RESULT_OF_NOTHING if nothing else LOW_RESULT) and each >= one + LEAST_GAINED
        if not poor and not (floats and nothing and part > LEAST_PART):
            return ""
        return f"it reads what {joined.node.name} joins: {joined.fewest}, and its result {one:.1f} dB"


def _is_concat(node: Node) -> bool:
    return node.op == "call_function" and OPERATOR_KINDS.get(node.target) == "concat" and is_float_tensor(node)


def _joins(node: Node) -> Iterator[tuple[Node, Node]]:
    """(concatenation, value that it joins) of a concatenation, and of those whose results it joins, instead of these."""
    for value in node.args[0]:
        inner = value
        while isinstance(inner, fx.Node) and not _is_concat(inner) and len(sources := moved_inputs(inner)) == 1:
            inner = sources[0]
        if isinstance(inner, fx.Node) and _is_concat(inner):
            yield from _joins(inner)
        elif isinstance(value, fx.Node) and is_float_tensor(value):
            yield node, value


def _leaves(node: Node) -> list[Node]:
    """The values that a concatenation joins, each once; in the place of joined ones those that they join."""
    return list(dict.fromkeys(value for _, value in _joins(node)))


def _makers_of(leaf: Node) -> list[Node]:
    """The operators that compute a value, before those that only move it."""
    while (sources := moved_inputs(leaf)) and not _is_concat(leaf):
        leaf = sources[0]
    return [leaf]


def _reached_from(node: Node, placement: Placement, *, joins: bool = True) -> _Reached:
    """What reads a value, after operators that hand it on. joins: whether concatenations hand it on, or are left out."""
    found, ends = _Reached(), dict[Node, bool]()

    def visit(value: Node) -> bool:
        """Whether anything but a layer in integers is reached."""
        if value not in ends:
            others = [reads(user, value) for user in value.users if joins or not _is_concat(user)]  # all of them are looked at
            ends[value] = any(others)
        return ends[value]

    def reads(user: Node, value: Node) -> bool:
        kind = "move" if user.target is operator.getitem else OPERATOR_KINDS.get(user.target)
        if user.name in placement.integer and kind in ("conv", "linear") and user.args[0] is value:
            found.layers += [user] * (user not in found.layers)
            return False
        if user.op != "call_function" or kind not in _HANDED_ON or not is_float_tensor(user):
            return True
        other = visit(user)
        if other and kind != "concat" and user.name in placement.integer and user not in found.handed:
            found.handed.append(user)
        return other

    found.other = visit(node)
    return found


def _losses(
    captured: Captured, inputs: Inputs, scheme: Scheme, joined: _Joined, layer: Node, beside: Mapping[Node, Range]
) -> tuple[float, float, float]:
    """What rounding of joined values does to the result of a layer.

    beside: values that it reads besides the concatenation, and their ranges; empty for a layer that reads what is joined.

    Returns (dB with one scale for all, dB with a scale for each, the share of its power that narrow operands make).
    """
    rows = row_count(inputs)
    if rows is not None and rows > NOISE_ROWS and all(0 in dims for dims in captured.varying):
        inputs = take_rows(inputs, slice(0, NOISE_ROWS))
    concats, values = {concat for concat, _ in _joins(joined.node)}, beside or joined.leaves

    def result(change: Callable[[Node, Tensor], Tensor] | None) -> Tensor:
        def compute(node: Node, value_of: ValueOf) -> Any:
            if change is None or _is_concat(node) is bool(beside) or not (beside or node in concats):
                return execute(captured.module, node, value_of)
            return execute(captured.module, node, lambda n: change(n, value_of(n)) if n in values else value_of(n))

        with torch.no_grad():
            value: Tensor = run_graph(captured.module, pytree.tree_leaves(inputs), compute=compute, until=layer)
        return value.double()

    def rounded(value: Tensor, ends: Range) -> Tensor:
        low, high = (torch.tensor(end) for end in ends)
        scale, zero_point = affine(low, high, scheme)
        return fake_quantize(value, scale.to(value.device), zero_point.to(value.device), scheme)

    clean = result(None)
    power = float(clean.square().sum())

    def noise(change: Callable[[Node, Tensor], Tensor]) -> float:
        return float((result(change) - clean).square().sum())

    one = noise(lambda _, value: rounded(value, joined.joint))
    each = noise(lambda node, value: rounded(value, values[node]))
    without = noise(lambda node, value: torch.zeros_like(value) if node in joined.narrow else value)
    return decibels(power, one), decibels(power, each), without / max(power, 1e-300)
