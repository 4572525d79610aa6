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
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import nn

from compresskit import mixed
from compresskit.base import distributed
from compresskit.base.errors import CompressError, DataError, ModelError, SettingError, TrainingError, first_line
from compresskit.base.objective import LossFunction, Objective
from compresskit.base.packing import Resumable
from compresskit.base.progress import Training
from compresskit.base.settings import NO_EFFECT, check_field_types
from compresskit.base.stage import Stage
from compresskit.base.task import Task, check_is_task
from compresskit.graph.masks import enforce_masks_
from compresskit.graph.quantized import quantized_parts
from compresskit.graph.surgery import check_is_module
from compresskit.graph.tracing import autocasts_of_caller, no_autocast
from compresskit.mixed.channels_last import channels_last_weights
from compresskit.mixed.checks import check_backend, check_clip, check_start_dtypes, requires_closure
from compresskit.mixed.compiled_model import compiled_model
from compresskit.mixed.formats.casts import kept_fp32
from compresskit.mixed.formats.levels import require_policy
from compresskit.mixed.formats.parallel import is_sharded
from compresskit.mixed.step.masters import check_not_in_run, widen_
from compresskit.train.callbacks import Callbacks, as_callbacks
from compresskit.train.cursor import naming_dead_workers
from compresskit.train.learning_rates import LearningRates
from compresskit.train.length import Length, check_last_row
from compresskit.train.loop import Hook, TrainingLoop, TrainingResult, align_processes_
from compresskit.train.lr import AnySchedule, Cosine, as_schedule, check_lr_schedule
from compresskit.train.modes import remember_modes_, train_mode_
from compresskit.train.objective import bind_objective, check_losses_are_fixed
from compresskit.train.param_groups import ParamGroups, groups_of, warn_of_sparse_gradients
from compresskit.train.snapshots import fill_snapshots_
from compresskit.train.validation import Validation

log = logging.getLogger(__name__)

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
            `no_decay_on_vectors` of `compresskit.train.param_groups`. In QAT, too, the names are those of the float model.
        schedule: factor on the learning rate over the training, such as `lr.OneCycle()`, evaluated before every step; or one of
            torch's schedulers, `lr.EachEpoch(partial(torch.optim.lr_scheduler.StepLR, step_size=30))`.
        precision: number formats of the training, a policy such as `mixed.AMP_BF16`.
        objective: what is minimised; by default the task's loss.
        clip: largest norm of the gradients; None for no clipping.
        accumulate: batches per optimizer step; their gradients are summed in fp32.
        flat: whether the optimizer updates all parameters as one tensor; see `mixed.prepare`.
        backend: how the optimizer's step is computed; see `mixed.prepare`.
        compile: let torch.compile run the model in this training. The first steps take minutes, the others less time (figures:
            benchmarks/training_speed.md). Without a compiler, and in QAT, the model runs as written, which the log says.
        channels_last: lay images and weights of convolutions out in `torch.channels_last` during this training: most kernels
            read that faster (benchmarks/training_speed.md). Code that calls `.view` on images fails, and is to call `.reshape`.
        validate_every: epochs between two measurements of the task's metric (with `steps`, optimizer steps); the last step is
            always followed by one. None measures after every epoch where there is `Task(val=...)`, 0 never.
        keep_best: end with the weights of the best measurement in place of the last ones.
        patience: end the training after so many measurements in a row without a better one; None for no early end.
        exact: of several processes, whether BatchNorm and the ranges of QAT see the rows of all, by messages in every layer, so
            that the result is that of one process except for rounding, if the loss is a mean over rows or torch's cross-entropy
            (docs/runs.md). Otherwise each sees its own rows, as under torch's DDP, and running averages are averaged once a step.
        on_step: a function, or several, that is called with a `StepReport` (losses, rates, metric) after every optimizer step. A
            resumed training calls it for the steps after the checkpoint.
        on_epoch: the same after every epoch, with an `EpochReport` (mean loss, metric, rates).

    Raises:
        SettingError: a setting is out of range or of the wrong kind.
    """

    hints: ClassVar[Mapping[str, str]] = {
        "callbacks": "on_step= or on_epoch=, functions that are called after every step, or epoch",
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
        "memory_format": "channels_last=True",
        "ema": "objective=imitate(EMA()), or run.ema of mixed.prepare in a loop of your own",
        "device": "Task(device=...)",
        "seed": "Recipe(seed=...), or torch.manual_seed",
    }

    epochs: int | None = None
    steps: int | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = functools.partial(torch.optim.AdamW, lr=1e-3)
    param_groups: ParamGroups | None = None
    schedule: AnySchedule = field(default_factory=Cosine)
    precision: mixed.Policy = mixed.FP32
    objective: Objective | LossFunction | None = None
    clip: float | None = None
    accumulate: int = 1
    flat: bool = False
    backend: Literal["foreach", "compiled"] | None = None
    compile: bool = False
    channels_last: bool = False
    validate_every: int | None = None
    keep_best: bool = False
    patience: int | None = None
    exact: bool = False
    on_step: Callbacks = field(default=None, metadata=NO_EFFECT)
    on_epoch: Callbacks = field(default=None, metadata=NO_EFFECT)

    def __post_init__(self) -> None:
        _check_length(self)
        check_field_types(self)
        _check_validation(self)
        if self.accumulate < 1:
            raise SettingError(f"Train(accumulate=...): wanted a whole number >= 1, got {self.accumulate}")
        check_clip(self.clip, "Train")
        require_policy(self.precision, "Train(precision=...)")
        check_backend(self.backend, "Train")
        if self.compile and self.exact:
            raise SettingError(
                "Train(compile=True, exact=True): messages in every layer cannot be compiled; leave one of the two out"
            )
        if not callable(self.optimizer):
            kind = type(self.optimizer).__name__
            made = kind if isinstance(self.optimizer, torch.optim.Optimizer) else "SGD"
            raise SettingError(f"Train(optimizer=...): wanted a function, got {kind}; write partial(torch.optim.{made}, lr=...)")
        check_lr_schedule(self.schedule, "Train(schedule=...)")

    def length(self, task: Task) -> Length:
        """How long the training is on a task; DataError where epochs are counted and the data have no length."""
        if self.steps is None:
            batches = task.length("train")
            steps = (self.epochs or 0) * math.ceil(batches / self.accumulate)
            return Length(steps=steps, epochs=self.epochs, batches=batches, accumulate=self.accumulate)
        known = task.known_length("train")
        epochs = None if known is None else math.ceil(self.steps / math.ceil(known / self.accumulate))
        return Length(steps=self.steps, epochs=epochs, batches=known, accumulate=self.accumulate)

    @property
    def reads_target(self) -> bool:
        """Whether what it minimises is known to read the targets of batches, see `Objective`."""
        return self.objective is None or (isinstance(self.objective, Objective) and self.objective.reads_target)

    @property
    def starts_from_trained(self) -> bool:
        """False: it trains the incoming model."""
        return False

    def check_fits(self, model: nn.Module, task: Task) -> None:
        """Raise an error where settings do not fit the names and the layers of a float model, which is not changed.

        Raises:
            ModelError: `Policy(keep_fp32=...)` names what the model does not have. SettingError: of `param_groups`.
        """
        if not self.starts_from_trained:  # the graph of a quantized model may read an embedding in another way
            warn_of_sparse_gradients(model, self.optimizer)
        if self.precision.param_dtype is not None:
            kept_fp32(model, self.precision)
        groups_of(model, self.param_groups, quiet=True)

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        check_is_module(model, "Train")
        check_is_task(task, "Train")
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
        settings: of the training. Inside torch.autocast of the caller its steps compute in that, too, which the log says.
        objective: is minimised in place of `settings.objective`.
        after_step: called as `hook(step, steps)` after every optimizer step.
        setup: called as `setup(run, steps)` before the first step; the function that it returns is called after the last.
        resumables: objects that change during the training and whose state belongs into the checkpoints.
        label: name of the progress bar and of the checkpoints.

    Raises:
        TrainingError: a loss is not finite, or cannot be computed.
        ModelError: the model has no trainable parameter. SettingError: `settings` is no `Train`, or `task` no `Task`.
        DataError: the loader fails, or changes its length, or its last batch is one row, of which BatchNorm has no statistics.
        Interrupted: a signal stopped the training after it wrote a checkpoint.
    """
    _begin_(model, task, settings)
    _check_start_(model, task, settings, objective or settings.objective, hooked=setup is not None or bool(after_step))
    training = None if task.progress is None else task.progress.training(label)
    align_processes_(model)
    result = TrainingResult(model=model, task=task, resumables=resumables)
    if training is not None and (finished := training.finished()) is not None:
        result.restore_(finished)
        return model.eval()
    with naming_dead_workers(label), torch.enable_grad():
        _train_(
            model,
            task,
            settings,
            objective=_bound_objective(objective or settings.objective, model, task, label),
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


def _bound_objective(objective: Objective | LossFunction | None, model: nn.Module, task: Task, label: str) -> Objective:
    """What is minimised, bound to the model, which it may run meanwhile, outside of torch.autocast that the steps compute in."""
    for autocast in autocasts_of_caller():
        log.info("%s: its steps compute in %s by the torch.autocast that it is called in", label, autocast.fast_dtype)
    with no_autocast():
        return bind_objective(objective, model, task)


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
    length = settings.length(task)
    steps = length.steps
    if (settings.keep_best or settings.patience is not None) and (setup is not None or task.snapshots):
        raise SettingError(
            f"Train(keep_best=..., patience=...): {label} changes masks on its way, or a later stage rewinds to a point in it, so"
            " that no earlier end and no earlier weights can be taken; leave both out of this training"
        )
    with ExitStack() as cleanup:
        cleanup.callback(objective.close)
        if settings.channels_last:
            cleanup.enter_context(channels_last_weights(model))  # before the optimizer's state takes their form
        run = _mixed_run(model, settings)  # after binding, since an objective may add parameters to the model
        cleanup.callback(run.finish)
        with no_autocast():
            finish_setup = None if setup is None else setup(run, steps)  # may attach masks
        cleanup.callback(enforce_masks_(model, run, quiet=True))
        if finish_setup is not None:
            cleanup.callback(finish_setup)
        train_mode_(model, label)
        if settings.compile:
            cleanup.enter_context(_compiled_training(model, run, label))
        fill_snapshots_(task.snapshots, model, run, 0, steps)
        validation = _validation(run, task, settings, length, label)
        measured = None if validation is None else task
        loop = TrainingLoop(
            run=run,
            objective=objective,
            task=task,
            length=length,
            rates=LearningRates(run.optimizer, as_schedule(settings.schedule), length, measured),
            validation=validation,
            on_step=as_callbacks(settings.on_step, "Train(on_step=...)"),
            on_epoch=as_callbacks(settings.on_epoch, "Train(on_epoch=...)"),
            hooks=[functools.partial(fill_snapshots_, task.snapshots, model, run), *after_step],
            resumables=resumables,
            training=training,
            label=label,
            exact=settings.exact,
            channels_last=settings.channels_last,
        )
        loop.train()
    if validation is not None:
        validation.restore_best_(model)
    if not settings.exact:  # scales that followed the rows of one process
        distributed.broadcast_model_(model, buffers_alone=True)


def _compiled_training(model: nn.Module, run: mixed.Run, label: str) -> AbstractContextManager[None]:
    """Let torch.compile run a model, unless it is quantized."""
    if quantized_parts(model):
        log.warning(
            "%s: compile=True: a quantized layer looks at values before it rounds, which leaves pieces that are no faster"
            " compiled; the model runs as written",
            label,
        )
        return nullcontext()
    return compiled_model(model, run.device, f"{label}: compile=True")


def _begin_(model: Any, task: Any, settings: Any) -> None:
    """Refuse arguments of `fit_` that are of another kind, and remember which modules were given in train mode."""
    check_is_module(model, "fit_")
    check_is_task(task, "fit_")
    if not isinstance(settings, Train):
        raise SettingError(f"fit_(settings=...): wanted those of a training, got {settings!r:.60}; write ck.Train(epochs=1)")
    remember_modes_(model)


def _check_start_(
    model: nn.Module, task: Task, settings: Train, objective: Objective | LossFunction | None, *, hooked: bool
) -> None:
    """Refuse what no training can begin with, and bring a half model to fp32 where its masters would be made of it.

    An objective may run the model when it is bound, or copy it, before it is prepared.
    """
    if torch.is_inference_mode_enabled():
        raise SettingError(
            "a training was called inside torch.inference_mode(), where nothing has a gradient; call it outside of that block"
        )
    _check_trainable(model, task)
    reads = objective is None or (isinstance(objective, Objective) and objective.reads_target)
    check_losses_are_fixed(objective, task, reads_task_loss=reads, model=model)
    if objective is None and type(settings) is Train and not hooked:  # hooks, and other stages, may freeze statistics before it
        try:
            check_last_row(model, task, settings.length(task), "train")
        except DataError as error:
            if not (settings.on_step or settings.on_epoch):  # which may freeze them, too
                raise
            log.warning("%s, unless on_step= or on_epoch= freezes BatchNorm before it", error)
    check_not_in_run(model)
    check_start_dtypes(model, settings.precision)
    if settings.precision.param_dtype is not None and not is_sharded(model):
        widen_(model)


def _check_trainable(model: nn.Module, task: Task) -> None:
    task.known_length("train")  # raises where the loader is missing or empty
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(f"{type(model).__name__} has no parameter with requires_grad; nothing can be trained")


def _check_finite(model: nn.Module) -> None:
    if bad := [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]:
        raise TrainingError(f"after the last step {bad[0]} is not finite; lower the learning rate or set Train(clip=1.0)")


def _validation(run: mixed.Run, task: Task, settings: Train, length: Length, label: str) -> Validation | None:
    """What measures the metric during a training; None where there are no data for it, or it is not wanted."""
    needed = settings.keep_best or settings.patience is not None
    asked = needed or bool(settings.validate_every)
    if settings.validate_every == 0 or (task.val is None and not asked):
        return None
    task.length("val")
    per_epoch = length.steps_per_epoch
    if needed and settings.validate_every is None and per_epoch is None:
        raise SettingError(
            "Train(keep_best=..., patience=...): the training data have no length; pass validate_every=, in optimizer steps"
        )
    every = settings.validate_every if settings.steps is not None else (settings.validate_every or 1) * (per_epoch or 1)
    return Validation(
        run=run,
        task=task,
        every=every or per_epoch or length.steps,
        keep_best=settings.keep_best,
        patience=settings.patience,
        asked=asked,
        label=label,
    )


def _check_length(settings: Train) -> None:
    where = type(settings).__name__  # a stage that trains, too
    if (settings.epochs is None) == (settings.steps is None):
        got = "both" if settings.epochs is not None else "neither"
        raise SettingError(f"{where}(): wanted epochs= or steps=, one of the two, got {got}")
    for name, value in (("epochs", settings.epochs), ("steps", settings.steps)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise SettingError(f"{where}({name}=...): wanted a whole number >= 1, got {value!r}")


def _check_validation(settings: Train) -> None:
    for name, value, least in (("validate_every", settings.validate_every, 0), ("patience", settings.patience, 1)):
        if value is not None and value < least:
            raise SettingError(f"Train({name}=...): wanted a whole number >= {least}, got {value}")
    if settings.validate_every == 0 and (settings.keep_best or settings.patience is not None):
        raise SettingError("Train(validate_every=0): keep_best= and patience= need measurements; leave validate_every= out")
    if settings.param_groups is not None and not callable(settings.param_groups):
        raise SettingError(f"Train(param_groups=...): wanted a function, got {type(settings.param_groups).__name__}")
    as_callbacks(settings.on_step, "Train(on_step=...)")
    as_callbacks(settings.on_epoch, "Train(on_epoch=...)")


def refuse_optimizer_with_closure(kind: str, where: str) -> NoReturn:
    """Raise SettingError, which begins with `where`, for an optimizer that evaluates the loss itself, as LBFGS does."""
    raise SettingError(
        f"{where}: optimizer={kind} evaluates the loss itself, several times a step, which no training of a stage does; give"
        " another, such as partial(torch.optim.AdamW, lr=...), or train with ck.mixed.prepare and run.step(closure)"
    )


def _mixed_run(model: nn.Module, settings: Train) -> mixed.Run:
    groups = groups_of(model, settings.param_groups)
    try:
        optimizer = settings.optimizer(groups)
    except (ValueError, TypeError, RuntimeError) as error:
        if isinstance(error, CompressError):
            raise
        raise SettingError(
            f"Train(optimizer=...): it cannot be made of the model's parameters: {type(error).__name__}: {first_line(error)};"
            " param_groups= chooses what it gets, and takes no parameter that is frozen with requires_grad_(False)"
        ) from error
    if isinstance(optimizer, torch.optim.Optimizer) and requires_closure(optimizer):
        refuse_optimizer_with_closure(type(optimizer).__name__, "Train")
    return mixed.prepare(model, optimizer, settings.precision, clip=settings.clip, flat=settings.flat, backend=settings.backend)
