"""Self-distillation: a network's predictions teach classifier heads on its earlier layers (Zhang et al., 1905.08094)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.objective import Losses, Objective, bound
from compresskit.base.task import Task, call, first_tensor
from compresskit.distill.class_dim import check_dim, told_class_dim
from compresskit.distill.losses.common import check_positive
from compresskit.distill.losses.logits import match_predictions
from compresskit.distill.objectives.terms import DistillLoss, attach_adapters_, drop_adapters_, keep_fp32_
from compresskit.graph.surgery import mode
from compresskit.graph.taps import feature, find_taps, tapped
from compresskit.train.objective import supervised_loss

HeadFactory = Callable[[Tensor, Tensor], nn.Module]


class PooledHead(nn.Module):
    """Average features (N, C, H, W) over positions or (N, T, D) over tokens, then apply a linear layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(_average_positions(features))


def _average_positions(features: Tensor) -> Tensor:
    if features.ndim == 3:
        return features.mean(1)
    return features.flatten(2).mean(2) if features.ndim > 3 else features


def pooled_head(features: Tensor, predictions: Tensor) -> PooledHead:
    """Make a head from features (N, C, H, W), (N, T, D) or (N, D) of an example to predictions (N, classes)."""
    if features.ndim < 2 or predictions.ndim != 2:
        raise ModelError(
            f"no pooled head turns features {tuple(features.shape)} into predictions {tuple(predictions.shape)}; pass"
            " self_distill(head=...) a function (features, predictions) -> module"
        )
    return PooledHead(_average_positions(features).shape[1], predictions.shape[1])


@dataclass(frozen=True, kw_only=True)
class SelfDistill(Objective):
    """The objective that `self_distill` returns. From `bind` to `close`, the heads are submodules of the student."""

    taps: tuple[str, ...]
    head: HeadFactory
    temperature: float
    weight: float
    dim: int | None = None
    loss: DistillLoss = match_predictions
    task: Task | None = None
    student: nn.Module | None = None
    heads: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def reads_target(self) -> bool:
        """True: the task's loss is always a part of it."""
        return True

    def bind(self, model: nn.Module, task: Task) -> SelfDistill:
        """Find the taps, make the heads from one example, and attach them to the student."""
        drop_adapters_(model)
        taps = tuple(dict.fromkeys(name for tap in self.taps for name in find_taps(model, tap)))
        with torch.no_grad(), mode(model, training=False), tapped(model, taps) as features:
            predictions = task.predict(call(model, task.example()))
        match = partial(match_predictions, temperature=self.temperature)
        loss = told_class_dim("self_distill", match, task, model, predictions, reads_loss=True, given=self.dim)
        heads: dict[str, nn.Module] = {}
        for tap in taps:
            heads[tap] = head = self.head(feature(features, tap), predictions).to(predictions.device)
            keep_fp32_(head)
            with torch.no_grad(), mode(head, training=False):
                got = head(feature(features, tap).float()).shape
            if got != predictions.shape:
                raise ModelError(f"self_distill: the head of {tap} gives {tuple(got)}, the model {tuple(predictions.shape)}")
        attach_adapters_(model, heads)
        return replace(self, taps=taps, loss=loss, task=task, student=model, heads=heads)

    def close(self) -> None:
        """Remove the heads from the student."""
        if self.student is not None:
            drop_adapters_(self.student)

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        task = bound(self.task, self)
        inputs, target = task.split(batch)
        with tapped(bound(self.student, self), self.taps) as features:
            deepest = task.predict(call(model, inputs))
        losses: Losses = {"task": supervised_loss(task, deepest, target)}
        deepest = first_tensor(deepest)
        for tap, head in self.heads.items():
            predictions = head(feature(features, tap).to(next(head.parameters(), deepest).dtype)).float()
            losses[f"task:{tap}"] = (1 - self.weight) * supervised_loss(task, predictions, target)
            losses[f"imitate:{tap}"] = self.weight * self.loss(predictions, deepest)
        return losses


def self_distill(
    *taps: str, head: HeadFactory = pooled_head, temperature: float = 3.0, weight: float = 0.3, dim: int | None = None
) -> SelfDistill:
    """Return an objective that trains classifier heads on earlier layers with the model's own predictions.

    The sum of the task's loss and, for each head, (1 - weight) * (the task's loss) + weight * soft targets from the model's
    predictions ("be your own teacher", Zhang et al., 1905.08094, eq. 4-5, without its hint term). Where the task compares
    predictions as numbers, a relative squared error takes the place of the soft targets.

    Args:
        taps: names or globs of the model's modules, see `find_taps`.
        head: `(features, predictions) -> module`, called once with an example; see `pooled_head`. Heads are trained with the
            model and removed at the end.
        temperature: of the soft targets, a positive number.
        weight: of the soft targets, in (0, 1].
        dim: the dimension of the predictions that holds the classes, as in `imitate`.

    Raises: SettingError for settings of the wrong type or range.
    """
    check_dim(dim, "self_distill")
    if not taps:
        raise SettingError("self_distill(): wanted the names of at least one module, such as self_distill('layer1', 'layer2')")
    check_positive("self_distill", "temperature", temperature)
    if not 0 < weight <= 1:
        raise SettingError(f"self_distill(weight=...): wanted a number in (0, 1], got {weight}")
    if not callable(head):
        raise SettingError(f"self_distill(head=...): wanted a function, got {type(head).__name__}")
    return SelfDistill(taps=taps, head=head, temperature=temperature, weight=weight, dim=dim)
