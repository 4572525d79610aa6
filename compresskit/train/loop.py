"""The inside of `fit_`: epochs and steps, where they are saved, and how they go on after an interruption."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from compresskit import mixed
from compresskit.base import distributed, randomness
from compresskit.base.errors import CheckpointError, CompressError, DataError, TrainingError, memory_ran_out
from compresskit.base.objective import Losses, Objective
from compresskit.base.task import Task, shapes_of
from compresskit.mixed.formats.parallel import is_sharded
from compresskit.train.cursor import Feed, refuse_dead_worker
from compresskit.train.progress import Training, module_states, restore_modules_

Hook = Callable[[int, int], None]
#: What goes wrong where a state is another's: one CheckpointError is made of it.
FOREIGN = (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError)
LESS_MEMORY = (
    "lower the batch size (accumulate= keeps the step what it was), or take a precision of half the bytes, such as"
    " mixed.MASTER_BF16; then run the same command again"
)


class How(Protocol):
    """What the loop reads of a `Train`."""

    @property
    def epochs(self) -> int: ...

    @property
    def accumulate(self) -> int: ...

    @property
    def schedule(self) -> Callable[[float], float]: ...


class Loop:
    """What goes on from epoch to epoch: the position in the data, the number of the step, and with it the learning rates."""

    def __init__(
        self,
        run: mixed.Run,
        goal: Objective,
        task: Task,
        how: How,
        steps: int,
        *,
        hooks: Sequence[Hook],
        remember: Sequence[Any],
        training: Training | None,
    ) -> None:
        self.run, self.goal, self.task, self.how, self.steps, self.hooks = run, goal, task, how, steps, hooks
        self.remember, self.training = remember, training
        self.rates = [group["lr"] for group in run.optimizer.param_groups]
        self.step = 0

    def train(self, batches: int, label: str) -> None:
        """All epochs, or what is left of them."""
        how, training = self.how, self.training
        self.feed = Feed(self.task.batches("train"), torch.get_rng_state())
        torch.set_rng_state(randomness.forked(self.feed.stream, salt=distributed.rank()))
        try:
            if training is not None:
                training.progress.stop.training = True
                if (state := training.latest()) is not None:
                    self._resume_(state)
            first = max(1, self.feed.number)
            done = (first - 1) * batches + self.feed.position
            bar = tqdm(total=how.epochs * batches, initial=done, desc=label, disable=None, leave=False, unit="batch")
            with bar, distributed.common_statistics(self.run.model):
                for number in range(first, how.epochs + 1):
                    self._epoch(number, batches, bar)
        finally:
            torch.set_rng_state(self.feed.stream)
            if training is not None:
                training.progress.stop.training = False

    def _epoch(self, number: int, batches: int, bar: tqdm[Any]) -> None:
        """Train on every batch once; DataError where there are not as many as the loader said."""
        run, accumulate = self.run, self.how.accumulate
        for batch in self.feed.epoch():
            seen = self.feed.position
            if seen > batches:
                raise DataError(f"the training loader has length {batches} and gave more batches; it must not change")
            start = (seen - 1) // accumulate * accumulate  # the last step of an epoch may have fewer batches
            together = min(accumulate, batches - start)
            part, weight = distributed.part_of(batch, self.feed.loader)
            self.goal.advance(self.step / self.steps)
            # Off the CPU a look at the loss waits for the device, so it is rare there.
            look = run.device.type == "cpu" or seen % 50 == 0 or seen == batches
            total = _backward(run, self.goal, part, (together, weight), f"epoch {number}, batch {seen}", look=look)
            if seen % accumulate == 0 or seen == batches:
                self._update(f"epoch {number}, batch {seen}")
            bar.update()
            if seen % 10 == 0 and not bar.disable:
                bar.set_postfix(epoch=f"{number}/{self.how.epochs}", loss=f"{total.item():.3f}")
        if self.feed.position != batches:
            raise DataError(f"the training loader has length {batches} and gave {self.feed.position} batches; it must not change")

    def _update(self, where: str) -> None:
        for group, rate in zip(self.run.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.how.schedule(self.step / self.steps)
        save = self._share()
        try:
            self.run.step()
        except (RuntimeError, MemoryError) as error:
            refuse_dead_worker(error, where)
            if memory_ran_out(error):
                raise TrainingError(f"{where}: the optimizer's step ran out of memory; {LESS_MEMORY}") from error
            raise
        self.step += 1
        for hook in self.hooks:
            hook(self.step, self.steps)
        training = self.training
        if distributed.ranks() == 1:  # a signal may have come meanwhile
            save = training is not None and (training.progress.stop.asked is not None or training.due(self.step))
        if save and training is not None:
            training.save(self._state(), self.step)
            training.stopped(where)

    def _share(self) -> bool:
        """Average the gradients of all processes; whether to save after this step, on which they agree in the same message."""
        training, run = self.training, self.run
        if distributed.ranks() == 1:
            return False
        save = training is not None and (training.progress.stop.asked is not None or training.due(self.step + 1))
        found = [scaler.found_inf for scaler in run.scalers.values()]
        # FSDP2 has averaged its shards already.
        own = [] if is_sharded(run.model) else [*run.unscaled().values(), *found]
        (asked,) = distributed.mean_(own, [float(save)])
        return asked > 0

    def _state(self) -> dict[str, Any]:
        """All that must be known to go on from here with the same bits; tensors are not copied."""
        own = {
            "modules": module_states(self.run.model),
            "goal": self.goal.resume_state(),
            "remember": [thing.resume_state() for thing in self.remember],
            "random": randomness.captured(),
        }
        return {
            "step": self.step,
            "run": self.run.state_dict(copy=False),
            "processes": distributed.gathered(own),
            "snapshots": self.task.snapshots or {},
            "feed": self.feed.resume_state(),
        }

    def _resume_(self, state: Mapping[str, Any]) -> None:
        try:
            self.run.load_state_dict(state["run"])
            own = own_(state)
            restore_modules_(self.run.model, own["modules"])
            if own["goal"] is not None:
                self.goal.resume_from_(own["goal"])
            restore_others_(self.remember, self.task, own["remember"], state["snapshots"])
            self.step = int(state["step"])
            self.feed.resume_from_(state["feed"])
            randomness.restore_(own["random"])
        except CompressError:
            raise
        except FOREIGN as error:
            raise foreign(self.training, error) from error


def begin_alike_(model: nn.Module) -> None:
    """Let processes that did not do the same before begin alike: with one model, and one order of the data."""
    if distributed.ranks() > 1 and not is_sharded(model):
        randomness.restore_(distributed.first_of(randomness.captured))
        distributed.equal_(model)


class Left:
    """What a training leaves behind: the tensors that the model had before it, which it changed."""

    def __init__(self, *, model: nn.Module, task: Task, remember: Sequence[Any]) -> None:
        self.model, self.task, self.remember = model, task, remember
        self.names = [name for name, _ in _tensors(model)]  # an objective may put more on the model meanwhile

    def behind(self) -> dict[str, Any]:
        """The state after the training."""
        now = dict(_tensors(self.model))
        own = {
            "modules": module_states(self.model),
            "remember": [thing.resume_state() for thing in self.remember],
            "random": randomness.captured(),
        }
        return {
            "values": {name: now[name] for name in self.names},
            "processes": distributed.gathered(own),
            "snapshots": self.task.snapshots or {},
            "held": [randomness.state_of(g) for g in randomness.held_by(self.task.batches("train"))],
        }

    def take_(self, state: Mapping[str, Any]) -> None:
        """Leave the same behind, without the training."""
        try:
            own, values = dict(_tensors(self.model)), state["values"]
            if own.keys() != values.keys() or any(own[n].shape != v.shape or own[n].dtype != v.dtype for n, v in values.items()):
                raise ValueError("the tensors of the model are others")
            with torch.no_grad():
                for name, value in values.items():
                    own[name].copy_(value)
            process = own_(state)
            restore_modules_(self.model, process["modules"])
            restore_others_(self.remember, self.task, process["remember"], state["snapshots"])
            for generator, saved in zip(randomness.held_by(self.task.batches("train")), state["held"], strict=True):
                randomness.put_(generator, saved)
            randomness.restore_(process["random"])
        except CompressError:
            raise
        except FOREIGN as error:
            raise foreign(None, error) from error


def own_(state: Mapping[str, Any]) -> dict[str, Any]:
    """What this process alone had; where there are more or fewer of them now, what the first had."""
    found = state["processes"]
    return found[distributed.rank() if len(found) == distributed.ranks() else 0]  # type: ignore[no-any-return]


def restore_others_(remember: Sequence[Any], task: Task, states: Sequence[Any], snapshots: Mapping[float, Any]) -> None:
    """What a training changes besides the model: objects of its stage, and snapshots of the task."""
    for thing, saved in zip(remember, states, strict=True):
        thing.resume_from_(saved)
    for share, values in snapshots.items():
        assert task.snapshots is not None
        task.snapshots[share].update(values)


def foreign(training: Training | None, error: Exception) -> CheckpointError:
    """The error for a checkpoint that is whole and does not fit."""
    where = "" if training is None else f"{training.progress.folder}: "
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return CheckpointError(f"{where}the checkpoint is of another training ({first}); delete the folder to start that stage again")


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _backward(run: mixed.Run, goal: Objective, batch: Any, shares: tuple[int, float], where: str, *, look: bool) -> Tensor:
    """shares: batches that make a step together, and the weight of this process's rows."""
    try:
        losses = goal(run, batch)
    except (RuntimeError, IndexError, ValueError, TypeError, MemoryError) as error:
        if isinstance(error, CompressError):
            raise
        refuse_dead_worker(error, where)
        if distributed.gone(error):
            raise TrainingError(f"{where}: another process is gone; all end. Run the same command again to go on") from error
        if memory_ran_out(error):
            raise TrainingError(f"{where}: no memory for tensors of shape {shapes_of(batch)}; {LESS_MEMORY}") from error
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TrainingError(f"{where}: the loss cannot be computed (tensors of shape {shapes_of(batch)}): {first}") from error
    total = torch.stack([loss.float() for loss in losses.values()]).sum()
    if look and not math.isfinite(total.item()):
        raise TrainingError(_why_not_finite(run.model, losses, batch, where))
    try:
        run.backward(total / shares[0] * shares[1])
    except (RuntimeError, MemoryError) as error:
        refuse_dead_worker(error, where)
        if memory_ran_out(error):
            raise TrainingError(f"{where}: no memory for the gradients of {shapes_of(batch)}; {LESS_MEMORY}") from error
        raise TrainingError(
            f"{where}: no gradient of the loss: {str(error).splitlines()[0]}; does Task(predict=...) detach?"
        ) from error
    return total.detach()


def _why_not_finite(model: nn.Module, losses: Losses, batch: Any, where: str) -> str:
    named = ", ".join(f"{name} = {loss.item():g}" for name, loss in losses.items())
    tensors = [v for v in torch.utils._pytree.tree_leaves(batch) if isinstance(v, Tensor) and v.is_floating_point()]
    bad = next((name for name, p in model.named_parameters() if not torch.isfinite(p).all()), None)
    if bad is not None:
        cause = f"the first parameter that is not finite is {bad}; lower the learning rate or set Train(clip=1.0)"
    elif any(not torch.isfinite(v).all() for v in tensors):
        cause = "the batch itself holds nan or inf; clean the data"
    else:
        cause = "all parameters are finite, so the forward pass overflowed; lower the learning rate, or look at the loss"
    return f"{where}: the loss is not finite ({named}); {cause}"
