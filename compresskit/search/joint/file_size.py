"""Bytes of the exported file as a sum over weights, each bits times the widths of two groups of channels.

bytes = fixed + sum over weights of (bits / 8) * rest * outputs * inputs + CHANNEL_BYTES * outputs

where `outputs` and `inputs` are themselves sums: of the channels that stay in each group that reaches the dimension, and of those
that cannot be removed. A weight read by the layer after a flattening has several inputs for each channel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from compresskit.graph.surgery import get_tensor
from compresskit.prune.structure.groups import ChannelAnalysis

CHANNEL_BYTES = 12  # of an output channel in the file: scale of the weight, scale of the bias, bias; four each
FLOAT_BITS = 32


@dataclass(frozen=True, kw_only=True)
class Side:
    """One dimension of a weight. fixed: entries that stay whatever is pruned. groups: number of a group -> entries a channel."""

    fixed: int
    groups: dict[int, int]

    def size(self, kept: Sequence[int]) -> int:
        """Entries that are left. kept: channels that stay in each group."""
        return self.fixed + sum(each * kept[group] for group, each in self.groups.items())


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """A weight in the file.

    layer: number of the layer that chooses its bits; None for one that stays in float.
    outputs, inputs: its first two dimensions. rest: the product of the others.
    """

    layer: int | None
    outputs: Side
    inputs: Side
    rest: int

    def size(self, kept: Sequence[int]) -> int:
        """Numbers that are left of it."""
        return self.rest * self.outputs.size(kept) * self.inputs.size(kept)


def stored_bits(bits: int) -> int:
    """Bits that a weight takes in a file: seven are stored in eight."""
    return 8 if bits == 7 else bits


def modelled_bytes(weights: Sequence[StoredWeight], kept: Sequence[int], bits: Sequence[int]) -> float:
    """Bytes of all weights and of what the file holds for each output channel, without the operators.

    kept: channels that stay in each group. bits: of each layer.
    """
    total = 0.0
    for weight in weights:
        width = FLOAT_BITS if weight.layer is None else stored_bits(bits[weight.layer])
        total += math.ceil(weight.size(kept) * width / 8)
        total += 0 if weight.layer is None else CHANNEL_BYTES * weight.outputs.size(kept)
    return total


def stored_weights(model: nn.Module, analysis: ChannelAnalysis, layers: Sequence[str]) -> list[StoredWeight]:
    """The matrices and filters of a model. layers: dotted names of those that choose bits.

    Dimensions beyond the second are taken as whole, also where a group reaches them.
    """
    number = {name: i for i, name in enumerate(layers)}
    along: dict[str, dict[int, dict[int, int]]] = {}
    for g, group in enumerate(analysis.groups):
        for (tensor, dim, _), indices in group.indices.items():
            entries = along.setdefault(analysis.prefix + tensor, {}).setdefault(dim, {})
            entries[g] = entries.get(g, 0) + indices.shape[1]
    found = []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        layer, _, leaf = name.rpartition(".")
        sides = [_side(get_tensor(model, name).shape[dim], along.get(name, {}).get(dim, {}), analysis) for dim in (0, 1)]
        rest = math.prod(parameter.shape[2:])
        own = number.get(layer) if leaf == "weight" else None
        found.append(StoredWeight(layer=own, outputs=sides[0], inputs=sides[1], rest=rest))
    return found


def _side(size: int, groups: dict[int, int], analysis: ChannelAnalysis) -> Side:
    return Side(fixed=size - sum(each * analysis.groups[g].size for g, each in groups.items()), groups=groups)
