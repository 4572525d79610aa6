"""Trial repair: find by trial the constraints that are not visible in the graph, such as hard-coded sizes.

A slightly pruned copy of the model is run; where it fails, the module in which it failed is repaired by the first of these
assumptions under which it runs: its own attributes follow the width; all that reads one of them gets one width; its heads are
together as wide as its input; whole heads go. What none of them repairs is locked: the sizes at which it fails, where that
helps, else all that the module gives. Attributes that a plan does not need are left as they are: a number of steps may equal a
width by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from compresskit.base.errors import ModelError
from compresskit.base.task import Inputs
from compresskit.prune.structure.assemble import assemble_plan
from compresskit.prune.structure.channel_sets import varying_dims
from compresskit.prune.structure.groups import ChannelAnalysis, ChannelGroup, find_groups
from compresskit.prune.structure.plan import Plan
from compresskit.prune.structure.propagate import propagate
from compresskit.prune.structure.prove import Failure, check_plan, try_pruned_copy
from compresskit.prune.structure.resolve import Assumptions
from compresskit.prune.structure.trace import trace_model

MAX_REPAIRS = 60  # after which a model is refused


class TrialRepair:
    """Finds the groups of a model that its own code allows to be cut, and repairs them when a plan fails.

    model, example: the user's model and its inputs. inside: the submodule that is pruned, the whole model by default.
    ignore: modules that are never cut. whole_heads: cut attention by whole heads. trace: of the model.
    """

    def __init__(
        self, model: nn.Module, example: Inputs, *, inside: str | None, ignore: tuple[str, ...], whole_heads: bool = False
    ) -> None:
        self.model, self.example, self.ignore = model, example, ignore
        self.trace = trace_model(model, example, inside=inside)
        self.prefix = self.trace.name_prefix
        self.propagation = propagate(self.trace)
        heads = frozenset(split.path for split in self.propagation.splits) if whole_heads else frozenset()
        self.assumptions = Assumptions(whole_heads=heads)
        self._macs = 0
        self._last: ChannelAnalysis | None = None
        self._candidates: dict[str, Iterator[Assumptions]] = {}
        self._repairs = 0
        self._tried_without_rescaling = False

    def find_groups(self, macs: int) -> ChannelAnalysis:
        """Groups of a model of so many MACs, after trials on a copy where its code gives sizes."""
        self._macs = macs
        analysis = self._analyse()
        while self.propagation.splits or self.propagation.hard_coded_sizes:
            plan = trial_plan(analysis)
            failure = try_pruned_copy(self.model, plan, self.example, analysis) if plan.remove else None
            if failure is None:
                break
            analysis = self.repair(failure, analysis)
        return analysis

    def prove(self, plan: Plan, analysis: ChannelAnalysis) -> Failure | None:
        """None where the pruned model equals the model with zeros, else what is wrong."""
        return check_plan(self.model, plan, self.example, analysis)

    def repair(self, failure: Failure, analysis: ChannelAnalysis) -> ChannelAnalysis:
        """Groups under new assumptions, after a plan failed; ModelError where there is nothing left to try."""
        self._repairs += 1
        if self._repairs > MAX_REPAIRS:
            raise self._refusal(failure)
        if failure.cuts:
            self.assumptions = self._without_cuts(failure.cuts)
            return self._analyse()
        path = failure.path.removeprefix(self.prefix) if failure.path is not None else None
        if path is not None and (assumptions := self._next_candidate(self._responsible_module(path), failure)) is not None:
            self.assumptions = assumptions
        else:
            self.assumptions = self._bisect(failure, analysis)
        return self._analyse()

    def without_idle_attributes(self, plan: Plan, analysis: ChannelAnalysis) -> Plan:
        """The plan with those attributes alone whose change its proof needs: others equal a width by chance.

        Where the plan itself was not proved, it comes back as it is, or proved without some of them. Attributes of one name in
        modules of one type are taken back together, and one that its type has alone is not: it was changed because the model did
        not run without that. Where it is needed, a run shows that, which costs little.
        """
        alike: dict[str, dict[str, set[str]]] = {}  # type of module -> attribute -> its names in the plan
        for path, name in sorted(self.assumptions.attributes):
            key = self.prefix + (f"{path}.{name}" if path else name)
            if key in plan.attributes:
                kind = self._kind(path)
                alike.setdefault(kind, {}).setdefault(name, set()).add(key)
        for keys in (keys for names in alike.values() if len(names) > 1 for keys in names.values()):
            fewer = replace(plan, attributes={key: sizes for key, sizes in plan.attributes.items() if key not in keys})
            if try_pruned_copy(self.model, fewer, self.example, analysis) is None and self.prove(fewer, analysis) is None:
                plan = fewer
        return plan

    def _analyse(self) -> ChannelAnalysis:
        if self._last is not None and _of_channels(self._last.assumptions) == _of_channels(self.assumptions):
            groups = [group.unscored() for group in self._last.groups]
            self._last = replace(self._last, groups=groups, assumptions=self.assumptions)
        else:
            self._last = find_groups(self.propagation, self._macs, ignore=self.ignore, assumptions=self.assumptions)
        return self._last

    def _refusal(self, failure: Failure) -> ModelError:
        return ModelError(f"{type(self.model).__name__} cannot be pruned safely: {failure.reason}; nothing was changed")

    # -- cuts of channels at places that do not follow the width

    def _without_cuts(self, wrong: tuple[int, ...]) -> Assumptions:
        """Let attributes follow the parts of cuts, or else lock what is cut, in all modules of the same type."""
        cuts = self.propagation.cuts
        places: dict[int, tuple[str, int]] = {}  # the type of the module, and which of its cuts
        for number, cut in enumerate(cuts):
            places[number] = self._kind(cut.path), sum(other.path == cut.path for other in cuts[:number])
        alike = frozenset(n for n in places if places[n] in {places[w] for w in wrong})
        paths = frozenset(cuts[n].path for n in alike)
        attributes = frozenset(self._size_attributes(paths, cuts=alike)) - self.assumptions.attributes
        if attributes:
            return replace(self.assumptions, attributes=self.assumptions.attributes | attributes)
        return replace(self.assumptions, fixed_cuts=self.assumptions.fixed_cuts | alike)

    # -- one module whose forward failed

    def _kind(self, path: str) -> str:
        return type(self.trace.module.get_submodule(path)).__qualname__

    def _responsible_module(self, path: str) -> str:
        """The innermost module around `path` whose own code gives sizes."""
        suspects = {s.path for s in self.propagation.hard_coded_sizes} | {s.path for s in self.propagation.splits}
        while path and (path not in suspects or type(self.trace.module.get_submodule(path)) is nn.Sequential):
            path = path.rpartition(".")[0]
        return path

    def _next_candidate(self, path: str, failure: Failure) -> Assumptions | None:
        """The next assumptions to try for all modules of the type of the one at `path`."""
        kind = self._kind(path)
        if kind not in self._candidates:
            paths = frozenset(n for n, m in self.trace.module.named_modules() if type(m).__qualname__ == kind)
            self._candidates[kind] = self._fixes(paths, self.assumptions, failure.reason)
        return next(self._candidates[kind], None)

    def _fixes(self, paths: frozenset[str], before: Assumptions, reason: str) -> Iterator[Assumptions]:
        """Yield candidate fixes for modules of one type, least restrictive first; the last one locks all their sizes."""
        attributes = frozenset(self._size_attributes(paths))
        splits = frozenset(s.path for s in self.propagation.splits if s.path in paths)
        if attributes:
            wider = replace(self.assumptions, attributes=self.assumptions.attributes | attributes)
            yield wider
            yield replace(wider, one_width=wider.one_width | attributes)
        if splits:
            yield replace(
                self.assumptions,
                tied_heads=self.assumptions.tied_heads | splits,
                attributes=before.attributes,
                one_width=before.one_width,
            )
            if attributes:
                yield replace(self.assumptions, attributes=self.assumptions.attributes | attributes)
            heads = self.assumptions.whole_heads ^ splits
            yield replace(self.assumptions, tied_heads=self.assumptions.tied_heads - splits, whole_heads=heads)
        numbers = [n for n, s in enumerate(self.propagation.hard_coded_sizes) if s.given and s.path in paths]
        if numbers and (failing := self._failing_sizes(numbers, self._without(splits, attributes))):
            yield self._without(splits, attributes, failing)
        if numbers:
            yield self._without(splits, attributes, dict.fromkeys(numbers, _did_not_run(reason)))

    def _without(
        self, splits: frozenset[str], attributes: frozenset[tuple[str, str]], locked: Mapping[int, str] | None = None
    ) -> Assumptions:
        """The assumptions without what was tried for heads and attributes, and with sizes that stay -> why."""
        return replace(
            self.assumptions,
            tied_heads=self.assumptions.tied_heads - splits,
            whole_heads=self.assumptions.whole_heads - splits,
            attributes=self.assumptions.attributes - attributes,
            locked_sizes={**(locked or {}), **self.assumptions.locked_sizes},
        )

    def _failing_sizes(self, numbers: list[int], assumptions: Assumptions) -> dict[int, str]:
        """Those of some sizes, by number, whose channels cannot be cut alone -> why; none where the same channels have them all.

        A size is judged together with those that modules of the same type give at the same place in their code.
        """
        analysis = find_groups(self.propagation, self._macs, ignore=self.ignore, assumptions=assumptions)
        places: dict[int, int] = {}  # which of its module's sizes each one is
        met: list[set[int]] = [set() for _ in analysis.groups]  # the places of the sizes that channels of a group have
        before: Counter[str] = Counter()
        for number in numbers:
            size = self.propagation.hard_coded_sizes[number]
            places[number] = before[size.path]
            before[size.path] += 1
            roots = torch.unique(analysis.resolved.sets.roots(size.labels))
            for of_group, group in zip(met, analysis.groups, strict=True):
                if bool(torch.isin(group.roots, roots).any()):
                    of_group.add(places[number])
        alike: dict[frozenset[int], list[ChannelGroup]] = {}
        for of_group, group in zip(met, analysis.groups, strict=True):
            if of_group:
                alike.setdefault(frozenset(of_group), []).append(group)
        if len(alike) < 2:
            return {}
        failing = self._failing_places(alike, analysis, self._kind(size.path))
        fine = set[int]().union(*(alike.keys() - failing.keys()))
        return {n: why for part, why in failing.items() for n in numbers if places[n] in ((part - fine) or part)}

    def _failing_places(
        self, groups: Mapping[frozenset[int], list[ChannelGroup]], analysis: ChannelAnalysis, kind: str
    ) -> dict[frozenset[int], str]:
        """The places at which a cut fails in modules of a type, found by halving -> why; all that fail only together."""
        plan = trial_plan(replace(analysis, groups=[group for some in groups.values() for group in some]))
        failure = try_pruned_copy(self.model, plan, self.example)
        if failure is None or failure.path is None:
            return {}
        if self._kind(self._responsible_module(failure.path.removeprefix(self.prefix))) != kind:
            return {}
        why, entries, half = _did_not_run(failure.reason), [*groups.items()], len(groups) // 2
        found: dict[frozenset[int], str] = {}
        for few in (entries[:half], entries[half:]) if half else ():
            found |= self._failing_places(dict(few), analysis, kind)
        return found or dict.fromkeys(groups, why)

    def _size_attributes(self, paths: frozenset[str], cuts: frozenset[int] | None = None) -> Iterator[tuple[str, str]]:
        """Attributes of the user's modules, and of Unflatten, as (path, name), that equal a size their code gives (to `cuts`)."""
        for size in self.propagation.hard_coded_sizes:
            module = self.trace.module.get_submodule(size.path)
            follows = type(module).__module__.startswith("torch.") and not isinstance(module, nn.Unflatten)
            if size.path not in paths or follows:
                continue  # torch's own layers are made to agree with their tensors; Unflatten has none
            if cuts is not None and size.cut not in cuts:
                continue
            values = {size.shape[d] for d in varying_dims(size.labels)}
            for name, value in vars(module).items():
                sizes = value if type(value) in (tuple, list, torch.Size) and all(type(v) is int for v in value) else (value,)
                if any(type(entry) is int and entry in values for entry in sizes) and not name.startswith("_"):
                    yield size.path, name

    # -- values that differ, or code that fails far from where it was cut

    def _bisect(self, failure: Failure, analysis: ChannelAnalysis) -> Assumptions:
        """Repair or lock every group that fails when it alone is cut; all of them where each alone is fine."""
        if failure.path is None and self.propagation.width_scalings and not self._tried_without_rescaling:
            self._tried_without_rescaling = True
            return replace(self.assumptions, rescaled=False)
        self.assumptions = replace(self.assumptions, rescaled=True)
        failing = self._failing_groups(analysis.groups, analysis, failure) or analysis.groups
        if not failing:
            raise self._refusal(failure)
        roots = torch.cat([g.roots for g in failing])
        for split in self.propagation.splits:
            if bool(torch.isin(analysis.resolved.sets.roots(split.labels), roots).any()):
                self._tried_without_rescaling = False
                if (assumptions := self._next_candidate(split.path, failure)) is not None:
                    return assumptions
        reason = f"a copy that was cut there failed its proof ({failure.reason})"
        locked = {(tensor, dim): reason for g in failing for tensor, dim, _ in g.indices}
        return replace(self.assumptions, locked_axes={**self.assumptions.locked_axes, **locked})

    def _failing_groups(self, groups: list[ChannelGroup], analysis: ChannelAnalysis, failure: Failure) -> list[ChannelGroup]:
        """The groups whose cut fails, found by halving; all of those that fail only together."""
        plan = trial_plan(replace(analysis, groups=groups))
        fails_to_run = failure.path is not None and try_pruned_copy(self.model, plan, self.example) is not None
        if not groups or (not fails_to_run and check_plan(self.model, plan, self.example, analysis) is None):
            return []
        if len(groups) == 1:
            return groups
        half = len(groups) // 2
        halves = groups[:half], groups[half:]
        return [group for part in halves for group in self._failing_groups(part, analysis, failure)] or groups


def _did_not_run(reason: str) -> str:
    return f"; a copy that was cut there did not run ({reason.partition(': ')[2]})"


def _of_channels(assumptions: Assumptions) -> Assumptions:
    """What the channel sets depend on: of the attributes that follow a width, those whose widths are joined."""
    return replace(assumptions, attributes=assumptions.attributes & assumptions.one_width, rescaled=True)


def trial_plan(analysis: ChannelAnalysis) -> Plan:
    """A plan that cuts a third of every group, whatever it is worth."""
    chosen = [torch.arange(max(1, group.size // 3)) for group in analysis.groups]
    return assemble_plan(analysis, chosen, lines=(), macs=1, macs_before=1)
