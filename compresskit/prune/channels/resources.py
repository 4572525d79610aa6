"""Resources of a model, counted while channels are removed, and the limits that every plan keeps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from compresskit.base.budget import Budget, Quantity
from compresskit.base.errors import SettingError
from compresskit.prune.structure.groups import ChannelAnalysis, ChannelGroup, MacCounter

#: Quantities that a plan of channels can have as its budget.
PRUNABLE: tuple[Quantity, ...] = ("macs", "parameters", "bytes", "latency", "channels")


def measured_quantity(budget: Budget) -> Literal["bytes", "latency"] | None:
    """The budget's quantity where it has to be measured on exported candidates, because counting does not tell; else None."""
    return budget.quantity if budget.quantity in ("bytes", "latency") else None


def counted_unit(budget: Budget) -> Literal["MACs", "parameters", "channels"]:
    """Unit that is counted while channels are chosen: MACs for a latency, parameters for bytes."""
    if budget.quantity == "channels":
        return "channels"
    return "parameters" if budget.quantity in ("parameters", "bytes") else "MACs"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of every plan, whatever its budget.

    round_to: widths stay multiples of this. minimum: channels that every group keeps.
    ratios: layer -> ratio of its channels to remove, prescribed by the user, to the nearest channel whatever `round_to` is.
    """

    round_to: int = 8
    minimum: int = 1
    ratios: Mapping[str, float]

    def check(self, where: str) -> None:
        """Raise SettingError for a limit out of its range."""
        for name, value in (("round_to", self.round_to), ("minimum", self.minimum)):
            if not isinstance(value, int) or value < 1:
                raise SettingError(f"{where[:-1]}{name}=...): wanted a whole number >= 1, got {value!r}")
        if not isinstance(self.ratios, Mapping):
            raise SettingError(
                f"{where[:-1]}ratios=...): wanted the ratio of each layer, such as {{'conv1': 0.5}}, got {self.ratios!r:.60}"
            )
        for name, ratio in self.ratios.items():
            if not isinstance(ratio, int | float) or not 0 <= ratio < 1:
                raise SettingError(
                    f"{where[:-1]}ratios={{{name!r}: ...}}): wanted the fraction that goes, in [0, 1), got {ratio!r}"
                )

    def step(self, group: ChannelGroup) -> int:
        """Number of channels to remove at once so that widths stay multiples of `round_to`; fewer in narrow layers."""
        size = self.round_to
        while size > 1 and group.size < 2 * size:
            size //= 2
        return (group.size - group.removed) % size or size

    def count(self, group: ChannelGroup, ratio: float) -> int:
        """Number of channels to remove for a ratio of an unpruned group, as near as the alignment of widths allows."""
        size = self.step(group)
        return round(ratio * group.size / size) * size

    def leaves_enough(self, group: ChannelGroup, count: int) -> bool:
        """Whether the group keeps its minimum of channels after losing `count` more."""
        return group.size - group.removed - count >= max(1, min(self.minimum, group.size))


class ResourceCounter:
    """One resource of the model, counted while channels are removed. unit: "MACs", "parameters" or "channels"."""

    def __init__(self, analysis: ChannelAnalysis, unit: str, module: nn.Module) -> None:
        self.analysis, self.unit, self.widths = analysis, unit, MacCounter(analysis)
        self.numbers = {name: p.numel() for name, p in module.named_parameters()}  # a tied one once
        self.removed: Counter[tuple[str, int]] = Counter()
        if unit == "channels":
            self.total = float(sum(g.size for g in analysis.groups))
        else:
            self.total = self.widths.macs() if unit == "MACs" else float(sum(self.numbers.values()))
        self.current = self.total

    def saving(self, group: ChannelGroup, count: int) -> float:
        """What removing `count` more channels of a group saves."""
        if self.unit == "channels":
            return float(count)
        return self.widths.saving(group, count) if self.unit == "MACs" else self._parameters(group, count)

    def _parameters(self, group: ChannelGroup, count: int) -> float:
        extra: dict[str, dict[int, int]] = defaultdict(dict)
        for (tensor, dim, _), indices in group.indices.items():
            extra[tensor][dim] = indices.shape[1] * count
        saved = 0.0
        for tensor, more in extra.items():
            now = left = float(self.numbers.get(tensor, 0))
            for dim, size in enumerate(self.analysis.shapes[tensor]):
                now *= 1 - self.removed[tensor, dim] / size
                left *= 1 - (self.removed[tensor, dim] + more.get(dim, 0)) / size
            saved += now - left
        return saved

    def remove(self, group: ChannelGroup, count: int) -> None:
        """Count `count` more channels of a group as removed."""
        self.current -= self.saving(group, count)
        for (tensor, dim, _), indices in group.indices.items():
            self.removed[tensor, dim] += indices.shape[1] * count
        self.widths.cut(group, count)
