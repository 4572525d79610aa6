"""Update bf16 weights without an fp32 master: formats that keep the bits bf16 cannot hold; pure functions on one tensor.

    "split"       all of it, as an int16 remainder                                (Split-SGD, 2005.04680)
    "kahan"       the next eight bits, as a bf16 compensation                     (Zamirai et al., 2010.06192)
    "stochastic"  none of it: rounds up with the probability that keeps the mean  (Gupta et al., 1502.02551)

    to_fp32:   (bf16 weight, remainder) -> fp32    before the optimizer's step
    from_fp32: fp32 -> (bf16 weight, remainder)    after it

All functions are elementwise and work for any shape, so that they can be part of one compiled kernel; `bf16_in_pieces` does the
same on a CPU without temporary tensors.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from compresskit.mixed.formats.policy import Bf16Format

_LOW_32_BITS, _GOLDEN = 0xFFFFFFFF, 0x9E3779B1
DRAWS_OF_BLOCK = 2**17  # values whose random bits are made of the same hashes


def to_fp32(half: Tensor, remainder: Tensor | None, bf16_format: Bf16Format | None) -> Tensor:
    """The fp32 value of a half weight and its remainder."""
    if remainder is None:
        return half.float()
    return join(half, remainder) if bf16_format == "split" else half.float() + remainder.float()


def from_fp32(
    value: Tensor, half: Tensor, remainder: Tensor | None, bf16_format: Bf16Format | None, seed: int, step: Tensor, offset: int
) -> tuple[Tensor, Tensor | None]:
    """The half weight and the remainder of an fp32 value.

    Args:
        value: fp32, any shape.
        half, remainder: what they were before the step, in the shape of `value`.
        bf16_format: see the module; None rounds to the dtype of `half`.
        seed, step, offset: for "stochastic", see `random_bits`.
    """
    if bf16_format == "split":
        return split(value)
    if bf16_format == "kahan" and remainder is not None:
        return compensate(value, half, remainder)
    if bf16_format == "stochastic":
        return round_stochastically(value, random_bits(seed, step, offset, value)), None
    return value.to(half.dtype), None


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into bf16 and the int16 remainder of its bits; `join` gives the fp32 back exactly, for all finite values.

    hi = (bits + 0x8000) >> 16, lo = bits - (hi << 16): round to nearest, ties away from zero (Split-SGD, 2005.04680; Intel
    Extension for PyTorch). Values within half a bf16 step of the largest fp32 round to inf and are still joined exactly.
    """
    bits = value.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(half: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 value that `split` was given.

    A remainder of another weight than this one can make a nan of 0 or inf; such a weight is taken without its remainder.
    """
    bits = half.view(torch.int16).to(torch.int32)
    bits *= 65536  # a multiplication wraps as the shift does, and is faster on a CPU
    bits += remainder.to(torch.int32)
    value = bits.view(torch.float32)
    if value.device.type == "cpu" and not torch.compiler.is_compiling() and math.isfinite(value.sum().item()):
        return value  # one sum costs less than the selection
    return torch.where(value == value, value, half.float())


def compensate(value: Tensor, half: Tensor, compensation: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 weight and bf16 compensation nearest to an fp32 value (Zamirai et al., 2010.06192, algorithm 3).

    A value that still equals `half + compensation` keeps both, so that a skipped step changes nothing, ties included.
    """
    new = value.bfloat16()
    error = (value - new.float()).bfloat16()
    old = half.float() + compensation.float()
    if value.device.type != "cpu" or torch.compiler.is_compiling():
        same = value == old
        return torch.where(same, half, new), torch.where(same, compensation, error)
    # On a CPU a comparison and two selections take five times as long as the same on bits: -1 where they differ, else 0.
    other = old.view(torch.int32) ^ value.view(torch.int32)
    differs = ((other | -other) >> 31).to(torch.int16)
    return _selected(half, new, differs), _selected(compensation, error, differs)


def _selected(old: Tensor, new: Tensor, differs: Tensor) -> Tensor:
    """bf16 values: `new` where `differs`, int16, is -1, and `old` where it is 0."""
    kept = old.view(torch.int16)
    return (kept ^ ((kept ^ new.view(torch.int16)) & differs)).view(torch.bfloat16)


def hash32_(x: Tensor) -> Tensor:
    """Hash int32 in place, and return it."""
    # lowbias32 (C. Wellons, "Prospecting for Hash Functions", 2018) in int32, whose products wrap as unsigned ones do; shifts
    # must not draw the sign in. Processors multiply int32 vectors much faster than int64.
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _as_int32(0x846CA68B)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _as_int32(word: int) -> int:
    """The int32 with the bits of the low 32 of a whole number."""
    word &= _LOW_32_BITS
    return word - 2**32 if word >= 2**31 else word


def random_key(seed: int, step: Tensor) -> Tensor:
    """What the draws of one step have in common: a hash of seed and step, int32 of no dimension."""
    key = hash32_((step + (seed & _LOW_32_BITS) * _GOLDEN).to(torch.int32))
    return hash32_(key + _as_int32(seed >> 32))


def words_of_places(places: Tensor, key: Tensor) -> Tensor:
    """A hash of each place in a block, int32; `places` counts pairs of values and is of int32."""
    return hash32_(places ^ key)


def factors_of_blocks(blocks: Tensor, key: Tensor) -> Tensor:
    """An odd factor for each block, int32, by which the words of its places are multiplied; `blocks` is int32."""
    return hash32_((blocks ^ _as_int32(_GOLDEN)) + key) | 1


def random_bits(seed: int, step: Tensor, offset: int, like: Tensor) -> Tensor:
    """16 random bits for every value of a tensor, a function of (seed, step, global index) alone.

    No generator: nothing to save, and every rank of a distributed run draws the same (Salmon et al., SC 2011, counter-based
    random numbers). The words of a block of values are those of the first block, hashed anew in each step, times a
    factor; one word serves two neighbours, the low half the even one. `offset` is the index of the first value.
    """
    key, end = random_key(seed, step), offset + like.numel()
    if torch.compiler.is_compiling() or sys.byteorder != "little":
        index = torch.arange(offset, end, device=like.device).view(like.shape)
        return (_words(index >> 1, key) >> ((index & 1) * 16).to(torch.int32)) & 0xFFFF
    words = _words(torch.arange(offset >> 1, (end + 1) >> 1, device=like.device), key)
    bits = words.view(torch.int16)[offset & 1 :][: like.numel()]
    return bits.to(torch.int32).bitwise_and_(0xFFFF).view(like.shape)


def _words(pairs: Tensor, key: Tensor) -> Tensor:
    """The words of pairs of values by the index of the pair, int64."""
    places, blocks = (pairs & (DRAWS_OF_BLOCK // 2 - 1)).to(torch.int32), (pairs // (DRAWS_OF_BLOCK // 2)).to(torch.int32)
    return folded_(words_of_places(places, key) * factors_of_blocks(blocks, key))


def folded_(words: Tensor, spare: Tensor | None = None) -> Tensor:
    """Let the low halves of int32 take part of the high ones, in place: a product's low bits know nothing of the bits above."""
    words ^= torch.bitwise_right_shift(words, 16, out=spare).bitwise_and_(0xFFFF)
    return words


def round_stochastically(value: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 to bf16, up or down with the probability that makes the mean exact (Gupta et al., 1502.02551, section 3).

    Args:
        value: fp32; inf and nan stay what they are.
        bits: random integers in [0, 65536), in the shape of `value`.
    """
    raw = value.view(torch.int32)
    moved = torch.where(torch.isfinite(value), raw + bits.to(torch.int32), raw)
    rounded = (moved >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(torch.isfinite(value), rounded, value.bfloat16())
