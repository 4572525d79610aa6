"""How long a training is, in batches, optimizer steps and epochs, and whether it can end an epoch as its data do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader

from compresskit.base.distributed import world_size
from compresskit.base.errors import CompressError, DataError, first_line
from compresskit.base.fingerprint.data import undisturbed
from compresskit.base.task import Inputs, Task, batch_size, call
from compresskit.graph.surgery import copy_model, no_attention_fastpath
from compresskit.mixed.formats.policy import BATCH_NORMS
from compresskit.train.modes import given_modes

_OF_ONE_ROW = "more than 1 value per channel"  # what torch says where BatchNorm has no variance
_REMEDY = "pass DataLoader(..., drop_last=True), or another batch_size"


@dataclass(frozen=True, kw_only=True)
class Length:
    """The length of a training.

    Attributes:
        steps: optimizer steps.
        epochs: passes over the data, the last of which may end early; None where the data have no known length.
        batches: of an epoch; None where it is not known.
        accumulate: batches of an optimizer step; the last step of an epoch may have fewer.
    """

    steps: int
    epochs: int | None
    batches: int | None
    accumulate: int

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch; None where it is not known."""
        return None if self.batches is None else math.ceil(self.batches / self.accumulate)

    def batches_until(self, step: int) -> int:
        """Batches of the first optimizer steps; where steps at the end of an epoch may have fewer, at most so many."""
        if self.batches is None or self.steps_per_epoch is None:
            return step * self.accumulate
        whole, rest = divmod(step, self.steps_per_epoch)
        return whole * self.batches + rest * self.accumulate


def check_last_row(
    model: nn.Module, task: Task, length: Length, where: str, *, prepare: Callable[[nn.Module], nn.Module] | None = None
) -> None:
    """Raise DataError where a training ends its first epoch at a batch of one row, of which BatchNorm has no statistics.

    Not where processes share the rows of a batch, nor for loaders that do not tell how many rows their last batch has.

    Args:
        model: is trained; a copy of it is run on that row.
        task: has the training data.
        length: of the training.
        where: begins the message.
        prepare: makes of a copy the model that is trained in its place, with all BatchNorm layers in train mode.
    """
    whole = length.batches is not None and length.steps * length.accumulate >= length.batches
    if not whole or world_size() > 1 or not any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        return
    if (inputs := _last_row(task)) is None:
        return
    try:
        probe = copy_model(model).to(task.device).train()
        for name, training in given_modes(model).items() if prepare is None else ():
            probe.get_submodule(name).train(training)
        failure = _failure(probe, inputs)
        if failure and prepare is not None:
            failure = _failure(prepare(copy_model(model).to(task.device)).train(), inputs)
    except CompressError:  # said where it is in the way of a training
        return
    if failure:
        raise DataError(
            f"{where}: the last batch of the training data has one row, of which BatchNorm has no statistics ({failure});"
            f" {_REMEDY}"
        )


def remedy_of_one_row(error: Exception) -> str:
    """What to do about an error of BatchNorm in a batch of one row; "" for another error."""
    return _REMEDY if _OF_ONE_ROW in str(error) else ""


def _last_row(task: Task) -> Inputs | None:
    """The inputs of the last training batch, if that has one row; None where it has more, is not known or cannot be read."""
    loader = task.train
    try:
        if isinstance(loader, list | tuple):
            inputs = task.inputs(loader[-1])
        elif type(loader) is DataLoader and loader.batch_size and not loader.drop_last and isinstance(loader.sampler, Sized):
            if len(loader.sampler) % loader.batch_size != (1 if loader.batch_size > 1 else 0):
                return None
            with undisturbed(loader):
                inputs = task.inputs(loader.collate_fn([loader.dataset[next(iter(loader.sampler))]]))
        else:
            return None
        return inputs if batch_size(inputs) == 1 else None
    except Exception:  # whatever a data set of the user raises, said with its batch where that is read
        return None


def _failure(model: nn.Module, inputs: Inputs) -> str:
    """What BatchNorm says of a batch of one row; "" where the model runs, or fails otherwise, which whole batches tell better."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), no_attention_fastpath():
            call(model, inputs)
    except Exception as error:
        return first_line(error) if _OF_ONE_ROW in str(error) else ""
    return ""
