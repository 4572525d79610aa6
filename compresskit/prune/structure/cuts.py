"""Where operators cut a dimension into parts, and whether the places follow a width that shrinks.

`x[:, : x.shape[1] // 2]` and `x[:, :16]` look the same in the graph. In a run of a pruned copy they do not: there the first cuts
where the channels that stay are parted, the second one where the code says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compresskit.graph.normalize import aten
from compresskit.prune.structure.channel_sets import ChannelSets
from compresskit.prune.structure.constraints import ChannelCut

#: Start, stop and step of each part.
CutPlaces = tuple[tuple[int, int, int], ...]

#: Operators whose places are followed.
CUTS = (
    aten.slice.Tensor,
    aten.narrow.default,
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
)


def cut_places(target: Any, args: Any, kwargs: Any, size: int) -> CutPlaces:
    """The places at which a call of one of `CUTS` cuts a dimension of so many entries."""
    names = [argument.name for argument in target._schema.arguments]
    given = {a.name: a.default_value for a in target._schema.arguments} | dict(zip(names, args, strict=False)) | dict(kwargs)
    if target is aten.slice.Tensor:
        return (slice(given["start"], given["end"], given["step"]).indices(size),)
    if target is aten.narrow.default:
        start = given["start"] % size if size else 0
        return ((start, start + given["length"], 1),)
    sizes = given["split_sizes"] if "split_sizes" in given else given["split_size"]
    if isinstance(sizes, int):
        return tuple((start, min(start + sizes, size), 1) for start in range(0, size, sizes))
    stops = torch.tensor(sizes).cumsum(0).tolist()
    return tuple((stop - length, stop, 1) for length, stop in zip(sizes, stops, strict=True))


class CutRecorder(TorchDispatchMode):
    """Notes where a run cuts.

    paths: the modules whose forward is running, innermost last; only calls inside of `prefix` count.
    """

    def __init__(self, cuts: Iterable[ChannelCut], paths: list[str], prefix: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.targets, self.paths, self.prefix = {cut.target for cut in cuts}, paths, prefix
        self.calls: Counter[Any] = Counter()
        self.places: dict[tuple[Any, int], tuple[int, CutPlaces]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inside = not self.prefix or any(f"{path}.".startswith(f"{self.prefix}.") for path in self.paths)
        if func in self.targets and inside:
            self.calls[func] += 1
            names = [argument.name for argument in func._schema.arguments]
            dim = dict(zip(names, args, strict=False)).get("dim", kwargs.get("dim", 0))
            size = args[0].shape[dim]
            self.places[func, self.calls[func]] = size, cut_places(func, args, kwargs, size)
        return func(*args, **kwargs)

    def wrong(self, cuts: list[ChannelCut], sets: ChannelSets, removed: Tensor, *, finished: bool) -> tuple[int, ...]:
        """Numbers of the cuts whose places are not those between which the channels that stay are parted.

        removed: roots of the sets that are gone. finished: whether the run came to its end, past all cuts.
        """
        return tuple(
            number
            for number, cut in enumerate(cuts)
            if (found := self.places.get((cut.target, cut.nth))) != (wanted := _places_after(cut, sets, removed))
            and (finished or (found is not None and found[0] == wanted[0]))
        )


def _places_after(cut: ChannelCut, sets: ChannelSets, removed: Tensor) -> tuple[int, CutPlaces]:
    """(size of the dimension, where a cut must be) once the sets are gone."""
    kept = ~torch.isin(sets.roots(cut.labels), removed)
    along = kept.movedim(cut.dim, 0).reshape(kept.shape[cut.dim], -1).any(1)
    before = [0, *along.cumsum(0).tolist()]
    return before[-1], tuple((before[a] if step == 1 else a, before[b], step) for a, b, step in cut.places)
