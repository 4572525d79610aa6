"""Whether a merged layer can be rounded as well as the operators that it takes the place of, on the inputs of the capture.

* A layer's input has one grid for all channels. Scales that make channels alike, such as the standard deviations of features in
  different units, make that grid fine enough for all of them, and must stay; those of the colours of an image differ little.
* x + conv(x) rounds the result of the convolution before it is added. As one layer it does not, but the ones that it adds to the
  weights make their grids coarse: little in a depthwise convolution, which has few weights a channel, and much in others. The
  error of rounded weights is alike in all positions, so that a mean over positions, at the end of many networks, does not average
  it out, as it does with that of a rounded result.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compresskit.base.distributed import on_rank_zero
from compresskit.base.settings import stands_in
from compresskit.graph.capture import Captured, module_path
from compresskit.graph.interpreter import run_graph
from compresskit.graph.layers.channel_affine import ChannelAffine
from compresskit.graph.layers.merging import Rounds, TakesIdentity, layer_axis
from compresskit.graph.layers.stored import stored_value
from compresskit.graph.normalize import Node
from compresskit.quant.numerics.bit_widths import BitWidths, bits_of_layer
from compresskit.quant.numerics.scheme import Scheme, affine, fake_quantize
from compresskit.quant.numerics.targets import Target

MOST_NOISE = 1.25  # of the mean square of the rounding errors, relative to those of the value that the layer reads now: 1 dB
LESS_NOISE = 2.0  # of two operators' mean square error by that of one; nearer to 1, what follows decides which is better
MOST_OF_MEANS = 8.0  # of the mean square of the error's means over positions, relative to that of two operators


def rounds_as_well(captured: Captured) -> Rounds:
    """Return what compares the two values of a captured graph on the inputs that it was captured with; see `MergeRules`.

    Of several processes, which see different inputs, the first decides for all.
    """

    def rounds(layer: Node, affine: ChannelAffine, rest: Tensor | None) -> bool:
        return on_rank_zero(partial(compare, layer, affine, rest))

    def compare(layer: Node, affine: ChannelAffine, rest: Tensor | None) -> bool:
        values: dict[Node, Any] = {}
        with torch.no_grad():
            read = run_graph(captured.module, pytree.tree_leaves(captured.example), values.__setitem__, until=layer.args[0])
            instead = values[affine.x].double()
            shape = [1] * instead.ndim
            shape[layer_axis(layer)] = -1
            instead = instead if rest is None else instead + rest.view(shape)
            noise = (_range(instead) * affine.scale).square().mean()
            return bool(noise <= MOST_NOISE * _range(read.double()) ** 2)

    return rounds


def takes_identity(captured: Captured, target: Target, bits: BitWidths, skip: tuple[str, ...] = ()) -> TakesIdentity:
    """Return what compares x + conv(x) as two operators and as one depthwise convolution, on the inputs of a captured graph; see
    `MergeRules`. Other layers take no identity, nor do those of `skip`, which round nothing.

    Of several processes, which see different inputs, the first decides for all.
    """
    conv, add = target.operators.get("conv"), target.operators.get("add")
    per_channel = conv is not None and conv.axis is not None
    rounds_result = add is not None and not add.fuses

    def takes(layer: Node, weight: Tensor) -> bool:
        path = module_path(layer)
        skipped = layer.name in skip or stands_in(path, skip)
        if skipped or not per_channel or add is None or weight.ndim < 3 or weight.shape[1] > 1:
            return False
        return on_rank_zero(partial(compare, layer, weight))

    def compare(layer: Node, weight: Tensor) -> bool:
        widths = bits_of_layer(bits, module_path(layer))
        scheme = replace(target.weights, bits=widths.weights or target.weights.bits)
        own = stored_value(captured.module, layer.args[1])
        assert own is not None
        with torch.no_grad():
            read = run_graph(captured.module, pytree.tree_leaves(captured.example), until=layer.args[0])
            apart, apart_means = _noise_of_rounding(layer, read, own, scheme)
            if rounds_result:
                steps, result = target.activations.high - target.activations.low, _convolved(layer, read, own)
                rounding = (_range(result) / steps).square() / 12
                apart, apart_means = apart + rounding, apart_means + rounding / result[0, 0].numel()
            merged, merged_means = _noise_of_rounding(layer, read, weight.to(own), scheme)
            return bool(merged * LESS_NOISE <= apart and merged_means <= MOST_OF_MEANS * apart_means)

    return takes


def _noise_of_rounding(layer: Node, read: Tensor, weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Mean square of the error that rounding the weight makes in the result of a convolution, and of its means over positions."""
    high = weight.abs().flatten(1).amax(1) if scheme.per_channel else weight.abs().amax()
    error = _convolved(layer, read, fake_quantize(weight, *affine(-high, high, scheme), scheme) - weight)
    return error.square().mean(), error.flatten(2).mean(-1).square().mean()


def _convolved(layer: Node, read: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = layer.target(read, weight, None, *layer.args[3:])  # type: ignore[operator, arg-type]
    return result


def _range(values: Tensor) -> Tensor:
    """Width of the smallest range that holds all values, and zero."""
    return values.amax().clamp(min=0) - values.amin().clamp(max=0)
