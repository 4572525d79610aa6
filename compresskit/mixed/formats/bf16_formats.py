"""What a bf16 weight cannot hold: kept whole (split), in part (Kahan), or rounded at random; pure functions on one tensor.

    widen:  (half, rest) -> fp32              before the optimizer's step
    narrow: fp32 -> (half, rest)              after it

All of them are elementwise and hold for any shape, so that one compiled kernel can take them in.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 to bf16 and the int16 remainder of its bits; `join` gives the fp32 back exactly, for all finite values.

    hi = (bits + 0x8000) >> 16, lo = bits - (hi << 16): round to nearest, ties away from zero (Split-SGD, 2005.04680; Intel
    Extension for PyTorch). Values within half a bf16 step of the largest fp32 round to inf and are given back as they were.
    """
    bits = value.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(half: Tensor, rest: Tensor) -> Tensor:
    """The fp32 value that `split` took apart."""
    return ((half.view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)).view(torch.float32)


def compensate(value: Tensor, half: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 weight and bf16 compensation nearest to an fp32 value (Zamirai et al., 2010.06192, algorithm 3).

    A value that is still `half + rest` is left as it lies, so that a skipped step moves nothing, ties included.
    """
    new = value.bfloat16()
    left = (value - new.float()).bfloat16()
    same = value == half.float() + rest.float()
    return torch.where(same, half, new), torch.where(same, rest, left)


def _mixed(x: Tensor) -> Tensor:
    # lowbias32 (C. Wellons, "Prospecting for Hash Functions", 2018) in int32, whose products wrap as unsigned ones do; shifts
    # must not draw the sign in. Processors multiply int32 vectors much faster than int64.
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(word: int) -> int:
    """The int32 with the bits of the low 32 of a whole number."""
    word &= _LOW
    return word - 2**32 if word >= 2**31 else word


def noise(seed: int, step: Tensor, start: int, like: Tensor) -> Tensor:
    """16 random bits for every value of a tensor, a function of (seed, step, global index) alone.

    No generator: nothing to save, and every rank of a distributed run draws the same (Salmon et al., SC 2011, counter-based
    random numbers). `start` is the global index of the tensor's first value.
    """
    index = torch.arange(start, start + like.numel(), device=like.device).view(like.shape)
    low, high = index.to(torch.int32), (index >> 32).to(torch.int32)  # the cast drops the upper bits
    key = _mixed((step + (seed & _LOW) * 0x9E3779B1).to(torch.int32))
    key = _mixed(key + _signed(seed >> 32))
    return _mixed(_mixed(low ^ key) + high) & 0xFFFF


def stochastic(value: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16, up or down with the probability that makes the mean exact; `bits` in [0, 65536) are the dice.

    Gupta et al., 1502.02551, section 3. inf and nan stay what they are.
    """
    raw = value.view(torch.int32)
    moved = torch.where(torch.isfinite(value), raw + bits.to(torch.int32), raw)
    rounded = (moved >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(torch.isfinite(value), rounded, value.bfloat16())
