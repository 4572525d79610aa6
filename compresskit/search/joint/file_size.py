"""Bytes of the exported file as a sum over weights, each bits times the widths of two groups of channels.

bytes = fixed + sum over weights of (bits / 8) * rest * outputs * inputs + CHANNEL_BYTES * outputs

where `outputs` and `inputs` are themselves sums: of the channels that stay in each group that reaches the dimension, and of those
that cannot be removed. A weight read by the layer after a flattening has several inputs for each channel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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


def stored_weights(
    model: nn.Module, analysis: ChannelAnalysis, stored: Mapping[str, Tensor], layers: Mapping[str, int]
) -> list[StoredWeight]:
    """The matrices and filters of the file.

    Dimensions beyond the second are taken as whole, also where a group reaches them.

    Args:
        model: the float model. analysis: its groups of channels.
        stored: the weights as the file stores them, by their names in the model; those that the model computes from other
            parameters (weight norm) are among them with their values.
        layers: name of a weight -> number of the layer that chooses its bits; the others stay in float.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    along: dict[Tensor | None, dict[int, dict[int, int]]] = {}  # by the tensor, since a tied one has several names
    for g, group in enumerate(analysis.groups):
        for (tensor, dim, _), indices in group.indices.items():
            entries = along.setdefault(parameters.get(analysis.prefix + tensor), {}).setdefault(dim, {})
            entries[g] = entries.get(g, 0) + indices.shape[1]
    found = []
    for name, weight in stored.items():
        if weight.ndim < 2:
            continue
        source = next((p for p in _weight_sources(parameters, name) if _is_of_shape(p, weight)), None)
        reached = along.get(source, {}) if source is not None else {}
        dims = (1, 0) if source is not None and _is_stored_transposed(source, weight) else (0, 1)
        sides = [_side(weight.shape[i], reached.get(dim, {}), analysis) for i, dim in enumerate(dims)]
        rest = math.prod(weight.shape[2:])
        found.append(StoredWeight(layer=layers.get(name), outputs=sides[0], inputs=sides[1], rest=rest))
    return found


def _weight_sources(parameters: Mapping[str, Tensor], name: str) -> Iterator[Tensor]:
    """The parameters that a weight may be computed from: itself, those under a parametrization, those of the older hooks."""
    path, dot, leaf = name.rpartition(".")
    under = f"{path}{dot}parametrizations.{leaf}."
    for other, parameter in parameters.items():
        if other in (name, f"{name}_v", f"{name}_orig") or other.startswith(under):
            yield parameter


def _is_of_shape(source: Tensor, weight: Tensor) -> bool:
    """Whether a parameter has the shape of a stored weight, or that of its transpose."""
    return source.shape == weight.shape or (weight.ndim == 2 and source.shape == weight.shape[::-1])


def _is_stored_transposed(source: Tensor, weight: Tensor) -> bool:
    """Whether a matrix is stored transposed: of `x @ w`, to make a linear layer of it."""
    if source.shape != weight.shape:
        return True
    return weight.ndim == 2 and torch.equal(source.T, weight) and not torch.equal(source, weight)


def _side(size: int, groups: dict[int, int], analysis: ChannelAnalysis) -> Side:
    return Side(fixed=size - sum(each * analysis.groups[g].size for g, each in groups.items()), groups=groups)
