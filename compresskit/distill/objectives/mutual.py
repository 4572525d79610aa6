"""Deep mutual learning: several students are trained at once and teach one another (Zhang et al., 1706.00384)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.objective import Losses, Objective, bound
from compresskit.base.task import Inputs, Task, call, first_tensor
from compresskit.distill.class_dim import check_dim, check_soft_targets, told_class_dim
from compresskit.distill.losses.common import check_positive
from compresskit.distill.losses.logits import soft_targets
from compresskit.distill.objectives.terms import DistillLoss, attach_adapters_, drop_adapters_
from compresskit.graph.surgery import copy_model, mode
from compresskit.train.objective import supervised_loss


@dataclass(frozen=True, kw_only=True)
class Mutual(Objective):
    """The objective that `mutual` returns. From `bind` to `close`, copies of the peers are submodules of the student."""

    peers: tuple[nn.Module, ...]
    loss: DistillLoss
    weight: float
    task_weight: float
    dim: int | None = None
    task: Task | None = None
    student: nn.Module | None = None

    @property
    def reads_target(self) -> bool:
        """True: the task's loss is always a part of it."""
        return True

    def bind(self, model: nn.Module, task: Task) -> Mutual:
        """Copy the peers, check that all predict the same classes, and attach the copies to the student."""
        drop_adapters_(model)
        peers = [copy_model(peer).requires_grad_(True).to(task.device) for peer in self.peers]
        example = task.example()
        shapes: list[tuple[int, ...]] = []
        losses: list[DistillLoss] = []
        for each in (model, *peers):
            with torch.no_grad(), mode(each, training=False):
                predictions = task.predict(call(each, example))
            losses.append(self._told(each, predictions, task) if each is model else losses[0])
            check_soft_targets("mutual", losses[0], each, predictions)
            shapes.append(tuple(predictions.shape))
        for peer, shape in zip(peers, shapes[1:], strict=True):
            if shape != shapes[0]:
                raise ModelError(
                    f"mutual(): {type(peer).__name__} gives predictions {shape}, {type(model).__name__} {shapes[0]};"
                    " all must have the same classes"
                )
        attach_adapters_(model, {str(i): peer for i, peer in enumerate(peers)})
        return replace(self, peers=tuple(peers), loss=losses[0], task=task, student=model)

    def for_task(self, task: Task) -> Mutual:
        """Return the objective with its task, whose loss and labels say what the predictions are."""
        return replace(self, task=task)

    def rehearse(self, model: nn.Module, predictions: Any) -> None:
        """Raise `ModelError` for soft targets of one channel, and of what the task, where it is known, says are no classes."""
        if self.task is None:
            check_soft_targets("mutual", self.loss, model, predictions)
        else:
            self._told(model, predictions, self.task)

    def _told(self, model: nn.Module, predictions: Any, task: Task) -> DistillLoss:
        """The loss, which knows in which dimension of a model's predictions the classes are."""
        return told_class_dim("mutual", self.loss, task, model, predictions, reads_loss=bool(self.task_weight), given=self.dim)

    def close(self) -> None:
        """Remove the peers from the student."""
        if self.student is not None:
            drop_adapters_(self.student)

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        task = bound(self.task, self)
        inputs, target = task.split(batch)
        predictions = [
            first_tensor(task.predict(call(model, inputs))),
            *(_peer_predictions(peer, inputs, task) for peer in self.peers),
        ]
        losses: Losses = {}
        for i, student in enumerate(predictions):
            from_others = [self.loss(student, other.detach()) for j, other in enumerate(predictions) if j != i]
            losses[f"imitate:{i}"] = self.weight * torch.stack(from_others).mean()
            if self.task_weight:
                losses[f"task:{i}"] = self.task_weight * supervised_loss(task, student, target)
        return losses


def _peer_predictions(peer: nn.Module, inputs: Inputs, task: Task) -> Tensor:
    """A peer's predictions; its parameters may be half, for a precision policy converts it along with the student."""
    dtype = next((p.dtype for p in peer.parameters()), torch.float32)

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return first_tensor(task.predict(call(peer, pytree.tree_map(cast, inputs)))).float()


def mutual(
    *peers: nn.Module,
    loss: DistillLoss | None = None,
    temperature: float = 1.0,
    weight: float = 1.0,
    task_weight: float = 1.0,
    dim: int | None = None,
) -> Mutual:
    """Return an objective that trains the model and its peers, each on what the others predict (1706.00384).

    The loss of each network is weight * mean over the others of loss(its predictions, the other's) + task_weight * (the task's
    loss). Only the model itself is kept after training.

    Args:
        peers: models with the same classes, of any architecture and from another initialisation; they are copied.
        loss: `(student, teacher) -> scalar` of the predictions; `soft_targets` at `temperature` if None.
        temperature: of the soft targets, a positive number.
        weight: of the loss, a positive number.
        task_weight: of the task's loss, >= 0.
        dim: the dimension of the predictions that holds the classes, as in `imitate`.

    Raises: SettingError for settings of the wrong type or range.
    """
    check_dim(dim, "mutual")
    if not peers:
        raise SettingError("mutual(): wanted at least one peer besides the model that is trained")
    if wrong := [type(peer).__name__ for peer in peers if not isinstance(peer, nn.Module)]:
        raise SettingError(f"mutual(): wanted models, got {wrong[0]}")
    if weight <= 0:
        raise SettingError(f"mutual(weight=...): wanted a positive number, got {weight}; without it there is nothing mutual")
    if task_weight < 0:
        raise SettingError(f"mutual(task_weight=...): wanted a number >= 0, got {task_weight}")
    check_positive("mutual", "temperature", temperature)
    chosen = loss if loss is not None else partial(soft_targets, temperature=temperature)
    return Mutual(peers=peers, loss=chosen, weight=weight, task_weight=task_weight, dim=dim)
