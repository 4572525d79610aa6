"""The search for a plan: cut the cheapest step again and again until the target is met, by count or by measurement."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from compresskit.base.budget import Budget
from compresskit.base.errors import ModelError, SettingError
from compresskit.base.task import Inputs
from compresskit.prune.channels.measured import Files
from compresskit.prune.channels.resources import Limits, ResourceCounter, counted_unit, measured_quantity
from compresskit.prune.rankings import Ranking, Step
from compresskit.prune.structure.assemble import assemble_plan
from compresskit.prune.structure.groups import ChannelAnalysis, ChannelGroup, MacCounter
from compresskit.prune.structure.plan import Plan, PlanLine

SLACK = 0.02  # share of the budget by which a plan may fall below its target for the sake of aligned widths
TRIALS = 6  # candidates that are exported for a measured target
CLOSE = 0.02  # a candidate this little below a measured target is good enough


def preset(resource: ResourceCounter, limits: Limits, prefix: str) -> list[ChannelGroup]:
    """Cut what `limits.ratios` decided; returns the groups that are still free.

    Raises SettingError for a name that no group has, or a ratio that would empty its layer.
    """
    names = {name: g for g in resource.found.groups for name in (g.layer, *g.producers)}
    free = list(resource.found.groups)
    for name, ratio in limits.ratios.items():
        group = names.get(name.removeprefix(prefix))
        if group is None:
            have = ", ".join(sorted(prefix + g.layer for g in resource.found.groups)[:12])
            raise SettingError(
                f"ratios={{{name!r}: ...}}: no layer of that name makes channels that can be cut; there are: {have}"
            )
        count = round(ratio * group.size)
        if not 0 <= ratio < 1 or not limits.left_over(group, count):
            raise SettingError(
                f"ratios={{{name!r}: {ratio}}}: would leave {group.size - count} of {group.size} channels; wanted a ratio in"
                f" [0, 1) that leaves at least {max(1, limits.minimum)}"
            )
        if group in free:
            free.remove(group)
            resource.cut(group, count)
    return free


def choose_(resource: ResourceCounter, share: float, limits: Limits, ranking: Ranking, free: list[ChannelGroup]) -> bool:
    """Cut the cheapest steps until `share` of the budget is left; False where that cannot be reached."""
    target = share * resource.total
    while resource.current > target * (1 + 1e-9):
        best: tuple[float, int, int] | None = None
        for i, group in enumerate(free):
            count = limits.step(group)
            if not limits.left_over(group, count) or (saved := resource.saving(group, count)) <= 0:
                continue
            # What lies below the target is given away for nothing.
            useful = min(saved, resource.current - target)
            price = ranking(Step(group=group, count=count, useful=useful))
            if best is None or price < best[0]:
                best = (price, i, count)
        if best is None:
            return False
        group, count = free[best[1]], best[2]
        # The last cut may be finer than the alignment where the target would be missed by far.
        while count > 1 and resource.current - resource.saving(group, count) < target - SLACK * resource.total:
            if resource.current - resource.saving(group, count // 2) > target:
                break
            count //= 2
        resource.cut(group, count)
    return True


class Cutter:
    """Plans for one model whose groups have scores; every call starts from the whole model."""

    def __init__(
        self, found: ChannelAnalysis, budget: Budget, limits: Limits, ranking: Ranking, prefix: str, macs: int, model: nn.Module
    ) -> None:
        self.found, self.budget, self.limits, self.ranking, self.prefix = found, budget, limits, ranking, prefix
        self.unit, self.measured = counted_unit(budget), measured_quantity(budget)
        self.macs, self.model = macs, model

    def to(self, share: float) -> tuple[Plan, float]:
        """The plan that keeps `share` of what is counted, and the share that it really keeps: more where locks allow no less."""
        for group in self.found.groups:
            group.removed = 0
        resource = ResourceCounter(self.found, self.unit, self.model.get_submodule(self.prefix.removesuffix(".")))
        free = preset(resource, self.limits, self.prefix)
        choose_(resource, share, self.limits, self.ranking, free)
        return plan_of(self.found, self.macs, self.prefix), resource.current / max(resource.total, 1)

    def plan(self) -> Plan:
        """The plan for a counted target; ModelError where it cannot be reached."""
        share = self.budget.kept
        plan, reached = self.to(share)
        if reached > share * (1 + 1e-9):
            raise ModelError(f"{self.name(share)}, only {reached:.1%} can be reached{self.why()}")
        return plan

    def name(self, share: float) -> str:
        """The wish, in words."""
        return f"{type(self.model).__name__}: wanted {share:.1%} of the {self.measured or self.unit}"

    def why(self) -> str:
        """What holds the rest."""
        locks = "; ".join(f"{count} channels: {reason}" for reason, count in list(self.found.locked.items())[:6])
        limits = f"; every group keeps at least {self.limits.minimum}" if self.limits.minimum > 1 else ""
        return f"; locked: {locks or 'none'}{limits}"

    def measured_plan(self, example: Inputs) -> Plan:
        """The plan for a measured target: candidates are exported and measured, and the share that is counted is bisected."""
        wanted = self.budget.kept
        best: Plan | None = None
        with Files(self.model, example, self.measured or "") as files:
            _, low = self.to(1e-9)
            high, guess, seen = 1.0, max(wanted, low), []
            for _ in range(TRIALS):
                plan, share = self.to(guess)
                got, said = files.share(plan)
                seen.append((got, share))
                if got <= wanted and (best is None or plan.macs > best.macs):
                    best = replace(plan, note=said)
                if got <= wanted:
                    low = guess
                else:
                    high = guess
                if wanted * (1 - CLOSE) <= got <= wanted or high - low < 0.01:
                    break
                guess = low if best is None and len(seen) == TRIALS - 1 else (low + high) / 2
        if best is None:
            got, share = min(seen)
            raise ModelError(
                f"{self.name(wanted)}; the least that was measured is {got:.1%}, with {share:.1%} of the {self.unit}{self.why()}"
            )
        return best


def plan_of(found: ChannelAnalysis, total: int, prefix: str) -> Plan:
    """The plan that removes the lowest `gone` channels of every group."""
    chosen, lines, widths = [], [], MacCounter(found)
    for group in found.groups:
        count, group.removed = group.removed, 0
        widths.cut(group, count)
        chosen.append(group.scores.argsort()[:count])
        along = [f"{t.rpartition('.')[0]}[in]" if role == "in" else t.rpartition(".")[0] for t, _, role in group.indices]
        others = tuple(dict.fromkeys(prefix + a for a in along if a != group.layer))
        lines.append(PlanLine(layer=prefix + group.layer, size=group.size, keep=group.size - count, dependents=others))
    settings = {"lines": tuple(lines), "macs": round(widths.macs()), "macs_before": total, "locked": found.locked}
    return assemble_plan(found, chosen, **settings)
