"""Criteria: which channels matter. `(Slices) -> scores (channels,)`, larger = keep.

Row c of `Slices` holds every weight that vanishes with channel c, so a criterion is written once for all kinds of layer, and
serves single weights too: a row of one value is a weight. A criterion that reads more than weights says so by asking: whoever
scores catches `Needs`, collects that evidence from data, and asks again, a batch at a time; scores are averaged over batches.

    weights only              l1 l2 group_l2 fpgm lamp bn_scale random
    gradients of a batch      taylor
    gradients of each sample  taylor_samples fisher obd
    activations, no labels    mean_activation apoz output_energy irreplaceable
    losses without channels   shapley
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


class Needs(Exception):
    """Raised by `Slices` when a criterion asks for evidence that was not collected; the planner collects it and asks again."""


class NeedsGradients(Needs):
    """The gradient of a batch's loss."""


class NeedsSampleGradients(Needs):
    """The gradient of every sample's loss by itself."""


class NeedsActivations(Needs):
    """Values of the channels on data."""


class NeedsLosses(Needs):
    """Losses of the model with some of the channels removed."""


@dataclass(frozen=True, kw_only=True)
class Slices:
    """All that vanishes with each channel of one group.

    weight: (channels, K), every weight of convolutions and linear layers in a row; the rows that make the channel and
        the columns that read it. Norms and biases are left out: they have another scale.
    reads: (K,) bool, which of the K are columns of a layer that reads the channel.
    layers: (K,) the number of the layer that each column belongs to; None where all belong to one.
    scales: (channels, norms) factors of the norms that the channel passes, or None where it passes none.
    grad: (channels, K) gradient of the loss of one batch.
    sample_grad: (samples, channels, K) gradients of the losses of single samples.
    activations: (channels, V) values of the channel where it is read, over samples and positions.
    loss: `(keep (channels,) bool) -> loss of one batch` without the other channels.
    """

    weight: Tensor
    reads: Tensor
    layers: Tensor | None = None
    scales: Tensor | None = None
    grad: Tensor | None = None
    sample_grad: Tensor | None = None
    activations: Tensor | None = None
    loss: Callable[[Tensor], float] | None = None

    @property
    def gradient(self) -> Tensor:
        """The gradients; asking for them is how a criterion says that it needs them."""
        if self.grad is None:
            raise NeedsGradients
        return self.grad

    @property
    def sample_gradients(self) -> Tensor:
        """Gradients of single samples, (samples, channels, K)."""
        if self.sample_grad is None:
            raise NeedsSampleGradients
        return self.sample_grad

    @property
    def values(self) -> Tensor:
        """Activations, (channels, V)."""
        if self.activations is None:
            raise NeedsActivations
        return self.activations

    def loss_of(self, keep: Tensor) -> float:
        """Loss of one batch with only the channels of `keep`, (channels,) bool."""
        if self.loss is None:
            raise NeedsLosses
        return self.loss(keep)

    @property
    def used(self) -> Tensor:
        """(K,) bool: the columns whose removal is the removal of the channel: those that read it, or all where nothing does."""
        return self.reads if bool(self.reads.any()) else torch.ones_like(self.reads)

    def part(self, columns: Tensor) -> Slices:
        """The same channels with only some columns, (K,) bool."""
        return replace(
            self,
            weight=self.weight[:, columns],
            reads=self.reads[columns],
            layers=None if self.layers is None else self.layers[columns],
            grad=None if self.grad is None else self.grad[:, columns],
            sample_grad=None if self.sample_grad is None else self.sample_grad[:, :, columns],
        )


Criterion = Callable[[Slices], Tensor]


def l1(slices: Slices) -> Tensor:
    """Sum of absolute values of the row (Li et al., 1608.08710)."""
    return slices.weight.abs().sum(1)


def l2(slices: Slices) -> Tensor:
    """Euclidean norm of the row (Li et al., 1608.08710, with L2 and over the whole group)."""
    return torch.linalg.vector_norm(slices.weight, dim=1)


def group_l2(slices: Slices) -> Tensor:
    """Norm of a group in which every layer counts the same, whatever its fan-in (DepGraph, 2301.12900, eq. 6): the root of the
    mean over layers of the mean square.
    """
    layers = torch.zeros_like(slices.reads, dtype=torch.long) if slices.layers is None else slices.layers
    return torch.stack([slices.weight[:, layers == n].square().mean(1) for n in layers.unique()]).mean(0).sqrt()


def fpgm(slices: Slices) -> Tensor:
    """Sum of distances to the other rows: those close to the geometric median can be replaced by others (He et al., 1811.00250).

    A row of zeros is not the first to go, one that resembles all others is.
    """
    return torch.cdist(slices.weight, slices.weight, compute_mode="donot_use_mm_for_euclid_dist").sum(1)


def lamp(slices: Slices) -> Tensor:
    """Share of a row's energy in that of all rows not smaller (Lee et al., 2010.07611, eq. 2), so that layers can be ranked
    against one another without any other normalisation: pass `normalize=unscaled`.
    """
    energy, order = slices.weight.double().square().sum(1).sort()
    at_least = energy.flip(0).cumsum(0).flip(0).clamp(min=1e-300)
    return torch.empty_like(energy).index_copy_(0, order, energy / at_least)


def bn_scale(slices: Slices) -> Tensor:
    """Mean absolute factor of the norms that the channel passes (Liu et al., 1708.06519); its L2 norm where it passes none."""
    return l2(slices) if slices.scales is None else slices.scales.abs().mean(1)


def random(slices: Slices, *, seed: int = 0) -> Tensor:
    """Uniform numbers in [0, 1) made from the weights and a seed, whatever the order of the channels: a baseline."""
    return (_hashed(slices.weight, seed) >> 11 & (1 << 52) - 1).double() / (1 << 52)


def _hashed(weight: Tensor, seed: int) -> Tensor:
    """One 64-bit number for each row, from its bits."""
    bits = weight.float().contiguous().view(torch.int32).long()
    factors = torch.randint(-(2**62), 2**62, (bits.shape[1],), generator=torch.Generator().manual_seed(seed)) * 2 + 1
    number = (bits * factors.to(bits.device)).sum(1) + seed
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):  # the finalizer of splitmix64
        number = (number ^ (number >> shift)) * factor
    return number ^ (number >> 31)


def taylor(slices: Slices) -> Tensor:
    """Squared first-order change of a batch's loss when the channel is removed (Molchanov et al., 1906.10771, eq. 8).

    Removing a channel is removing the columns that read it, so only those are summed; a group that nothing with weights
    reads falls back on the rows that make it.
    """
    return (slices.weight * slices.gradient)[:, slices.used].sum(1).square()


def _sample_changes(slices: Slices) -> Tensor:
    """(samples, channels): first-order change of each sample's loss when the channel is removed."""
    used = slices.used
    return torch.einsum("ck,nck->nc", slices.weight[:, used], slices.sample_gradients[:, :, used])


def taylor_samples(slices: Slices) -> Tensor:
    """Mean absolute first-order change of a sample's loss (Molchanov et al., 1611.06440): samples do not cancel one another."""
    return _sample_changes(slices).abs().mean(0)


def fisher(slices: Slices) -> Tensor:
    """Second-order change of the loss with the empirical Fisher information of the channel's gate as its curvature: half the
    mean square of the samples' first-order changes (Theis et al., 1801.05787, eq. 5).
    """
    return _sample_changes(slices).square().mean(0) / 2


def obd(slices: Slices) -> Tensor:
    """Optimal brain damage: half of weight squared times curvature, the diagonal of the empirical Fisher information, summed
    over the columns (LeCun et al., 1989). Unlike `fisher`, weights of a channel are taken to act independently.
    """
    used = slices.used
    curvature = slices.sample_gradients[:, :, used].square().mean(0)
    return (slices.weight[:, used].square() * curvature).sum(1) / 2


def mean_activation(slices: Slices) -> Tensor:
    """Mean absolute value of the channel where it is read (Molchanov et al., 1611.06440, section 2.2). Needs no labels."""
    return slices.values.abs().mean(1)


def apoz(slices: Slices) -> Tensor:
    """Share of positions where the channel is not zero: 1 - the average percentage of zeros (Hu et al., 1607.03250)."""
    return (slices.values != 0).double().mean(1)


def output_energy(slices: Slices) -> Tensor:
    """What the layers that read the channel lose beyond a constant: variance of its values times the squared norm of the columns.

    The mean of a channel can be folded into the bias or BatchNorm that follows, its variation cannot. Needs no labels.
    """
    return slices.values.double().var(1, correction=0) * slices.weight[:, slices.used].double().square().sum(1)


def irreplaceable(slices: Slices, *, damping: float = 1e-3) -> Tensor:
    """What the layers that read the channel lose although the channels that are left make up for it as well as they linearly can.

    Optimal brain surgeon (Hassibi & Stork, 1993; layer by layer as in Kurtic et al., 2302.04089), one channel after another: the
    channel that costs least goes, its columns are handed to the others, and so on; the score is the cost at that moment. The
    positions of a filter are taken to vary alike. Goes with `reconstruct_`, which does the making up. Needs no labels.
    """
    values, columns = slices.values.double(), slices.weight[:, slices.used].double()
    covariance = torch.cov(values, correction=0).reshape(len(values), len(values))
    diagonal = covariance.diagonal().mean().clamp(min=1e-30)
    inverse = torch.linalg.inv(covariance + damping * diagonal * torch.eye(len(covariance), device=values.device))
    scores, alive = torch.zeros_like(values[:, 0]), torch.ones_like(values[:, 0], dtype=torch.bool)
    for _ in range(len(scores)):
        cost = columns.square().sum(1) / inverse.diagonal().clamp(min=1e-300)
        channel = int(cost.masked_fill(~alive, torch.inf).argmin())
        scores[channel] = cost[channel]
        alive[channel] = False
        share = inverse[:, channel] / inverse[channel, channel]
        columns = columns - torch.outer(share, columns[channel])
        inverse = inverse - torch.outer(share, inverse[channel])
    return scores


def shapley(slices: Slices, *, permutations: int = 1, seed: int = 0) -> Tensor:
    """Sampled Shapley value of each channel: the mean rise of the loss when it is removed after a random set of others
    (Ancona et al., 2006.01795). Takes channels + 1 evaluations of the loss for each permutation and batch.
    """
    rise = torch.zeros(len(slices.weight), dtype=torch.double)
    for i in range(permutations):
        keep = torch.ones(len(rise), dtype=torch.bool)
        before = slices.loss_of(keep)
        for channel in _hashed(slices.weight, seed + i).argsort().tolist():
            keep[channel] = False
            after = slices.loss_of(keep)
            rise[channel] += after - before
            before = after
    return rise / permutations


#: Every criterion of the library; the contract tests run over this list.
CRITERIA = (
    l1,
    l2,
    group_l2,
    fpgm,
    lamp,
    bn_scale,
    random,
    taylor,
    taylor_samples,
    fisher,
    obd,
    mean_activation,
    apoz,
    output_energy,
    irreplaceable,
    shapley,
)
