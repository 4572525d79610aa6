"""What a training does beside its steps: it measures the metric on its way, keeps the best weights, and ends early."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compresskit import mixed
from compresskit.base import distributed, randomness
from compresskit.base.errors import SettingError
from compresskit.base.packing import module_states, restore_module_states_
from compresskit.base.task import Task, accuracy
from compresskit.graph.surgery import mode
from compresskit.measure import evaluate

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What `Train(on_step=...)` is told after an optimizer step.

    Attributes:
        step: optimizer steps that are done.
        steps: of the whole training.
        epoch: from 1.
        losses: by name, of the step's last batch: scalars without a gradient, on the device; reading one waits for the device.
        learning_rates: of this step, one for each param group.
        metric: of the validation set, where this step was followed by a measurement; else None.
    """

    step: int
    steps: int
    epoch: int
    losses: dict[str, Tensor]
    learning_rates: list[float]
    metric: float | None


OnStep = Callable[[StepReport], None]


class Validation:
    """Measures the task's metric during a training, and remembers the best one with its weights.

    Measuring draws from copies of the random number generators, so that it leaves the training as it would be without.

    Args:
        run: the model under its precision policy, in which it is measured.
        task: has the validation data and the metric.
        every: optimizer steps between two measurements.
        keep_best: whether the weights of the best measurement are kept.
        patience: measurements in a row without a better one after which the training is over; None for no end.
        label: of the training, in the log.

    Raises:
        SettingError: whether a smaller metric is a better one has to be known and is not said.
    """

    def __init__(self, *, run: mixed.Run, task: Task, every: int, keep_best: bool, patience: int | None, label: str) -> None:
        self.run, self.task, self.every, self.keep_best, self.patience, self.label = run, task, every, keep_best, patience, label
        if (keep_best or patience is not None) and task.lower_is_better is None and task.metric is not accuracy:
            raise SettingError(
                "Train(keep_best=..., patience=...): which of two metrics is better is not said; pass"
                " Task(lower_is_better=True) for an error, False for a score"
            )
        self.best, self.best_step, self.worse = 0.0, 0, 0  # step 0: nothing was measured yet
        self.values: dict[str, Tensor] = {}
        self.modules: Any = None

    def measure(self, step: int) -> float:
        """Measure the metric after a step."""
        before = randomness.rng_state()
        with mode(self.run.model, training=False):
            here = evaluate(self.run, self.task, label=f"{self.label}, validation")
        randomness.set_rng_state_(before)
        metric = distributed.on_rank_zero(lambda: here)
        sign = -1 if self.task.lower_is_better else 1
        if not self.best_step or sign * metric > sign * self.best:
            self.best, self.best_step, self.worse = metric, step, 0
            if self.keep_best:
                tensors = self.run.named_masters() | dict(self.run.model.named_buffers())
                self.values = {name: _in_full(value).detach().clone() for name, value in tensors.items()}
                self.modules = module_states(self.run.model)
        else:
            self.worse += 1
        log.info("%s: step %d, metric %.4g, best %.4g of step %d", self.label, step, metric, self.best, self.best_step)
        return metric

    @property
    def is_over(self) -> bool:
        """Whether patience has ended."""
        return self.patience is not None and self.worse >= self.patience

    @torch.no_grad()
    def restore_best_(self, model: nn.Module) -> None:
        """Give a trained fp32 model the best weights and buffers, where they are kept."""
        if not self.values:
            return
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in self.values:
                tensor.copy_(self.values[name])
        restore_module_states_(model, self.modules)
        log.info("%s: the weights of step %d are kept, metric %.4g", self.label, self.best_step, self.best)

    def resume_state(self) -> dict[str, Any]:
        """Return the best so far, and for how many measurements nothing was better."""
        best = {"best": self.best, "best_step": self.best_step, "worse": self.worse}
        return {**best, "values": self.values, "modules": self.modules}

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Continue from what `resume_state` returned."""
        self.best, self.best_step, self.worse = float(state["best"]), int(state["best_step"]), int(state["worse"])
        self.values, self.modules = dict(state["values"]), state["modules"]


def _in_full(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() and value.itemsize < 4 else value
