"""A transposed convolution in the form of a plain one: the same values from kernels that every runtime has.

A transposed convolution of stride s writes each output position q s + r (0 <= r < s) as a sum over few inputs around q, with the
taps of its kernel that are r + padding apart from a multiple of s. So each r, a phase, is a convolution of stride 1, and all
phases together are one with s times as many channels per dimension, whose result is rearranged by depth to space (Shi et al.,
arXiv 1609.07009, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ConvolutionForm:
    """A plain convolution of stride 1 that computes the phases of a transposed one, for each spatial dimension.

    weight: (channels out * phases, channels in / groups, *kernel); the phases of an output channel are neighbours, those of the
        last dimension closest.
    low, high: positions of zeros before and after the input; below 0, positions that are cut off.
    dilation: of the convolution.
    phases: by how many each position of its result is unfolded.
    surplus: positions to cut off the end of the unfolded result.
    """

    weight: Tensor
    low: tuple[int, ...]
    high: tuple[int, ...]
    dilation: tuple[int, ...]
    phases: tuple[int, ...]
    surplus: tuple[int, ...]


def convolution_form(
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> ConvolutionForm:
    """The form of a transposed convolution with the given settings, one of each for each spatial dimension.

    Args:
        weight: (channels in, channels out / groups, *kernel), as of `nn.ConvTranspose2d`. Zeros where a mask has them, and only
            there, give the mask of the new weight.
    """
    settings = list(zip(weight.shape[2:], stride, padding, output_padding, dilation, strict=True))
    lines = [_line(*setting) for setting in settings]
    channels_in, per_group = weight.shape[:2]
    for axis, line in enumerate(lines):  # each spatial dimension becomes two: phases, taps
        at = 2 + 2 * axis
        size = weight.shape[at]
        nothing = weight.new_zeros(()).expand(*weight.shape[:at], 1, *weight.shape[at + 1 :])
        chosen = torch.cat([weight, nothing], at).index_select(at, line.taps.flatten().remainder(size + 1).to(weight.device))
        weight = chosen.unflatten(at, tuple(line.taps.shape))
    weight = weight.unflatten(0, (groups, channels_in // groups))
    spatial = len(lines)
    order = [0, 2, *(3 + 2 * i for i in range(spatial)), 1, *(4 + 2 * i for i in range(spatial))]
    phases, kernel = tuple(line.taps.shape[0] for line in lines), tuple(line.taps.shape[1] for line in lines)
    return ConvolutionForm(
        weight=weight.permute(order).reshape(groups * per_group * math.prod(phases), channels_in // groups, *kernel),
        low=tuple(line.low for line in lines),
        high=tuple(line.high for line in lines),
        dilation=tuple(line.dilation for line in lines),
        phases=phases,
        surplus=tuple(line.surplus for line in lines),
    )


@dataclass(frozen=True, kw_only=True)
class _Line:
    """One spatial dimension. taps: (phases, kernel), the position in the transposed kernel, -1 for none."""

    taps: Tensor
    low: int
    high: int
    dilation: int
    surplus: int


def _line(size: int, stride: int, padding: int, output_padding: int, dilation: int) -> _Line:
    reach = dilation * (size - 1)
    longer = reach + output_padding + 1 - stride - 2 * padding  # of n inputs there are stride * n + longer outputs
    if stride == 1:
        return _Line(
            taps=torch.arange(size - 1, -1, -1).view(1, -1),
            low=reach - padding,
            high=longer + padding,
            dilation=dilation,
            surplus=0,
        )
    # (phase, position of the input relative to that of the result, tap): input q + first - j is read with tap stride * j + rest.
    reads = []
    for phase in range(stride):
        first, rest = divmod(phase + padding, stride)
        reads += [(phase, first - j, stride * j + rest) for j in range(-(-(reach + 1 - rest) // stride)) if rest <= reach]
    reads = [(phase, offset, tap // dilation) for phase, offset, tap in reads if tap % dilation == 0]
    nearest, farthest = min(offset for _, offset, _ in reads), max(offset for _, offset, _ in reads)
    taps = torch.full((stride, farthest - nearest + 1), -1)
    for phase, offset, tap in reads:
        taps[phase, offset - nearest] = tap
    rows = -(-longer // stride)  # of n inputs there are n + rows positions before they are unfolded
    return _Line(taps=taps, low=-nearest, high=rows + farthest, dilation=1, surplus=rows * stride - longer)
