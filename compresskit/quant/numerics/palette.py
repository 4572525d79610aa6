"""Palettes: a weight stored as indices into a few values, its centroids, which k-means finds (deep compression, 1510.00149).

cluster                            the centroids of numbers: k-means in one dimension
Palette                            number format of a weight: bits of an index, and which output channels share centroids
PaletteQuantizer                   rounds a weight to its centroids
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.settings import as_python, check_field_types
from compresskit.quant.numerics.block_grid import BlockQuantizer, BlockScheme, MatrixQuantizer

MOST_EXACT = 512  # different numbers up to which the clusters are those of least squared error
MOST_LLOYD = 100  # iterations of Lloyd's algorithm
LARGEST_PACKED = 6  # bits of an index that a file packs; 7 take 8


@dataclass(frozen=True, kw_only=True)
class Palette:
    """Number format of a weight that is stored as indices into centroids: a smaller file, products in float.

    bits: of an index, 1 to 8; a palette has 2^bits centroids.
    group_size: neighbouring output channels (rows of an embedding) that share centroids; None for one palette for the weight.
        The last group may have fewer.
    """

    bits: int = 4
    group_size: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # NumPy's numbers become Python's, which a record can have
            object.__setattr__(self, name, as_python(value))
        check_field_types(self)
        if not 1 <= self.bits <= 8:
            raise SettingError(f"Palette(bits=...): wanted 1..8, got {self.bits}")
        if self.group_size is not None and self.group_size < 1:
            raise SettingError(
                f"Palette(group_size=...): wanted the number of channels that share centroids, or None, got {self.group_size}"
            )

    def __str__(self) -> str:
        shared = "one palette" if self.group_size is None else f"a palette for {self.group_size} channels"
        return f"{self.bits}-bit indices, {shared}"


#: Number format of a weight that weight-only quantization rounds.
WeightScheme = BlockScheme | Palette


def cluster(values: np.ndarray, count: int) -> np.ndarray:
    """Find the centroids (count,), in rising order, that numbers (n,) are closest to: sum of squared distances.

    Up to 512 different numbers the result is optimal, by dynamic programming (Wang & Song, Ckmeans.1d.dp, 2011). More of them
    are first cut at 512 places, half of them equally far from each other and half with equally many numbers between; the best
    of these cuts are then refined by Lloyd's algorithm. The same numbers give the same centroids. Fewer different numbers than
    centroids are all kept, the largest several times.

    >>> cluster(np.array([1.0, 1.0, 2.0, 10.0, 11.0]), 2).round(2).tolist()
    [1.33, 10.5]
    """
    numbers, times = np.unique(values.astype(np.float64), return_counts=True)
    if len(numbers) <= count:
        return np.concatenate([numbers, np.full(count - len(numbers), numbers[-1] if len(numbers) else 0.0)])
    middle = numbers.mean()  # squares of numbers far from zero would lose digits
    numbers = numbers - middle
    sums = np.stack([np.concatenate([[0.0], np.cumsum(times * numbers**power)]) for power in (0, 1, 2)])
    centroids = _means(sums, _best_cuts(sums, _possible_cuts(numbers), count))
    for _ in range(MOST_LLOYD):
        cuts = np.concatenate([[0], np.searchsorted(numbers, (centroids[1:] + centroids[:-1]) / 2), [len(numbers)]])
        after = _means(sums, cuts, otherwise=centroids)
        if np.array_equal(after, centroids):
            break
        centroids = after
    return np.asarray(centroids + middle)


def _possible_cuts(numbers: np.ndarray) -> np.ndarray:
    """Places 0 to n between sorted numbers where a cluster may begin."""
    n = len(numbers)
    if n <= MOST_EXACT:
        return np.arange(n + 1)
    places = np.linspace(0, n, MOST_EXACT // 2 + 1).round().astype(np.int64)
    even = np.searchsorted(numbers, np.linspace(numbers[0], numbers[-1], MOST_EXACT // 2 + 1))
    return np.unique(np.concatenate([places, even]))


def _best_cuts(sums: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """The cuts (count + 1,) among `places`, the ends included, whose clusters have the least squared error.

    sums: (3, n + 1), how many, sum and sum of squares of the first i numbers.
    """
    many, first, second = sums[:, places]
    with np.errstate(divide="ignore", invalid="ignore"):
        error = second - second[:, None] - (first - first[:, None]) ** 2 / (many - many[:, None])  # [start, end]
    error[np.tril_indices(len(places))] = np.inf
    least, choices = error[0], []
    for _ in range(count - 1):
        totals = least[:, None] + error
        choices.append(totals.argmin(0))
        least = np.take_along_axis(totals, choices[-1][None], 0)[0]
    cuts = [len(places) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return places[[0, *reversed(cuts)]]


def _means(sums: np.ndarray, cuts: np.ndarray, *, otherwise: np.ndarray | float = 0.0) -> np.ndarray:
    """The mean of the numbers between each two cuts; `otherwise` where there are none."""
    many, first, _ = np.diff(sums[:, cuts], axis=1)
    return np.where(many > 0, first / np.maximum(many, 1), otherwise)


class PaletteQuantizer(MatrixQuantizer):
    """Rounds a weight to the nearest of its centroids; gradients pass straight through.

    scheme: its number format. shape: of the weight. axis: the dimension that holds the inputs.
    centroids: (groups, 2^bits) fp32, each row in rising order.
    """

    centroids: Tensor

    def __init__(self, scheme: Palette, shape: tuple[int, ...], axis: int) -> None:
        super().__init__(shape, axis)
        self.scheme = scheme
        channels = self.rows(torch.empty(shape, device="meta")).shape[0]
        self.group_size = min(scheme.group_size or channels, channels)
        groups = -(-channels // self.group_size)
        self.register_buffer("centroids", torch.zeros(groups, 2**scheme.bits, dtype=torch.float32))

    def fit_(self, rows: Tensor, mask: Tensor | None, name: str) -> Tensor:
        """Find the centroids of a weight; returns it rounded, (channels, inputs).

        Args:
            rows: the weight, (channels, inputs).
            mask: (channels, inputs) bool, False where the weight is pruned: 0 is then a centroid. None for a dense weight.
            name: of the weight, for the message.

        Raises ModelError for one bit and a mask with zeros: there is one other value, so that all weights would have one sign.
        """
        count = 2**self.scheme.bits
        pruned = mask is not None and not bool(mask.all())
        if pruned and count == 2:
            raise ModelError(
                f"{name}: pruning left zeros in it, and a palette of one bit has two values, 0 and one for all other weights;"
                f" take 2 bits or more, or leave it float: overrides={{{name!r}: None}}"
            )
        for group, part in enumerate(rows.detach().split(self.group_size)):
            values = part.double().cpu().numpy()
            if not pruned:
                found = cluster(values.ravel(), count)
            else:
                assert mask is not None
                kept = mask[group * self.group_size :][: len(part)].cpu().numpy()
                found = np.sort(np.append(cluster(values[kept], count - 1), 0.0))
            self.centroids[group] = torch.from_numpy(found).to(self.centroids)
        return self._each_row().gather(1, self.nearest(rows))

    def _each_row(self) -> Tensor:
        """The centroids of each channel, (channels, 2^bits)."""
        channels = self.rows(torch.empty(self.shape, device="meta")).shape[0]
        return self.centroids.repeat_interleave(self.group_size, 0)[:channels]

    def nearest(self, rows: Tensor) -> Tensor:
        """Which centroid of its group is nearest to each weight: (channels, inputs) int64, from 0."""
        centroids = self._each_row()
        between = (centroids[:, 1:] + centroids[:, :-1]) / 2
        return torch.searchsorted(between.contiguous(), rows.detach().float().contiguous())

    def keep_nonzero_(self, weight: Tensor, mask: Tensor) -> None:
        """Change, in place, each weight that `mask` keeps but that is rounded to zero into the nearest centroid that is not 0."""
        rows, kept, centroids = self.rows(weight).clone(), self.rows(mask), self._each_row()
        lost = kept & (centroids.gather(1, self.nearest(rows)) == 0)
        channel = lost.nonzero()[:, 0]
        distance = (centroids[channel] - rows[lost][:, None]).abs().masked_fill(centroids[channel] == 0, torch.inf)
        if len(channel):
            rows[lost] = centroids[channel].gather(1, distance.argmin(1, keepdim=True))[:, 0].to(rows.dtype)
        weight.copy_(self.weight(rows))

    def forward(self, weight: Tensor) -> Tensor:
        if not self.enabled:
            return weight
        rows = self.rows(weight)
        rounded = self._each_row().gather(1, self.nearest(rows)).to(rows.dtype)
        return self.weight(rounded + (rows - rows.detach()))

    def stored(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a file stores of a weight: (indices, table, places), such that table[indices + places] is the rounded weight.

        indices: int8 in the weight's shape, around 0, as integers of few bits are packed; one bit is -1 and 1.
        table: fp32, the centroids of all groups one after the other; one bit has an unused entry between its two.
        places: int32, where the middle of each channel's centroids stands in the table.
        """
        bits, nearest, table = self.scheme.bits, self.nearest(self.rows(weight)), self.centroids
        indices = 2 * nearest - 1 if bits == 1 else nearest - 2 ** (bits - 1)
        if bits == 1:
            table = table[:, [0, 0, 1]]
        groups, entries = table.shape
        places = torch.arange(groups, dtype=torch.int32, device=table.device) * entries + entries // 2
        channels = places.repeat_interleave(self.group_size)[: len(nearest), None]
        shape = (-1, *[1] * (len(self.shape) - 1))
        spread = channels.view(shape) if len(self.shape) > 2 else channels.movedim(1, self.axis)
        return (
            self.weight(indices.to(torch.int8)).contiguous(),
            table.flatten(),
            places[0] if groups == 1 else spread.contiguous(),
        )

    @property
    def stored_bytes(self) -> int:
        """Size of the weight in a file: indices, table, and the place of each channel in it."""
        bits = self.scheme.bits if self.scheme.bits <= LARGEST_PACKED else 8
        groups, entries = len(self.centroids), 3 if bits == 1 else 2**self.scheme.bits
        channels = self.rows(torch.empty(self.shape, device="meta")).shape[0]
        return math.ceil(math.prod(self.shape) * bits / 8) + 4 * groups * entries + 4 * (channels if groups > 1 else 1)

    def extra_repr(self) -> str:
        return str(self.scheme)


def matrix_quantizer(scheme: WeightScheme, shape: tuple[int, ...], axis: int) -> MatrixQuantizer:
    """The quantizer of a weight of a shape, whose inputs are dimension `axis`, in a number format."""
    return PaletteQuantizer(scheme, shape, axis) if isinstance(scheme, Palette) else BlockQuantizer(scheme, shape, axis)
