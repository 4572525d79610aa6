"""Rankings and normalizers: which channels they remove first."""

from __future__ import annotations

import copy
from itertools import pairwise

import networks
import torch
from networks import build, image

import compresskit as ck
from compresskit.prune import apply_, plan_channels
from compresskit.prune.criteria import Slices, l2
from compresskit.prune.normalizers import by_deviation, by_largest, by_mean, unscaled
from compresskit.prune.rankings import cost_aware, isomorphic, pooled, uniform


def cut(model, **settings):
    plan = plan_channels(model, image(2), **{"round_to": 4, **settings})
    return plan, apply_(copy.deepcopy(model), plan)


def keeps(ranking, criterion=l2, **settings):
    plan, _ = cut(
        build(networks.Concat),
        **{"budget": ck.remove(channels=0.5), "round_to": 1, "ranking": ranking, "criterion": criterion, **settings},
    )
    return {line.layer: line.keep / line.size for line in plan.lines}


def test_uniform_cuts_every_group_alike() -> None:
    assert all(abs(share - 0.5) < 0.1 for share in keeps(uniform).values())


def test_pooled_cuts_the_lowest_scores_of_all() -> None:
    """One group's channels are worth ten times less: it alone is cut, unless scores are normalised first."""

    def criterion(s: Slices):
        return torch.linspace(1, 2, len(s.weight)) * (0.01 if len(s.weight) == 24 else 1)

    share = keeps(pooled, criterion, normalize=unscaled, budget=ck.remove(channels=0.3))
    assert share["b.0"] < 0.15
    assert all(v == 1 for name, v in share.items() if name != "b.0")
    assert all(v < 1 for v in keeps(pooled, criterion, normalize=by_mean, budget=ck.remove(channels=0.3)).values())


def test_normalisations_matter_to_pooled() -> None:
    def criterion(s: Slices):
        return torch.linspace(1, 2, len(s.weight)) ** (len(s.weight) / 8)

    found = [keeps(pooled, criterion, normalize=n) for n in (unscaled, by_mean, by_largest, by_deviation)]
    assert all(a != b for a, b in pairwise(found))


def test_isomorphic_ranks_only_groups_of_a_kind() -> None:
    """Groups of another kind are cut by the same ratio however their scores compare; `pooled` empties the cheap kind."""

    def criterion(s: Slices):
        return torch.linspace(1, 2, len(s.weight)) * (1e-3 if s.scales is None else 1)

    model = build(networks.Residual)
    settings = dict(budget=ck.remove(channels=0.4), round_to=1, criterion=criterion, normalize=unscaled)
    by = {}
    for ranking in (pooled, isomorphic):
        plan, _ = cut(model, ranking=ranking, **settings)
        by[ranking] = {line.layer: line.keep / line.size for line in plan.lines}
    assert by[pooled] != by[isomorphic]
    spread = {ranking: max(v.values()) - min(v.values()) for ranking, v in by.items()}
    assert spread[isomorphic] < 0.2 < spread[pooled]


def test_cost_aware_does_not_depend_on_the_scale_of_scores() -> None:
    model = build(networks.Concat)
    one = plan_channels(model, image(2), budget=ck.keep(macs=0.6), round_to=4)
    scales = {16: 3.0, 24: 0.1}
    other = plan_channels(
        model, image(2), budget=ck.keep(macs=0.6), round_to=4, criterion=lambda s: l2(s) * scales[len(s.weight)]
    )
    assert one.remove == other.remove
    assert cost_aware is not uniform
