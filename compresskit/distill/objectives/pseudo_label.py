"""Pseudo-labels: a teacher labels data that has none, and the student learns from what it is sure of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.base.objective import Losses, Objective
from compresskit.base.randomness import fork_rng_state
from compresskit.base.task import Inputs, Task, call, to_device
from compresskit.distill.losses.logits import hard_targets
from compresskit.distill.models.teacher import AnyTeacher, Source, as_source
from compresskit.distill.objectives.terms import DistillLoss
from compresskit.graph.surgery import mode
from compresskit.train.cursor import DataCursor
from compresskit.train.objective import supervised_loss


class Endless:
    """The batches of a loader of inputs, again from the start when it ends; its random numbers are a stream of their own."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._cursor = DataCursor(loader, fork_rng_state(torch.get_rng_state(), salt=1), "pseudo_label(unlabelled=...)")
        self._batches: Iterator[Any] = iter(())

    def __next__(self) -> Any:
        for _ in range(2):
            for batch in self._batches:
                return batch
            self._batches = self._cursor.next_epoch()
        raise DataError("pseudo_label(unlabelled=...): the loader is empty")

    def resume_state(self) -> dict[str, Any]:
        """Where it stands."""
        return self._cursor.resume_state()

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if state["epoch"]:
            self._cursor.resume_from_(dict(state))
            self._batches = self._cursor.next_epoch()


@dataclass(frozen=True, kw_only=True)
class PseudoLabel(Objective):
    """See `pseudo_label`. Bound to a task it holds the frozen teacher, in eval mode."""

    teacher: AnyTeacher | None
    unlabelled: Iterable[Any]
    loss: DistillLoss
    weight: float
    task_weight: float
    task: Task | None = None
    source: Source | None = None
    feed: Endless | None = None

    def bind(self, model: nn.Module, task: Task) -> PseudoLabel:
        """Freeze the teacher, and check that it and the student agree on the first unlabelled batch."""
        teacher = self.teacher if self.teacher is not None else task.reference
        if teacher is None:
            raise SettingError("pseudo_label(): there is no teacher; pass pseudo_label(teacher, ...) or Task(reference=...)")
        source = as_source(teacher, model, "pseudo_label()")
        if not isinstance(source, nn.Module):
            raise SettingError("pseudo_label(): a cache knows nothing of the unlabelled data; pass the teacher itself")
        source.to(task.device)
        first = next(Endless(self.unlabelled))
        inputs = self._inputs(first, task)
        with torch.no_grad(), mode(model, training=False):
            wanted = source.example(inputs, task, ())[0].shape
            got = task.predict(call(model, inputs)).shape
        if wanted != got:
            raise ModelError(
                f"the teacher {source.label} gives predictions {tuple(wanted)}, the student {type(model).__name__} {tuple(got)};"
                " both must have the same classes"
            )
        return replace(self, source=source, task=task, feed=Endless(self.unlabelled))

    def resume_state(self) -> dict[str, Any]:
        """Where the unlabelled data stands."""
        assert self.feed is not None, "bind first"
        return self.feed.resume_state()

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        assert self.feed is not None, "bind first"
        self.feed.resume_from_(state)

    def _inputs(self, batch: Any, task: Task) -> Inputs:
        if not isinstance(batch, Tensor | tuple | list | dict):
            raise DataError(
                f"pseudo_label(unlabelled=...): wanted batches of inputs, a tensor, a tuple or a dict, got {type(batch).__name__}"
            )
        inputs: Inputs = (batch,) if isinstance(batch, Tensor) else batch if isinstance(batch, dict) else tuple(batch)
        return to_device(inputs, task.device)  # type: ignore[no-any-return]

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        task, source = self.task, self.source
        assert task is not None, "bind first"
        assert source is not None, "bind first"
        assert self.feed is not None, "bind first"
        losses: Losses = {}
        inputs = self._inputs(next(self.feed), task)
        opinion, _ = source.opinion(model, None, inputs, task, ())
        losses["pseudo"] = self.weight * self.loss(task.predict(call(model, inputs)), opinion)
        if self.task_weight:
            inputs, target = task.split(batch)
            losses["task"] = self.task_weight * supervised_loss(task, task.predict(call(model, inputs)), target)
        return losses


def pseudo_label(
    teacher: AnyTeacher | None,
    unlabelled: Iterable[Any],
    *,
    threshold: float = 0.95,
    loss: DistillLoss | None = None,
    weight: float = 1.0,
    task_weight: float = 1.0,
) -> PseudoLabel:
    """An objective: task_weight * (the task's loss of a labelled batch) + weight * loss(student, teacher) of an unlabelled one.

    Each step takes the next batch of both; the unlabelled loader starts again when it ends. (Noisy Student, Xie et al.,
    1911.04252; FixMatch's threshold, Sohn et al., 2001.07685.)

    teacher: a trained model in eval mode, or a `Teacher`; None takes the task's reference.
    unlabelled: a loader of inputs alone: a tensor, a tuple of inputs, or a dict of them.
    threshold: only what the teacher gives at least this probability counts, with the class that it gives it to.
    loss: used instead of the hard labels, such as `soft_targets`, which asks for no threshold.
    """
    if not isinstance(unlabelled, Iterable) or isinstance(unlabelled, Iterator | Tensor):
        raise SettingError(
            "pseudo_label(unlabelled=...): wanted a loader of batches that can be read many times, got"
            f" {type(unlabelled).__name__}"
        )
    if not 0 <= threshold < 1:
        raise SettingError(f"pseudo_label(threshold=...): wanted a number in [0, 1), got {threshold}")
    if not weight > 0:
        raise SettingError(f"pseudo_label(weight=...): wanted a positive number, got {weight}")
    if task_weight < 0:
        raise SettingError(f"pseudo_label(task_weight=...): wanted a number >= 0, got {task_weight}")
    chosen = loss if loss is not None else partial(hard_targets, threshold=threshold)
    return PseudoLabel(teacher=teacher, unlabelled=unlabelled, loss=chosen, weight=weight, task_weight=task_weight)
