"""Nudge scales so that no result lies on a rounding boundary, and every kernel rounds every value to the same integer.

A rounding boundary, or tie, is a value halfway between two integers of the output. The result of a layer is a whole number times
M = (scale of the input) * (scale of the weight) / (scale of the output); an addition is two whole numbers times two such factors.
The simulation, the file as written (float kernels between DequantizeLinear and QuantizeLinear) and the file as a runtime rewrites
it (integer kernels) differ only in the last bits of fp32. Where a result is that close to a rounding boundary, they round it to
different integers, and each such value changes others in the next layer: of all integers in ten torchvision networks 1.4 to 21 %
differed between the two forms of the file (benchmarks/quantize_ties.md).

The whole numbers that occur are known before anything runs, and so are those that land close to a boundary. Each scale is
enlarged by the smallest factor for which none of the frequent ones does, or the fewest; by at most `TRIES * NUDGE`, which leaves
accuracy as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, fx, nn

from compresskit.graph.capture import parameter_name
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor
from compresskit.mixed.formats.parallel import full_tensor
from compresskit.quant.numerics.operators import OPERATOR_KINDS, is_global
from compresskit.quant.numerics.quantizers import ActivationQuantizer, WeightQuantizer
from compresskit.quant.passes.insert import quantizer_of

NUDGE = 4e-6  # relative change per try; a result half a step from zero moves by 2e-6 steps
TRIES = 128
CHANNELS_AT_ONCE = 512  # so that intermediate results stay in the cache
HALF_ULP = 2.0**-24  # half a unit in the last place of fp32, relative to the value
#: Distance that the result of a product must keep from a boundary, in output steps: `DISTANCE + RELATIVE_DISTANCE * |result|`.
#: A sum in fp32 has an absolute error, a rounded M a relative one. Found by trial on a few ResNets.
DISTANCE, RELATIVE_DISTANCE = 2.0**-15, 2.0**-23


def nudge_scales_(body: fx.GraphModule) -> None:
    """Enlarge the scales of a graph with quantizers, by at most 0.05 %, so that fewest results lie close to a rounding boundary.

    Scales of activations change for additions, multiplications, pooling, products of two activations and hardsigmoids with a
    rounding of their own; scales of weights for convolutions and linear layers, each channel separately. Scales with an anchor
    stay, and nothing changes for operators that read another hardsigmoid or, on targets that quantize inputs only, for sums with
    an unrounded operand. Weights start from their calibrated scales, activations from their present ones, so that a second call
    may enlarge these again.
    """
    makers: dict[ActivationQuantizer, list[Node]] = {}
    for node in body.graph.nodes:
        if isinstance(quantizer := _module(body, node), ActivationQuantizer):
            makers.setdefault(quantizer, []).append(_maker(node))
    with torch.no_grad():
        for out, nodes in makers.items():
            costs = [cost for node in nodes if (cost := _boundary_cost(body, node, out)) is not None]
            if costs and out.anchor is None:
                _move_scale_(out, costs)
        for rounding, (weight, uses) in _weights(body, makers).items():
            _move_weight_(rounding, weight, uses)


def _runs_in_float(*quantizers: ActivationQuantizer) -> bool:
    """Whether an operator between activations runs in float, since one of them has more than 8 bits."""
    return any(quantizer.scheme.bits > 8 for quantizer in quantizers)


def _module(body: fx.GraphModule, node: object) -> nn.Module | None:
    return body.get_submodule(str(node.target)) if isinstance(node, fx.Node) and node.op == "call_module" else None


def _maker(node: Node) -> Node:
    """The operator whose result is rounded; a clamp in between does not move boundaries, nor does a PReLU above zero."""
    source = node.args[0]
    bent = source.target is aten.prelu.default and OPERATOR_KINDS.get(source.args[0].target) == "conv"
    return source.args[0] if bent or OPERATOR_KINDS.get(source.target) == "clamp" else source


# -- scales of activations

BoundaryCost = Callable[[float], float]  # scale of the output -> how many of the frequent results lie close to a boundary


def _boundary_cost(body: fx.GraphModule, node: Node, out: ActivationQuantizer) -> BoundaryCost | None:
    """The cost function of an operator between activations; None for other operators."""
    kind = OPERATOR_KINDS.get(node.target)
    inputs = [quantizer_of(body, a) for a in node.args[: 1 if kind in ("mean", "avg_pool") else 2]]
    quantizers = [q for q in inputs if isinstance(q, ActivationQuantizer)]
    if len(quantizers) < len(inputs) or _runs_in_float(out, *quantizers):
        return None
    if kind == "hardsigmoid":
        return _sixths(quantizers[0], out) if out.is_fixed else None
    if kind in ("add", "mul") and len(quantizers) == 2 and len(node.args) == 2:
        return None if kind == "add" and all(q is out for q in quantizers) else _pairs(kind, quantizers[0], quantizers[1], out)
    if kind == "matmul" and len(quantizers) == 2:
        return _sums(out, quantizers, 1)
    count = _values_averaged(node, kind) if kind in ("mean", "avg_pool") else 0
    return _sums(out, quantizers, count) if count else None


def _values_averaged(node: Node, kind: str | None) -> int:
    """How many values of the example a pooling operator averages; 0 where that differs between positions."""
    shape = node.args[0].meta["val"].shape
    if kind == "mean":
        return math.prod(int(n) for n in shape[2:]) if is_global(node) else 0
    if len(node.args) > 4:  # windows beyond the edge, or another divisor
        return 0
    kernel = node.args[1]
    sizes = list(kernel) if isinstance(kernel, list | tuple) else [kernel]
    return int(math.prod(sizes) ** (1 if len(sizes) > 1 else len(shape) - 2))


def _pairs(kind: str | None, a: ActivationQuantizer, b: ActivationQuantizer, out: ActivationQuantizer) -> BoundaryCost:
    """The cost of an addition or a multiplication, over all pairs of integers."""
    p, q = _steps(a)[:, None], _steps(b)[None, :]
    frequency = 1 / (1 + p.abs() + q.abs())
    low, high = _steps(out)[[0, -1]].tolist()

    def cost(scale: float) -> float:
        # An input with the quantizer of the output: its factor is 1 for every scale.
        f, g = ((scale if one is out else float(one.scale)) for one in (a, b))
        if kind == "add":
            f, g = f / scale, g / scale
            result = p * f + q * g
            # Kernels subtract the zero points from the sum as one constant.
            size = (p.abs() + abs(int(a.zero_point))) * f + (q.abs() + abs(int(b.zero_point))) * g + abs(low)
        else:
            result = p * q * (f * g / scale)
            size = 2 * result.abs() + abs(low)
        distance = (result - 0.5 - (result - 0.5).round()).abs()
        return float((frequency * (distance < 2 * HALF_ULP * size) * (result > low) * (result < high)).sum())

    return cost


def _sixths(x: ActivationQuantizer, out: ActivationQuantizer) -> BoundaryCost:
    """The cost of a hardsigmoid that saturates, which a runtime adds up as x / 6 + 1/2.

    `TRIES * NUDGE` leave 1 at the largest integer, from which a range up to 1 - 1/511 is half a step.
    """
    p = _steps(x)
    low, high = _steps(out)[[0, -1]].tolist()

    def cost(scale: float) -> float:
        factor, half = float(x.scale) / 6 / scale, 0.5 / scale
        result = p * factor + half
        size = (p.abs() + abs(int(x.zero_point))) * factor + half + abs(low)
        distance = (result - 0.5 - (result - 0.5).round()).abs()
        return float(((distance < 2 * HALF_ULP * size) * (result > low) * (result < high) / (1 + p.abs())).sum())

    return cost


def _sums(out: ActivationQuantizer, inputs: list[ActivationQuantizer], count: int) -> BoundaryCost:
    """The cost of a sum of products of integers, divided by `count`."""

    def cost(scale: float) -> float:
        factor = math.prod(scale if q is out else float(q.scale) for q in inputs) / (count * scale)
        return float(_closeness(torch.tensor([factor], dtype=torch.float64), _boundaries(out)))

    return cost


def _move_scale_(out: ActivationQuantizer, costs: list[BoundaryCost]) -> None:
    """Take the first scale of cost 0, or the one of least cost."""
    start, least, best = float(out.scale), math.inf, float(out.scale)
    for k in range(TRIES):
        scale = _fp32(start * (1 + k * NUDGE))
        if (total := sum(cost(scale) for cost in costs)) < least:
            least, best = total, scale
        if not least:
            break
    out.scale.fill_(best)


# -- scales of weights


#: Of a weight by a layer: (scale of the input / scale of the output, for each channel or for all, boundaries of the output).
Use = tuple[Tensor, Tensor]


def _weights(
    body: fx.GraphModule, makers: dict[ActivationQuantizer, list[Node]]
) -> dict[WeightQuantizer, tuple[Tensor, list[Use]]]:
    """Weights of layers with quantized input and output, each with its uses."""
    weights: dict[WeightQuantizer, tuple[Tensor, list[Use]]] = {}
    for out, nodes in makers.items():
        for node in (n for n in nodes if len(n.args) > 1):
            rounding, source = _module(body, node.args[1]), quantizer_of(body, node.args[0])
            if (
                isinstance(rounding, WeightQuantizer)
                and isinstance(source, ActivationQuantizer)
                and not _runs_in_float(source, out)
            ):
                weight = get_tensor(body, node.args[1].args[0].target)
                uses = weights.setdefault(rounding, (weight, []))[1]
                ratio = torch.tensor([float(source.scale) / float(out.scale)], dtype=torch.float64)
                uses.append((ratio, _boundaries(out)))
                if (slopes := _slopes_behind(body, node)) is not None:
                    uses.append((ratio * slopes, _boundaries(out)))
    return weights


def _slopes_behind(body: fx.GraphModule, node: Node) -> Tensor | None:
    """|slope| of each channel of the PReLU that alone reads a convolution and is rounded in its place, else None."""
    reader = next(iter(node.users))
    name = parameter_name(reader.args[1]) if reader.target is aten.prelu.default else None
    if name is None:
        return None
    slopes = get_tensor(body, name).detach().double().abs().cpu()
    return torch.where(slopes == 0, 1.0, slopes)


def _move_weight_(rounding: WeightQuantizer, weight: Tensor, uses: list[Use]) -> None:
    """Enlarge the scales of a weight, each channel separately; the factor stays when the weight is trained further."""
    rounding.scale_factor.fill_(1)
    scales = rounding.qparams(full_tensor(weight))[0].detach()
    every = scales.cpu().reshape(-1)
    wide = [(ratios.expand(len(every)), boundaries) for ratios, boundaries in uses if len(ratios) in (1, len(every))]
    factors = [
        _safest_factors(every[rows], [(ratios[rows], boundaries) for ratios, boundaries in wide])
        for rows in torch.arange(len(every)).split(CHANNELS_AT_ONCE)
    ]
    rounding.scale_factor.copy_(torch.cat(factors).view_as(scales))


def _safest_factors(scales: Tensor, uses: list[Use]) -> Tensor:
    """For each scale (n,) the first factor of cost 0, or the one of least cost."""
    found, rows = torch.ones_like(scales), torch.arange(len(scales))
    best, least = torch.ones_like(scales), torch.full_like(scales, math.inf, dtype=torch.float64)
    factors = torch.tensor([1 + k * NUDGE for k in range(TRIES)], dtype=torch.float32)
    for tried in factors.split(max(1, CHANNELS_AT_ONCE // max(1, len(scales)))):
        products = (scales * tried[:, None]).double()
        costs = torch.stack([_closeness((products * ratio[rows]).flatten(), boundaries) for ratio, boundaries in uses]).sum(0)
        cost, first = costs.view(len(tried), -1).min(0)  # the first of equal ones
        better = cost < least
        least, best = torch.where(better, cost, least), torch.where(better, tried[first], best)
        going = least > 0
        if not bool(going.all()):
            found[rows] = best
            rows, scales, best, least = rows[going], scales[going], best[going], least[going]
            if not len(rows):
                break
    found[rows] = best
    return found


def _closeness(factors: Tensor, boundaries: Tensor) -> Tensor:
    """How many of the frequent results, weighted by their closeness, lie close to a boundary, for each factor M (n,).

    boundaries: results (t,) halfway between two steps. Of all whole numbers only the one nearest to boundary / M counts.
    """
    exact = boundaries * factors.reciprocal()[:, None]
    distance = exact.round().sub_(exact).abs_()
    near = distance.mul_(factors[:, None]).mul_(-1 / (DISTANCE + RELATIVE_DISTANCE * boundaries.abs())).add_(1).clamp_(min=0)
    return near @ (4 + boundaries.abs()).reciprocal()  # results near zero are the most frequent


def _steps(quantizer: ActivationQuantizer) -> Tensor:
    """The integers of a format minus the zero point, float64."""
    return torch.arange(quantizer.scheme.low, quantizer.scheme.high + 1, dtype=torch.float64) - int(quantizer.zero_point)


def _boundaries(quantizer: ActivationQuantizer) -> Tensor:
    return _steps(quantizer)[:-1] + 0.5


def _fp32(value: float) -> float:
    return float(np.float32(value))
