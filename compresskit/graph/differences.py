"""How far the outputs of two models that should give the same are apart, as a fraction of what the outputs are large."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

NOTHING_FINITE = "no output of the model is finite on the example, so that nothing can be compared"
FAR_LARGER = 1000  # times an entry's own size: what is larger than that says nothing about the entry's rounding
SMALLEST_WIDE, SMALLEST_SINGLE = 1e-2, 1.0  # the least size by which differences are divided, in float64 and in other dtypes
#: Of numbers that are filled in: their least size, how many times larger than all others they are, how few there are of them,
#: and how often others are looked for behind them.
LEAST_FILL, TIMES_LARGER, FEW_FILLS, FILLS = 1000, 100, 8, 3


def relative_difference(wanted: Tensor, got: Tensor) -> float:
    """The largest difference of two tensors of one shape, each entry's as a fraction of the size of the entries that differ.

    Entries that are equal, infinities and NaN among them, say nothing: a model that fills masked logits with -1e9, or with the
    least number there is, would let any other difference look small. Nor does an entry a thousand times as large as the one at
    hand, such as a logit to which -1e9 was added. Sizes below `SMALLEST_WIDE` count as that: outputs may be rounding alone.

    Returns: 0 where they are equal; infinity or NaN where only one of them is finite at a place.
    """
    differs = ~((wanted == got) | (wanted.isnan() & got.isnan()))
    if not bool(differs.any()):
        return 0.0
    a, b = wanted[differs], got[differs]
    smallest = SMALLEST_WIDE if a.dtype == torch.float64 else SMALLEST_SINGLE
    sizes = a.nan_to_num(0, 0, 0).abs()
    scale = torch.minimum(sizes.max(), FAR_LARGER * sizes.clamp(min=smallest)).clamp(min=smallest)
    return float(((a - b).abs() / scale).max())


def any_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether one entry of some tensors is a number by which two models can be compared."""
    return any(bool(v.isfinite().any()) for v in tensors)


def filled_in(wanted: Tensor, *others: Tensor) -> Tensor | None:
    """Which entries code fills in, as `masked_fill(~valid, -1e9)` does: a few numbers, the same in all tensors, which are of one
    shape, and far larger than all else in the first. They say nothing of a model, and make any error look small.

    Returns a mask, True there; None where there are none.
    """
    if not wanted.is_floating_point() or not wanted.numel() or any(v.shape != wanted.shape for v in others):
        return None
    size = wanted.abs().where(wanted.isfinite(), 0)
    if float(size.max()) < LEAST_FILL:
        return None
    filled, finite = torch.zeros_like(wanted, dtype=torch.bool), wanted.isfinite()
    for _ in range(FILLS):
        largest = size.max()
        far = size > largest / 10
        rest = finite & ~far & ~filled
        if largest < LEAST_FILL or not bool(rest.any()) or bool(size[rest].max() > largest / TIMES_LARGER):
            break
        if len(wanted[far].unique()) > FEW_FILLS or any(bool((v[far] != wanted[far]).any()) for v in others):
            break
        filled |= far
        size[far] = 0
    return filled if bool(filled.any()) else None


def without_fills(wanted: Tensor, got: Tensor) -> tuple[Tensor, Tensor]:
    """Both with 0 for what code fills in and for the same infinities, so that powers are those of the rest."""
    same = (wanted == got) & wanted.isinf()
    filled = filled_in(wanted, got)
    if filled is None and not bool(same.any()):
        return wanted, got
    out = same if filled is None else same | filled
    return wanted.masked_fill(out, 0), got.masked_fill(out, 0)
