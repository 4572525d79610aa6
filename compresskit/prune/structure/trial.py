"""What the graph cannot know is found by trial: cut a little everywhere, run, and take back what the code does not stand.

A size written in the code breaks the forward of a pruned copy. The module in which it broke is asked, in this order: do numbers
of its own follow the width; are its heads as wide together as its input; must whole heads go? What none of these mends stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from compresskit.base.errors import ModelError
from compresskit.base.task import Inputs
from compresskit.prune.structure.assemble import assemble_plan
from compresskit.prune.structure.channel_sets import varying
from compresskit.prune.structure.groups import ChannelAnalysis, ChannelGroup, find_groups
from compresskit.prune.structure.plan import Plan
from compresskit.prune.structure.propagate import Walk
from compresskit.prune.structure.prove import Failure, examine, runs
from compresskit.prune.structure.resolve import Choices
from compresskit.prune.structure.trace import record

ROUNDS = 60  # trials after which a model is refused


class TrialRepair:
    """Finds the groups of a model whose cut the model's own code stands."""

    def __init__(
        self, model: nn.Module, example: Inputs, *, inside: str | None, ignore: tuple[str, ...], whole_heads: bool = False
    ) -> None:
        self.model, self.example, self.ignore = model, example, ignore
        self.trace = record(model, example, inside=inside)
        self.walk = Walk(self.trace)
        self.prefix = f"{inside}." if inside else ""
        heads = frozenset(split.path for split in self.walk.splits) if whole_heads else frozenset()
        self.choices = Choices(whole_heads=heads)
        self._ways: dict[str, Iterator[Choices]] = {}
        self._rounds = 0
        self._flipped = False

    def find_groups(self, macs: int) -> ChannelAnalysis:
        """Groups, after trials on a copy where the model has code that gives sizes."""
        self.macs = macs
        found = self._find()
        while self.walk.splits or self.walk.suspects:
            plan = trial_plan(found, self.prefix)
            failure = runs(self.model, plan, self.example) if plan.remove else None
            if failure is None:
                break
            found = self.repair(failure, found, plan)
        return found

    def prove(self, plan: Plan, found: ChannelAnalysis) -> Failure | None:
        """The proof of a plan."""
        return examine(self.model, plan, self.example, found)

    def repair(self, failure: Failure, found: ChannelAnalysis, plan: Plan) -> ChannelAnalysis:
        """Groups without what failed; ModelError where nothing is left to take back."""
        self._rounds += 1
        if self._rounds > ROUNDS:
            raise ModelError(f"{type(self.model).__name__} cannot be pruned safely: {failure.reason}; nothing was changed")
        path = failure.path.removeprefix(self.prefix) if failure.path is not None else None
        if path is not None and (choices := self._next_way(self._culprit(path), failure)) is not None:
            self.choices = choices
        else:
            self.choices = self._bisected(failure, found, plan)
        return self._find()

    def _find(self) -> ChannelAnalysis:
        return find_groups(self.walk, self.macs, ignore=self.ignore, assumptions=self.choices)

    # -- one module whose forward failed

    def _culprit(self, path: str) -> str:
        """The innermost module around `path` whose own code gives sizes."""
        noted = {s.path for s in self.walk.suspects} | {s.path for s in self.walk.splits}
        while path and (path not in noted or type(self.trace.module.get_submodule(path)) is nn.Sequential):
            path = path.rpartition(".")[0]
        return path

    def _next_way(self, path: str, failure: Failure) -> Choices | None:
        kind = type(self.trace.module.get_submodule(path)).__qualname__
        if kind not in self._ways:
            alike = frozenset(n for n, m in self.trace.module.named_modules() if type(m).__qualname__ == kind)
            self._ways[kind] = self._possible(alike, self.choices, failure.reason)
        return next(self._ways[kind], None)

    def _possible(self, paths: frozenset[str], before: Choices, reason: str) -> Iterator[Choices]:
        """Ways to mend modules of one kind, the least loss first; the last one leaves them as they are."""
        numbers = frozenset(self._numbers(paths))
        split = frozenset(s.path for s in self.walk.splits if s.path in paths)
        if numbers:
            yield replace(self.choices, attributes=self.choices.attributes | numbers)
        if split:
            yield replace(self.choices, coupled=self.choices.coupled | split, attributes=before.attributes)
            if numbers:
                yield replace(self.choices, attributes=self.choices.attributes | numbers)
            heads = self.choices.whole_heads ^ split
            yield replace(self.choices, coupled=self.choices.coupled - split, whole_heads=heads)
        noted = {s.path for s in self.walk.suspects if s.path in paths}
        if noted - set(self.choices.locked):
            why = f"; a copy that was cut there did not run ({reason.partition(': ')[2]})"
            yield replace(
                self.choices,
                coupled=self.choices.coupled - split,
                whole_heads=self.choices.whole_heads - split,
                attributes=frozenset(a for a in self.choices.attributes if a not in numbers),
                locked={**self.choices.locked, **dict.fromkeys(noted, why)},
            )

    def _numbers(self, paths: frozenset[str]) -> Iterator[tuple[str, str]]:
        for suspect in self.walk.suspects:
            module = self.trace.module.get_submodule(suspect.path)
            if suspect.path not in paths or type(module).__module__.startswith("torch."):
                continue  # torch's own layers are made to agree with their tensors
            sizes = {suspect.shape[d] for d in varying(suspect.labels)}
            for name, value in vars(module).items():
                if type(value) is int and value in sizes and not name.startswith("_"):
                    yield suspect.path, name

    # -- values that differ, or code that fails far from where it was cut

    def _bisected(self, failure: Failure, found: ChannelAnalysis, plan: Plan) -> Choices:
        """Mend or keep every group that fails when it alone is cut; all of them where each alone is fine."""
        if failure.path is None and self.walk.scalings and not self._flipped:
            self._flipped = True
            return replace(self.choices, rescaled=False)
        self.choices = replace(self.choices, rescaled=True)
        bad = self._failing(found.groups, found, failure) or found.groups
        if not bad:
            raise ModelError(f"{type(self.model).__name__} cannot be pruned safely: {failure.reason}; nothing was changed")
        roots = torch.cat([g.roots for g in bad])
        for split in self.walk.splits:
            if bool(torch.isin(found.resolved.units.roots(split.labels), roots).any()):
                self._flipped = False
                if (choices := self._next_way(split.path, failure)) is not None:
                    return choices
        reason = f"a copy that was cut there failed its proof ({failure.reason})"
        kept = {(tensor, dim): reason for g in bad for tensor, dim, _ in g.indices}
        return replace(self.choices, kept={**self.choices.kept, **kept})

    def _failing(self, groups: list[ChannelGroup], found: ChannelAnalysis, failure: Failure) -> list[ChannelGroup]:
        """The groups whose cut fails, found by halving; all of those that fail only together."""
        plan = trial_plan(replace(found, groups=groups), self.prefix)
        quick = runs(self.model, plan, self.example) if failure.path is not None else None
        if not groups or (quick is None and examine(self.model, plan, self.example, found) is None):
            return []
        if len(groups) == 1:
            return groups
        half = len(groups) // 2
        return [
            *self._failing(groups[:half], found, failure),
            *self._failing(groups[half:], found, failure),
        ] or groups


def trial_plan(found: ChannelAnalysis, prefix: str) -> Plan:
    """A plan that cuts a third of every group, whatever it is worth."""
    return assemble_plan(
        found, [torch.arange(max(1, group.size // 3)) for group in found.groups], prefix, lines=(), macs=1, macs_before=1
    )
