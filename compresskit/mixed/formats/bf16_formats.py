"""Update bf16 weights without an fp32 master: formats that keep the bits bf16 cannot hold; pure functions on one tensor.

    "split"       all of it, as an int16 remainder                                (Split-SGD, 2005.04680)
    "kahan"       the next eight bits, as a bf16 compensation                     (Zamirai et al., 2010.06192)
    "stochastic"  none of it: rounds up with the probability that keeps the mean  (Gupta et al., 1502.02551)

    to_fp32:   (bf16 weight, remainder) -> fp32    before the optimizer's step
    from_fp32: fp32 -> (bf16 weight, remainder)    after it

All functions are elementwise and work for any shape, so that they can be part of one compiled kernel.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from compresskit.mixed.formats.policy import Bf16Format

_LOW_32_BITS, _GOLDEN = 0xFFFFFFFF, 0x9E3779B1
PIECE = 2**17  # values that are written at once on a CPU: what is computed on the way stays in the cache


def to_fp32(half: Tensor, remainder: Tensor | None, bf16_format: Bf16Format | None) -> Tensor:
    """The fp32 value of a half weight and its remainder."""
    if remainder is None:
        return half.float()
    return join(half, remainder) if bf16_format == "split" else half.float() + remainder.float()


def fill_fp32_(
    masters: Sequence[Tensor], halves: Sequence[Tensor], remainders: Sequence[Tensor | None], bf16_format: Bf16Format | None
) -> None:
    """Fill fp32 tensors with what `to_fp32` gives for half weights and their remainders, without copies on the way."""
    for master, half, remainder in zip(masters, halves, remainders, strict=True):
        if bf16_format == "split" and remainder is not None:
            master.view(torch.int32).copy_(half.view(torch.int16)).mul_(65536).add_(remainder)
        else:
            master.copy_(half)
            if remainder is not None:
                master.add_(remainder)
    if bf16_format != "split" or ({master.device.type for master in masters} == {"cpu"} and _all_finite(masters)):
        return
    for master, half in zip(masters, halves, strict=True):
        master.copy_(torch.where(master == master, master, half.float()))  # as in `join`


def _all_finite(values: Sequence[Tensor]) -> bool:
    """Whether no value is inf or nan, by one sum for each tensor on the CPU; False also where a sum overflows."""
    return math.isfinite(torch.stack([value.sum() for value in values]).sum().item())


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


def store_(
    master: Tensor, half: Tensor, remainder: Tensor | None, bf16_format: Bf16Format | None, seed: int, step: Tensor, offset: int
) -> None:
    """Write into `half` and `remainder` what `from_fp32` gives for `master`, whose values are lost.

    On a CPU large tensors are written piece by piece, without temporary tensors of their size.
    """
    tensors = (master, half) if remainder is None else (master, half, remainder)
    plain = all(type(t) is Tensor and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    if not plain:
        values, rest = from_fp32(master, half, remainder, bf16_format, seed, step, offset)
        half.copy_(values)
        if remainder is not None and rest is not None:
            remainder.copy_(rest)
        return
    for start in range(0, master.numel(), PIECE):
        value, low, *rests = (t.view(-1)[start : start + PIECE] for t in tensors)
        bits = value.view(torch.int32)
        if bf16_format == "split":
            rests[0].copy_(bits)  # the low 16 bits, as in `split`
            low.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))
        elif bf16_format == "kahan":
            new, error = compensate(value, low, rests[0])
            low.copy_(new)
            rests[0].copy_(error)
        else:
            drawn = random_bits(seed, step, offset + start, value)
            if math.isfinite(value.sum().item()):  # one sum costs less than two selections
                low.view(torch.int16).copy_(bits.add_(drawn).bitwise_right_shift_(16))
            else:
                low.copy_(round_stochastically(value, drawn))


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


def _hash32_(x: Tensor) -> Tensor:
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


def random_bits(seed: int, step: Tensor, offset: int, like: Tensor) -> Tensor:
    """16 random bits for every value of a tensor, a function of (seed, step, global index) alone.

    No generator: nothing to save, and every rank of a distributed run draws the same (Salmon et al., SC 2011, counter-based
    random numbers). One hash serves two neighbours, the low half the even one. `offset` is the global index of the tensor's
    first value.
    """
    key = _hash32_((step + (seed & _LOW_32_BITS) * _GOLDEN).to(torch.int32))
    key = _hash32_(key + _as_int32(seed >> 32))
    end = offset + like.numel()
    if not torch.compiler.is_compiling() and end < 2**32 - 2 and sys.byteorder == "little":
        pairs = torch.arange(offset >> 1, (end + 1) >> 1, device=like.device, dtype=torch.int32)
        bits = _hash32_(pairs.bitwise_xor_(key)).view(torch.int16)[offset & 1 :][: like.numel()]
        return bits.to(torch.int32).bitwise_and_(0xFFFF).view(like.shape)
    index = torch.arange(offset, end, device=like.device).view(like.shape)
    low, high = (index >> 1).to(torch.int32), (index >> 33).to(torch.int32)  # the cast drops the upper bits
    both = _hash32_(low ^ key ^ (high * _as_int32(_GOLDEN)))
    return (both >> ((index & 1) * 16).to(torch.int32)) & 0xFFFF


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
