"""Channel sets: joining, locking, and labels that take no memory."""

from __future__ import annotations

import torch

from compresskit.prune.structure.channel_sets import (
    UNCONSTRAINED,
    ChannelSets,
    collapse,
    expand_along,
    fixed_labels,
    tighten,
    varying_dims,
)


def test_joined_labels_have_one_root() -> None:
    sets = ChannelSets()
    a, b, c = sets.fresh(4), sets.fresh(4), sets.fresh(4)
    sets.join(a, b, "added")
    sets.join(b, c, "added")
    assert torch.equal(sets.roots(a), sets.roots(c))
    assert len(sets.roots(torch.cat([a, b, c])).unique()) == 4


def test_a_label_joined_with_what_cannot_be_removed_locks_its_set() -> None:
    sets = ChannelSets()
    a, b = sets.fresh(3), sets.fresh(3)
    sets.join(a, b, "added")
    sets.join(a, torch.tensor([0, UNCONSTRAINED, 0]), "an input")
    sets.lock(b, "an output")
    assert [sets.locks[root] for root in sets.roots(b).tolist()] == ["an input", "an output", "an input"]


def test_a_lock_survives_a_later_join() -> None:
    sets = ChannelSets()
    a, b = sets.fresh(1), sets.fresh(1)
    sets.lock(b, "an output")
    sets.join(a, b, "added")
    assert sets.locks[sets.find(int(a))] == "an output"


def test_a_copy_is_independent() -> None:
    sets = ChannelSets()
    a = sets.fresh(2)
    other = sets.copy()
    other.join(a[:1], a[1:], "added")
    assert len(sets.roots(a).unique()) == 2
    assert len(other.roots(a).unique()) == 1


def test_labels_are_collapsed_by_value() -> None:
    labels = expand_along(torch.arange(1, 4), 1, (2, 3, 5)).contiguous()
    assert collapse(labels).shape == (1, 3, 1)
    assert varying_dims(labels) == [1]
    assert torch.equal(tighten(labels), labels)
    assert tighten(labels).stride()[::2] == (0, 0)
    assert collapse(fixed_labels((2, 3))).shape == (1, 1)
