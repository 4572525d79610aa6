"""Functions of the user that a training calls after its steps and epochs: `Train(on_step=..., on_epoch=...)`.

What they are told does not hold on to the training, and they draw from copies of the random number generators, so that a training
is the same with them and without. Of several processes, the first calls them, and what they freeze at the end of an epoch is
frozen in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import Tensor

from compresskit.base import distributed, randomness
from compresskit.base.errors import SettingError, TrainingError, first_line


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What `on_step` is told after an optimizer step.

    Attributes:
        stage: folder of the stage in a run, such as "2-prune"; empty outside of a recipe.
        training: label of the training in its stage, such as "fine-tune".
        step: optimizer steps that are done.
        steps: of the whole training.
        epoch: from 1.
        losses: by name, of the step's last batch: scalars without a gradient, on the device; reading one waits for the device.
            Of several processes, those of process 0's rows.
        learning_rates: of this step, one for each param group.
        metric: of the validation set, where this step was followed by a measurement; else None.
    """

    stage: str
    training: str
    step: int
    steps: int
    epoch: int
    losses: dict[str, Tensor]
    learning_rates: list[float]
    metric: float | None


@dataclass(frozen=True, kw_only=True)
class EpochReport:
    """What `on_epoch` is told after an epoch.

    Attributes:
        stage, training: as in `StepReport`.
        epoch: from 1.
        epochs: of the whole training; None where the length of the data is not known.
        step, steps: optimizer steps that are done, and of the whole training.
        loss: mean over the batches of the epoch; of several processes, over the rows of all.
        metric: of the validation set, where it was measured after the last step of the epoch; else None.
        learning_rates: of the last step, one for each param group.
    """

    stage: str
    training: str
    epoch: int
    epochs: int | None
    step: int
    steps: int
    loss: float
    metric: float | None
    learning_rates: list[float]


OnStep = Callable[[StepReport], Any]
OnEpoch = Callable[[EpochReport], Any]
#: One function, or several that are called in their order.
Callbacks = Callable[..., Any] | Sequence[Callable[..., Any]] | None


def as_callbacks(given: Any, where: str) -> tuple[Callable[..., Any], ...]:
    """Return callbacks as a tuple of functions.

    Raises:
        SettingError: `given` is no function, and no list of functions.
    """
    functions = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    for function in functions:
        if not callable(function):
            raise SettingError(f"{where}: wanted a function, or a list of functions, got {type(function).__name__}")
    return functions


def call_back(functions: Sequence[Callable[..., Any]], report: Any, where: str) -> None:
    """Tell functions of a report, in process 0; the global random number generators are afterwards as they were.

    Args:
        functions: take the report.
        report: what they are told.
        where: names the setting and the place in the training, for messages.

    Raises:
        TrainingError: one of them raised an error; the message names it.
    """
    if not functions or distributed.rank() != 0:
        return
    with randomness.generators_kept():
        for function in functions:
            try:
                function(report)
            except Exception as error:
                named = isinstance(function, FunctionType | MethodType | BuiltinFunctionType)
                name = function.__qualname__ if named else type(function).__qualname__
                raise TrainingError(
                    f"{where}: the callback {name} failed: {type(error).__name__}: {first_line(error)}; mend it or leave"
                    " it out, then run the same command again"
                ) from error
