"""Greedy selection: remove the cheapest channels again and again until the budget is met, by counting or by measuring."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import nn

from compresskit.base.budget import Budget, percents
from compresskit.base.errors import ModelError, SettingError
from compresskit.base.task import Inputs
from compresskit.graph.surgery import copy_model
from compresskit.prune.channels.candidates import ExportedCandidates
from compresskit.prune.channels.resources import Limits, ResourceCounter, counted_unit, measured_quantity
from compresskit.prune.rankings import Ranking, Step, cost_aware
from compresskit.prune.structure.assemble import assemble_plan
from compresskit.prune.structure.groups import ChannelAnalysis, ChannelGroup, MacCounter
from compresskit.prune.structure.plan import Plan, PlanLine, apply_

SLACK = 0.02  # fraction of the resource by which a plan may fall below its budget for the sake of aligned widths
NOTABLE = 0.05  # fraction of the loss that another end has to save; scores are estimates, and plans do not change for less
MOST_CANDIDATES = 6  # candidates that are exported for a measured budget
MOST_REASONS = 6  # that a refusal lists
CLOSE_ENOUGH = 0.02  # a candidate that is this little below a measured budget ends the search


def remove_preset_(resource: ResourceCounter, limits: Limits, prefix: str) -> list[ChannelGroup]:
    """Remove the channels that `limits.ratios` prescribes; returns the groups without a prescribed ratio.

    Raises SettingError for a name that no group has, or a ratio that would empty its layer.
    """
    names = {name: g for g in resource.analysis.groups for name in (g.layer, *g.producers)}
    free = list(resource.analysis.groups)
    for name, ratio in limits.ratios.items():
        group = names.get(name.removeprefix(prefix))
        if group is None:
            have = ", ".join(sorted(prefix + g.layer for g in resource.analysis.groups)[:12])
            raise SettingError(
                f"ratios={{{name!r}: ...}}: no layer of that name makes channels that can be cut; there are: {have}"
            )
        count = round(ratio * group.size)
        if not 0 <= ratio < 1 or not limits.leaves_enough(group, count):
            raise SettingError(
                f"ratios={{{name!r}: {ratio}}}: would leave {group.size - count} of {group.size} channels; wanted a ratio in"
                f" [0, 1) that leaves at least {max(1, limits.minimum)}"
            )
        if group in free:
            free.remove(group)
            resource.remove(group, count)
    return free


def select_channels_(
    resource: ResourceCounter, fraction: float, limits: Limits, ranking: Ranking, groups: list[ChannelGroup]
) -> bool:
    """Take the cheapest steps until `fraction` of the resource is left; False where that cannot be reached.

    Near the target a step that saves more than is wanted looks dear for what is useful of it, and small ones that look cheap
    may cost more in all: with `cost_aware`, whose losses add up, another end is taken that was seen and loses less.
    """
    target, spent, end = fraction * resource.total, 0.0, End()
    while resource.current > target * (1 + 1e-9):
        best: tuple[float, int, int] | None = None
        wanted, loss = resource.current - target, 0.0
        for i, group in enumerate(groups):
            count = limits.step(group)
            if not limits.leaves_enough(group, count) or (saved := resource.saving(group, count)) <= 0:
                continue
            # Savings below the target are worth nothing.
            useful = min(saved, wanted)
            price = ranking(Step(group=group, count=count, useful=useful))
            if saved >= wanted:
                end = min(end, End(spent + price * useful, tuple(g.removed for g in groups), i), key=lambda e: e.loss)
            if best is None or price < best[0]:
                best, loss = (price, i, count), price * useful
        if best is None:
            break
        group, count = groups[best[1]], best[2]
        spent += loss
        remove_finely_(resource, group, count, target)
    met = resource.current <= target * (1 + 1e-9)
    if ranking is cost_aware and end.loss < (spent * (1 - NOTABLE) if met else math.inf):
        for group, removed in zip(groups, end.removed, strict=True):
            resource.remove(group, removed - group.removed)
        remove_finely_(resource, groups[end.last], limits.step(groups[end.last]), target)
    return resource.current <= target * (1 + 1e-9)


@dataclass(frozen=True)
class End:
    """One way to come to the target: what it loses in all, the channels of each group that are gone before, and the last step's
    group.
    """

    loss: float = math.inf
    removed: tuple[int, ...] = ()
    last: int = 0


def remove_finely_(resource: ResourceCounter, group: ChannelGroup, count: int, target: float) -> None:
    """Remove a step; one that falls far below the target may be finer than the alignment."""
    while count > 1 and resource.current - resource.saving(group, count) < target - SLACK * resource.total:
        if resource.current - resource.saving(group, count // 2) > target:
            break
        count //= 2
    resource.remove(group, count)


class ChannelSelector:
    """Plans for one model whose groups have scores; every call starts from the whole model.

    analysis: groups of the model inside `prefix`, which has `macs` multiply-accumulates for one sample.
    """

    def __init__(
        self,
        analysis: ChannelAnalysis,
        budget: Budget,
        limits: Limits,
        ranking: Ranking,
        prefix: str,
        macs: int,
        model: nn.Module,
    ) -> None:
        self.analysis, self.budget, self.limits, self.ranking, self.prefix = analysis, budget, limits, ranking, prefix
        self.unit, self.measured = counted_unit(budget), measured_quantity(budget)
        self.macs, self.model = macs, model

    def plan(self, example: Inputs) -> Plan:
        """The plan that meets the budget; raises ModelError where it cannot be met."""
        if not self.analysis.groups and self.budget.kept < 1:
            raise ModelError(f"{self._wish()}, but no channel can be removed{self._reasons()}")
        return self._counted_plan() if self.measured is None else self._measured_plan(example)

    def _plan_for(self, fraction: float, limits: Limits | None = None) -> tuple[Plan, float]:
        """The plan that keeps `fraction` of the counted resource, and the fraction it keeps: more where locks allow no less."""
        limits = limits or self.limits
        for group in self.analysis.groups:
            group.removed = 0
        resource = ResourceCounter(self.analysis, self.unit, self.model.get_submodule(self.prefix.removesuffix(".")))
        free = remove_preset_(resource, limits, self.prefix)
        select_channels_(resource, fraction, limits, self.ranking, free)
        return plan_of(self.analysis, self.macs, self.prefix), resource.current / max(resource.total, 1)

    def _counted_plan(self) -> Plan:
        plan, reached = self._plan_for(self.budget.kept)
        if reached > self.budget.kept * (1 + 1e-9):
            wanted, least = percents(self.budget.kept, reached)
            raise ModelError(f"{self._wish(wanted)}, only {least} can be reached{self._reasons()}{self._finer()}")
        return plan

    def _finer(self) -> str:
        """Whether widths of any size would meet the budget."""
        if self.limits.round_to == 1:
            return ""
        _, finer = self._plan_for(self.budget.kept, replace(self.limits, round_to=1))
        met = finer <= self.budget.kept * (1 + 1e-9)
        return f"; with round_to=1 in the place of {self.limits.round_to}, {finer:.1%} is reached" if met else ""

    def _measured_plan(self, example: Inputs) -> Plan:
        """Export and measure candidates, and bisect the fraction that is counted."""
        target = self.budget.kept
        best: Plan | None = None
        with ExportedCandidates(self.model, example, self.measured or "") as candidates:
            _, low = self._plan_for(1e-9)
            high, guess = 1.0, max(target, low)
            tried: list[tuple[float, float]] = []
            for _ in range(MOST_CANDIDATES):
                plan, counted = self._plan_for(guess)
                reached, note = candidates.measure(apply_(copy_model(self.model), plan))
                tried.append((reached, counted))
                if reached <= target and (best is None or plan.macs > best.macs):
                    best = replace(plan, note=note)
                if reached <= target:
                    low = guess
                else:
                    high = guess
                if target * (1 - CLOSE_ENOUGH) <= reached <= target or high - low < 0.01:
                    break
                guess = low if best is None and len(tried) == MOST_CANDIDATES - 1 else (low + high) / 2
        if best is None:
            reached, counted = min(tried)
            wanted, least = percents(self.budget.kept, reached)
            raise ModelError(
                f"{self._wish(wanted)}; the least that was measured is {least}, with {counted:.1%} of the {self.unit}"
                f"{self._reasons()}"
            )
        return best

    def _wish(self, kept: str = "") -> str:
        return f"{type(self.model).__name__}: wanted {kept or f'{self.budget.kept:.1%}'} of the {self.measured or self.unit}"

    def _reasons(self) -> str:
        reasons = list(self.analysis.locked_by_macs().items())
        locks = "; ".join(f"{count} channels: {reason}" for reason, count in reasons[:MOST_REASONS])
        if len(reasons) > MOST_REASONS:
            locks += f"; {len(reasons) - MOST_REASONS} more reasons, which hold fewer MACs"
        limits = f"; every group keeps at least {self.limits.minimum}" if self.limits.minimum > 1 else ""
        return f"; locked: {locks or 'none'}{limits}"


def plan_of(found: ChannelAnalysis, total: int, prefix: str) -> Plan:
    """The plan that removes the lowest `gone` channels of every group."""
    chosen, lines, widths = [], [], MacCounter(found)
    for group in found.groups:
        count, group.removed = group.removed, 0
        widths.cut(group, count)
        chosen.append(group.scores.argsort()[:count])
        holders = [((prefix + tensor).rpartition(".")[0], role) for tensor, _, role in group.indices]
        makes = prefix + group.layer
        along = [f"{path or 'the model'}{'[in]' * (role == 'in')}" for path, role in holders if role == "in" or path != makes]
        others = tuple(dict.fromkeys(along))
        lines.append(PlanLine(layer=makes, size=group.size, keep=group.size - count, dependents=others))
    settings = {"lines": tuple(lines), "macs": round(widths.macs()), "macs_before": total, "locked": found.locked}
    return assemble_plan(found, chosen, **settings)
