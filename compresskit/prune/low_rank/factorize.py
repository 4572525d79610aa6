"""Closed-form factors of low rank for linear layers and convolutions, from weights and statistics of their inputs.

A linear layer W that reads inputs of covariance C keeps the outputs' r main directions U: W ~ U (U' W), the matrix of rank r
whose outputs are nearest (with C = 1, the truncated SVD). A convolution is factored in its output and in its input channels,
Tucker-2 (Kim et al., 1511.06530): 1x1 to r_in channels, k x k to r_out, 1x1 to the outputs. One of size 1x1 counts as linear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.graph.replacements import Factored
from compresskit.prune.channels.reconstruct import InputStatistics

DAMPING = 1e-5  # fraction of the mean variance of the inputs that is added to each

FactorableLayer = nn.Linear | nn.Conv2d


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """Directions of a layer, the main ones first.

    outputs: (out, out) orthonormal columns. energy: (out,) fraction of the output's variance along each, which sum to 1.
    inputs, inverse: (in, in) V' C^-1/2 and C^1/2 V of a convolution of several positions, energy_in: (in,); None for all others.
    shift: (columns,) the mean of what the layer multiplies its weights with; None without a bias.
    """

    outputs: Tensor
    energy: Tensor
    inputs: Tensor | None = None
    inverse: Tensor | None = None
    energy_in: Tensor | None = None
    shift: Tensor | None = None

    def lost(self, ranks: tuple[int, ...]) -> float:
        """Fraction of the output's variance that is lost at some ranks; of Tucker-2 an upper bound."""
        lost = float(self.energy[ranks[-1] :].sum())
        return lost if self.energy_in is None else lost + float(self.energy_in[ranks[0] :].sum())


def is_tucker(layer: FactorableLayer) -> bool:
    """Whether a layer is a convolution of several positions, which is factored in inputs and outputs."""
    return isinstance(layer, nn.Conv2d) and math.prod(layer.kernel_size) > 1


def spectrum(layer: FactorableLayer, statistics: InputStatistics | None) -> Spectrum:
    """Directions of a layer's outputs (and inputs), in float64.

    Args:
        layer: linear, or a convolution of one group.
        statistics: of what it multiplies its weights with; None takes the weights alone.
    """
    weight = layer.weight.detach().double()
    flat = weight.flatten(1)
    moment, mean = torch.eye(flat.shape[1], dtype=flat.dtype, device=flat.device), None
    if statistics is not None:
        moment = (statistics.products / statistics.rows).to(flat)
        if layer.bias is not None:  # the bias takes the mean
            mean = (statistics.total / statistics.rows).to(flat)
            moment = moment - torch.outer(mean, mean)
        moment = moment + DAMPING * moment.diagonal().mean().clamp(min=1e-12) * torch.eye(len(moment)).to(moment)
    values, outputs = _descending(flat @ moment @ flat.T)
    if not is_tucker(layer):
        return Spectrum(outputs=outputs, energy=_fractions(values), shift=mean)
    channels = weight.shape[1]
    # The covariance of channels, the mean over positions of the kernel; what positions have in common is left out.
    between = moment.view(channels, -1, channels, moment.shape[0] // channels).diagonal(dim1=1, dim2=3).mean(-1)
    sizes, basis = torch.linalg.eigh(between)
    root = basis * sizes.clamp(min=1e-12).sqrt() @ basis.T
    by_input = weight.transpose(0, 1).flatten(1)
    energy_in, directions = _descending(root @ by_input @ by_input.T @ root)
    return Spectrum(
        outputs=outputs,
        energy=_fractions(values),
        inputs=directions.T @ torch.linalg.inv(root),
        inverse=root @ directions,
        energy_in=_fractions(energy_in),
        shift=mean,
    )


def _descending(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    return values.flip(0), vectors.flip(1)


def _fractions(values: Tensor) -> Tensor:
    values = values.clamp(min=0)
    return values / values.sum().clamp(min=1e-300)


@torch.no_grad()
def factored(layer: FactorableLayer, ranks: tuple[int, ...], directions: Spectrum) -> Factored:
    """The layers of these ranks in the place of one; its bias takes the mean of what is lost."""
    made = Factored.like(layer, ranks)
    weight = layer.weight.detach().double()
    outputs = directions.outputs[:, : ranks[-1]]
    core = torch.einsum("or,oikl->rikl", outputs, weight) if weight.ndim == 4 else outputs.T @ weight
    first: Any = made[0]
    if directions.inputs is None or directions.inverse is None:
        first.weight.copy_(core)
        whole = torch.tensordot(outputs, core, 1)
    else:
        inputs, inverse = directions.inputs[: ranks[0]], directions.inverse[:, : ranks[0]]
        core = torch.einsum("oikl,ir->orkl", core, inverse)
        first.weight.copy_(inputs[:, :, None, None])
        middle: Any = made[1]
        middle.weight.copy_(core)
        whole = torch.einsum("or,rskl,si->oikl", outputs, core, inputs)
    last: Any = made[-1]
    last.weight.copy_(outputs.view(last.weight.shape))
    if layer.bias is not None:
        last.bias.copy_(layer.bias)
        if directions.shift is not None:
            last.bias += ((weight - whole).flatten(1) @ directions.shift).to(last.bias.dtype)
    for parameter in made.parameters():
        parameter.requires_grad_(layer.weight.requires_grad)
    return made.train(layer.training)
