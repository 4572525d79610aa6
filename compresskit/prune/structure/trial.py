"""What the graph cannot know is found by trial: cut a little everywhere, run, and take back what the code does not stand.

A size written in the code breaks the forward of a pruned copy. The module in which it broke is asked, in this order: do numbers
of its own follow the width; are its heads as wide together as its input; must whole heads go? What none of these mends stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from compresskit.base.errors import ModelError
from compresskit.base.task import Inputs
from compresskit.prune.structure.channel_sets import varying
from compresskit.prune.structure.groups import Found, Group, find_groups
from compresskit.prune.structure.plan import Plan
from compresskit.prune.structure.propagate import Walk
from compresskit.prune.structure.prove import Failure, examine, runs
from compresskit.prune.structure.resolve import Choices
from compresskit.prune.structure.trace import record

ROUNDS = 60  # trials after which a model is refused


class Search:
    """Finds the groups of a model whose cut the model's own code stands."""

    def __init__(
        self, model: nn.Module, example: Inputs, *, inside: str | None, ignore: tuple[str, ...], whole_heads: bool = False
    ) -> None:
        self.model, self.example, self.ignore = model, example, ignore
        self.recorded = record(model, example, inside=inside)
        self.walk = Walk(self.recorded)
        self.prefix = f"{inside}." if inside else ""
        heads = frozenset(split.path for split in self.walk.splits) if whole_heads else frozenset()
        self.choices = Choices(whole_heads=heads)
        self._ways: dict[str, Iterator[Choices]] = {}
        self._rounds = 0
        self._flipped = False

    def start(self, macs: int) -> Found:
        """Groups, after trials on a copy where the model has code that gives sizes."""
        self.macs = macs
        found = self._find()
        while self.walk.splits or self.walk.suspects:
            plan = trial(found, self.prefix)
            failure = runs(self.model, plan, self.example) if plan.remove else None
            if failure is None:
                break
            found = self.retreat(failure, found, plan)
        return found

    def check(self, plan: Plan, found: Found) -> Failure | None:
        """The proof of a plan."""
        return examine(self.model, plan, self.example, found)

    def retreat(self, failure: Failure, found: Found, plan: Plan) -> Found:
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

    def _find(self) -> Found:
        return find_groups(self.walk, self.macs, ignore=self.ignore, choices=self.choices)

    # -- one module whose forward failed

    def _culprit(self, path: str) -> str:
        """The innermost module around `path` whose own code gives sizes."""
        noted = {s.path for s in self.walk.suspects} | {s.path for s in self.walk.splits}
        while path and (path not in noted or type(self.recorded.module.get_submodule(path)) is nn.Sequential):
            path = path.rpartition(".")[0]
        return path

    def _next_way(self, path: str, failure: Failure) -> Choices | None:
        kind = type(self.recorded.module.get_submodule(path)).__qualname__
        if kind not in self._ways:
            alike = frozenset(n for n, m in self.recorded.module.named_modules() if type(m).__qualname__ == kind)
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
            module = self.recorded.module.get_submodule(suspect.path)
            if suspect.path not in paths or type(module).__module__.startswith("torch."):
                continue  # torch's own layers are made to agree with their tensors
            sizes = {suspect.shape[d] for d in varying(suspect.labels)}
            for name, value in vars(module).items():
                if type(value) is int and value in sizes and not name.startswith("_"):
                    yield suspect.path, name

    # -- values that differ, or code that fails far from where it was cut

    def _bisected(self, failure: Failure, found: Found, plan: Plan) -> Choices:
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
            if bool(torch.isin(found.settled.units.roots(split.labels), roots).any()):
                self._flipped = False
                if (choices := self._next_way(split.path, failure)) is not None:
                    return choices
        reason = f"a copy that was cut there failed its proof ({failure.reason})"
        kept = {(tensor, dim): reason for g in bad for tensor, dim, _ in g.places}
        return replace(self.choices, kept={**self.choices.kept, **kept})

    def _failing(self, groups: list[Group], found: Found, failure: Failure) -> list[Group]:
        """The groups whose cut fails, found by halving; all of those that fail only together."""
        plan = trial(replace(found, groups=groups), self.prefix)
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


def trial(found: Found, prefix: str) -> Plan:
    """A plan that cuts a third of every group, whatever it is worth."""
    return assembled(
        found, [torch.arange(max(1, group.size // 3)) for group in found.groups], prefix, lines=(), macs=1, macs_before=1
    )


def assembled(found: Found, chosen: Sequence[torch.Tensor], prefix: str, **settings: Any) -> Plan:
    """The plan that removes these units, (removed,) int64 for each group, and all that goes or changes with them."""
    remove: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    roots: set[int] = set()
    for group, units in zip(found.groups, chosen, strict=True):
        roots.update(group.roots[units].tolist())
        for (tensor, dim, _), indices in group.places.items() if len(units) else ():
            remove[prefix + tensor][dim].update(indices[units].flatten().tolist())
    attributes, scales = consequences(found, roots, prefix)
    return Plan(
        remove={n: {d: tuple(sorted(i)) for d, i in sorted(dims.items())} for n, dims in remove.items()},
        sizes={n: found.shapes[n.removeprefix(prefix)] for n in remove},
        attributes=attributes,
        scales=scales,
        **settings,
    )


def consequences(
    found: Found, roots: set[int], prefix: str
) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[float, tuple[int, ...]]]]:
    """What else changes when these units go: numbers that repeat a width, and queries that are scaled by one."""
    units, walk = found.settled.units, found.walk
    removed = torch.tensor(sorted(roots), dtype=torch.long)

    def stays(labels: torch.Tensor, dim: int) -> int:
        """How many indices of a dimension keep at least one entry."""
        kept = ~torch.isin(units.roots(labels), removed)
        return int(kept.movedim(dim, 0).reshape(kept.shape[dim], -1).any(1).sum())

    attributes: dict[str, tuple[Any, Any]] = {}

    def follow(path: str, name: str, after: int, position: int | None = None) -> None:
        key = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
        now = getattr(walk.recorded.module.get_submodule(path), name)
        old, new = attributes.get(key, (now, now))
        new = after if position is None else (*new[:position], after, *new[position + 1 :])
        if new != old:
            attributes[key] = (old, new)

    for suspect in walk.suspects:
        for path, name in found.choices.attributes:
            size = getattr(walk.recorded.module.get_submodule(path), name) if path == suspect.path else None
            for d in varying(suspect.labels):
                if size == suspect.shape[d]:
                    follow(path, name, stays(suspect.labels, d))
    for mirror in walk.mirrors:
        follow(mirror.path, mirror.attribute, stays(mirror.labels, 0), mirror.position)
    for split in walk.splits:
        module = walk.recorded.module.get_submodule(split.path)
        if isinstance(module, nn.MultiheadAttention) and split.path in found.choices.whole_heads:
            heads, all_heads = stays(split.labels, varying(split.labels)[-2]), split.labels.shape[varying(split.labels)[-2]]
            follow(split.path, "num_heads", module.num_heads * heads // all_heads)
    scales: dict[str, tuple[float, tuple[int, ...]]] = {}
    for scaling in walk.scalings if found.choices.rescaled else ():
        before, after = scaling.labels.shape[scaling.dim], stays(scaling.labels, scaling.dim)
        if after == before:
            continue
        for member in units.members:
            rows = torch.isin(member.labels, scaling.labels[scaling.labels > 0]).nonzero().flatten()
            if member.dim == 0 and member.role != "in" and len(rows):
                scales[prefix + member.tensor] = ((after / before) ** (0.25 if scaling.shared else 0.5), tuple(rows.tolist()))
    return attributes, scales
