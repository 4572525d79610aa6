"""Choose the range of each activation by what it does to the layers that read it, measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx

from compresskit.base.task import Inputs, call
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor, mode
from compresskit.quant.calibration.layer_outputs import IntegerLayer, integer_layers
from compresskit.quant.calibration.paired_run import Pair, run_float_and_quantized
from compresskit.quant.effort.aligned_sums import quantizers_of_sums
from compresskit.quant.effort.samples import OutputError
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.histogram import Histogram
from compresskit.quant.numerics.observers import HistogramMSE, KnownRange, has_fixed_range
from compresskit.quant.numerics.quantizers import ActivationQuantizer

Rule = Literal["extremes", "least error", "percentile"]
RULES: tuple[Rule, ...] = ("extremes", "least error", "percentile")
PERCENTILE = 0.9999  # of the values that are inside
NARROWER = (0.9, 0.8, 0.7, 0.6, 0.5)  # factors of many ranges, tried until one is worse
LEAST_GAIN = 0.02  # fraction of the error by which another rule must beat the extremes


class SeveralRanges(HistogramMSE):
    """An observer that knows the range of several rules; `rule` says which one it gives."""

    rule: Rule = "extremes"

    def _choose(self, histogram: Histogram, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        if self.rule == "extremes":
            return low, high
        if self.rule == "percentile":
            rest = (1 - PERCENTILE) / 2
            return histogram.quantile(rest), histogram.quantile(1 - rest)
        return super()._choose(histogram, low, high)


def set_range_(quantized: Quantized, *, label: str, rule: Rule, batches: Sequence[Inputs]) -> None:
    """Give one activation the range of another rule, in place, unless its range is fixed.

    label: of its quantizer. batches: show its values, in float.
    """
    body, enabled = quantized.body, [quantizer.enabled for quantizer in quantized.quantizers()]
    chosen = [q for q in quantized.activation_quantizers() if q.label == label and not has_fixed_range(q.observer)]
    quantized.enable_(False)
    for quantizer in chosen:
        observer = SeveralRanges(min(8, quantizer.scheme.bits), symmetric=quantizer.scheme.symmetric)
        observer.rule, quantizer.observer, quantizer.observing = rule, observer, True
    with torch.no_grad(), mode(quantized, training=False):
        for inputs in batches:
            call(body, inputs)
    for quantizer in chosen:
        quantizer.observing = False
        quantizer.freeze_range_()
    for each, on in zip(quantized.quantizers(), enabled, strict=True):
        each.enabled = on
    quantized.fit_weight_scales_()
    quantized.balance_weights_()


def choose_ranges_(quantized: Quantized, inputs: Inputs) -> int:
    """Give each activation the rule whose range leaves the layers that read it closest to float, in place.

    One pass over the graph: each range is chosen on the values that the ranges before it leave. A range
    that several values share stays that of the extremes.

    Args:
        quantized: a model that was calibrated with `SeveralRanges`.
        inputs: a batch to choose by, whose activations fit in memory.

    Returns the number of activations whose rule is no longer "extremes".
    """
    body, layers = quantized.body, {layer.node: layer for layer in integer_layers(quantized)}
    uses = Counter(node.target for node in body.graph.nodes if node.op == "call_module")
    chosen: list[Rule] = []

    def visit(node: Node, pair: Pair, pair_of: Callable[[Node], Pair]) -> None:
        quantizer = body.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(quantizer, ActivationQuantizer) or uses[node.target] > 1 or quantizer.is_fixed:
            return
        if isinstance(quantizer.observer, SeveralRanges):
            rule, value = _best_rule_(body, node, quantizer, quantizer.observer, layers, pair, pair_of(node.args[0])[1])
            pair[1].copy_(value)
            if rule != "extremes":
                chosen.append(rule)

    with mode(quantized, training=False):
        run_float_and_quantized(body, inputs, visit)
    quantized.fit_weight_scales_()
    return len(chosen)


def _best_rule_(
    body: fx.GraphModule,
    node: Node,
    quantizer: ActivationQuantizer,
    observer: SeveralRanges,
    layers: dict[Node, IntegerLayer],
    pair: Pair,
    unrounded: Tensor,
) -> tuple[Rule, Tensor]:
    """Set the best rule of one quantizer; returns it, and the rounded value."""
    readers = [layers[user] for user in node.users if user in layers]
    wanted = [_layer_output(body, reader, pair[0], rounded=False) for reader in readers] or [pair[0]]
    best: tuple[Rule, float, Tensor] | None = None
    for rule in RULES:
        observer.rule = rule
        quantizer.freeze_range_()
        value = quantizer(unrounded)
        got = [_layer_output(body, reader, value, rounded=True) for reader in readers] or [value]
        errors = [float((a - b).square().mean() / a.square().mean().clamp(min=1e-30)) for a, b in zip(wanted, got, strict=True)]
        if best is None or sum(errors) < best[1] * (1 - LEAST_GAIN):
            best = (rule, sum(errors), value)
    assert best is not None
    observer.rule = best[0]
    quantizer.freeze_range_()
    return best[0], best[2]


def _layer_output(body: fx.GraphModule, layer: IntegerLayer, x: Tensor, *, rounded: bool) -> Any:
    """The output of a layer on a value, with its weight rounded or not."""
    weight = get_tensor(body, layer.weight)
    bias = [None if layer.bias is None else get_tensor(body, layer.bias)] if len(layer.node.args) > 2 else []
    return layer.node.target(x, layer.quantizer(weight) if rounded else weight, *bias, *layer.node.args[3:])


def narrow_ranges_(quantized: Quantized, error: OutputError) -> tuple[float, float]:
    """Narrow the ranges of many activations by one factor, in place: values far out are rare, and make every step coarse.

    First those of operands and results of sums, since errors there add up along a chain of residual blocks, then all others. One
    factor for many ranges does not follow the samples that it is chosen by as closely as a choice for each would. Ranges that
    are known from the operator stay, as do those of the model's inputs.

    Args:
        quantized: a calibrated model.
        error: on the data to choose the factors by.

    Returns the two factors, which `narrow_by_` takes; 1.0 where no smaller one lowers the error.
    """
    least, chosen = sum(error.of(quantized)), list[float]()
    for activations in _sums_and_others(quantized):
        best, tried = 1.0, 1.0
        for factor in NARROWER if activations else ():
            _narrow_(activations, factor / tried)
            tried = factor
            if (found := sum(error.of(quantized))) >= least:
                break
            best, least = factor, found
        _narrow_(activations, best / tried)
        chosen.append(best)
    return chosen[0], chosen[1]


def narrow_by_(quantized: Quantized, factors: tuple[float, float]) -> None:
    """Narrow the ranges of a calibrated model in place: of operands and results of sums by the first factor, of all others."""
    for activations, factor in zip(_sums_and_others(quantized), factors, strict=True):
        _narrow_(activations, factor)


def _sums_and_others(quantized: Quantized) -> tuple[list[ActivationQuantizer], list[ActivationQuantizer]]:
    """The activations whose ranges may be narrowed: operands and results of sums, and all others."""
    readers = [user for node in quantized.body.graph.find_nodes(op="placeholder") for user in node.users]
    inputs = {quantized.body.get_submodule(str(node.target)) for node in readers if node.op == "call_module"}
    free = [
        activation
        for activation in quantized.activation_quantizers()
        if not activation.is_fixed and not isinstance(activation.observer, KnownRange) and activation not in inputs
    ]
    summed = quantizers_of_sums(quantized.body)
    return [a for a in free if a in summed], [a for a in free if a not in summed]


def _narrow_(activations: Sequence[ActivationQuantizer], factor: float) -> None:
    for activation in activations:
        activation.scale.mul_(factor)
