"""Cuts of channels: where each operator cuts, and sizes in a list that a pruned and saved model keeps."""

from __future__ import annotations

import json

import special_networks as special
import torch
from pruned import assert_equals_zeroed, cut

from compresskit.graph.surgery import restructure_, structure
from compresskit.prune import Plan, apply_
from compresskit.prune.structure.cuts import cut_places

aten = torch.ops.aten


def test_places_of_every_operator() -> None:
    x = torch.zeros(2, 12)
    assert cut_places(aten.slice.Tensor, (x, 1, -4, 100), {}, 12) == ((8, 12, 1),)
    assert cut_places(aten.slice.Tensor, (x, 1), {"step": 2}, 12) == ((0, 12, 2),)
    assert cut_places(aten.narrow.default, (x, 1, -4, 3), {}, 12) == ((8, 11, 1),)
    assert cut_places(aten.split.Tensor, (x, 5, 1), {}, 12) == ((0, 5, 1), (5, 10, 1), (10, 12, 1))
    assert cut_places(aten.split_with_sizes.default, (x, [4, 8]), {"dim": 1}, 12) == ((0, 4, 1), (4, 12, 1))


def test_sizes_in_a_list_follow_and_are_saved() -> None:
    model, plan, pruned = cut(special.ListedParts)
    before, after = plan.attributes["sizes"]
    assert before == (8, 16, 8)
    assert sum(after) == len(pruned.a.weight) < 32
    assert pruned.sizes == list(after)
    assert_equals_zeroed(model, plan, special.example(special.ListedParts))
    replayed = apply_(special.ListedParts(), Plan.from_json(json.loads(json.dumps(plan.to_json()))))
    assert replayed.sizes == pruned.sizes
    rebuilt = special.ListedParts()
    restructure_(rebuilt, json.loads(json.dumps(structure(pruned))))
    assert rebuilt.sizes == pruned.sizes
