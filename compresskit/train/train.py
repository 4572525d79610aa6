"""The one training loop, `fit_`, and the stage `Train`. Distillation, fine-tuning and QAT all go through it.

for epoch in range(epochs):
    for batch in feed.epoch():             # task.train; the position in it can be found again
        losses = objective(run, batch)     # run: the model under its precision policy
        run.backward(sum(losses))
        run.step()                         # every `accumulate` batches; masks that the model carries are held
        after_step hooks                   # observers; then a checkpoint, where one is due
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from compresskit import mixed
from compresskit.base.errors import ModelError, SettingError, TrainingError
from compresskit.base.objective import LossFunction, Objective
from compresskit.base.settings import check_kinds
from compresskit.base.stage import Stage
from compresskit.base.task import Task
from compresskit.graph.masks import hold_
from compresskit.mixed.formats.parallel import is_sharded
from compresskit.train.loop import Left, Loop, begin_alike_
from compresskit.train.lr import Cosine, LRSchedule, check_lr_schedule
from compresskit.train.objective import bind_objective
from compresskit.train.snapshots import take_


@dataclass(frozen=True, kw_only=True)
class Train(Stage):
    """Train a model; also the settings of any fine-tuning.

    epochs: passes over the training data.
    optimizer: `(parameters) -> torch optimizer`, such as `partial(torch.optim.SGD, lr=0.1, momentum=0.9)`.
    schedule: factor on the learning rate over the training, such as `lr.Cosine()`; evaluated before every step.
    precision: policy of `compresskit.mixed`.
    objective: what is minimised; the task's loss where nothing is given.
    clip: largest norm of the gradients.
    accumulate: batches per optimizer step; their gradients are summed in fp32.
    flat, backend: how the optimizer's step is laid out and computed; see `mixed.prepare`.
    """

    epochs: int
    optimizer: Callable[..., torch.optim.Optimizer] = functools.partial(torch.optim.AdamW, lr=1e-3)
    schedule: LRSchedule = field(default_factory=Cosine)
    precision: mixed.Policy = mixed.FP32
    objective: Objective | LossFunction | None = None
    clip: float | None = None
    accumulate: int = 1
    flat: bool = False
    backend: Literal["foreach", "compiled"] = "foreach"

    def __post_init__(self) -> None:
        if not isinstance(self.epochs, int) or self.epochs < 1:
            raise SettingError(f"Train(epochs=...): wanted a whole number >= 1, got {self.epochs}")
        check_kinds(self)
        if self.accumulate < 1:
            raise SettingError(f"Train(accumulate=...): wanted a whole number >= 1, got {self.accumulate}")
        if self.clip is not None and self.clip <= 0:
            raise SettingError(f"Train(clip=...): wanted a positive norm, got {self.clip}")
        if not isinstance(self.precision, mixed.Policy):
            raise SettingError(f"Train(precision=...): wanted a policy such as mixed.MASTER_BF16, got {self.precision!r}")
        if self.backend not in ("foreach", "compiled"):
            raise SettingError(f"Train(backend=...): wanted 'foreach' or 'compiled', got {self.backend!r}")
        if not callable(self.optimizer):
            raise SettingError(f"Train(optimizer=...): wanted a function, got {type(self.optimizer).__name__}")
        check_lr_schedule(self.schedule, "Train(schedule=...)")

    @property
    def starts_from_trained(self) -> bool:
        """False: it trains the incoming model."""
        return False

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        return fit_(model.to(task.device), task, self)


def fit_(
    model: nn.Module,
    task: Task,
    how: Train,
    *,
    objective: Objective | LossFunction | None = None,
    after_step: Sequence[Callable[[int, int], None]] = (),
    attend: Callable[[mixed.Run, int], Callable[[], None]] | None = None,
    remember: Sequence[Any] = (),
    label: str = "train",
) -> nn.Module:
    """Train a model in place, on the device where it is.

    Args:
        objective: used instead of `how.objective` where the caller has one of its own.
        after_step: called as `hook(step, steps)` after every optimizer step.
        attend: called as `attend(run, steps)` before the first step, for what must see the fp32 weights; what it returns is
            called after the last.
        remember: objects that change on the way and have `resume_state` and `resume_from_`, see `Objective`.
        label: name of the progress bar.

    With `Task(progress=...)`, which a Recipe gives, it is saved on the way and goes on where it was interrupted. The loader's
    random numbers follow from torch's global generator as it is, those of the model (dropout) are a stream beside it.

    Raises TrainingError at the first loss that is not finite; ModelError where nothing can be trained.
    """
    batches = task.length("train")
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(f"{type(model).__name__} has no parameter with requires_grad; nothing can be trained")
    training = None if task.progress is None else task.progress.training(label)
    if training is not None and is_sharded(model):
        raise SettingError("fit_: a model under FSDP2 is not saved on its way; leave Task(progress=...) out")
    begin_alike_(model)
    left = Left(model=model, task=task, remember=remember)
    if training is not None and (end := training.finished()) is not None:
        left.take_(end)
        return model.eval()
    goal = bind_objective(objective or how.objective, model, task)
    optimizer = how.optimizer([p for p in model.parameters() if p.requires_grad])  # with what the objective put on the model
    run = mixed.prepare(model, optimizer, how.precision, clip=how.clip, flat=how.flat, backend=how.backend)
    steps = how.epochs * math.ceil(batches / how.accumulate)
    release = [] if attend is None else [attend(run, steps)]
    release.append(hold_(model, run))
    model.train()
    take_(task.snapshots, model, run, 0, steps)
    hooks = [lambda step, steps: take_(task.snapshots, model, run, step, steps), *after_step]
    loop = Loop(run, goal, task, how, steps, hooks=hooks, remember=remember, training=training)
    try:
        loop.train(batches, label)
    finally:
        for end_ in release:
            end_()
        run.finish()
        goal.close()
    if bad := [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]:
        raise TrainingError(f"after the last step {bad[0]} is not finite; lower the learning rate or set Train(clip=1.0)")
    if training is not None:
        training.save(left.behind(), "end")
        training.stopped("at its end")
    return model.eval()
