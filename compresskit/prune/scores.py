"""Score channel groups or maskable weights with one criterion, and collect the evidence that it declares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from compresskit.base.distributed import world_size
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.base.task import Task
from compresskit.prune.criteria import EVIDENCE, Criterion, Slices, needs_of
from compresskit.prune.evidence import Evidence, collect, refuse_unseen
from compresskit.prune.normalizers import Normalizer
from compresskit.prune.patterns import Pattern
from compresskit.prune.structure.groups import ChannelGroup

K = TypeVar("K", bound=Hashable)


def score_groups_(
    groups: list[ChannelGroup],
    model: nn.Module,
    prefix: str,
    criterion: Criterion,
    normalize: Normalizer,
    task: Task | None,
    samples: int,
    *,
    where: str,
) -> None:
    """Set the scores of every group, and the sums and orders of them that rankings read.

    where: the function that the user called, which the message for a missing task names.
    """
    names = sorted({prefix + tensor for group in groups for tensor, _, _ in group.indices})

    def score(evidence: Evidence) -> Iterator[tuple[int, Tensor]]:
        for i, group in enumerate(groups):
            slices = group.slices(model, prefix, evidence)
            if slices.activations is not None and not slices.activations.shape[1]:
                continue  # no row of this batch came to the layer, which is an expert, say
            scores = criterion(slices)
            yield i, check_scores(scores, group.size, group.layer).cpu()

    scores = _mean_scores(_evidence(model, names, criterion, task, samples, where, prefix), score, "channels")
    pools: dict[object, list[float]] = defaultdict(list)
    for i, group in enumerate(groups):
        if i not in scores:
            refuse_unseen(group.indices, prefix)
        group.remaining = scores[i].clamp(min=0).sort(descending=True).values.cumsum(0).flip(0).tolist()
        group.scores = normalize(scores[i])
        group.sorted_scores = group.scores.sort().values.tolist()
        group.pooled_scores = pools[group.architecture]
        group.pooled_scores.extend(group.sorted_scores)
    for pool in pools.values():
        pool.sort()


def score_weights(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    pattern: Pattern,
    criterion: Criterion,
    task: Task | None,
    samples: int,
    *,
    where: str,
) -> dict[str, Tensor]:
    """Scores of the units of every tensor, (units,) each; summed over the processes where there are several.

    where: the function that the user called, which the message for a missing task names.
    """

    def score(evidence: Evidence) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights.items():
            grad, hessian, norms = (None if e is None else e[name] for e in (evidence.grads, evidence.hessian, evidence.norms))
            rows = weight_slices(weight, pattern, grad=grad, hessian=hessian, norms=norms)
            yield name, check_scores(criterion(rows), len(rows.weight), name).double()

    scores = _mean_scores(_evidence(model, list(weights), criterion, task, samples, where), score, "weights")
    if world_size() > 1:
        for name in sorted(scores):
            torch.distributed.all_reduce(scores[name])
    return scores


def weight_slices(
    weight: Tensor, pattern: Pattern, *, grad: Tensor | None = None, hessian: Tensor | None = None, norms: Tensor | None = None
) -> Slices:
    """One tensor and the evidence about it, each of its shape, as rows of the units of a pattern."""
    rows = pattern.rows(weight.detach().float())
    grad, hessian, norms = (None if values is None else pattern.rows(values.float()) for values in (grad, hessian, norms))
    reads = torch.ones(rows.shape[1], dtype=torch.bool, device=rows.device)
    return Slices(weight=rows, reads=reads, grad=grad, hessian=hessian, norms=norms)


def check_scores(scores: Tensor, count: int, name: str) -> Tensor:
    """The scores without their graph; raises ModelError unless there is a finite one for each unit."""
    if scores.shape != (count,) or not bool(torch.isfinite(scores).all()):
        raise ModelError(f"{name}: the criterion gave scores of shape {tuple(scores.shape)} for {count} units, or not all finite")
    return scores.detach()


def _evidence(
    model: nn.Module, names: list[str], criterion: Criterion, task: Task | None, samples: int, where: str, prefix: str = ""
) -> Iterable[tuple[int, Evidence]]:
    needs = needs_of(criterion)
    if not needs:
        return [(1, Evidence())]
    if task is None:
        raise SettingError(f"this criterion reads {EVIDENCE[min(needs)]}, which needs data; pass {where}(task=...)")
    return collect(model, names, task, needs=needs, samples=samples, prefix=prefix)


def _mean_scores(
    evidence: Iterable[tuple[int, Evidence]], score: Callable[[Evidence], Iterator[tuple[K, Tensor]]], what: str
) -> dict[K, Tensor]:
    """Scores by key, in float64, averaged over the samples of all batches."""
    totals: dict[K, Tensor] = {}
    seen = 0
    for rows, batch in evidence:
        for key, scores in score(batch):
            weighted = (rows * scores).double()
            totals[key] = totals[key] + weighted if key in totals else weighted
        seen += rows
    if not seen:
        raise DataError(f"scoring {what}: the loader gave no batch")
    return {key: total / seen for key, total in totals.items()}
