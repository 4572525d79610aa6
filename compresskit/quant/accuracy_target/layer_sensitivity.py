"""How much the outputs of a model lose when the weights of one layer alone are rounded to few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compresskit.base.progress import progress_bar
from compresskit.graph.surgery import get_tensor
from compresskit.quant.calibration.layer_outputs import IntegerLayer, integer_layers
from compresskit.quant.effort.samples import OutputError
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.quantizers import WeightQuantizer


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
    """What rounding the weights of one layer costs.

    layer: dotted name of the module. weights: how many. macs: of one sample.
    noise: bits -> power of the error of the outputs, as a fraction of their power, the sum of all outputs.
    """

    layer: str
    weights: int
    macs: int
    noise: dict[int, float]


def layer_sensitivities(quantized: Quantized, error: OutputError, widths: Sequence[int]) -> list[LayerSensitivity]:
    """Round the weights of one layer after the other, everything else in float, and measure the outputs.

    Args:
        quantized: a calibrated model; it is as before afterwards.
        error: the float model's outputs on the data to measure on.
        widths: bits to try.

    Returns one entry for each module that holds layers in integers, in the order of the graph. It takes a pass over the data for
    each module and width.
    """
    layers: dict[str, list[IntegerLayer]] = {}
    for layer in integer_layers(quantized):
        layers.setdefault(quantized.placement.layers[layer.node.name], []).append(layer)
    enabled = [quantizer.enabled for quantizer in quantized.quantizers()]
    quantized.enable_(False)
    try:
        return [
            _sensitivity(name, members, quantized, error, widths)
            for name, members in progress_bar(list(layers.items()), desc="sensitivity")
        ]
    finally:
        for quantizer, on in zip(quantized.quantizers(), enabled, strict=True):
            quantizer.enabled = on


def _sensitivity(
    name: str, members: Sequence[IntegerLayer], quantized: Quantized, error: OutputError, widths: Sequence[int]
) -> LayerSensitivity:
    noise = {}
    for bits in widths:
        kept = [(layer.quantizer, layer.quantizer.scheme, layer.quantizer.packing) for layer in members]
        for rounding, _, _ in kept:
            _round_to(rounding, bits)
        noise[bits] = sum(error.of(quantized))
        for rounding, scheme, packing in kept:
            rounding.scheme, rounding.packing, rounding.enabled = scheme, packing, False
    weights = sum(get_tensor(quantized.body, layer.weight).numel() for layer in members)
    macs = sum(quantized.placement.costs[layer.node.name].macs for layer in members)
    return LayerSensitivity(layer=name, weights=weights, macs=macs, noise=noise)


def _round_to(rounding: WeightQuantizer, bits: int) -> None:
    """Let a quantizer round to a width. Up to seven bits no pair of products overflows, and none has to be made smaller."""
    if bits != rounding.scheme.bits:
        rounding.scheme, rounding.packing = replace(rounding.scheme, bits=bits), None
    rounding.enabled = True
