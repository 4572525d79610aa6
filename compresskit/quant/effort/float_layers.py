"""Choose the layers that should stay float: those whose rounding makes much noise for the work that they are.

The noise of the outputs is the sum of what each rounding adds (`rounding_noise`). A rounding of an activation is gone only where
all operators that it serves are float, so whole regions must be weighed, not single layers. For a price of work, the set of
operators that saves most noise for its price is a minimum cut (the "project selection" problem: each rounding is a project that
needs its operators). The lower the price, the larger the set, and each holds the ones before.

The price is for the work, or for time: of the work, of which convolutions of few channels take little more in float, and of the
conversions where float and integers meet.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from compresskit.graph.capture import parameter_name
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor
from compresskit.quant.measured_placement.placement_model import OperatorTimes
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.minimum_cut import minimum_cut
from compresskit.quant.numerics.operators import OPERATOR_KINDS
from compresskit.quant.passes.coverage import element_count, example_rows
from compresskit.quant.passes.placement import Placement

#: A set is worth its price where its share of the noise is at least this many times its share of the work.
LEAST_RATIO = 1.0
#: The same where nearly all layers may be float: those that stay in integers then save most time for their noise.
LEAST_RATIO_OF_NEARLY_ALL = LEAST_RATIO / 8
#: Multiply-accumulates in float that take as long as converting a value from float to integers or back: read off the profile of
#: the face detector of `benchmarks/real_networks.py` with AVX512-VNNI (`audit(..., profile=True)`).
CONVERSION = 20
#: Input times output channels of a convolution (of each group) up to which the float kernel is as fast: the integer one copies
#: the windows of its input, a few bytes at a time. Read off kernels of 3x3 and 5x5 with AVX512-VNNI: of 3 channels and 16 outputs
#: they take 1.3 to 1.6 times as long as in float, of 64 outputs 0.6 times; of one channel and 64 outputs 1.7 times.
NO_SLOWER_IN_FLOAT = 128
#: The largest share of the work that may be float where float takes no longer: small files are wanted, too.
MOST_FREE = 0.5
PRICES = tuple(2 ** (step / 4) for step in range(24, -1, -1))  # as multiples of the least


@dataclass(frozen=True)
class FloatLayers:
    """Operators that should stay float, and what that is predicted to do.

    names: of their nodes. work: their share of the work, with those that were float before. noise: the share of the noise that is
    left, of what there was with these. free: those that are measured to take no longer in float. slower: whether all together,
    conversions included, are predicted to take longer in float; True where nothing is measured.
    """

    names: frozenset[str]
    work: float
    noise: float
    free: frozenset[str] = frozenset()
    slower: bool = True


def choose_float_layers(
    quantized: Quantized,
    noise: Mapping[Node, float],
    most_work: float,
    before: Collection[str] = (),
    *,
    free: Collection[str] = (),
    by_time: bool = False,
    measured: OperatorTimes | None = None,
    least_ratio: float = LEAST_RATIO,
) -> FloatLayers:
    """Choose the operators that should stay float.

    Args:
        quantized: a calibrated model.
        noise: of each rounding, see `rounding_noise`.
        most_work: the largest share of the work that may be float. A multiply-accumulate is one, and so is a value written. By
            time, convolutions of few channels do not count, nor does what takes no longer in float, up to `MOST_FREE`.
        before: names of operators that were chosen before, and are float; they count.
        free: names of operators that were chosen before since they take no longer in float.
        by_time: weigh noise against time, conversions included, and not against the work alone.
        measured: the times of the operators; None estimates them.
        least_ratio: the share of the noise, for each share of the work, that makes a set worth its price.

    Returns the largest choice within these bounds, which may be empty.
    """
    placement = quantized.placement
    needs = {node: _served(node, placement) for node in noise if noise[node] > 0}
    nodes = {node.name: node for node in quantized.body.graph.nodes}
    work = {name: float(_work(node, placement)) for name, node in nodes.items() if name in placement.integer}
    all_work = sum(work.values())
    times, conversion = dict(work), 0.0
    if by_time and measured is not None:
        unit = all_work / measured.milliseconds  # work that takes a millisecond
        times = {name: unit * measured.extra.get(name, 0.0) for name in work}
        conversion = unit * measured.conversion
    elif by_time:
        times, conversion = _times(quantized, work), float(CONVERSION)
    times = _less_conversions(times, noise, placement, conversion)
    left = {name: float(_work(nodes[name], placement)) for name in before if name in nodes and name not in work}
    few = {name for name in (*work, *left) if by_time and _has_few_channels(quantized.body, nodes[name])}
    fast = {name for name in work if by_time and measured is not None and measured.extra.get(name, 0.0) < 0}
    spent = sum(left.values())
    counted = [sum(value for name, value in left.items() if name not in some) for some in (few.union(free), few)]
    all_work, all_noise = all_work + spent, sum(noise.values())
    best = FloatLayers(frozenset(), spent / max(1.0, all_work), 1.0)
    if not work or not 0 < all_noise < float("inf"):
        return best
    bounds = [(most_work * all_work, few | fast, counted[0]), (max(most_work, MOST_FREE) * all_work, few, counted[1])]
    times |= {name: math.inf for name in work if _is_too_much([name], work, bounds)}  # else they would stand in the way of others
    edges = _conversions(noise, placement, conversion)
    for price in PRICES:
        names = _worth(needs, noise, least_ratio * price * all_noise / all_work, times, edges)
        share = (spent + sum(work[name] for name in names)) / all_work
        if placement.costs.keys() & work.keys() <= names or _is_too_much(names, work, bounds):
            break  # at least one layer stays in integers
        saved = sum(noise[node] for node, served in needs.items() if served <= names)
        taken = sum(times[name] for name in names) + sum(v for (a, b), v in edges.items() if a in names and b not in names)
        best = FloatLayers(names, share, 1 - saved / all_noise, frozenset(names & fast), measured is None or taken > 0)
    return best


def _is_too_much(
    names: Collection[str], work: Mapping[str, float], bounds: Sequence[tuple[float, frozenset[str] | set[str], float]]
) -> bool:
    """Whether operators are more work than one of the bounds allows: (the most, operators that do not count, before)."""
    return any(before + sum(work[name] for name in names if name not in free) > most for most, free, before in bounds)


def _worth(
    needs: Mapping[Node, frozenset[str]],
    noise: Mapping[Node, float],
    price: float,
    times: Mapping[str, float],
    conversions: Mapping[tuple[str, str], float],
) -> frozenset[str]:
    """The operators whose roundings save more noise than they cost, by a minimum cut. price: noise for a unit of time."""
    edges: dict[tuple[Any, Any], float] = {("saved", node): noise[node] for node in needs}
    edges |= {(node, name): float("inf") for node, served in needs.items() for name in served}
    edges |= {(name, "paid"): price * value for name, value in times.items() if value >= 0}
    edges |= {("saved", name): price * -value for name, value in times.items() if value < 0}
    edges |= {pair: price * value for pair, value in conversions.items()}
    return frozenset(name for name in minimum_cut(edges, "saved", "paid") if name in times)


def _conversions(roundings: Iterable[Node], placement: Placement, conversion: float) -> dict[tuple[str, str], float]:
    """What it takes that one of two operators is float and the other is not, for pairs of which one reads the other.

    conversion: of a value.
    """
    found: dict[tuple[str, str], float] = defaultdict(float)
    for node in roundings if conversion else ():
        makers, readers = _sides(node, placement)
        cost = conversion * _converted(node, placement)
        for pair in itertools.product(makers, readers):
            for way in (pair, pair[::-1]):
                found[way] += cost
    return dict(found)


def _times(quantized: Quantized, work: Mapping[str, float]) -> dict[str, float]:
    """What it is estimated to take that an operator is float: its work, without multiplying few channels."""
    nodes = {node.name: node for node in quantized.body.graph.nodes}
    few = [name for name in work if _has_few_channels(quantized.body, nodes[name])]
    return {**work, **{name: float(_written(nodes[name])) for name in few}}


def _less_conversions(
    times: Mapping[str, float], roundings: Iterable[Node], placement: Placement, conversion: float
) -> dict[str, float]:
    """The times, less conversions that an operator in float saves: of inputs that it reads and of outputs that it makes."""
    left = dict(times)
    for node in roundings if conversion else ():
        makers, readers = _sides(node, placement)
        if not makers or not readers:
            for name in makers or readers:
                left[name] -= conversion * _converted(node, placement)
                left[name] = max(left[name], min(0.0, times[name]))
    return left


def _has_few_channels(body: fx.GraphModule, node: Node) -> bool:
    """Whether an operator is a convolution of few channels, such as a depthwise or a first one, its weight rounded or not."""
    if OPERATOR_KINDS.get(node.target) != "conv":
        return False
    weight = node.args[1]
    name = parameter_name(weight.args[0] if weight.op == "call_module" else weight)
    if name is None:
        return False
    outputs, inputs, *window = get_tensor(body, name).shape
    groups = int(node.args[6]) if len(node.args) > 6 else 1
    return inputs == 1 or (math.prod(window) > 1 and inputs * outputs // groups <= NO_SLOWER_IN_FLOAT)


def _served(node: Node, placement: Placement) -> frozenset[str]:
    """The integer operators that a rounding serves: the layer of a weight; those that make or read an activation."""
    if node.op != "call_module":
        return frozenset({node.name})
    makers, readers = _sides(node, placement)
    return makers | readers


def _sides(node: Node, placement: Placement) -> tuple[frozenset[str], frozenset[str]]:
    """The integer operators that make a rounded activation, and those that read it; none of either for a weight."""
    if node.op != "call_module":
        return frozenset(), frozenset()
    found: tuple[set[str], set[str]] = (set(), set())
    pending, seen = [(node.args[0], True), *((user, False) for user in node.users)], set[Node]()
    while pending:
        here, back = pending.pop()
        if here in seen:
            continue
        seen.add(here)
        if here.name in placement.integer:
            found[0 if back else 1].add(here.name)
        elif here.name in placement.carried or (back and _is_in_kernel(here, placement)):
            further = here.all_input_nodes if back else here.users
            pending += [(other, back) for other in further if isinstance(other, fx.Node)]
    return frozenset(found[0]), frozenset(found[1])


def _converted(rounding: Node, placement: Placement) -> int:
    """Values that are converted where one side of a rounding is float: the fewest before its ways part, as behind a pooling."""
    here, least = rounding, _written(rounding)
    while len(here.users) == 1 and (user := next(iter(here.users))).name in placement.carried:
        here, least = user, min(least, _written(user))
    return least


def _is_in_kernel(node: Node, placement: Placement) -> bool:
    """Whether the kernel before an operator computes it: a clamp, or a PReLU that is neither in integers nor in float."""
    kind = OPERATOR_KINDS.get(node.target)
    return kind == "clamp" or (kind == "leaky_relu" and node.name not in placement.floating)


def _work(node: Node, placement: Placement) -> int:
    """Multiply-accumulates of an operator for one sample, and the values that it writes."""
    cost = placement.costs.get(node.name)
    return (0 if cost is None else cost.macs) + _written(node)


def _written(node: Node) -> int:
    """Values that an operator writes for one sample."""
    value, rows = node.meta["val"], example_rows(node.graph)
    written = [element_count(v, rows) for v in (value if isinstance(value, tuple | list) else (value,)) if isinstance(v, Tensor)]
    return sum(written) // rows
