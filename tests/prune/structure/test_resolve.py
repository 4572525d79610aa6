"""Constraints of attention: whole heads, or the same inner positions of every head."""

from __future__ import annotations

import pytest
import special_networks as special
import torch
from pruned import assert_equals_zeroed, cut


@pytest.mark.parametrize("kind", [special.FusedAttention, special.Multihead, special.CrossAttention], ids=lambda k: k.__name__)
def test_whole_heads_are_cut_where_that_is_asked_for(kind) -> None:
    model, plan, pruned = cut(kind, macs=0.45, whole_heads=True)
    if kind is special.FusedAttention:
        assert pruned.heads == pruned.table.shape[1] < 4  # the table of relative positions loses that head's column
        assert pruned.qkv.out_features == 3 * 8 * pruned.heads
    else:
        assert pruned.attention.num_heads < 4
        assert pruned.attention.head_dim == 8
    assert_equals_zeroed(model, plan, special.example(kind))


def test_heads_stay_equally_wide() -> None:
    _, plan, pruned = cut(special.SeparateAttention)
    for name in ("q", "k", "v"):
        gone = torch.zeros(32, dtype=torch.bool)
        gone[list(plan.remove[f"{name}.weight"][0])] = True
        assert len(set(gone.view(4, 8).sum(1).tolist())) == 1
    assert plan.remove["q.weight"][0] == plan.remove["k.weight"][0]
    assert pruned.out.in_features == pruned.v.out_features
