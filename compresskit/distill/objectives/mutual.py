"""Mutual learning: students that teach one another while they are trained (Zhang et al., 1706.00384)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.objective import Losses, Objective
from compresskit.base.task import Inputs, Task, call
from compresskit.distill.losses.logits import soft_targets
from compresskit.distill.objectives.terms import DistillLoss, attach_, drop_adapters_
from compresskit.graph.surgery import mode
from compresskit.train.objective import supervised_loss


@dataclass(frozen=True, kw_only=True)
class Mutual(Objective):
    """See `mutual`. Once bound, `peers` are copies that the student carries while it is trained; `close()` takes them off."""

    peers: tuple[nn.Module, ...]
    loss: DistillLoss
    weight: float
    task_weight: float
    task: Task | None = None
    student: nn.Module | None = None

    def bind(self, model: nn.Module, task: Task) -> Mutual:
        """Copy the peers, check that all give predictions of one shape, and let the student carry them."""
        drop_adapters_(model)
        peers = [copy.deepcopy(peer).requires_grad_(True).to(task.device) for peer in self.peers]
        example = task.example()
        shapes = []
        for each in (model, *peers):
            with torch.no_grad(), mode(each, training=False):
                shapes.append(tuple(task.predict(call(each, example)).shape))
        for peer, shape in zip(peers, shapes[1:], strict=True):
            if shape != shapes[0]:
                raise ModelError(
                    f"mutual(): {type(peer).__name__} gives predictions {shape}, {type(model).__name__} {shapes[0]};"
                    " all must have the same classes"
                )
        attach_(model, {str(i): peer for i, peer in enumerate(peers)})
        return replace(self, peers=tuple(peers), task=task, student=model)

    def close(self) -> None:
        """Take the peers off the student."""
        if self.student is not None:
            drop_adapters_(self.student)

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        task = self.task
        assert task is not None, "bind first"
        inputs, target = task.split(batch)
        everyone = [task.predict(call(model, inputs)), *(_run(peer, inputs, task) for peer in self.peers)]
        losses: Losses = {}
        for i, own in enumerate(everyone):
            others = [self.loss(own, other.detach()) for j, other in enumerate(everyone) if j != i]
            losses[f"imitate:{i}"] = self.weight * torch.stack(others).mean()
            if self.task_weight:
                losses[f"task:{i}"] = self.task_weight * supervised_loss(task, own, target)
        return losses


def _run(peer: nn.Module, inputs: Inputs, task: Task) -> Tensor:
    """A peer's predictions; under a policy with half parameters it has them too, for it is carried by the student."""
    dtype = next((p.dtype for p in peer.parameters()), torch.float32)

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return task.predict(call(peer, pytree.tree_map(cast, inputs))).float()


def mutual(
    *peers: nn.Module,
    loss: DistillLoss | None = None,
    temperature: float = 1.0,
    weight: float = 1.0,
    task_weight: float = 1.0,
) -> Mutual:
    """An objective: the model and its peers are all trained, each on weight * mean over the others of loss(own, other's)
    + task_weight * (the task's loss).

    peers: models with the same classes, of any architecture and from another initialisation; they are copied, and what is kept
        after training is the model that was handed to it. loss: soft targets at `temperature` where nothing is given.
    """
    if not peers:
        raise SettingError("mutual(): wanted at least one peer besides the model that is trained")
    if wrong := [type(peer).__name__ for peer in peers if not isinstance(peer, nn.Module)]:
        raise SettingError(f"mutual(): wanted models, got {wrong[0]}")
    if weight <= 0:
        raise SettingError(f"mutual(weight=...): wanted a positive number, got {weight}; without it there is nothing mutual")
    if task_weight < 0:
        raise SettingError(f"mutual(task_weight=...): wanted a number >= 0, got {task_weight}")
    if temperature <= 0:
        raise SettingError(f"mutual(temperature=...): wanted a positive number, got {temperature}")
    chosen = loss if loss is not None else partial(soft_targets, temperature=temperature)
    return Mutual(peers=peers, loss=chosen, weight=weight, task_weight=task_weight)
