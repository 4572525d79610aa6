"""What the first stages of candidates make, for candidates that begin with the same ones.

Of two candidates without the same blocks, the blocks are planned, removed and made up for once; so is all that comes before a
short training, which the candidate had when it was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from compresskit.base.fingerprint import describe, short_hash
from compresskit.base.stage import Stage
from compresskit.graph.surgery import copy_model
from compresskit.prune import Prune
from compresskit.prune.depth import Depth, Merge
from compresskit.prune.low_rank import LowRank

MOST_BEGUN = 2**28  # bytes of parameters and buffers that are kept


class Beginnings:
    """Models after the first stages of candidates, those that were used last, up to `most` bytes."""

    def __init__(self, most: int = MOST_BEGUN) -> None:
        self.most = most
        self._held: dict[str, nn.Module] = {}  # the one used last is the last

    def of(self, stages: Sequence[Stage]) -> tuple[nn.Module, int] | None:
        """A copy of the model after the most of these stages, and how many those are; None where none is kept."""
        for count, key in reversed(list(_hashes_of_beginnings(stages))):
            if key in self._held:
                self._held[key] = self._held.pop(key)
                return copy_model(self._held[key]), count
        return None

    def keep(self, stages: Sequence[Stage], model: nn.Module) -> None:
        """Keep a copy of the model that these stages made, in the place of what was not used for the longest time.

        Not where a stage trains, or does more than remove layers and channels.
        """
        keys = dict(_hashes_of_beginnings(stages))
        if len(stages) not in keys or _held_bytes(model) > self.most:
            return
        self._held[keys[len(stages)]] = copy_model(model)
        while sum(map(_held_bytes, self._held.values())) > self.most:
            del self._held[next(iter(self._held))]


def _hashes_of_beginnings(stages: Sequence[Stage]) -> Iterator[tuple[int, str]]:
    """How many of the first stages can be kept, from one on, and a hash of them: as far as they only remove, without training."""
    described = []
    for count, stage in enumerate(stages, 1):
        if not isinstance(stage, Depth | Merge | Prune | LowRank) or stage.finetune is not None:
            return
        described.append([type(stage).__name__, describe(stage)])
        yield count, short_hash(described)


def _held_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
