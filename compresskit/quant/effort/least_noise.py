"""The factors of channels for which least noise is predicted at the outputs, from gradients of the float model.

A value t is rounded in steps of span_t / 255, span_t = max_c a_c high_c - min_c a_c low_c, and channel c hands 1 / a_c^2 of that
noise on; the weights of output o in steps of max_i |w_oi| / a_i / 127, times a_i^2 behind input i:

    noise(a) = sum_t (span_t(a) / 255)^2 sum_c G_tc / a_c^2 + sum_layers sum_o (max_i |w_oi| / a_i / 127)^2 sum_i a_i^2 F_oi

G and F are squared gradients of the outputs by values and weights, for random signs (Hutchinson). The factors a are enlargements,
tied where the graph ties them (`channel_ties`), and found by gradient descent on log noise(exp(t)).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs
from compresskit.graph.interpreter import ValueOf, execute, run_graph
from compresskit.graph.normalize import Node
from compresskit.quant.calibration.rounding_noise import PROBES, random_product
from compresskit.quant.effort.channel_ties import ChannelTies, ScaledLayer

STEPS, RATE = 300, 0.05  # of Adam; the rate falls as a cosine
MOST_ENTRIES = 2**16  # of the weights of one layer, which are read in every step: outputs are left out of larger ones
LARGEST = 32.0  # a channel is enlarged by at most that: other data may bring larger values
VALUE_STEPS, WEIGHT_STEPS = 255, 127


@dataclass(frozen=True)
class _Value:
    """A rounded value: the factor that each channel has, (c,), the ends of its channels, and its squared gradients, (c,) each."""

    factors: Tensor
    low: Tensor
    high: Tensor
    gradients: Tensor

    def noise(self, a: Tensor) -> Tensor:
        here = a[self.factors]
        span = (here * self.high).amax() - (here * self.low).amin()
        return (span / VALUE_STEPS).square() * (self.gradients / here.square()).sum()


@dataclass(frozen=True)
class _Weight:
    """Weights of a layer: the factor of each input of each output, largest |weight| and squared gradients, (o, i) each."""

    factors: Tensor
    largest: Tensor
    gradients: Tensor

    def noise(self, a: Tensor) -> Tensor:
        here = a[self.factors]
        steps = (self.largest / here).amax(1) / WEIGHT_STEPS
        return (steps.square() * (here.square() * self.gradients).sum(1)).sum()


def least_noise_factors(
    module: fx.GraphModule, batches: Sequence[Inputs], few: Inputs, rounded: Collection[str]
) -> dict[int, float]:
    """Find the factors that channels are divided by for least noise.

    Args:
        module: a prepared graph, without BatchNorm and quantizers.
        batches: inputs that show the ends of the ranges of each channel. few: a batch for the gradients, whose activations fit in
            memory, all of them at once.
        rounded: names of the nodes whose values are rounded.

    Returns the factor of each root of `ChannelTies` that may have one, 1 for all where the noise is too large for fp32. Raises
    RuntimeError, as torch does, for an operator without a derivative.
    """
    ties = ChannelTies(module)
    free = sorted(ties.free_roots())
    number = {root: k for k, root in enumerate(free)}
    seen = [node for node in ties.of if node.name in rounded]
    of = {node: torch.tensor([number.get(ties.root(c), len(free)) for c in ties.of[node]]) for node in ties.of}
    ends = _ends(module, batches, seen)
    of_values, of_weights = _gradients_of_parts(module, few, seen, ties.layers)
    values = [_Value(of[node], *ends[node], of_values[node]) for node in seen if node in ends and node in of_values]
    weights = [
        _scaled_weight(layer, of[layer.node.args[0]], *of_weights[layer.node])
        for layer in ties.layers
        if layer.node in of_weights
    ]
    parts: list[_Value | _Weight] = [*values, *weights]
    logs = torch.zeros(len(free), requires_grad=True)
    optimizer = torch.optim.Adam([logs], lr=RATE)
    for step in range(STEPS if free and values else 0):
        optimizer.param_groups[0]["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        with torch.enable_grad():
            a = torch.cat([logs.exp(), torch.ones(1)])
            loss = torch.stack([part.noise(a) for part in parts]).sum().log()
        if not math.isfinite(float(loss.detach())):  # fp32 does not hold the squares of such values, and says nothing about them
            return dict.fromkeys(free, 1.0)
        (logs.grad,) = torch.autograd.grad(loss, [logs])
        optimizer.step()
        with torch.no_grad():
            logs.clamp_(-math.log(LARGEST), math.log(LARGEST))
    return dict(zip(free, (-logs.detach()).exp().tolist(), strict=True))


def _scaled_weight(layer: ScaledLayer, read: Tensor, largest: Tensor, gradients: Tensor) -> _Weight:
    """The weights of a layer, of so many outputs that there are few entries; those stand for the others.

    read: the factor of each channel that the layer reads, all groups.
    """
    outputs, inputs = largest.shape
    rows = torch.arange(0, outputs, -(-outputs * inputs // MOST_ENTRIES))
    factors = read.view(layer.groups, inputs)[rows * layer.groups // outputs]
    return _Weight(factors, largest[rows], gradients[rows] * (outputs / len(rows)))


def _ends(module: fx.GraphModule, batches: Sequence[Inputs], seen: Sequence[Node]) -> dict[Node, tuple[Tensor, Tensor]]:
    """The smallest and largest value of each channel, and 0, which every range contains."""
    found: dict[Node, tuple[Tensor, Tensor]] = {}
    wanted = set(seen)

    def visit(node: Node, value: object) -> None:
        if node in wanted and isinstance(value, Tensor):
            channels = value.transpose(0, 1).flatten(1)
            low, high = channels.amin(1).clamp(max=0), channels.amax(1).clamp(min=0)
            before = found.get(node, (low, high))
            found[node] = torch.minimum(before[0], low), torch.maximum(before[1], high)

    with torch.no_grad():
        for inputs in batches:
            run_graph(module, pytree.tree_leaves(inputs), visit)
    return found


def _gradients_of_parts(
    module: fx.GraphModule, inputs: Inputs, seen: Sequence[Node], layers: Sequence[ScaledLayer]
) -> tuple[dict[Node, Tensor], dict[Node, tuple[Tensor, Tensor]]]:
    """Squared gradients of each value, (c,); of each layer the largest weights and squared gradients, (o, i) each."""
    kept: dict[Any, Tensor] = {}
    names = {layer.weight: layer.node for layer in layers}
    wanted = set(seen)

    def compute(node: Node, value_of: ValueOf) -> Any:
        value = execute(module, node, value_of)
        if node.op == "get_attr" and isinstance(value, Tensor):
            value = value.detach()
            if node.target in names and value.is_floating_point():
                value.requires_grad_()
                kept[node.target] = value
        elif node in wanted and isinstance(value, Tensor) and value.requires_grad:
            kept[node] = value
        return value

    with torch.enable_grad():
        outputs = run_graph(module, pytree.tree_leaves(inputs), compute=compute)
    outputs = [v for v in pytree.tree_leaves(outputs) if isinstance(v, Tensor) and v.requires_grad]
    total: dict[Any, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for probe in range(PROBES if outputs else 0):
        with torch.enable_grad():
            projected = random_product(outputs, generator)
        found = torch.autograd.grad(projected, list(kept.values()), retain_graph=probe < PROBES - 1, allow_unused=True)
        for key, gradient in zip(kept, found, strict=True):
            if gradient is not None:
                square = gradient.square()
                if key not in names:
                    square = square * (kept[key] != 0)
                each = _of_inputs(square).sum(2) if key in names else square.transpose(0, 1).flatten(1).sum(1)
                total[key] = each if key not in total else total[key] + each
    weights = {names[key]: (_of_inputs(kept[key].detach().abs()).amax(2), value) for key, value in total.items() if key in names}
    return {node: total[node] for node in seen if node in total}, weights


def _of_inputs(weight: Tensor) -> Tensor:
    """A weight as (outputs, inputs, positions of the window)."""
    return weight.flatten(2) if weight.ndim > 2 else weight.unsqueeze(2)
