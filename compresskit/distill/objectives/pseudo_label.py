"""Pseudo-labels: a teacher labels unlabelled data, and the student learns from its confident predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.base.objective import Losses, Objective, bound
from compresskit.base.packing import Resumable
from compresskit.base.randomness import fork_rng_state
from compresskit.base.task import Inputs, Task, call, first_tensor, to_device
from compresskit.distill.class_dim import check_dim, class_dim, told_dim, with_class_dim
from compresskit.distill.losses.logits import hard_targets
from compresskit.distill.models.teacher import TeacherLike, TeacherSource, teacher_source
from compresskit.distill.objectives.averages import averaged_for
from compresskit.distill.objectives.terms import DistillLoss
from compresskit.graph.surgery import mode
from compresskit.train.cursor import DataCursor
from compresskit.train.objective import supervised_loss


class RepeatedLoader:
    """Iterate over a loader without end; it draws its random numbers from a stream of its own."""

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
        """Return the position in the loader."""
        return self._cursor.resume_state()

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Continue from what `resume_state` returned."""
        if state["epoch"]:
            self._cursor.resume_from_(dict(state))
            self._batches = self._cursor.next_epoch()


@dataclass(frozen=True, kw_only=True)
class PseudoLabel(Objective):
    """The objective that `pseudo_label` returns: its settings, and, once bound, the teacher and the unlabelled batches."""

    teacher: TeacherLike | None
    unlabelled: Iterable[Any]
    loss: DistillLoss
    weight: float
    task_weight: float
    dim: int | None = None
    task: Task | None = None
    source: TeacherSource | None = None
    batches: RepeatedLoader | None = None

    def bind(self, model: nn.Module, task: Task) -> PseudoLabel:
        """Freeze the teacher, and check on the first unlabelled batch that it and the student predict the same classes."""
        teacher = self.teacher if self.teacher is not None else task.reference
        if teacher is None:
            raise SettingError("pseudo_label(): there is no teacher; pass pseudo_label(teacher, ...) or Task(reference=...)")
        source = teacher_source(teacher, model, "pseudo_label()")
        if not isinstance(source, nn.Module):
            raise SettingError("pseudo_label(): a cache has no predictions of the unlabelled data; pass the teacher itself")
        source.to(task.device)
        first = next(RepeatedLoader(self.unlabelled))
        inputs = self._inputs(first, task)
        with torch.no_grad(), mode(model, training=False):
            wanted = source.example_outputs(inputs, task, ())[0].shape
            predictions = task.predict(call(model, inputs))
            got = predictions.shape
        if wanted != got:
            raise ModelError(
                f"the teacher {source.label} gives predictions {tuple(wanted)}, the student {type(model).__name__} {tuple(got)};"
                " both must have the same classes"
            )
        given = self.dim if self.dim is not None else told_dim(self.loss)
        reads_loss = bool(self.task_weight)
        found = class_dim(task, model, predictions, reads_loss=reads_loss, given=given, where="pseudo_label")
        loss = with_class_dim("pseudo_label", self.loss, found, model, predictions)
        source = averaged_for(source, loss, predictions, found.dim)
        return replace(self, source=source, loss=loss, task=task, batches=RepeatedLoader(self.unlabelled))

    def resume_state(self) -> dict[str, Any]:
        """Return the position in the unlabelled data, and the state of the teacher where it has one, as a moving average has."""
        source = self.source.resume_state() if isinstance(self.source, Resumable) else None
        return {"batches": bound(self.batches, self).resume_state(), "source": source}

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Continue from what `resume_state` returned.

        Checkpoints of before the teacher had a state hold the position alone; a moving average starts anew from the student.
        """
        bound(self.batches, self).resume_from_(state.get("batches", state))
        if isinstance(self.source, Resumable) and "source" in state:
            self.source.resume_from_(state["source"])

    @property
    def reads_target(self) -> bool:
        """Whether the labelled batches count."""
        return bool(self.task_weight)

    def _inputs(self, batch: Any, task: Task) -> Inputs:
        if not isinstance(batch, Tensor | tuple | list | dict):
            raise DataError(
                f"pseudo_label(unlabelled=...): wanted batches of inputs, a tensor, a tuple or a dict, got {type(batch).__name__}"
            )
        inputs: Inputs = (batch,) if isinstance(batch, Tensor) else batch if isinstance(batch, dict) else tuple(batch)
        return to_device(inputs, task.device)  # type: ignore[no-any-return]

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        task, source = bound(self.task, self), bound(self.source, self)
        losses: Losses = {}
        inputs = self._inputs(next(bound(self.batches, self)), task)
        teacher, _ = source.outputs(model, None, inputs, task, ())
        losses["pseudo"] = self.weight * self.loss(first_tensor(task.predict(call(model, inputs))), teacher)
        if self.task_weight:
            inputs, target = task.split(batch)
            losses["task"] = self.task_weight * supervised_loss(task, task.predict(call(model, inputs)), target)
        return losses


def pseudo_label(
    teacher: TeacherLike | None,
    unlabelled: Iterable[Any],
    *,
    threshold: float = 0.95,
    loss: DistillLoss | None = None,
    weight: float = 1.0,
    task_weight: float = 1.0,
    dim: int | None = None,
) -> PseudoLabel:
    """Return an objective: task_weight * (the task's loss) of a labelled batch + weight * loss of an unlabelled batch.

    Each step takes the next batch of both loaders; the unlabelled one starts again when it ends. Noisy Student (Xie et al.,
    1911.04252), with the threshold of FixMatch (Sohn et al., 2001.07685).

    Args:
        teacher: a trained model in eval mode, or a `Teacher`; None takes `Task.reference`.
        unlabelled: a loader of inputs without labels: a tensor, a tuple of inputs, or a dict of them.
        threshold: a probability in [0, 1); only samples whose most probable class reaches it count.
        loss: `(student, teacher) -> scalar` instead of `hard_targets` with the threshold, such as `soft_targets`.
        weight: of the unlabelled loss, a positive number.
        task_weight: of the task's loss, >= 0.
        dim: the dimension of the predictions that holds the classes, as in `imitate`.

    Raises: SettingError for settings of the wrong type or range.
    """
    check_dim(dim, "pseudo_label")
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
    return PseudoLabel(teacher=teacher, unlabelled=unlabelled, loss=chosen, weight=weight, task_weight=task_weight, dim=dim)
