"""Saturation: integer kernels that add pairs of products in int16, and weights that cannot overflow there.

x86 without VNNI multiplies uint8 activations by int8 weights in pairs: `vpmaddubsw` adds a * v + b * w in int16 and saturates.
A pair fits whatever the activations are if |v + w| <= 128. Weights are made such that every pair does:

    PairPacking.widen     the range of an output channel, where its pairs do not fit    1.25 times on average in ResNets
    PairPacking.balance   the rounding in such channels: the errors of each kernel cancel, so that the wider steps cost nothing
    PairPacking.fit       what still offends, because a scale was learned or fixed: both weights of the pair are made smaller

Which weights are a pair was measured for ONNX Runtime 1.31 (`tests/quant/numerics/test_saturation.py`): neighbours along (kernel
position, input channel) of one group, in matrix products neighbours along the inputs. Depthwise convolutions, and products of
uint8 by uint8, widen before they add.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compresskit.quant.numerics.scheme import Scheme

PAIR_LIMIT = 128  # 255 * 128 < 2^15, 255 * 129 is not
PADDED_CHANNELS = 4  # input channels that the image of a first convolution is padded to, see `export.rewrite.onnxruntime`


#: Pairs of weights that were made smaller: rows, indices of both, signs; one entry for each way to pack.
ChangedPairs = list[tuple[Tensor, Tensor, Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class PairPacking:
    """How kernels pair the weights of one output.

    A row of weights is flattened as (channels, positions). Channels 2 i and 2 i + 1 at one position are a pair.

    positions: of a convolution's kernel; 1 for a matrix product, whose inputs are the channels.
    others: further pairs, each (pairs, 2) with indices into the row: kernels that pack channels in other ways.
    nonnegative: whether the inputs are, so that errors of one sign add up over channels.
    """

    positions: int = 1
    others: tuple[Tensor, ...] = ()
    nonnegative: bool = False

    def joined(self, other: PairPacking | None) -> PairPacking:
        """The pairs of both, for a weight that two layers read."""
        if other is None:
            return self
        return replace(self, others=(*self.others, *other.others), nonnegative=self.nonnegative and other.nonnegative)

    def sums(self, rows: Tensor) -> list[Tensor]:
        """The sum of each pair of rows (n, channels * positions): a (n, pairs) tensor for each way to pack."""
        channels = rows.unflatten(1, (-1, self.positions))
        half = channels.shape[1] // 2
        together = (channels[:, : 2 * half : 2] + channels[:, 1 : 2 * half : 2]).flatten(1)
        more = [rows[:, pairs[:, 0]] + rows[:, pairs[:, 1]] for pairs in (p.to(rows.device) for p in self.others)]
        return [together, *more] if half else more

    def places(self, way: int, pair: Tensor) -> tuple[Tensor, Tensor]:
        """Indices into the row of both weights of pairs. way: into `others`, or -1."""
        if way >= 0:
            places = self.others[way].to(pair.device)[pair]
            return places[:, 0], places[:, 1]
        block, position = pair // self.positions, pair % self.positions
        first = 2 * block * self.positions + position
        return first, first + self.positions

    def widen(self, rows: Tensor, low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
        """Ranges that contain `low` and `high`, (n,) or (1,), wide enough for the pairs of rows (n, values) to fit."""
        sums = self.sums(rows)
        if not sums:
            return low, high
        top = functools.reduce(torch.maximum, [total.amax(1) for total in sums])
        bottom = functools.reduce(torch.minimum, [total.amin(1) for total in sums])
        if len(low) == 1:  # all rows have one scale
            top, bottom = top.amax(0, keepdim=True), bottom.amin(0, keepdim=True)
        if scheme.symmetric:
            reach = torch.maximum(top, -bottom) * (scheme.high / PAIR_LIMIT)
            return torch.minimum(low, -reach), torch.maximum(high, reach)
        top, bottom = top.clamp(min=0), bottom.clamp(max=0)
        # The zero point moves all weights, so half of a sum lies within a quarter of the range around its middle.
        middle, quarter = (top + bottom) / 4, (top - bottom) / 4
        half = torch.maximum(2 * quarter, torch.maximum(high - middle, middle - low))
        offends = quarter + (middle - (low + high) / 2).abs() > (high - low) / 4
        return torch.where(offends, middle - half, low), torch.where(offends, middle + half, high)

    def round(self, exact: Tensor, zero: Tensor, scheme: Scheme, correction: Tensor | None = None) -> tuple[Tensor, ChangedPairs]:
        """Round rows such that all pairs fit.

        exact: rows in steps, before rounding, (n, values). zero: zero points, (n, 1) or (1, 1). correction: steps that are added
            to the nearest integers, as `balance` returns them.

        Returns the integers, fp32, and the pairs that `fit` changed.
        """
        integers = torch.round(exact)
        if not scheme.symmetric:
            integers.add_(zero)
        integers = (integers if correction is None else integers.add_(correction)).clamp_(scheme.low, scheme.high)
        if all(bool(torch.maximum(total.amax(), -total.amin()) <= PAIR_LIMIT) for total in self.sums(integers)):
            return integers, []
        return self.fit(integers, exact)

    def balance(self, exact: Tensor, scheme: Scheme) -> Tensor:
        """Which weights to round the other way, so that the errors of each kernel sum to at most half a step (SQuant, Guo et al.,
        arXiv 2202.07471); of a row, where there is one position and inputs are nonnegative.

        Neighbours in an image are alike, and so are the means of channels after ReLU: such errors add up, others do not.

        exact: rows in steps, before rounding, (n, values), of a symmetric format.

        Returns -1, 0 or 1 for each, int8. It is 0 in rows whose pairs fit anyway and would be with the smallest scale, and for
        weights that are zero or would become so.
        """
        plain = torch.round(exact).clamp_(scheme.low, scheme.high)
        sums, found = self.sums(plain), torch.zeros_like(plain)
        if not sums or not (self.positions > 1 or self.nonnegative):
            return found.to(torch.int8)
        reach = functools.reduce(torch.maximum, [torch.maximum(total.amax(1), -total.amin(1)) for total in sums])
        rows = ((reach >= PAIR_LIMIT - 1) & (plain.abs().amax(1) < scheme.high)).nonzero()[:, 0]
        if self.positions > 1:
            kernels = (v[rows].reshape(-1, self.positions) for v in (plain, exact))
            found[rows] = _cancel_errors(*kernels).view_as(plain[rows]) - plain[rows]
        else:
            found[rows] = _cancel_row_errors(plain[rows], exact[rows]) - plain[rows]
        return found.to(torch.int8)

    def fit(self, integers: Tensor, exact: Tensor) -> tuple[Tensor, ChangedPairs]:
        """Make both weights of every pair that does not fit smaller, such that it does and the squared error is least.

        Making one pair smaller lets no other overflow: two weights that offend have one sign.

        Returns the integers, and the pairs that were changed.
        """
        changed: ChangedPairs = []
        sums = self.sums(integers)
        for way, total in enumerate(sums, start=len(self.others) - len(sums)):
            rows, pair = (total.abs() > PAIR_LIMIT).nonzero(as_tuple=True)
            if not len(rows):
                continue
            i, j = self.places(way, pair)
            a, b = integers[rows, i], integers[rows, j]
            sign, excess = (a + b).sign(), ((a + b).abs() - PAIR_LIMIT).clamp(min=0)
            difference = ((a - exact[rows, i]) - (b - exact[rows, j])) * sign
            less = torch.minimum(((excess + difference) / 2).round().clamp(min=0), excess)
            integers = integers.clone()
            integers[rows, i], integers[rows, j] = a - sign * less, b - sign * (excess - less)
            changed.append((rows, i, j, sign))
        return integers, changed


def _cancel_errors(integers: Tensor, exact: Tensor) -> Tensor:
    """Rows (n, values) of integers, with those rounded the other way whose errors are largest, until each row's error is small.

    For many short rows: one weight of each at a time.
    """
    integers = integers.clone()
    total = (integers - exact).sum(1)
    rows = (total.abs() > 0.5).nonzero()[:, 0]
    while len(rows):
        sign = total[rows].sign()[:, None]
        largest, place = _errors(integers[rows], exact[rows], sign).max(1)
        found = largest > 0
        rows, place, sign = rows[found], place[found], sign[found, 0]
        integers[rows, place] -= sign
        total[rows] -= sign
        rows = rows[total[rows].abs() > 0.5]
    return integers


def _cancel_row_errors(integers: Tensor, exact: Tensor) -> Tensor:
    """As `_cancel_errors`, for a few long rows."""
    total = (integers - exact).sum(1, keepdim=True)
    count, sign = total.abs().round(), total.sign()
    errors = _errors(integers, exact, sign)
    largest, places = errors.topk(min(int(count.max()), errors.shape[1]) if len(count) else 0, dim=1)
    ranks = torch.arange(places.shape[1], device=count.device)
    return integers.scatter_add(1, places, -sign * ((ranks < count) & (largest > 0)))


def _errors(integers: Tensor, exact: Tensor, sign: Tensor) -> Tensor:
    """Errors of rounding in the direction of `sign`; 0 where rounding the other way would make a weight zero, or not zero."""
    error = (integers - exact) * sign
    return torch.where((integers != 0) & (integers != sign), error, 0)


class FitPairs(torch.autograd.Function):
    """A weight moved to the integers that a `PairPacking` chose; elsewhere unchanged.

    The gradient passes, except that it pushes no pair further beyond what fits.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, moved: Tensor, changed: ChangedPairs, axis: int) -> Tensor:
        ctx.changed, ctx.axis = changed, axis
        return moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.changed:
            return grad, None, None, None
        turned = grad.movedim(ctx.axis, 0)
        rows = turned.flatten(1).clone()
        for row, i, j, sign in ctx.changed:
            sign = sign.to(rows.dtype)
            outward = ((rows[row, i] + rows[row, j]) / 2 * sign).clamp(max=0) * sign
            rows[row, i] -= outward
            rows[row, j] -= outward
        return rows.view(turned.shape).movedim(0, ctx.axis), None, None, None


def can_overflow(weights: Scheme, activations: Scheme) -> bool:
    """Whether a pair of products in these formats may leave int16. Products of two signed or two unsigned numbers are widened."""
    if not weights.signed or activations.signed or activations.bits > 8:  # wider activations run in float
        return False
    return 2 * max(-weights.low, weights.high) * activations.high >= 2**15


def conv_packing(
    shape: tuple[int, ...], groups: int, stride: tuple[int, ...], padding: tuple[int, ...], *, nonnegative: bool = False
) -> PairPacking | None:
    """How kernels pair the weights of a convolution, (outputs, channels of a group, *kernel); None where they add no pairs.

    An odd number of channels is packed across positions; by kernels that pad it to an even one, within them. The first
    convolution of a file for x86 may read 2 x 2 pixels as one with four times the channels.
    """
    outputs, channels, *kernel = shape
    if channels == 1 and groups > 1 and outputs == groups:
        return None
    positions = math.prod(kernel)
    others = []
    if channels % 2:
        order = torch.arange(channels * positions).view(channels, -1).T.flatten()
        others.append(order[: len(order) // 2 * 2].view(-1, 2))
    if groups == 1 and channels % PADDED_CHANNELS and len(kernel) == 2 and min(kernel) >= 5 and tuple(stride) == (2, 2):
        others.append(_folded_pairs(channels, kernel, padding))
    return PairPacking(positions, tuple(p for p in others if len(p)), nonnegative)


def _folded_pairs(channels: int, kernel: list[int], padding: tuple[int, ...]) -> Tensor:
    """The pairs of a kernel over 2 x 2 pixels: channels of the folded image are (row, column, channel) of the pixels."""
    folded: dict[tuple[int, int], list[int]] = {}
    for i, j in itertools.product(*(range(k) for k in kernel)):
        (row, a), (column, b) = divmod(i - padding[0], 2), divmod(j - padding[1], 2)
        lanes = folded.setdefault((row, column), [-1] * 4 * channels)
        for c in range(channels):
            lanes[(2 * a + b) * channels + c] = c * kernel[0] * kernel[1] + i * kernel[1] + j
    pairs = [lanes[k : k + 2] for lanes in folded.values() for k in range(0, 4 * channels, 2)]
    return torch.tensor([pair for pair in pairs if min(pair) >= 0]).view(-1, 2)
