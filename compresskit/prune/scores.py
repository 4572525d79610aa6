"""Score the channels of all groups with one criterion, collecting from data what it asks for."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.base.task import Task
from compresskit.prune.channels.normalize import Normalizer
from compresskit.prune.criteria import Criterion, Needs, NeedsActivations, NeedsGradients, NeedsLosses, NeedsSampleGradients
from compresskit.prune.evidence import collect
from compresskit.prune.structure.groups import ChannelGroup

#: What a criterion may ask for, in words.
NEEDED: dict[type[Needs], str] = {
    NeedsGradients: "gradients",
    NeedsSampleGradients: "gradients of single samples",
    NeedsActivations: "activations",
    NeedsLosses: "losses without channels",
}


def score_(
    groups: list[ChannelGroup],
    model: nn.Module,
    prefix: str,
    criterion: Criterion,
    normalize: Normalizer,
    task: Task | None,
    samples: int,
) -> None:
    """Put scores into groups, and what rankings need of them."""
    needs: set[type[Needs]] = set()
    while True:
        try:
            raw = _scores(groups, model, prefix, criterion, task, samples, needs)
            break
        except Needs as need:
            if task is None:
                raise SettingError(
                    f"this criterion reads {NEEDED[type(need)]}, which needs data; pass plan_channels(task=...)"
                ) from None
            needs.add(type(need))
    pools: dict[object, list[float]] = defaultdict(list)
    for group, score in zip(groups, raw, strict=True):
        if score.shape != (group.size,) or not bool(torch.isfinite(score).all()):
            raise ModelError(f"{group.layer}: the criterion gave scores of shape {tuple(score.shape)}, or not all finite")
        score = score.double().cpu()
        group.remaining = score.clamp(min=0).sort(descending=True).values.cumsum(0).flip(0).tolist()
        group.scores = normalize(score)
        group.sorted_scores = group.scores.sort().values.tolist()
        group.pooled_scores = pools[group.architecture]
        group.pooled_scores.extend(group.sorted_scores)
    for pool in pools.values():
        pool.sort()


def _scores(
    groups: list[ChannelGroup], model: nn.Module, prefix: str, criterion: Criterion, task: Task | None, samples: int,
    needs: set[type[Needs]],
) -> list[Tensor]:  # fmt: skip
    if not needs or task is None:
        return [criterion(g.slices(model, prefix)) for g in groups]
    raw, seen = [torch.zeros(g.size, dtype=torch.double) for g in groups], 0
    for rows, evidence in collect(model, [g.indices for g in groups], prefix, task, needs=needs, samples=samples):
        for i, group in enumerate(groups):
            score = criterion(group.slices(model, prefix, evidence)).cpu()
            raw[i] = raw[i] + rows * score if score.shape == raw[i].shape else score
        seen += rows
    if not seen:
        raise DataError("scoring channels: the loader gave no batch")
    return [r / seen for r in raw]
