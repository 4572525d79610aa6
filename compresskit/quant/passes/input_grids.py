"""Whether what a layer would read without a scale or shift before it can be rounded as well as what it reads now.

A layer's input has one grid for all channels. Scales that make channels alike, such as the standard deviations of features in
different units, make that grid fine enough for all of them, and must stay; those of the colours of an image differ little.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compresskit.base.distributed import on_rank_zero
from compresskit.graph.capture import Captured
from compresskit.graph.interpreter import run_graph
from compresskit.graph.layers.channel_affine import ChannelAffine
from compresskit.graph.layers.merging import Rounds, layer_axis
from compresskit.graph.normalize import Node

MOST_NOISE = 1.25  # of the mean square of the rounding errors, relative to those of the value that the layer reads now: 1 dB


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


def _range(values: Tensor) -> Tensor:
    """Width of the smallest range that holds all values, and zero."""
    return values.amax().clamp(min=0) - values.amin().clamp(max=0)
