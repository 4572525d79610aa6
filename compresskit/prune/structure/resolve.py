"""Decide what a walk left open, once all of the graph has been seen: which part of a split stays, what must go together.

(N, L, heads * width) seen as (N, L, heads, width): the code divides by a number that stays, so either all heads lose the same
inner positions, or whole heads go. q @ k.T, (N, heads, L, L), vanishes with a head, not with an inner position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from compresskit.prune.structure.channel_sets import Member, Units, varying
from compresskit.prune.structure.constraints import Split, Total
from compresskit.prune.structure.propagate import Walk


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is not in the graph: found by trial, or asked for.

    whole_heads: modules in which whole heads go. coupled: modules whose heads are as wide together as their input.
    attributes: numbers of modules, as (path, name), that follow a width. locked: modules whose sizes stay, with the reason.
    kept: dimensions of tensors that stay, with the reason. rescaled: whether 1 / sqrt(width) follows the width.
    """

    whole_heads: frozenset[str] = frozenset()
    coupled: frozenset[str] = frozenset()
    attributes: frozenset[tuple[str, str]] = frozenset()
    locked: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[tuple[str, int], str] = field(default_factory=dict)
    rescaled: bool = True


@dataclass(frozen=True, kw_only=True)
class Settled:
    """Units as they finally are, and for each dimension of each tensor one vector of labels with its role."""

    units: Units
    vectors: dict[tuple[str, int], Member]


def settle(walk: Walk, choices: Choices) -> Settled:
    """Join and lock what belongs together; the walk itself is not changed."""
    units = walk.units.copy()
    vectors = _merge(units)
    for split in walk.splits:
        module = walk.recorded.module.get_submodule(split.path)
        if split.path in choices.coupled or isinstance(module, nn.MultiheadAttention):
            _couple(walk, units, split)
    for suspect in walk.suspects:
        if suspect.path in choices.locked:
            units.lock(suspect.labels, f"{suspect.reason}{choices.locked[suspect.path]}")
    for key, reason in choices.kept.items():
        if key in vectors:
            units.lock(vectors[key].labels, reason)
    _follow_totals(units, walk.totals)
    before = -1
    while before != units.unions:
        before = units.unions
        for split in walk.splits:
            if _keep_rectangular(units, split, split.path in choices.whole_heads):
                _follow_totals(units, walk.totals)
    for total in walk.totals:
        _, whole = _whole_rows(units, total.rows, total.totals)
        units.lock(torch.where(whole, -1, total.totals), total.reason)
    return Settled(units=units, vectors=vectors)


def _merge(units: Units) -> dict[tuple[str, int], Member]:
    """A tensor that is read twice has two label vectors for one dimension: its indices make them one."""
    vectors: dict[tuple[str, int], Member] = {}
    rank = ("out", "in", "with").index
    for member in units.members:
        key = (member.tensor, member.dim)
        if (first := vectors.get(key)) is not None:
            reason = f"{member.tensor} is used twice, once where it cannot be cut"
            labels = units.join(first.labels, member.labels, reason)
            vectors[key] = replace(first, labels=labels, role=min(first.role, member.role, key=rank))
        else:
            vectors[key] = member
    return vectors


def _follow_totals(units: Units, totals: list[Total]) -> None:
    """What stands for a row goes with it where all of the row is one unit."""
    before = -1
    while before != units.unions:
        before = units.unions
        for total in totals:
            rows, whole = _whole_rows(units, total.rows, total.totals)
            if bool((whole & (rows != units.roots(total.totals))).any()):
                units.join(torch.where(whole, total.totals, -1), torch.where(whole, rows, -1), total.reason)


def _keep_rectangular(units: Units, split: Split, whole_heads: bool) -> bool:
    """What goes must be the same for all but one of the dimensions that were one; whether that joined anything."""
    moving = varying(units.roots(split.labels))
    if len(moving) < 2:
        return False
    stays = moving[-2] if whole_heads else moving[-1]
    first = split.labels
    for dim in moving:
        if dim != stays:
            first = first.narrow(dim, 0, 1)
    units.join(first, split.labels, split.reason)
    return True


def _whole_rows(units: Units, rows: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """(the unit of each row, whether all of the row is that unit), in the shape of totals."""
    roots = units.roots(rows)
    low, high = roots, roots
    for dim in range(roots.ndim):
        if totals.shape[dim] == 1:
            low, high = low.amin(dim, keepdim=True), high.amax(dim, keepdim=True)
    return high, (low == high) & (high > 0) & (totals > 0)


def _couple(walk: Walk, units: Units, split: Split) -> None:
    """The heads of a module are as wide together as its input: the code computes one from the other."""
    own = [torch.unique(s.labels) for s in walk.splits if s.path == split.path]
    inside = f"{split.path}." if split.path else ""
    here = [(made, inputs) for path, made, inputs in walk.makers if f"{path}.".startswith(inside)
            and any(bool(torch.isin(made, labels).any()) for labels in own)]  # fmt: skip
    for made, _ in here:
        inputs = here[0][1]
        if bool(torch.isin(made, split.labels).any()) and len(made) % len(inputs) == 0:
            reason = f"as wide as the input of {split.path or 'the model'}, which stays"
            units.join(inputs[None], made.view(-1, len(inputs)), reason)
