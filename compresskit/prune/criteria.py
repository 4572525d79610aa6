"""Criteria: functions that score channels, single weights or blocks of weights. `(Slices) -> scores (units,)`, larger = keep.

A unit is what is kept or removed as a whole: a channel of a group of layers (`Prune`), or a weight or block under a mask
(`Sparsify`). Row u of `Slices` holds every weight that vanishes with unit u, so one function serves all kinds of layer. A
criterion that reads more than weights declares it:

    @needs("gradients")
    def taylor_abs(slices: Slices) -> Tensor:
        return (slices.weight * slices.gradient).sum(1).abs()

That evidence is then collected from the task's data, a batch at a time, and scores are averaged over the samples.

    weights only               l1 l2 group_l2 fpgm lamp bn_scale random_scores
    gradients of a batch       taylor snip movement
    gradients of each sample   taylor_samples fisher obd                                        channels only
    activations, no labels     mean_activation apoz output_energy optimal_brain_surgeon         channels only
    losses without channels    shapley                                                          channels only
    Hessian times gradient     grasp                                                            masks only
    norms of inputs            wanda                                                            masks only
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from compresskit.base.errors import SettingError

#: Evidence that a criterion can declare with `needs`.
Need = Literal["gradients", "sample_gradients", "activations", "losses", "hessian_gradients", "input_norms"]

#: The same in words, for messages.
EVIDENCE: dict[Need, str] = {
    "gradients": "gradients",
    "sample_gradients": "gradients of single samples",
    "activations": "activations",
    "losses": "losses without channels",
    "hessian_gradients": "products with the Hessian",
    "input_norms": "activations (norms of inputs)",
}
CHANNEL_EVIDENCE: frozenset[Need] = frozenset({"gradients", "sample_gradients", "activations", "losses"})
WEIGHT_EVIDENCE: frozenset[Need] = frozenset({"gradients", "hessian_gradients", "input_norms"})
#: Evidence that is collected without labels.
UNLABELLED_EVIDENCE: frozenset[Need] = frozenset({"activations", "input_norms"})

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Tensor])


@dataclass(frozen=True, kw_only=True)
class Slices:
    """The weights that vanish with each unit of one group of channels, or of one masked tensor, and the evidence about them.

    weight: (units, K). For channels, every weight of convolutions and linear layers in a row: those that make the channel and
        those that read it; norms and biases are left out, their scale is another. For masks K is 1, or the size of a block.
    reads: (K,) bool, which of the K belong to a layer that reads the channel; all for masks.
    layers: (K,) the number of the layer that each column belongs to; None where all belong to one.
    scales: (units, norms) factors of the norms that the channel passes, or None where it passes none.
    grad: (units, K) gradient of the loss of one batch.
    sample_grad: (samples, units, K) gradients of the losses of single samples.
    activations: (units, V) values of the channel where it is read, over samples and positions.
    loss: `(keep (units,) bool) -> loss of one batch` without the other channels.
    hessian: (units, K) the Hessian of the loss times its gradient.
    norms: (units, K) for each weight the Euclidean norm of the input that it multiplies.
    """

    weight: Tensor
    reads: Tensor
    layers: Tensor | None = None
    scales: Tensor | None = None
    grad: Tensor | None = None
    sample_grad: Tensor | None = None
    activations: Tensor | None = None
    loss: Callable[[Tensor], float] | None = None
    hessian: Tensor | None = None
    norms: Tensor | None = None

    @property
    def gradient(self) -> Tensor:
        """Gradient of the loss of one batch, (units, K); needs "gradients"."""
        return _declared(self.grad, "gradients")

    @property
    def sample_gradients(self) -> Tensor:
        """Gradients of single samples, (samples, units, K); needs "sample_gradients"."""
        return _declared(self.sample_grad, "sample_gradients")

    @property
    def values(self) -> Tensor:
        """Activations, (units, V); needs "activations"."""
        return _declared(self.activations, "activations")

    @property
    def hessian_gradient(self) -> Tensor:
        """The Hessian of the loss times its gradient, (units, K); needs "hessian_gradients"."""
        return _declared(self.hessian, "hessian_gradients")

    @property
    def input_norms(self) -> Tensor:
        """Norms of the inputs that the weights multiply, (units, K); needs "input_norms"."""
        return _declared(self.norms, "input_norms")

    def loss_of(self, keep: Tensor) -> float:
        """Loss of one batch with only the channels of `keep`, (units,) bool; needs "losses"."""
        return _declared(self.loss, "losses")(keep)

    @property
    def used(self) -> Tensor:
        """(K,) bool: the columns whose removal removes the unit: those that read it, or all where nothing does."""
        return self.reads if bool(self.reads.any()) else torch.ones_like(self.reads)

    def part(self, columns: Tensor) -> Slices:
        """The same units with only some columns, (K,) bool."""
        return replace(
            self,
            weight=self.weight[:, columns],
            reads=self.reads[columns],
            layers=None if self.layers is None else self.layers[columns],
            grad=None if self.grad is None else self.grad[:, columns],
            sample_grad=None if self.sample_grad is None else self.sample_grad[:, :, columns],
            hessian=None if self.hessian is None else self.hessian[:, columns],
            norms=None if self.norms is None else self.norms[:, columns],
        )


def _declared(value: T | None, need: Need) -> T:
    if value is None:
        raise SettingError(
            f"this criterion reads {EVIDENCE[need]} and does not declare it; decorate it with @prune.criteria.needs({need!r})"
        )
    return value


#: Scores units, larger = keep. A function, or any object that can be called so.
Criterion = Callable[[Slices], Tensor]


@runtime_checkable
class DeclaresNeeds(Protocol):
    """A criterion that reads more than weights: it has the attribute that `needs` sets."""

    needs: frozenset[Need]


def needs(*evidence: Need) -> Callable[[C], C]:
    """Decorator: declare the evidence that a criterion reads besides the weights.

    evidence: "gradients", "sample_gradients", "activations" or "losses" for channels; "gradients", "hessian_gradients" or
        "input_norms" for masks. Raises SettingError for another word.
    """
    if unknown := sorted(set(evidence) - set(EVIDENCE)):
        raise SettingError(f"needs({unknown[0]!r}): wanted {', '.join(EVIDENCE)}")

    def declare(criterion: C) -> C:
        criterion.needs = frozenset(evidence)  # type: ignore[attr-defined]
        return criterion

    return declare


def needs_of(criterion: Any) -> frozenset[Need]:
    """The evidence that a criterion declares; a `functools.partial` needs what its function and its arguments need."""
    if isinstance(criterion, partial):
        parts = (criterion.func, *criterion.args, *criterion.keywords.values())
        return frozenset().union(*map(needs_of, parts))
    return criterion.needs if isinstance(criterion, DeclaresNeeds) else frozenset()


def reads_calibration(criterion: Any) -> bool:
    """Whether a criterion reads inputs of the calibration data; one that needs targets reads the training data."""
    needed = needs_of(criterion)
    return bool(needed) and needed <= UNLABELLED_EVIDENCE


def check_criterion(criterion: Any, where: str, available: frozenset[Need]) -> None:
    """Raise SettingError for what is no function, or needs evidence that is not available.

    where: the function or stage, for the message. available: `CHANNEL_EVIDENCE` or `WEIGHT_EVIDENCE`.
    """
    if not callable(criterion) or isinstance(criterion, type):
        known = isinstance(criterion, str) and criterion in {function.__name__ for function in (*CRITERIA, *WEIGHT_CRITERIA)}
        raise SettingError(
            f"{where}(criterion=...): wanted a function such as prune.criteria.{criterion if known else 'l2'}, got {criterion!r}"
        )
    if other := sorted(needs_of(criterion) - available):
        kind, stages = ("masks", "plan_mask, Sparsify") if available == CHANNEL_EVIDENCE else ("channels", "plan_channels, Prune")
        raise SettingError(
            f"{where}(criterion=...): this criterion is for {kind} ({stages}), it reads {EVIDENCE[other[0]]}; take another,"
            " such as prune.criteria.taylor"
        )


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

    The lowest score has a row that resembles all others, which need not be a row of zeros.
    """
    return torch.cdist(slices.weight, slices.weight, compute_mode="donot_use_mm_for_euclid_dist").sum(1)


def lamp(slices: Slices) -> Tensor:
    """Squared norm of a row over the sum of those that are not smaller (LAMP, Lee et al., 2010.07611, eq. 2).

    The scores are comparable between layers without further normalization: pass `normalize=unscaled`.
    """
    energy, order = slices.weight.double().square().sum(1).sort()
    at_least = energy.flip(0).cumsum(0).flip(0).clamp(min=1e-300)
    return torch.empty_like(energy).index_copy_(0, order, energy / at_least)


def bn_scale(slices: Slices) -> Tensor:
    """Mean absolute scale of the norms behind the channel (Liu et al., 1708.06519); its L2 norm where there is none."""
    return l2(slices) if slices.scales is None else slices.scales.abs().mean(1)


def random_scores(slices: Slices, *, seed: int = 0) -> Tensor:
    """Uniform numbers in [0, 1) made from the weights and a seed, whatever the order of the channels: a baseline."""
    return (_hashed(slices.weight, seed) >> 11 & (1 << 52) - 1).double() / (1 << 52)


def _hashed(weight: Tensor, seed: int) -> Tensor:
    """One 64-bit number for each row, from its bits."""
    bits = weight.float().contiguous().view(torch.int32).long()
    factors = torch.randint(-(2**62), 2**62, (bits.shape[1],), generator=torch.Generator().manual_seed(seed)) * 2 + 1
    number = (bits * factors.to(bits.device)).sum(1)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):  # the finalizer of splitmix64
        number = (number ^ (number >> shift)) * factor
    return number ^ (number >> 31)


@needs("gradients")
def taylor(slices: Slices) -> Tensor:
    """Squared first-order change of a batch's loss when the channel is removed (Molchanov et al., 1906.10771, eq. 8).

    Removing a channel is removing the columns that read it, so only those are summed. Where no layer with
    weights reads the group, the rows that make it are summed instead.
    """
    return (slices.weight * slices.gradient)[:, slices.used].sum(1).square()


def _sample_changes(slices: Slices) -> Tensor:
    """(samples, channels): first-order change of each sample's loss when the channel is removed."""
    used = slices.used
    return torch.einsum("ck,nck->nc", slices.weight[:, used], slices.sample_gradients[:, :, used])


@needs("sample_gradients")
def taylor_samples(slices: Slices) -> Tensor:
    """Mean absolute first-order change of a sample's loss (Molchanov et al., 1611.06440): samples do not cancel one another."""
    return _sample_changes(slices).abs().mean(0)


@needs("sample_gradients")
def fisher(slices: Slices) -> Tensor:
    """Second-order change of the loss with the empirical Fisher information of the channel's gate as its curvature: half the
    mean square of the samples' first-order changes (Theis et al., 1801.05787, eq. 5).
    """
    return _sample_changes(slices).square().mean(0) / 2


@needs("sample_gradients")
def obd(slices: Slices) -> Tensor:
    """Optimal brain damage: half of weight squared times curvature, the diagonal of the empirical Fisher information, summed
    over the columns (LeCun et al., 1989). Unlike `fisher`, weights of a channel are taken to act independently.
    """
    used = slices.used
    curvature = slices.sample_gradients[:, :, used].square().mean(0)
    return (slices.weight[:, used].square() * curvature).sum(1) / 2


@needs("activations")
def mean_activation(slices: Slices) -> Tensor:
    """Mean absolute value of the channel where it is read (Molchanov et al., 1611.06440, section 2.2). Needs no labels."""
    return slices.values.abs().mean(1)


@needs("activations")
def apoz(slices: Slices) -> Tensor:
    """Fraction of positions at which the channel is not zero: 1 - the average percentage of zeros (Hu et al., 1607.03250)."""
    return (slices.values != 0).double().mean(1)


@needs("activations")
def output_energy(slices: Slices) -> Tensor:
    """Variance of the channel's values times the squared norm of the columns that read it: the energy that its readers lose.

    The mean of a channel can be folded into the bias or BatchNorm that follows, its variation cannot. Needs no labels.
    """
    return slices.values.double().var(1, correction=0) * slices.weight[:, slices.used].double().square().sum(1)


@needs("activations")
def optimal_brain_surgeon(slices: Slices, *, damping: float = 1e-3) -> Tensor:
    """Output error of the layers that read the channel, after the remaining channels compensate for it by least squares.

    Optimal brain surgeon (Hassibi & Stork, 1993; layer by layer as in Kurtic et al., 2302.04089), one channel after another: the
    channel with the least error is removed, its columns are distributed over the others, and so on. The score of a channel is
    the error when it is removed. The positions of a filter are assumed to vary alike. `reconstruct_` computes the weights with
    that compensation. Needs no labels.
    """
    values, columns = slices.values.double(), slices.weight[:, slices.used].double()
    covariance = torch.cov(values, correction=0).reshape(len(values), len(values))
    diagonal = covariance.diagonal().mean().clamp(min=1e-30)
    inverse = torch.linalg.inv(covariance + damping * diagonal * torch.eye(len(covariance), device=values.device))
    scores, kept = torch.zeros_like(values[:, 0]), torch.ones_like(values[:, 0], dtype=torch.bool)
    for _ in range(len(scores)):
        cost = columns.square().sum(1) / inverse.diagonal().clamp(min=1e-300)
        channel = int(cost.masked_fill(~kept, torch.inf).argmin())
        scores[channel] = cost[channel]
        kept[channel] = False
        share = inverse[:, channel] / inverse[channel, channel]
        columns = columns - torch.outer(share, columns[channel])
        inverse = inverse - torch.outer(share, inverse[channel])
    return scores


@needs("losses")
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


@needs("gradients")
def snip(slices: Slices) -> Tensor:
    """|w g| summed over the row: sensitivity of the loss to the connection (Lee et al., 1810.02340)."""
    return (slices.weight * slices.gradient).abs().sum(1)


@needs("gradients")
def movement(slices: Slices) -> Tensor:
    """- w g: positive where a step of gradient descent moves the weight away from zero (Sanh et al., 2005.07683, eq. 4).

    Meant for a schedule, on which it is summed over all steps of the training.
    """
    return -(slices.weight * slices.gradient).sum(1)


@needs("hessian_gradients")
def grasp(slices: Slices) -> Tensor:
    """W (H g): how much the squared norm of the gradient falls when the weight is removed (Wang et al., 2002.07376, eq. 8)."""
    return (slices.weight * slices.hessian_gradient).sum(1)


@needs("input_norms")
def wanda(slices: Slices) -> Tensor:
    """|w| times the norm of its input (Sun et al., 2306.11695); for convolutions the norm of the input channel."""
    return (slices.weight.abs() * slices.input_norms).sum(1)


def layer_sum(scores: Tensor) -> Tensor:
    """(layers, channels) -> (channels,): the sum; each layer counts by its size."""
    return scores.sum(0)


def layer_mean(scores: Tensor) -> Tensor:
    """(layers, channels) -> (channels,): the mean; each layer counts the same."""
    return scores.mean(0)


def layer_max(scores: Tensor) -> Tensor:
    """(layers, channels) -> (channels,): the largest; a channel is kept if one layer needs it."""
    return scores.amax(0)


def over_layers(slices: Slices, *, criterion: Criterion, combine: Callable[[Tensor], Tensor] = layer_mean) -> Tensor:
    """Score each layer of a group by itself, then combine: `partial(over_layers, criterion=l1, combine=layer_max)`.

    combine: `(layers, channels) -> (channels,)`, such as `layer_sum`, `layer_mean`, `layer_max`.
    """
    if slices.layers is None:
        return combine(criterion(slices)[None])
    return combine(torch.stack([criterion(slices.part(slices.layers == n)) for n in slices.layers.unique().tolist()]))


#: Every criterion for channels; the contract tests run over this list.
CRITERIA = (
    l1,
    l2,
    group_l2,
    fpgm,
    lamp,
    bn_scale,
    random_scores,
    taylor,
    taylor_samples,
    fisher,
    obd,
    mean_activation,
    apoz,
    output_energy,
    optimal_brain_surgeon,
    shapley,
)

#: Criteria that were made for single weights; those of `CRITERIA` that read weights or gradients serve them too.
WEIGHT_CRITERIA = (snip, movement, grasp, wanda)
