"""The inside of `fit_`: epochs and steps, checkpoints, and resuming from them."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from tqdm import tqdm

from compresskit import mixed
from compresskit.base import distributed, randomness
from compresskit.base.errors import CheckpointError, CompressError, TrainingError, first_line, is_out_of_memory
from compresskit.base.inputs import packed_inputs
from compresskit.base.objective import Losses, Objective
from compresskit.base.packing import Resumable, module_states, restore_module_states_
from compresskit.base.progress import Training, announce, progress_bar
from compresskit.base.task import Inputs, Task, shapes_of
from compresskit.mixed.channels_last import channels_last_images
from compresskit.mixed.formats.casts import in_fp32
from compresskit.mixed.formats.parallel import is_sharded, shard_by_name, whole_on_rank_zero
from compresskit.train.callbacks import EpochReport, OnEpoch, OnStep, StepReport, call_back
from compresskit.train.cursor import DataCursor, check_same_batches, raise_if_worker_died, raise_other_length
from compresskit.train.history import History
from compresskit.train.learning_rates import LearningRates
from compresskit.train.length import Length, remedy_of_one_row
from compresskit.train.modes import call_and_share_
from compresskit.train.objective import check_batch_has_rows, no_scalar, weigh_as_whole, which_is_not_finite, why_not_finite
from compresskit.train.param_groups import average_gradients_, raise_failed_step
from compresskit.train.validation import Validation

log = logging.getLogger(__name__)

Hook = Callable[[int, int], None]
#: Errors that a state of another training causes when it is restored; they become one CheckpointError.
MISMATCH_ERRORS = (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError)
LESS_MEMORY = (
    "lower the batch size (accumulate= keeps the step what it was), or take a precision of half the bytes, such as"
    " mixed.MASTER_BF16; then run the same command again"
)


@dataclass(kw_only=True)
class TrainingLoop:
    """The epochs and optimizer steps of one training.

    Attributes:
        run: the model and its optimizer under a precision policy.
        objective: is minimised; bound to the model.
        task: has the data.
        length: how long the training is.
        rates: sets the learning rates.
        validation: measures the metric on the way; None for no measurements.
        on_step, on_epoch: are told of every step, and of every epoch.
        hooks: called as `hook(step, steps)` after every optimizer step.
        resumables: objects whose state belongs into the checkpoints, besides the model, the optimizer and the objective.
        training: reads and writes checkpoints; None for none.
        label: name of the training, for the progress bar and the log.
        exact: whether BatchNorm and observers see the rows of all processes.
        channels_last: whether images are laid out in `torch.channels_last`.
        step: optimizer steps that are done.
    """

    run: mixed.Run
    objective: Objective
    task: Task
    length: Length
    rates: LearningRates
    validation: Validation | None
    on_step: Sequence[OnStep]
    on_epoch: Sequence[OnEpoch]
    hooks: Sequence[Hook]
    resumables: Sequence[Resumable]
    training: Training | None
    label: str
    exact: bool = False
    channels_last: bool = False
    step: int = 0
    cursor: DataCursor = field(init=False)
    history: History = field(init=False)
    _compared: bool = field(default=False, init=False)  # whether the processes have compared a batch

    def __post_init__(self) -> None:
        self.history = History({} if self.training is None else self.training.history)
        self._trained = {name: p for name, p in self.run.named_parameters().items() if p.requires_grad}  # the optimizer has them
        self._unfrozen = False  # whether the log says that a callback unfroze others
        if self.training is not None:
            progress = self.training.progress
            self.on_step, self.on_epoch = [*self.on_step, *progress.on_step], [*self.on_epoch, *progress.on_epoch]

    def train(self) -> None:
        """Run all epochs, or those that a checkpoint left to do."""
        training = self.training
        self.cursor = DataCursor(self.task.batches("train"), torch.get_rng_state())
        torch.set_rng_state(randomness.fork_rng_state(self.cursor.stream, salt=distributed.rank()))
        try:
            if training is not None:
                training.progress.stop.training = True
                if (state := training.latest()) is not None:
                    self._resume_(state)
            first, until = max(1, self.cursor.epoch), self.length.batches_until
            bar = progress_bar(total=until(self.length.steps), initial=until(self.step), desc=self.label, unit="batch")
            with bar, distributed.synced_batchnorm(self.run.model) if self.exact else distributed.own_rows():
                for epoch in itertools.count(first):
                    if self._is_over():
                        self.cursor.replay()
                        break
                    self._epoch(epoch, bar)
            self._close_epoch(bar)  # of a training that was over when it was interrupted
        except RuntimeError as error:
            raise_if_worker_died(error, f"epoch {self.cursor.epoch}, batch {self.cursor.batch}")
            raise
        finally:
            torch.set_rng_state(self.cursor.stream)
            if training is not None:
                training.progress.stop.training = False

    def _is_over(self) -> bool:
        """Whether no step is left to do."""
        return self.step >= self.length.steps or (self.validation is not None and self.validation.is_over)

    def _epoch(self, epoch: int, bar: tqdm[Any]) -> None:
        """Train on every batch once; DataError where their number is not the length of the loader."""
        run, batches, steps = self.run, self.length.batches, self.length.steps
        for batch, seen, ends_step, batches_in_step in self.history.timed(self._batches()):
            where = f"epoch {epoch}, batch {seen}"
            rows, weight = self._own_rows(batch, where)
            rows = channels_last_images(rows) if self.channels_last else rows
            self.objective.advance(self.step / steps)
            # Reading the loss waits for the device, so off the CPU it is checked only now and then.
            check = run.device.type == "cpu" or seen % 50 == 0 or seen == batches or self.step + 1 == steps
            total, losses = _forward(run, self.objective, rows, where, self.task.inputs, check=check)
            _backward(run, total / batches_in_step * weight, rows, where)
            total = total.detach()
            self.history.add_loss(total * weight)
            if ends_step:
                self._optimizer_step(where, losses)
            bar.update()
            if seen % 10 == 0 and not bar.disable:
                self._show(bar, total.item())
            if self._is_over() and seen != batches:
                break
        if not self.cursor.batch or (batches not in (None, self.cursor.batch) and not self._is_over()):
            raise_other_length(self.cursor.loader, batches, str(self.cursor.batch))
        self._close_epoch(bar)

    def _own_rows(self, batch: Any, where: str) -> tuple[Any, float]:
        """Rows of this process in a batch, and the weight of their loss; DataError where the processes read other batches."""
        least = 0 if self.exact else 2
        if not self._compared:
            check_same_batches(batch, self.cursor.loader, self.task.split_in_place, where, least=least)
            self._compared = True
        rows, weight = distributed.shard_batch(batch, self.cursor.loader, least=least)
        return weigh_as_whole(self.objective, batch, rows, weight) if self.exact else (rows, weight)

    def _batches(self) -> Iterator[tuple[Any, int, bool, int]]:
        """Each batch of the epoch with its number from 1, whether it ends an optimizer step, and how many batches the step has.

        The last step of an epoch may have fewer. Where the length of the data is not known, the batches of a step are read
        before it begins.
        """
        batches, accumulate = self.length.batches, self.length.accumulate
        waiting: list[Any] = []
        for batch in self.cursor.next_epoch():
            seen = self.cursor.batch
            if batches is None:
                waiting.append(batch)
                if len(waiting) == accumulate:
                    yield from _one_step(waiting, seen)
                    waiting = []
                continue
            if seen > batches:
                raise_other_length(self.cursor.loader, batches, "more")
            first_of_step = (seen - 1) // accumulate * accumulate
            yield batch, seen, seen % accumulate == 0 or seen == batches, min(accumulate, batches - first_of_step)
        yield from _one_step(waiting, self.cursor.batch)

    def _show(self, bar: tqdm[Any], loss: float) -> None:
        """Write the epoch, the loss and the last metric into a progress bar."""
        epoch = f"{self.cursor.epoch}/{self.length.epochs}" if self.length.epochs else str(self.cursor.epoch)
        measured = self.history.last_metric
        metric = {} if measured is None else {self.task.metric_name: f"{measured[1]:.4g}"}
        bar.set_postfix(epoch=epoch, loss=f"{loss:.3f}", **metric)

    def _close_epoch(self, bar: tqdm[Any]) -> None:
        """Record the epoch that has ended, and tell of it."""
        mean = self.history.close_epoch(self.cursor.epoch, self.step, self.rates.used, self.run.scalers.values())
        if mean is None:
            return
        measured = self.history.last_metric
        metric = measured[1] if measured is not None and measured[0] == self.step else None
        report = EpochReport(
            stage=self._stage,
            training=self.label,
            epoch=self.cursor.epoch,
            epochs=self.length.epochs,
            step=self.step,
            steps=self.length.steps,
            loss=mean,
            metric=metric,
            learning_rates=list(self.rates.used),  # a callback's own
        )
        if bar.disable:
            of = f"/{report.epochs}" if report.epochs else f", step {report.step}/{report.steps}"
            said = "" if metric is None else f", {self.task.metric_name} {metric:.4g}"
            announce(log, "%s: epoch %d%s, loss %.4g%s", self.label, report.epoch, of, mean, said)
        call = functools.partial(call_back, self.on_epoch, report, f"epoch {report.epoch}: Train(on_epoch=...)")
        call_and_share_(call, self.run.model)
        self._warn_of_unfrozen()
        self.rates.after_epoch()

    def _warn_of_unfrozen(self) -> None:
        """Say once which parameter a callback has unfrozen, which no optimizer has."""
        parameters = self.run.named_parameters().items()
        unfrozen = [name for name, p in parameters if p.requires_grad and name not in self._trained]
        if unfrozen and not self._unfrozen:
            log.warning(
                "%s: %s (%d in all) was unfrozen on the way, and is not trained: the optimizer has what required a gradient at"
                " the start. Train twice, first with it frozen, then after requires_grad_(True)",
                self.label,
                unfrozen[0],
                len(unfrozen),
            )
            self._unfrozen = True

    @property
    def _stage(self) -> str:
        return "" if self.training is None else self.training.progress.stage

    def _optimizer_step(self, where: str, losses: Losses) -> None:
        self.rates.before_step(self.step)
        save = self._average_gradients()
        try:
            self.run.step()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise TrainingError(f"{where}: the optimizer's step ran out of memory; {LESS_MEMORY}") from error
            raise_failed_step(error, self.run.optimizer, where)
        self.step += 1
        for hook in self.hooks:
            hook(self.step, self.length.steps)
        metric = self._measure()
        self.rates.after_step(metric)
        if self.on_step:
            call_back(self.on_step, self._report(losses, metric), f"{where}: Train(on_step=...)")
        if distributed.world_size() == 1:  # decided after the step: a signal may have come meanwhile
            save = self._save_is_due(self.step)
        if save and self.training is not None:
            self.training.save(self._state(), self.step)
            self.training.raise_if_stopped(where)

    def _measure(self) -> float | None:
        """Measure the metric, if that is due after this step."""
        validation = self.validation
        if validation is None or (self.step % validation.every and self.step != self.length.steps):
            return None
        metric = validation.measure(self.step)
        if metric is not None:
            self.history.add_metric(self.step, metric)
            per_epoch = self.length.steps_per_epoch or self.length.steps
            if self.step % per_epoch and self.step != self.length.steps:  # the line of an epoch says it at its end
                said = (self.label, self.step, self.length.steps, self.task.metric_name, metric)
                announce(log, "%s: step %d/%d, %s %.4g", *said)
        return metric

    def _report(self, losses: Losses, metric: float | None) -> StepReport:
        return StepReport(
            stage=self._stage,
            training=self.label,
            step=self.step,
            steps=self.length.steps,
            epoch=self.cursor.epoch,
            losses={name: loss.detach() for name, loss in losses.items()},
            learning_rates=list(self.rates.used),  # a callback's own
            metric=metric,
        )

    def _save_is_due(self, step: int) -> bool:
        training = self.training
        return training is not None and (training.progress.stop.signal is not None or training.due(step))

    def _average_gradients(self) -> bool:
        """Average the gradients of all processes; return whether any process wants a checkpoint after this step."""
        run = self.run
        if distributed.world_size() == 1:
            return False
        wish = float(self._save_is_due(self.step + 1))
        statistics = [] if self.exact else distributed.running_statistics(run.model)
        if is_sharded(run.model):  # FSDP2 has averaged the gradients of its shards already
            return distributed.all_reduce_mean_(statistics, [wish])[0] > 0
        return average_gradients_(run, self._trained, statistics, wish) > 0

    def _state(self) -> dict[str, Any]:
        """The state from which the training can be resumed with the same bits; tensors are not copied, shards put together."""
        rank_state = {
            "modules": module_states(self.run.model),
            "objective": self.objective.resume_state(),
            "resumables": [thing.resume_state() for thing in self.resumables],
            "random": randomness.rng_state(),
            "losses": self.history.resume_state(),
        }
        state = {
            "step": self.step,
            "run": self.run.state_dict(copy=False),
            "ranks": distributed.gather_on_rank_zero(rank_state),
            "snapshots": self.task.snapshots or {},
            "cursor": self.cursor.resume_state(),
            "validation": None if self.validation is None else self.validation.resume_state(),
            "rates": self.rates.resume_state(),
        }
        return whole_on_rank_zero(state) if is_sharded(self.run.model) else state  # type: ignore[no-any-return]

    def _resume_(self, state: Mapping[str, Any]) -> None:
        try:
            self.run.load_state_dict(state["run"])
            rank_state = _rank_state(state)
            restore_module_states_(self.run.model, rank_state["modules"])
            if rank_state["objective"] is not None:
                self.objective.resume_from_(rank_state["objective"])
            _restore_resumables_(self.resumables, rank_state["resumables"])
            _restore_snapshots_(self.task, shard_by_name(state["snapshots"], self.run.model))
            self.step = int(state["step"])
            self.cursor.resume_from_(state["cursor"])
            if self.validation is not None:
                self.validation.resume_from_(shard_by_name(state["validation"], self.run.model))
            self.rates.resume_from_(state["rates"])
            self.history.resume_from_(rank_state.get("losses", state.get("epoch_losses", (0.0, 0))))
            randomness.set_rng_state_(rank_state["random"])
        except CompressError:
            raise
        except (*MISMATCH_ERRORS, MemoryError) as error:
            _raise_unrestored(self.training, error)


def _one_step(batches: Sequence[Any], last: int) -> Iterator[tuple[Any, int, bool, int]]:
    """The batches of one optimizer step, the last of which has the number `last` in its epoch, as `_batches` yields them."""
    for left, batch in zip(range(len(batches) - 1, -1, -1), batches, strict=True):
        yield batch, last - left, left == 0, len(batches)


def align_processes_(model: nn.Module) -> None:
    """Give all processes the model and the random number generators of rank 0, whatever they did before."""
    if distributed.world_size() > 1 and not is_sharded(model):
        randomness.set_rng_state_(distributed.on_rank_zero(randomness.rng_state))
        distributed.broadcast_model_(model)


class TrainingResult:
    """What a training changes, as a state: the tensors of the model, snapshots, generators, and objects with a state.

    Created before the training, because an objective may add modules to the model meanwhile, which do not belong to its result.
    """

    def __init__(self, *, model: nn.Module, task: Task, resumables: Sequence[Resumable]) -> None:
        self.model, self.task, self.resumables = model, task, resumables
        self.names = [name for name, _ in _named_tensors(model)]

    def state(self) -> dict[str, Any]:
        """Return the state after the training."""
        now = dict(_named_tensors(self.model))
        rank_state = {
            "modules": module_states(self.model),
            "resumables": [thing.resume_state() for thing in self.resumables],
            "random": randomness.rng_state(),
        }
        state = {
            "values": {name: now[name] for name in self.names},
            "ranks": distributed.gather_on_rank_zero(rank_state),
            "snapshots": self.task.snapshots or {},
            "generators": [randomness.generator_state(g) for g in randomness.generators_in(self.task.batches("train"))],
        }
        return whole_on_rank_zero(state) if is_sharded(self.model) else state  # type: ignore[no-any-return]

    def restore_(self, state: Mapping[str, Any]) -> None:
        """Restore the state after the training, in place of training."""
        try:
            tensors, values = dict(_named_tensors(self.model)), shard_by_name(state["values"], self.model)
            forms, saved_forms = ({n: (v.shape, v.dtype) for n, v in group.items()} for group in (tensors, values))
            if forms != saved_forms:
                raise ValueError("the tensors of the model are others")
            with torch.no_grad():
                for name, value in values.items():
                    tensors[name].copy_(value)
            rank_state = _rank_state(state)
            restore_module_states_(self.model, rank_state["modules"])
            _restore_resumables_(self.resumables, rank_state["resumables"])
            _restore_snapshots_(self.task, shard_by_name(state["snapshots"], self.model))
            for generator, saved in zip(randomness.generators_in(self.task.batches("train")), state["generators"], strict=True):
                randomness.set_generator_state_(generator, saved)
            randomness.set_rng_state_(rank_state["random"])
        except CompressError:
            raise
        except (*MISMATCH_ERRORS, MemoryError) as error:
            _raise_unrestored(None, error)


def _rank_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The saved state of this rank, or of rank 0 if the world size has changed."""
    ranks = state["ranks"]
    return ranks[distributed.rank() if len(ranks) == distributed.world_size() else 0]  # type: ignore[no-any-return]


def _restore_resumables_(resumables: Sequence[Resumable], states: Sequence[Any]) -> None:
    for thing, state in zip(resumables, states, strict=True):
        thing.resume_from_(state)


def _restore_snapshots_(task: Task, snapshots: Mapping[float, Mapping[str, Tensor]]) -> None:
    for fraction, values in snapshots.items():
        assert task.snapshots is not None
        task.snapshots[fraction].update(values)


def _raise_unrestored(training: Training | None, error: Exception) -> NoReturn:
    """Raise what an error says about a checkpoint that is intact: CheckpointError where it is of another training.

    A failure of the machine says nothing about the checkpoint: TrainingError, whose advice keeps it.
    """
    where = "" if training is None else f"{training.progress.folder}: "
    if is_out_of_memory(error):
        raise TrainingError(
            f"{where}no memory to load the checkpoint, which is whole ({first_line(error)}); end what else takes memory, then run"
            " the same command again"
        ) from error
    if distributed.is_peer_failure(error) or "CUDA error" in str(error):
        raise TrainingError(
            f"{where}the device or another process failed while the checkpoint was loaded, which is whole ({first_line(error)});"
            " run the same command again"
        ) from error
    raise CheckpointError(
        f"{where}the checkpoint is of another training ({first_line(error)}); delete the folder to start that stage again"
    ) from error


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _forward(
    run: mixed.Run, objective: Objective, batch: Any, where: str, inputs_of: Callable[[Any], Inputs], *, check: bool
) -> tuple[Tensor, Losses]:
    """Return the sum of the losses, and each; TrainingError where they cannot be computed or, with `check`, are not finite.

    Where they are not finite since the batch has no rows, DataError.
    """
    try:
        losses = objective(run, batch)
    except (RuntimeError, IndexError, ValueError, TypeError, MemoryError) as error:
        if isinstance(error, CompressError):
            raise
        raise_if_worker_died(error, where)
        if distributed.is_peer_failure(error):
            raise TrainingError(f"{where}: another process is gone; all end. Run the same command again to go on") from error
        if is_out_of_memory(error):
            raise TrainingError(f"{where}: no memory for tensors of shape {shapes_of(batch)}; {LESS_MEMORY}") from error
        why = (isinstance(error, TypeError) and _inputs_in_a_tuple(run.model, batch, inputs_of)) or first_line(error)
        if cause := remedy_of_one_row(error) or which_is_not_finite(run.model):
            why += f"; {cause}"
        raise TrainingError(f"{where}: the loss cannot be computed (tensors of shape {shapes_of(batch)}): {why}") from error
    if wrong := no_scalar(losses):
        raise TrainingError(f"{where}: the objective wants scalar tensors by name, got {wrong}; reduce each to its mean")
    total = torch.stack([in_fp32(loss) for loss in losses.values()]).sum()
    if check and not math.isfinite(total.item()):
        check_batch_has_rows(batch, where)
        raise TrainingError(why_not_finite(run.model, losses, batch, where))
    return total, losses


def _inputs_in_a_tuple(model: nn.Module, batch: Any, inputs_of: Callable[[Any], Inputs]) -> str:
    """Says of a batch in which the inputs are a tuple that the model takes them side by side; "" of any other."""
    try:
        return packed_inputs(model.forward, inputs_of(batch))
    except CompressError:  # a batch of another form, which the objective understands
        return ""


def _backward(run: mixed.Run, loss: Tensor, batch: Any, where: str) -> None:
    try:
        run.backward(loss)
    except (RuntimeError, MemoryError) as error:
        raise_if_worker_died(error, where)
        if is_out_of_memory(error):
            raise TrainingError(f"{where}: no memory for the gradients of {shapes_of(batch)}; {LESS_MEMORY}") from error
        raise TrainingError(f"{where}: no gradient of the loss: {first_line(error)}; does Task(predict=...) detach?") from error
