"""The formats of `bf16_formats` on a CPU: read and written piece by piece, with scratch memory that stays in the cache.

Bit for bit what `to_fp32` and `from_fp32` give. Those make temporary tensors of the size of the weights, which a CPU would
write to memory and read back from it; what this saves of a step is in `benchmarks/mixed_cpu.md`.
"""

from __future__ import annotations

import math
import sys
from functools import cached_property

import torch
from torch import Tensor

from compresskit.mixed.formats import bf16_formats
from compresskit.mixed.formats.policy import Bf16Format

#: Values that are read or written at once. In the steps of `benchmarks/mixed_cpu.py` fewer are slower for their many calls, and
#: twice as many for scratch memory that the system gives anew each time.
PIECE = 2**19
MOSTLY_MOVED = 1 / 16  # of a piece, up to which values that did not move are looked up by their places


def flat_views(*tensors: Tensor, in_order: bool = False) -> list[Tensor] | None:
    """The tensors as they lie in memory, as one row of values each; None where their values lie in different orders.

    in_order: also None where values do not lie in the order of their indices, as in `channels_last`.
    """
    if not all(type(t) is Tensor and t.device.type == "cpu" for t in tensors):
        return None
    if all(t.is_contiguous() for t in tensors):
        return [t.view(-1) for t in tensors]
    strides = {t.stride() for t in tensors}
    if in_order or len(strides) > 1 or not is_dense(tensors[0]):
        return None
    return [t.as_strided((t.numel(),), (1,)) for t in tensors]


def is_dense(tensor: Tensor) -> bool:
    """Whether the values fill their memory without a gap, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def fill_(
    master: Tensor, half: Tensor, remainder: Tensor | None, bf16_format: Bf16Format | None, before: Tensor | None = None
) -> None:
    """Fill fp32 tensors, the second where it is given, with what `bf16_formats.to_fp32` gives for a half and its remainder."""
    if remainder is None:
        master.copy_(half)
        return
    flat = flat_views(master, half, remainder, *([] if before is None else [before]))
    if flat is None:
        master.copy_(bf16_formats.to_fp32(half, remainder, bf16_format))
        if before is not None:
            before.copy_(master)
        return
    spare = torch.empty(min(PIECE, master.numel()), dtype=torch.int32)
    for start in range(0, master.numel(), PIECE):
        value, low, rest, *kept = (t[start : start + PIECE] for t in flat)
        bits, wide = value.view(torch.int32), spare[: value.numel()]
        if bf16_format == "kahan":
            value.copy_(low).add_(wide.view(torch.float32).copy_(rest))  # sums of two dtypes take twice as long
            for second in kept:
                second.copy_(value)
            continue
        bits.copy_(low.view(torch.int16)).mul_(65536).add_(wide.copy_(rest))
        if not math.isfinite(value.sum().item()):  # one sum costs less than the selection
            value.copy_(torch.where(value == value, value, low.float()))  # as in `bf16_formats.join`


class Draws:
    """The random bits of one step, for all its tensors: a function of `seed` and `step`, an int64 tensor of no dimension."""

    def __init__(self, seed: int, step: Tensor) -> None:
        self.seed, self.step = seed, step

    @cached_property
    def key(self) -> Tensor:
        """See `bf16_formats.random_key`."""
        return bf16_formats.random_key(self.seed, self.step)

    @cached_property
    def words(self) -> Tensor:
        """The words of the pairs of one block, from which those of all others are made."""
        return bf16_formats.words_of_places(torch.arange(bf16_formats.DRAWS_OF_BLOCK // 2, dtype=torch.int32), self.key)


def store_(
    master: Tensor,
    half: Tensor,
    remainder: Tensor | None,
    bf16_format: Bf16Format | None,
    draws: Draws,
    offset: int,
    before: Tensor | None = None,
) -> None:
    """Write into `half` and `remainder` what `bf16_formats.from_fp32` gives for `master`, whose values are lost.

    before: of "kahan", what `fill_` gave, where it was kept; its values are lost, too.
    """
    tensors = [t for t in (master, half, remainder, before) if t is not None]
    flat = flat_views(*tensors, in_order=bf16_format == "stochastic")  # its draws belong to indices
    if flat is None:
        values, rest = bf16_formats.from_fp32(master, half, remainder, bf16_format, draws.seed, draws.step, offset)
        half.copy_(values)
        if remainder is not None and rest is not None:
            remainder.copy_(rest)
        return
    if bf16_format == "stochastic":
        _round_stochastically_(flat[0], flat[1], draws, offset)
        return
    one, two = (torch.empty(min(PIECE, master.numel()), dtype=torch.int32) for _ in range(2))
    for start in range(0, master.numel(), PIECE):
        value, low, rest, *old = (t[start : start + PIECE] for t in flat)
        if bf16_format == "kahan":
            wide, spare = (t[: value.numel()].view(torch.float32) for t in (one, two))
            _compensate_(value, low, rest, wide, old[0] if old else spare.copy_(low).add_(wide.copy_(rest)))
            continue
        bits = value.view(torch.int32)
        rest.copy_(bits)  # the low 16 bits, as in `split`
        low.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))


def _compensate_(value: Tensor, half: Tensor, compensation: Tensor, wide: Tensor, old: Tensor) -> None:
    """`bf16_formats.compensate` into `half` and `compensation`; `old` is their fp32 value, `wide` scratch memory."""
    # A value that did not move keeps its pair of numbers. In most trainings these are few of a piece, or none.
    same = torch.eq(old, value, out=old)
    count = int(same.sum())
    if count > MOSTLY_MOVED * value.numel():
        new, error = bf16_formats.compensate(value, half, compensation)
        half.copy_(new)
        compensation.copy_(error)
        return
    places = same.nonzero().view(-1) if count else None
    kept = None if places is None else bf16_formats.compensate(value[places], half[places], compensation[places])
    half.copy_(value)
    compensation.copy_(value.sub_(wide.copy_(half)))
    if places is not None and kept is not None:
        half[places], compensation[places] = kept


def _round_stochastically_(values: Tensor, halves: Tensor, draws: Draws, offset: int) -> None:
    """`bf16_formats.round_stochastically` into `halves`, with the bits of `bf16_formats.random_bits`, block by block."""
    block, end = bf16_formats.DRAWS_OF_BLOCK, offset + values.numel()
    blocks = range(offset // block, -(-end // block))
    factors = bf16_formats.factors_of_blocks(torch.arange(blocks.start, blocks.stop).to(torch.int32), draws.key).tolist()
    one, two, drawn = (torch.empty(min(block, values.numel()) // n + 1, dtype=torch.int32) for n in (2, 2, 1))
    for index, factor in zip(blocks, factors, strict=True):
        start, stop = max(offset, index * block), min(end, (index + 1) * block)
        value, low = values[start - offset : stop - offset], halves[start - offset : stop - offset]
        if sys.byteorder != "little" or not math.isfinite(value.sum().item()):  # one sum costs less than two selections
            low.copy_(bf16_formats.round_stochastically(value, bf16_formats.random_bits(draws.seed, draws.step, start, value)))
            continue
        first, count = (start % block) // 2, (stop + 1) // 2 - start // 2
        product = torch.mul(draws.words[first : first + count], factor, out=one[:count])
        pairs = bf16_formats.folded_(product, two[:count]).view(torch.uint16)
        bits = value.view(torch.int32).add_(drawn[: len(value)].copy_(pairs[start & 1 :][: len(value)]))
        low.view(torch.int16).copy_(bits.bitwise_right_shift_(16))
