"""Grids on which no result lies next to a tie, so that every kernel rounds every value to the same side.

What a layer computes is a whole number times M = (scale of the input) * (scale of the weight) / (scale of the output); an
addition is two whole numbers times two such factors. The simulation, the file as it is written (float kernels between
DequantizeLinear and QuantizeLinear) and the file as a runtime rewrites it (integer kernels) differ only in the last bits of fp32.
Where a result lies that near to a tie between two steps, one falls to one side and another to the other, and each such value
moves others in the next layer: of all integers in ten torchvision networks 1.4 to 21 % differed so between the two forms of the
file (benchmarks/quantize_ties.md).

But whole numbers are countable: which of them land next to a tie is known before anything runs. So scales are made larger by as
little as leaves none of the frequent ones there, or the fewest; by no more than `TRIES * NUDGE`, which no accuracy notices.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor
from compresskit.quant.numerics.operators import OPERATOR_KINDS, is_global, moved
from compresskit.quant.numerics.quantizers import ActivationQuantizer, WeightQuantizer

NUDGE = 4e-6  # one try; a result half a step from zero moves by 2e-6 steps
TRIES = 128
CHANNELS_AT_ONCE = 512  # channels at once: what is computed for them stays in the cache
HALF_ULP = 2.0**-24  # half a unit in the last place, as a share of the value
#: How far from a tie a result of a product must stay, in output steps: a sum in fp32 is off by what was added up on the way, a
#: rounded M by a share of the result. Found by trial on a few ResNets.
NEAR, SLOPE = 2.0**-15, 2.0**-23

Grids = dict[Node, ActivationQuantizer]


def nudge_scales_(body: fx.GraphModule) -> None:
    """Enlarge the scales of a graph with quantizers, by at most 0.05 %, so that as few results as possible lie next to a tie.

    Scales of activations move for additions, multiplications, pools and products of two activations; those of weights for
    convolutions and linear layers, each channel by itself. A grid with an anchor stays where it is, and nothing moves for what
    reads a hardsigmoid or, on targets that round before operators, for sums of which one side is unrounded. Weights are moved
    from where calibration put them; activations from where they are, so that a second call may enlarge these again.
    """
    grids = {n: q for n in body.graph.nodes if isinstance(q := _module(body, n), ActivationQuantizer)}
    makers: dict[ActivationQuantizer, list[Node]] = {}
    for node, quantizer in grids.items():
        makers.setdefault(quantizer, []).append(_maker(node))
    with torch.no_grad():
        for out, nodes in makers.items():
            costs = [cost for node in nodes if (cost := _boundary_cost(node, out, grids)) is not None]
            if costs and out.anchor is None:
                _move_scale_(out, costs)
        for rounding, (weight, uses) in _weights(body, makers, grids).items():
            _move_weight_(rounding, weight, uses)


def _module(body: fx.GraphModule, node: object) -> nn.Module | None:
    return body.get_submodule(str(node.target)) if isinstance(node, fx.Node) and node.op == "call_module" else None


def _maker(node: Node) -> Node:
    """The operator whose result is rounded; a clamp before the rounding moves no tie."""
    made = node.args[0]
    return made.args[0] if OPERATOR_KINDS.get(made.target) == "clamp" else made


def grid_behind(value: object, grids: Grids) -> ActivationQuantizer | None:
    """The quantizer whose numbers a value has, looking back through what only moves it."""
    while isinstance(value, fx.Node):
        if value in grids:
            return grids[value]
        value = moved(value)
    return None


# -- scales of activations

BoundaryCost = Callable[[float], float]  # of a scale of the output: how much of what is often computed lies next to a tie


def _boundary_cost(node: Node, out: ActivationQuantizer, grids: Grids) -> BoundaryCost | None:
    """What ties cost the result of an operator between activations; None for any other."""
    kind = OPERATOR_KINDS.get(node.target)
    inputs = [grid_behind(a, grids) for a in node.args[: 1 if kind in ("mean", "avg_pool") else 2]]
    found = [q for q in inputs if q is not None]
    if len(found) < len(inputs):
        return None
    if kind in ("add", "mul") and len(found) == 2 and len(node.args) == 2:
        return None if kind == "add" and all(q is out for q in found) else _pairs(kind, found[0], found[1], out)
    if kind == "matmul" and len(found) == 2:
        return _sums(out, found, 1)
    count = _values_averaged(node, kind) if kind in ("mean", "avg_pool") else 0
    return _sums(out, found, count) if count else None


def _values_averaged(node: Node, kind: str | None) -> int:
    """How many values of the example a pool averages; 0 where that differs from place to place."""
    shape = node.args[0].meta["val"].shape
    if kind == "mean":
        return math.prod(int(n) for n in shape[2:]) if is_global(node) else 0
    if len(node.args) > 4:  # windows over the edge, or another divisor
        return 0
    kernel = node.args[1]
    sizes = list(kernel) if isinstance(kernel, list | tuple) else [kernel]
    return int(math.prod(sizes) ** (1 if len(sizes) > 1 else len(shape) - 2))


def _pairs(kind: str | None, a: ActivationQuantizer, b: ActivationQuantizer, out: ActivationQuantizer) -> BoundaryCost:
    """Of an addition or a multiplication: every pair of integers is looked at."""
    p, q = _steps(a)[:, None], _steps(b)[None, :]
    often = 1 / (1 + p.abs() + q.abs())
    low, high = _steps(out)[[0, -1]].tolist()

    def cost(scale: float) -> float:
        # The same grid on both sides: its factor is 1, however it moves.
        f, g = ((scale if one is out else float(one.scale)) for one in (a, b))
        if kind == "add":
            f, g = f / scale, g / scale
            result = p * f + q * g
            # Kernels take the zero points out of the sum, as one constant.
            size = (p.abs() + abs(int(a.zero_point))) * f + (q.abs() + abs(int(b.zero_point))) * g + abs(low)
        else:
            result = p * q * (f * g / scale)
            size = 2 * result.abs() + abs(low)
        apart = (result - 0.5 - (result - 0.5).round()).abs()
        return float((often * (apart < 2 * HALF_ULP * size) * (result > low) * (result < high)).sum())

    return cost


def _sums(out: ActivationQuantizer, inputs: list[ActivationQuantizer], count: int) -> BoundaryCost:
    """Of a sum of products of integers, divided by `count`."""

    def cost(scale: float) -> float:
        factor = math.prod(scale if q is out else float(q.scale) for q in inputs) / (count * scale)
        return float(_near(torch.tensor([factor], dtype=torch.float64), _ties(out)))

    return cost


def _move_scale_(out: ActivationQuantizer, costs: list[BoundaryCost]) -> None:
    """Take the first scale at which nothing lies next to a tie, or the one at which least does."""
    start, least, best = float(out.scale), math.inf, float(out.scale)
    for k in range(TRIES):
        scale = _fp32(start * (1 + k * NUDGE))
        if (total := sum(cost(scale) for cost in costs)) < least:
            least, best = total, scale
        if not least:
            break
    out.scale.fill_(best)


# -- scales of weights


Use = tuple[float, Tensor]  # of a weight by a layer: scale of the input over that of the output, and the output's ties


def _weights(
    body: fx.GraphModule, makers: dict[ActivationQuantizer, list[Node]], grids: Grids
) -> dict[WeightQuantizer, tuple[Tensor, list[Use]]]:
    """Weights of layers from one grid to another, with each such use."""
    found: dict[WeightQuantizer, tuple[Tensor, list[Use]]] = {}
    for out, nodes in makers.items():
        for node in (n for n in nodes if len(n.args) > 1):
            rounding, source = _module(body, node.args[1]), grid_behind(node.args[0], grids)
            if isinstance(rounding, WeightQuantizer) and source is not None:
                weight = get_tensor(body, node.args[1].args[0].target)
                uses = found.setdefault(rounding, (weight, []))[1]
                uses.append((float(source.scale) / float(out.scale), _ties(out)))
    return found


def _move_weight_(rounding: WeightQuantizer, weight: Tensor, uses: list[Use]) -> None:
    """Enlarge the scales of a weight, each channel's by itself; a weight that is trained on takes its factor along."""
    rounding.scale_factor.fill_(1)
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # one of FSDP2
    scales = rounding.qparams(whole)[0].detach()
    factors = torch.cat([_safest_factors(piece, uses) for piece in scales.cpu().reshape(-1).split(CHANNELS_AT_ONCE)])
    rounding.scale_factor.copy_(factors.view_as(scales))


def _safest_factors(scales: Tensor, uses: list[Use]) -> Tensor:
    """For each scale (n,) the first factor that leaves no frequent result next to a tie, or the one that leaves fewest there."""
    best, least, left = torch.ones_like(scales), torch.full_like(scales, math.inf, dtype=torch.float64), torch.arange(len(scales))
    for k in range(TRIES):
        factor = _fp32(1 + k * NUDGE)
        tried = (scales[left] * factor).double()
        found = torch.stack([_near(tried * ratio, ties) for ratio, ties in uses]).sum(0)
        better = left[found < least[left]]
        least[left] = least[left].minimum(found)
        best[better] = factor
        left = left[found > 0]
        if not len(left):
            break
    return best


def _near(factors: Tensor, ties: Tensor) -> Tensor:
    """How much lies next to a tie, for each factor M (n,); ties: results (t,) halfway between two steps.

    Of all whole numbers only the one nearest to tie / M counts.
    """
    exact = ties * factors.reciprocal()[:, None]
    apart = exact.round().sub_(exact).abs_()
    near = apart.mul_(factors[:, None]).mul_(-1 / (NEAR + SLOPE * ties.abs())).add_(1).clamp_(min=0)
    return near @ (4 + ties.abs()).reciprocal()  # results near zero are the most frequent


def _steps(quantizer: ActivationQuantizer) -> Tensor:
    """The grid, in steps from zero, float64."""
    return torch.arange(quantizer.scheme.low, quantizer.scheme.high + 1, dtype=torch.float64) - int(quantizer.zero_point)


def _ties(quantizer: ActivationQuantizer) -> Tensor:
    return _steps(quantizer)[:-1] + 0.5


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
