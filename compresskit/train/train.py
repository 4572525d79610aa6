"""The stage `Train`, and `fit_`, the library's only training loop: distillation, fine-tuning and QAT use it too.

for epoch in range(epochs):
    for batch in cursor.next_epoch():      # of task.train; the cursor can return to a batch after an interruption
        losses = objective(run, batch)     # run: the model under its precision policy
        run.backward(sum(losses))
        run.step()                         # every `accumulate` batches; then the model's masks are applied again
        after_step hooks                   # observers; then a checkpoint, if one is due
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import nn

from compresskit import mixed
from compresskit.base.errors import ModelError, SettingError, TrainingError
from compresskit.base.objective import LossFunction, Objective
from compresskit.base.packing import Resumable
from compresskit.base.progress import Training
from compresskit.base.settings import check_field_types
from compresskit.base.stage import Stage
from compresskit.base.task import Task
from compresskit.graph.masks import enforce_masks_
from compresskit.mixed.formats.levels import require_policy
from compresskit.mixed.formats.parallel import is_sharded
from compresskit.train.loop import Hook, TrainingLoop, TrainingResult, align_processes_
from compresskit.train.lr import Cosine, LRSchedule, check_lr_schedule
from compresskit.train.modes import remember_modes_, train_mode_
from compresskit.train.objective import bind_objective
from compresskit.train.param_groups import ParamGroups, groups_of
from compresskit.train.snapshots import fill_snapshots_
from compresskit.train.validation import OnStep, Validation

#: Called as `setup(run, steps)` before the first step; the function that it returns is called after the last.
Setup = Callable[[mixed.Run, int], Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class Train(Stage):
    """A stage that trains a model; also the settings of fine-tuning in other stages.

    Args:
        epochs: passes over the training data.
        steps: optimizer steps, in place of epochs.
        optimizer: `(parameters) -> torch optimizer`, such as `partial(torch.optim.SGD, lr=0.1, momentum=0.9)`.
        param_groups: `([(name, parameter), ...]) -> param groups`, which the optimizer gets in place of the parameters, such as
            `no_decay_on_vectors` of `compresskit.train.param_groups`.
        schedule: factor on the learning rate over the training, such as `lr.OneCycle()`; evaluated before every step.
        precision: number formats of the training, a policy such as `mixed.AMP_BF16`.
        objective: what is minimised; by default the task's loss.
        clip: largest norm of the gradients; None for no clipping.
        accumulate: batches per optimizer step; their gradients are summed in fp32.
        flat: whether the optimizer updates all parameters as one tensor; see `mixed.prepare`.
        backend: how the optimizer's step is computed; see `mixed.prepare`.
        validate_every: epochs between two measurements of the task's metric (with `steps`, optimizer steps). None does not
            measure, but for `keep_best` and `patience` after every epoch. The last step is always followed by one.
        keep_best: end with the weights of the best measurement in place of the last ones.
        patience: end the training after so many measurements in a row without a better one; None for no early end.
        on_step: is called with a `StepReport` (losses, rates, metric) after every optimizer step; a resumed training calls it for
            the steps that are left.

    Raises:
        SettingError: a setting is out of range or of the wrong kind.
    """

    hints: ClassVar[Mapping[str, str]] = {
        "callbacks": "on_step=, a function that is called after every step",
        "early_stopping": "patience=",
        "lr": "optimizer=partial(torch.optim.AdamW, lr=...)",
        "learning_rate": "optimizer=partial(torch.optim.AdamW, lr=...)",
        "weight_decay": "optimizer=partial(torch.optim.AdamW, weight_decay=...), and param_groups= for some parameters alone",
        "batch_size": "the loader Task(train=...) with it",
        "max_steps": "steps=",
        "max_epochs": "epochs=",
        "scheduler": "schedule=, such as lr.Cosine()",
        "loss": "Task(loss=...), or objective=",
        "metric": "Task(metric=...)",
        "resume": "Recipe(...).run(...), which resumes by itself",
        "ema": "objective=imitate(EMA()), or run.ema of mixed.prepare in a loop of your own",
        "device": "Task(device=...)",
        "seed": "Recipe(seed=...), or torch.manual_seed",
    }

    epochs: int | None = None
    steps: int | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = functools.partial(torch.optim.AdamW, lr=1e-3)
    param_groups: ParamGroups | None = None
    schedule: LRSchedule = field(default_factory=Cosine)
    precision: mixed.Policy = mixed.FP32
    objective: Objective | LossFunction | None = None
    clip: float | None = None
    accumulate: int = 1
    flat: bool = False
    backend: Literal["foreach", "compiled"] = "foreach"
    validate_every: int | None = None
    keep_best: bool = False
    patience: int | None = None
    on_step: OnStep | None = None

    def __post_init__(self) -> None:
        _check_length(self)
        check_field_types(self)
        _check_validation(self)
        if self.accumulate < 1:
            raise SettingError(f"Train(accumulate=...): wanted a whole number >= 1, got {self.accumulate}")
        if self.clip is not None and self.clip <= 0:
            raise SettingError(f"Train(clip=...): wanted a positive norm, got {self.clip}")
        require_policy(self.precision, "Train(precision=...)")
        if self.backend not in ("foreach", "compiled"):
            raise SettingError(f"Train(backend=...): wanted 'foreach' or 'compiled', got {self.backend!r}")
        if not callable(self.optimizer):
            raise SettingError(f"Train(optimizer=...): wanted a function, got {type(self.optimizer).__name__}")
        check_lr_schedule(self.schedule, "Train(schedule=...)")

    def optimizer_steps(self, batches: int) -> int:
        """The optimizer steps of the whole training, with so many batches in an epoch."""
        return self.steps if self.steps is not None else (self.epochs or 0) * math.ceil(batches / self.accumulate)

    @property
    def starts_from_trained(self) -> bool:
        """False: it trains the incoming model."""
        return False

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        return fit_(model.to(task.device), task, self)


def fit_(
    model: nn.Module,
    task: Task,
    settings: Train,
    *,
    objective: Objective | LossFunction | None = None,
    after_step: Sequence[Hook] = (),
    setup: Setup | None = None,
    resumables: Sequence[Resumable] = (),
    label: str = "train",
) -> nn.Module:
    """Train a model in place, on the device where it is, and return it in eval mode.

    With `Task(progress=...)`, which a Recipe sets, checkpoints are written, and an interrupted training is resumed with the same
    bits. The loader draws from torch's global generator; the model (dropout) from a stream that is forked from it.

    A model wholly in eval mode is put in train mode. In one in train mode, modules in eval mode, such as a frozen BatchNorm, stay
    so in this training, which logs them, and in later ones.

    Args:
        model: the model; at least one parameter requires a gradient.
        task: has the data and the loss.
        settings: of the training.
        objective: is minimised in place of `settings.objective`.
        after_step: called as `hook(step, steps)` after every optimizer step.
        setup: called as `setup(run, steps)` before the first step; the function that it returns is called
            after the last step.
        resumables: objects that change during the training and whose state belongs into the checkpoints.
        label: name of the progress bar and of the checkpoints.

    Raises:
        TrainingError: a loss is not finite, or cannot be computed.
        ModelError: the model has no trainable parameter.
        DataError: the loader fails, or changes its length.
        Interrupted: a signal stopped the training after it wrote a checkpoint.
    """
    remember_modes_(model)
    _check_trainable(model, task)
    training = _checkpoints(model, task, label)
    align_processes_(model)
    result = TrainingResult(model=model, task=task, resumables=resumables)
    if training is not None and (finished := training.finished()) is not None:
        result.restore_(finished)
        return model.eval()
    _train_(
        model,
        task,
        settings,
        objective=bind_objective(objective or settings.objective, model, task),
        after_step=after_step,
        setup=setup,
        resumables=resumables,
        training=training,
        label=label,
    )
    _check_finite(model)
    if training is not None:
        training.save(result.state(), "end")
        training.raise_if_stopped("at its end")
    return model.eval()


def _train_(
    model: nn.Module,
    task: Task,
    settings: Train,
    *,
    objective: Objective,
    after_step: Sequence[Hook],
    setup: Setup | None,
    resumables: Sequence[Resumable],
    training: Training | None,
    label: str,
) -> None:
    """Run the training loop with an objective that is bound to the model, and clean up after it."""
    batches = task.length("train")
    steps = settings.optimizer_steps(batches)
    if (settings.keep_best or settings.patience is not None) and (setup is not None or task.snapshots):
        raise SettingError(
            f"Train(keep_best=..., patience=...): {label} changes masks on its way, or a later stage rewinds to a point in it, so"
            " that no earlier end and no earlier weights can be taken; leave both out of this training"
        )
    with ExitStack() as cleanup:
        cleanup.callback(objective.close)
        run = _mixed_run(model, settings)  # after binding, since an objective may add parameters to the model
        cleanup.callback(run.finish)
        finish_setup = None if setup is None else setup(run, steps)  # may attach masks
        cleanup.callback(enforce_masks_(model, run))
        if finish_setup is not None:
            cleanup.callback(finish_setup)
        train_mode_(model, label)
        fill_snapshots_(task.snapshots, model, run, 0, steps)
        validation = _validation(run, task, settings, steps_per_epoch=math.ceil(batches / settings.accumulate), label=label)
        loop = TrainingLoop(
            run=run,
            objective=objective,
            task=task,
            epochs=settings.epochs or math.ceil(steps / math.ceil(batches / settings.accumulate)),
            batches=batches,
            accumulate=settings.accumulate,
            schedule=settings.schedule,
            steps=steps,
            ends_within_epoch=settings.steps is not None,
            validation=validation,
            on_step=settings.on_step,
            hooks=[functools.partial(fill_snapshots_, task.snapshots, model, run), *after_step],
            resumables=resumables,
            training=training,
            label=label,
        )
        loop.train()
    if validation is not None:
        validation.restore_best_(model)


def _check_trainable(model: nn.Module, task: Task) -> None:
    task.length("train")  # raises where the loader is missing or empty
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(f"{type(model).__name__} has no parameter with requires_grad; nothing can be trained")


def _check_finite(model: nn.Module) -> None:
    if bad := [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]:
        raise TrainingError(f"after the last step {bad[0]} is not finite; lower the learning rate or set Train(clip=1.0)")


def _checkpoints(model: nn.Module, task: Task, label: str) -> Training | None:
    if task.progress is None:
        return None
    if is_sharded(model):
        raise SettingError("fit_: a model under FSDP2 is not saved on its way; leave Task(progress=...) out")
    return task.progress.training(label)


def _validation(run: mixed.Run, task: Task, settings: Train, *, steps_per_epoch: int, label: str) -> Validation | None:
    """What measures the metric during a training; None where nothing asks for it."""
    every = settings.validate_every or (1 if settings.keep_best or settings.patience is not None else None)
    if every is None:
        return None
    task.length("val")
    every *= 1 if settings.steps is not None else steps_per_epoch
    return Validation(run=run, task=task, every=every, keep_best=settings.keep_best, patience=settings.patience, label=label)


def _check_length(settings: Train) -> None:
    if (settings.epochs is None) == (settings.steps is None):
        got = "both" if settings.epochs is not None else "neither"
        raise SettingError(f"Train(): wanted epochs= or steps=, one of the two, got {got}")
    for name, value in (("epochs", settings.epochs), ("steps", settings.steps)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise SettingError(f"Train({name}=...): wanted a whole number >= 1, got {value}")


def _check_validation(settings: Train) -> None:
    for name, value in (("validate_every", settings.validate_every), ("patience", settings.patience)):
        if value is not None and value < 1:
            raise SettingError(f"Train({name}=...): wanted a whole number >= 1, got {value}")
    if settings.steps is not None and settings.validate_every is None and (settings.keep_best or settings.patience is not None):
        raise SettingError("Train(steps=...): keep_best= and patience= want validate_every=, in optimizer steps")
    for name, function in (("on_step", settings.on_step), ("param_groups", settings.param_groups)):
        if function is not None and not callable(function):
            raise SettingError(f"Train({name}=...): wanted a function, got {type(function).__name__}")


def _mixed_run(model: nn.Module, settings: Train) -> mixed.Run:
    optimizer = settings.optimizer(groups_of(model, settings.param_groups))
    return mixed.prepare(model, optimizer, settings.precision, clip=settings.clip, flat=settings.flat, backend=settings.backend)
