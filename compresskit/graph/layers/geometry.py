"""Which inputs a convolution reads for each output, and the weights of sums and of sequences of convolutions.

    parallel([a, b])       the convolution that computes a(x) + b(x)       placed(weight, a, into)
    consecutive(a, b)      the convolution that computes b(a(x))           composed(weight of a, weight of b, a, b)

A linear layer is a convolution without spatial dimensions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes of a convolution; of those with several numbers, one for each spatial dimension.

    Output position q reads the inputs at q * stride - padding + dilation * a, for each tap a of the kernel.
    """

    outputs: int
    inputs: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def macs(self) -> int:
        """Multiply-accumulates for one position of the output, in all channels."""
        return self.outputs * (self.inputs // self.groups) * math.prod(self.kernel)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return (self.outputs, self.inputs // self.groups, *self.kernel)

    @property
    def reach(self) -> tuple[int, ...]:
        """How far the last tap is from the first."""
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True))


def pointwise(channels: int, spatial: int) -> Geometry:
    """A depthwise convolution of size 1: a scale for each channel."""
    ones = (1,) * spatial
    return Geometry(
        outputs=channels, inputs=channels, kernel=ones, stride=ones, padding=(0,) * spatial, dilation=ones, groups=channels
    )


def parallel(parts: Sequence[Geometry]) -> Geometry | None:
    """The convolution that computes the sum of several with the same input; None where there is none.

    Strides must be the same, and all must be placed over the input alike, which shows in padding - reach / 2; the largest padding
    then holds all taps (Ding et al., arXiv 2101.03697, section 3.3).
    """
    first = parts[0]
    balance = {tuple(2 * p - r for p, r in zip(g.padding, g.reach, strict=True)) for g in parts}
    if len({(g.outputs, g.inputs, g.stride) for g in parts}) > 1 or len(balance) > 1:
        return None
    padding = tuple(max(sizes) for sizes in zip(*(g.padding for g in parts), strict=True))
    dilation, kernel = [], []
    for i, largest in enumerate(padding):
        steps = [largest - g.padding[i] for g in parts] + [g.dilation[i] for g in parts if g.kernel[i] > 1]
        step = math.gcd(*steps) or 1
        last = max(largest - g.padding[i] + g.reach[i] for g in parts)
        dilation.append(step)
        kernel.append(last // step + 1)
    return Geometry(
        outputs=first.outputs,
        inputs=first.inputs,
        kernel=tuple(kernel),
        stride=first.stride,
        padding=padding,
        dilation=tuple(dilation),
        groups=math.gcd(*(g.groups for g in parts)),
    )


def placed(weight: Tensor, part: Geometry, into: Geometry) -> Tensor:
    """The weight of one of the convolutions that `parallel` joined, in the shape of the joined one."""
    result = weight.new_zeros((into.outputs, into.inputs // into.groups, *into.kernel))
    where = []
    for i, size in enumerate(part.kernel):
        begin, step = (into.padding[i] - part.padding[i]) // into.dilation[i], part.dilation[i] // into.dilation[i] or 1
        where.append(slice(begin, begin + step * (size - 1) + 1, step))
    result[(slice(None), slice(None), *where)] = _in_groups(weight, part, into.groups)
    return result


def _in_groups(weight: Tensor, part: Geometry, groups: int) -> Tensor:
    """The weight of a convolution as one of fewer groups, with zeros between channels of different groups before."""
    each = part.groups // groups
    if each == 1:
        return weight
    outputs, inputs = part.outputs // part.groups, part.inputs // part.groups
    result = weight.new_zeros((groups, each, outputs, each, inputs, *part.kernel))
    parts = weight.reshape(groups, each, outputs, inputs, *part.kernel)
    for i in range(each):
        result[:, i, :, i] = parts[:, i]
    return result.reshape(part.outputs, each * inputs, *part.kernel)


def consecutive(first: Geometry, second: Geometry, *, biased: bool) -> Geometry | None:
    """The convolution that computes the second of the first; None where there is none.

    Where the second pads, its zeros must be what the first gives outside the input: so the first may have no bias there, no
    padding of its own, and one tap.

    Args:
        first, second: the second reads the channels that the first writes.
        biased: whether the first has a bias.
    """
    for i, pad in enumerate(second.padding):
        if pad and (biased or first.kernel[i] > 1 or first.padding[i]):
            return None
    dilation, kernel = [], []
    for i, step in enumerate(first.stride):
        steps = [first.dilation[i]] if first.kernel[i] > 1 else []
        steps += [step * second.dilation[i]] if second.kernel[i] > 1 else []
        common = math.gcd(*steps) or 1
        dilation.append(common)
        kernel.append((first.reach[i] + step * second.reach[i]) // common + 1)
    return Geometry(
        outputs=second.outputs,
        inputs=first.inputs,
        kernel=tuple(kernel),
        stride=tuple(a * b for a, b in zip(first.stride, second.stride, strict=True)),
        padding=tuple(p + s * q for p, s, q in zip(first.padding, first.stride, second.padding, strict=True)),
        dilation=tuple(dilation),
        groups=math.gcd(first.groups, second.groups),
    )


def composed(weight: Tensor, then: Tensor, first: Geometry, second: Geometry) -> Tensor:
    """The weight of the convolution that `consecutive` returned, from those of the first and of the second."""
    whole = consecutive(first, second, biased=False)
    assert whole is not None
    result = weight.new_zeros(whole.shape)
    inner = _in_groups(weight, first, whole.groups).unflatten(0, (whole.groups, -1))
    outer = _in_groups(then, second, whole.groups).unflatten(0, (whole.groups, -1))
    for taps in itertools.product(*map(range, second.kernel)):
        where = []
        for i, tap in enumerate(taps):
            begin = tap * first.stride[i] * second.dilation[i] // whole.dilation[i]
            step = first.dilation[i] // whole.dilation[i] or 1
            where.append(slice(begin, begin + step * (first.kernel[i] - 1) + 1, step))
        product = torch.einsum("gom,gmc...->goc...", outer[(..., *taps)], inner).flatten(0, 1)
        result[(slice(None), slice(None), *where)] += product
    return result
