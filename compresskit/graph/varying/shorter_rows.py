"""Inputs with shorter rows than those of an example, for a model that packs sequences.

Where every row of the example is full, it shows nothing of what becomes of padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs

PACK: Any = torch._VF._pack_padded_sequence  # type: ignore[attr-defined]


class PackedLengths(TorchFunctionMode):
    """Notes the lengths of what a model packs while it runs inside the block.

    lengths: of each sequence that is packed, in the order that torch sorts them into. steps: of the batch that each is packed of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[list[int]] = []
        self.steps: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is PACK:
            x, lengths, batch_first = args
            self.steps.append(x.shape[1 if batch_first else 0])
            self.lengths.append(lengths.tolist())
        return func(*args, **(kwargs or {}))

    @property
    def full(self) -> int:
        """Of how many packed batches no row has padding."""
        return sum(min(lengths) == steps for lengths, steps in zip(self.lengths, self.steps, strict=True))


def with_shorter_rows(
    model: nn.Module, inputs: Inputs, packed: PackedLengths, run: Callable[[Inputs], object]
) -> tuple[Inputs, bool]:
    """Inputs of the same shapes, of which rows are shorter in the batches that the model packs without padding.

    Lengths are made smaller, and masks, indices and values behind the end of a row are filled, one input after another: what
    makes such a batch have padding, stays. The longest row keeps its length, and rows that are sorted stay so.

    Args:
        model: packs sequences. inputs: for which it packs some without padding.
        packed: what it packs for them. run: the model, on inputs of which it may write copies.

    Returns: the inputs, and whether every batch has padding for them.
    """
    leaves, form = pytree.tree_flatten(inputs)
    fills = sorted({0, *(m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None)})
    longest, full, rows = [max(lengths) for lengths in packed.lengths], packed.full, len(packed.lengths[0])
    for i, leaf in enumerate(leaves):
        for shorter in _shorter(leaf, rows, fills) if full and isinstance(leaf, Tensor) else ():
            tried = pytree.tree_unflatten([*leaves[:i], shorter, *leaves[i + 1 :]], form)
            try:
                with PackedLengths() as found:
                    run(tried)
            except Exception:  # no lengths
                continue
            if found.full < full and [max(lengths) for lengths in found.lengths] == longest:
                leaves[i], full = shorter, found.full
                break
    return pytree.tree_unflatten(leaves, form), not full


def _shorter(leaf: Tensor, rows: int, fills: Sequence[int]) -> Iterator[Tensor]:
    """One input with smaller lengths, or with what may stand for padding behind shorter rows."""
    for least in (1 / rows, 1 / 2 + 1 / 2 / rows, 1 - 1 / max(leaf.shape, default=1)):
        kept = torch.linspace(1, least, rows).tolist()
        if leaf.shape == (rows,):
            factors = torch.tensor(kept, device=leaf.device)
            yield leaf * factors if leaf.is_floating_point() else (leaf * factors).ceil().to(leaf.dtype)
        for row_dim in range(2):
            if leaf.ndim < 2 or leaf.shape[row_dim] != rows:
                continue
            for fill in (0, 1) if leaf.dtype is torch.bool else fills if not leaf.is_floating_point() else (0,):
                made = leaf.clone()
                for row, part in zip(made.unbind(row_dim), kept, strict=True):
                    row[max(1, math.ceil(part * len(row))) :] = fill
                yield made
