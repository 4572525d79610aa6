"""Give the operands and the result of sums one scale, so that adding rounds nothing.

x0 -> x1 = x0 + f(x0) -> x2 = x1 + f(x1) -> ...   one scale for all of them, as far as that pays

A sum of integers is rounded to the grid of its result. With one scale it lies on that grid already, so along a chain of residual
blocks only the branches are rounded, where each sum added a second error to theirs. The price is that the scale is the largest
of all: sums join one by one, the one that saves most noise first, while that lowers the noise that is predicted at the outputs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from compresskit.graph.normalize import Node, aten
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.quantizers import ActivationQuantizer
from compresskit.quant.passes.insert import quantizer_of

#: Relative difference of scales that are one: `nudge_scales_` moves them, by far less than half a step of any integer.
SAME_SCALE = 1e-3


@dataclass(frozen=True)
class _Sum:
    """An addition of two rounded values: the node that rounds its result, and the quantizers of the operands and the result."""

    rounding: Node
    quantizers: tuple[ActivationQuantizer, ActivationQuantizer, ActivationQuantizer]

    @property
    def is_exact(self) -> bool:
        """Whether operands and result have one scale."""
        scales = [float(quantizer.scale) for quantizer in self.quantizers]
        return max(scales) <= min(scales) * (1 + SAME_SCALE)


def exact_sums(body: fx.GraphModule) -> frozenset[Node]:
    """The roundings of sums whose operands and result have one scale: only clipping changes their values."""
    return frozenset(found.rounding for found in _rounded_sums(body) if found.is_exact)


def quantizers_in_exact_sums(body: fx.GraphModule) -> set[ActivationQuantizer]:
    """The quantizers of operands and results of sums in which these have one scale."""
    return {quantizer for found in _rounded_sums(body) if found.is_exact for quantizer in found.quantizers}


def quantizers_of_sums(body: fx.GraphModule) -> set[ActivationQuantizer]:
    """The quantizers of operands and results of sums."""
    return {quantizer for found in _rounded_sums(body) for quantizer in found.quantizers}


def align_sums_(quantized: Quantized, noise: Callable[[Quantized], Mapping[Node, float]]) -> int:
    """Give the operands and results of sums one scale where that lowers the predicted noise, in place.

    Args:
        quantized: a calibrated model.
        noise: of each rounding of it, see `rounding_noise`; not asked for where there is no sum to align.

    Returns the number of sums whose operands and result have one scale now.
    """
    sums = [found for found in _rounded_sums(quantized.body) if not any(q.is_fixed for q in found.quantizers)]
    if not sums:
        return 0
    groups = _Groups(quantized.body, sums, noise(quantized))
    while (best := max(sums, key=groups.gain)) and groups.gain(best) > 0:
        groups.join(best)
    for quantizer, scale in groups.scales().items():
        _widen_(quantizer, scale)
    return len(exact_sums(quantized.body))


class _Groups:
    """Quantizers in groups of one scale, and the noise that each group is predicted to make.

    A quantizer of scale s in a group of scale S makes (S / s)^2 of its noise. The rounding of a sum makes none where the operands
    are in its group.
    """

    def __init__(self, body: fx.GraphModule, sums: list[_Sum], noise: Mapping[Node, float]) -> None:
        self.sums = {found.rounding: found for found in sums}
        self.members = {id(q): [q] for found in sums for q in found.quantizers}
        self.group_of = {key: key for key in self.members}
        self.calls: dict[int, list[tuple[Node, float]]] = defaultdict(list)
        for node, value in noise.items():
            if node.op == "call_module":
                self.calls[id(body.get_submodule(str(node.target)))].append((node, value))

    def gain(self, found: _Sum) -> float:
        """The noise that joining a sum saves; 0 where it is one group already."""
        joined = {self.group_of[id(q)] for q in found.quantizers}
        if len(joined) == 1:
            return 0.0
        after = self._noise([q for group in joined for q in self.members[group]], joined)
        before = sum(self._noise(self.members[group], {group}) for group in joined)
        return before - after if math.isfinite(before) else 0.0

    def join(self, found: _Sum) -> None:
        """Make one group of the operands and the result of a sum."""
        first, *others = dict.fromkeys(self.group_of[id(q)] for q in found.quantizers)
        for other in others:
            for quantizer in self.members.pop(other):
                self.members[first].append(quantizer)
                self.group_of[id(quantizer)] = first

    def scales(self) -> dict[ActivationQuantizer, float]:
        """The scale of each quantizer that shares a group with others."""
        groups = [members for members in self.members.values() if len(members) > 1]
        return {q: max(float(other.scale) for other in members) for members in groups for q in members}

    def _noise(self, members: list[ActivationQuantizer], joined: Collection[int]) -> float:
        scale = max(float(q.scale) for q in members)
        return sum(
            value * (scale / float(q.scale)) ** 2
            for q in members
            for node, value in self.calls[id(q)]
            if node not in self.sums or not self._is_exact(self.sums[node], joined)
        )

    def _is_exact(self, found: _Sum, joined: Collection[int]) -> bool:
        groups = {self.group_of[id(q)] for q in found.quantizers}
        return len(groups) == 1 or groups <= set(joined)


def _rounded_sums(body: fx.GraphModule) -> list[_Sum]:
    """The additions of two rounded values whose result is rounded."""
    found = []
    for node in body.graph.nodes:
        out = body.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(out, ActivationQuantizer):
            continue
        source = node.args[0]
        while source.target is aten.relu.default:
            source = source.args[0]
        if source.target not in (aten.add.Tensor, aten.sub.Tensor) or source.kwargs or len(source.args) != 2:
            continue
        first, second = (quantizer_of(body, operand) for operand in source.args)
        if isinstance(first, ActivationQuantizer) and isinstance(second, ActivationQuantizer):
            found.append(_Sum(node, (first, second, out)))
    return found


def _widen_(quantizer: ActivationQuantizer, scale: float) -> None:
    """Give a quantizer a larger scale, such that its range begins where it did."""
    scheme, before = quantizer.scheme, float(quantizer.scale)
    with torch.no_grad():
        quantizer.scale.fill_(scale)
        if not scheme.symmetric:
            steps = round((int(quantizer.zero_point) - scheme.low) * before / scale)
            quantizer.zero_point.fill_(scheme.low + steps)
