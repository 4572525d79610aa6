"""How much each layer can lose by itself: loss and metric with one layer sparse and all others dense."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from compresskit.base.errors import DataError, SettingError
from compresskit.base.inputs import some_batches
from compresskit.base.task import Task, batch_size
from compresskit.graph.surgery import mode
from compresskit.prune.criteria import Criterion, l2
from compresskit.prune.masks.allocate import Allocation, measured_ratios
from compresskit.prune.masks.patterns import UNSTRUCTURED, Pattern
from compresskit.prune.masks.plan_mask import keep_best, maskable
from compresskit.prune.masks.weight_criteria import score
from compresskit.train.objective import bind_objective


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Curves: tensor -> ratio -> mean loss with that tensor alone made sparse; ratio 0 is the dense model."""

    loss: dict[str, dict[float, float]]
    samples: int

    def allocation(self) -> Allocation:
        """Shares a ratio out so that the measured loss rises least: for `plan_mask(allocation=...)`."""
        return measured_ratios(self.loss)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        return {"samples": self.samples, "loss": {n: {str(r): v for r, v in c.items()} for n, c in self.loss.items()}}

    def __str__(self) -> str:
        ratios = sorted({r for curve in self.loss.values() for r in curve})
        width = max(len(name) for name in self.loss)
        head = " " * width + "".join(f"{f'{r:.0%}':>9}" for r in ratios)
        rows = [f"{name:<{width}}" + "".join(f"{curve[r]:>9.4f}" for r in ratios) for name, curve in self.loss.items()]
        return "\n".join([f"loss on {self.samples} samples with one layer sparse", head, *rows])


def mask_sensitivity(
    model: nn.Module,
    task: Task,
    *,
    ratios: Sequence[float] = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
    pattern: Pattern = UNSTRUCTURED,
    criterion: Criterion = l2,
    protect: tuple[str, ...] = (),
    samples: int = 512,
) -> Sensitivity:
    """Measure the curve of every maskable layer, one after another, in eval mode on training samples; the model stays as it was.

    Without fine-tuning, which every layer would get: what counts is which layers lose first. Layers that cannot have the pattern
    are left out.
    """
    if not ratios or any(not 0 < r < 1 for r in ratios):
        raise SettingError(f"mask_sensitivity(ratios=...): wanted shares in (0, 1), got {tuple(ratios)}")
    if pattern.fixed is not None:
        raise SettingError(f"mask_sensitivity(pattern=...): {pattern} has one ratio, {pattern.fixed:g}; there is no curve")
    weights = {name: w for name, w in maskable(model, protect).items() if not pattern.fits(w.shape)}
    scores = score(model, weights, pattern, criterion, task, samples)
    batches = list(some_batches(task, "train", samples, "read samples"))
    seen = sum(batch_size(task.split(batch)[0]) for batch in batches)
    if not batches:
        raise DataError("mask_sensitivity: the training loader gave no batch")
    dense = _loss(model, task, batches)
    curves = {name: {0.0: dense} for name in weights}
    points = list(itertools.product(weights, sorted(ratios)))
    for name, ratio in tqdm(points, desc="sensitivity", disable=None, leave=False):
        kept = keep_best({name: scores[name]}, ratio, pattern)
        curves[name][ratio] = _loss_without(model, task, batches, weights[name], pattern.spread(kept[name], weights[name].shape))
    return Sensitivity(loss=curves, samples=seen)


def _loss_without(model: nn.Module, task: Task, batches: list[Any], weight: nn.Parameter, mask: Tensor) -> float:
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.masked_fill_(~mask, 0)
        return _loss(model, task, batches)
    finally:
        with torch.no_grad():
            weight.copy_(before)


def _loss(model: nn.Module, task: Task, batches: list[Any]) -> float:
    objective = bind_objective(None, model, task)
    total, seen = 0.0, 0
    with torch.no_grad(), mode(model, training=False):
        for batch in batches:
            rows = batch_size(task.split(batch)[0])
            total += rows * float(torch.stack(list(objective(model, batch).values())).sum())
            seen += rows
    return total / seen
