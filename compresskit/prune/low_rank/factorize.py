"""Closed-form factors of low rank for linear layers and convolutions, from weights and statistics of their inputs.

A linear layer W that reads inputs of covariance C keeps the outputs' r main directions U: W ~ U (U' W), the matrix of rank r
whose outputs are nearest (with C = 1, the truncated SVD). A convolution over one dimension or two is factored in its output and
in its input channels, Tucker-2 (Kim et al., 1511.06530): 1x1 to r_in channels, k x k to r_out, 1x1 to the outputs; or, over two,
by CP, see `cp`. One of size 1x1 counts as linear.

The covariance is around the mean where the layer's bias, or the BatchNorm that alone reads its output, takes the mean of what is
lost. Where nothing takes it, the factors keep the mean like any other direction, and what they lose of it counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.graph.replacements import Factored
from compresskit.graph.tracing import no_modes_of_caller
from compresskit.prune.channels.reconstruct import InputStatistics
from compresskit.prune.low_rank.cp import CPFactors, cp_factors, weighted_energy

DAMPING = 1e-5  # fraction of the mean variance of the inputs that is added to each

SCARCE = 2  # positions for each input of a weight below which their covariance is not taken as it is

RESOLVED = 1e-5  # fraction of a mean square below which a variance is what rounding the sums in single precision leaves

FactorableLayer = nn.Linear | nn.Conv1d | nn.Conv2d


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """Directions of a layer, the main ones first.

    outputs: (out, out) orthonormal columns. energy: (out,) fraction of the output's mean square along each, which sum to 1.
    square, variance: mean square of the output, without the mean where that is taken, and variance, both summed over channels.
    inputs, inverse: (in, in) V' C^-1/2 and C^1/2 V of a convolution of several positions, energy_in: (in,); None for all others.
    shift: (columns,) the mean of what the layer multiplies its weights with; None where neither a bias nor `norm` takes it.
    moment: (columns, columns) its covariance, or its mean products without `shift`, of a convolution of several positions; None
        for 1, and for all others.
    norm: dotted name of the BatchNorm that takes the mean, of a layer without a bias.
    """

    outputs: Tensor
    energy: Tensor
    square: float
    variance: float
    inputs: Tensor | None = None
    inverse: Tensor | None = None
    energy_in: Tensor | None = None
    shift: Tensor | None = None
    moment: Tensor | None = None
    norm: str | None = None

    def lost(self, ranks: tuple[int, ...]) -> float:
        """Mean squared error at some ranks, as a fraction of the output's variance.

        Of Tucker-2 it is the sum of what both modes lose: an upper bound for the weights alone, and nearly one on data.
        """
        lost = float(self.energy[ranks[-1] :].sum())
        lost = lost if self.energy_in is None else lost + float(self.energy_in[ranks[0] :].sum())
        return lost * self.square / max(self.variance, 1e-300)


def is_tucker(layer: FactorableLayer) -> bool:
    """Whether a layer is a convolution of several positions, which is factored in inputs and outputs."""
    return not isinstance(layer, nn.Linear) and math.prod(layer.kernel_size) > 1


def is_cp(layer: FactorableLayer, ranks: tuple[int, ...]) -> bool:
    """Whether ranks are of CP, which has one where Tucker-2 has two."""
    return is_tucker(layer) and len(ranks) == 1


def spectrum(layer: FactorableLayer, statistics: InputStatistics | None) -> Spectrum:
    """Directions of a layer's outputs (and inputs), in float64.

    Args:
        layer: linear, or a convolution of one group.
        statistics: of what it multiplies its weights with, from `input_statistics(..., norms=True)` where it has no bias; None
            takes the weights alone.
    """
    weight = layer.weight.detach().double()
    flat = weight.flatten(1)
    if statistics is None:
        moment, mean, left = torch.eye(flat.shape[1], dtype=flat.dtype, device=flat.device), None, None
    else:
        moment, mean, left = _moment_and_mean(layer, statistics)
    values, outputs = _descending(flat @ moment @ flat.T)
    square = float(values.clamp(min=0).sum())
    variance = square if left is None else max(square - float((flat @ left).square().sum()), RESOLVED * square)
    energy = _fractions(values)
    norm = None if statistics is None or layer.bias is not None else statistics.norm
    if not is_tucker(layer):
        return Spectrum(outputs=outputs, energy=energy, square=square, variance=variance, shift=mean, norm=norm)
    channels = weight.shape[1]
    # The covariance of channels, the mean over positions of the kernel; what positions have in common is left out.
    between = moment.view(channels, -1, channels, moment.shape[0] // channels).diagonal(dim1=1, dim2=3).mean(-1)
    sizes, basis = torch.linalg.eigh(between)
    root = basis * sizes.clamp(min=1e-12).sqrt() @ basis.T
    by_input = weight.transpose(0, 1).flatten(1)
    energy_in, directions = _descending(root @ by_input @ by_input.T @ root)
    return Spectrum(
        outputs=outputs,
        energy=energy,
        square=square,
        variance=variance,
        inputs=directions.T @ torch.linalg.inv(root),
        inverse=root @ directions,
        energy_in=_fractions(energy_in),
        shift=mean,
        moment=None if statistics is None else moment,
        norm=norm,
    )


def _moment_and_mean(layer: FactorableLayer, statistics: InputStatistics) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What a layer's inputs do, in float64, with little added to each variance.

    Returns the covariance, the mean, which a bias or a BatchNorm takes, and None; or, where neither does, the mean products,
    None, and the mean that is in them.
    """
    moment, mean = (
        (sums / statistics.rows).to(layer.weight.detach().double()) for sums in (statistics.products, statistics.total)
    )
    taken = layer.bias is not None or statistics.norm is not None
    if taken:
        moment = moment - torch.outer(mean, mean)
    left = torch.zeros_like(mean) if taken else mean
    if are_scarce(layer, statistics.rows):
        part = _evened(moment, statistics.rows)
        even = moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
        moment, left = (1 - part) * moment + part * even, (1 - part) ** 0.5 * left
    square = moment.diagonal().mean()
    ridge = DAMPING * torch.maximum(square - left.square().mean(), RESOLVED * square).clamp(min=1e-12)
    moment = moment + ridge * torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
    return (moment, mean, None) if taken else (moment, None, left)


def are_scarce(layer: FactorableLayer, rows: int) -> bool:
    """Whether so many positions are too few to tell which directions a layer's inputs never take."""
    return rows < SCARCE * layer.weight[0].numel()


def _evened(moment: Tensor, rows: int) -> float:
    """How far a sample covariance goes towards equal variances, the further the fewer rows (Chen et al., 0907.4698, eq. 23).

    Of n rows it has rank n: every layer of such inputs would seem to lose nothing at that rank.
    """
    size = len(moment)
    trace, squares = float(moment.trace()), float(moment.square().sum())
    spread = (rows + 1 - 2 / size) * (squares - trace**2 / size)
    return min(1.0, ((1 - 2 / size) * squares + trace**2) / spread) if spread > 0 else 1.0


def _descending(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    return values.flip(0), vectors.flip(1)


def _fractions(values: Tensor) -> Tensor:
    values = values.clamp(min=0)
    return values / values.sum().clamp(min=1e-300)


@no_modes_of_caller()
@torch.no_grad()
def factored(layer: FactorableLayer, ranks: tuple[int, ...], directions: Spectrum, norm: Any = None) -> Factored:
    """The layers of these ranks in the place of one; its bias takes the mean of what is lost.

    norm: the BatchNorm that `directions.norm` names, whose running mean takes it, in place, where the layer has no bias.
    """
    made = Factored.like(layer, ranks)
    weight = layer.weight.detach().double()
    if is_cp(layer, ranks):
        return _finished(made, layer, _set_cp_(made, layer, ranks[0], directions), directions, norm)
    outputs = directions.outputs[:, : ranks[-1]]
    core = torch.tensordot(outputs.T, weight, 1)
    first: Any = made[0]
    if directions.inputs is None or directions.inverse is None:
        first.weight.copy_(core)
        whole = torch.tensordot(outputs, core, 1)
    else:
        inputs, inverse = directions.inputs[: ranks[0]], directions.inverse[:, : ranks[0]]
        core = torch.einsum("oi...,ir->or...", core, inverse)
        first.weight.copy_(inputs.view(first.weight.shape))
        middle: Any = made[1]
        middle.weight.copy_(core)
        whole = torch.einsum("or,rs...,si->oi...", outputs, core, inputs)
    last: Any = made[-1]
    last.weight.copy_(outputs.view(last.weight.shape))
    return _finished(made, layer, whole, directions, norm)


def cp_of(layer: FactorableLayer, rank: int, directions: Spectrum) -> CPFactors:
    """The factors of a convolution in the form of CP."""
    weight, whiten, unwhiten = layer.weight.detach(), directions.inverse, directions.inputs
    return cp_factors(weight, rank, whiten=whiten, unwhiten=unwhiten, moment=directions.moment, variance=directions.variance)


def tucker_lost(layer: FactorableLayer, ranks: tuple[int, ...], directions: Spectrum) -> float:
    """Mean squared error of Tucker-2 of these ranks, as a fraction of the output's variance; `Spectrum.lost` adds both modes."""
    assert directions.inputs is not None
    assert directions.inverse is not None
    weight, outputs = layer.weight.detach().double(), directions.outputs[:, : ranks[1]]
    onto_inputs = directions.inverse[:, : ranks[0]] @ directions.inputs[: ranks[0]]
    whole = torch.einsum("pikl,ij->pjkl", torch.tensordot(outputs @ outputs.T, weight, 1), onto_inputs)
    return weighted_energy((weight - whole).flatten(1), directions.moment) / max(directions.variance, 1e-300)


def _set_cp_(made: Factored, layer: FactorableLayer, rank: int, directions: Spectrum) -> Tensor:
    """Set the weights of CP, of sizes that are alike in all factors, and return their product."""
    found = cp_of(layer, rank, directions)
    sizes = [f.norm(dim=1) for f in (found.inputs, found.rows, found.columns)] + [found.outputs.norm(dim=0)]
    each = torch.stack(sizes).clamp(min=1e-150).log().mean(0).exp()
    even = [each / size.clamp(min=1e-150) for size in sizes]
    first, down, along, last = (part.get_parameter("weight") for part in made)
    first.copy_((found.inputs * even[0][:, None])[:, :, None, None])
    down.copy_((found.rows * even[1][:, None])[:, None, :, None])
    along.copy_((found.columns * even[2][:, None])[:, None, None, :])
    last.copy_((found.outputs * even[3])[:, :, None, None])
    return found.whole()


def _finished(made: Factored, layer: FactorableLayer, whole: Tensor, directions: Spectrum, norm: Any) -> Factored:
    """The factors with the bias and the modes of the layer. whole: the weight that their product is."""
    last: Any = made[-1]
    missing: Any = 0 if directions.shift is None else (layer.weight.detach().double() - whole).flatten(1) @ directions.shift
    if layer.bias is not None:
        last.bias.copy_(layer.bias + missing)
    elif norm is not None:
        norm.running_mean -= torch.as_tensor(missing).to(norm.running_mean)
    for parameter in made.parameters():
        parameter.requires_grad_(layer.weight.requires_grad)
    if layer.bias is not None:  # which may be all that is trained, or all that is not
        last.bias.requires_grad_(layer.bias.requires_grad)
    return made.train(layer.training)
