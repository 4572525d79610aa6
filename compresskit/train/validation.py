"""What a training does beside its steps: it measures the metric on its way, keeps the best weights, and ends early."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from compresskit import mixed
from compresskit.base import distributed, randomness
from compresskit.base.errors import SettingError, TrainingError, is_out_of_memory
from compresskit.base.packing import module_states, restore_module_states_
from compresskit.base.progress import announce
from compresskit.base.task import Task
from compresskit.graph.surgery import mode, owner
from compresskit.graph.tracing import autocasts_of_caller
from compresskit.measure import evaluate
from compresskit.mixed.compiled_model import as_written

log = logging.getLogger(__name__)


class Validation:
    """Measures the task's metric during a training, and remembers the best one with its weights.

    Measuring draws from copies of the random number generators, so that it leaves the training as it would be without.

    Args:
        run: the model under its precision policy, in which it is measured.
        task: has the validation data and the metric.
        every: optimizer steps between two measurements.
        keep_best: whether the weights of the best measurement are kept.
        patience: measurements in a row without a better one after which the training is over; None for no end.
        asked: whether the user asked for the metric. If not, a metric that cannot be computed is only logged.
        label: of the training, in the log.

    Raises:
        SettingError: whether a larger metric is a better one has to be known and is not said.
    """

    def __init__(
        self, *, run: mixed.Run, task: Task, every: int, keep_best: bool, patience: int | None, asked: bool, label: str
    ) -> None:
        self.run, self.task, self.every, self.keep_best, self.patience, self.label = run, task, every, keep_best, patience, label
        if (keep_best or patience is not None) and task.prefers_higher is None:
            raise SettingError(
                "Train(keep_best=..., patience=...): which of two metrics is better is not said; pass"
                " Task(higher_is_better=False) for an error, True for a score"
            )
        self.asked, self.failed = asked, False
        self.best, self.best_step, self.worse = 0.0, 0, 0  # step 0: nothing was measured yet
        self.values: dict[str, Tensor] = {}
        self.modules: Any = None

    def measure(self, step: int) -> float | None:
        """Measure the metric after a step; None where it cannot be computed and nobody asked for it."""
        here = self._evaluate()
        if (metric := distributed.on_rank_zero(lambda: here)) is None:
            return None
        sign = -1 if self.task.prefers_higher is False else 1
        if not self.best_step or sign * metric > sign * self.best:
            self.best, self.best_step, self.worse = metric, step, 0
            if self.keep_best:
                tensors = self.run.named_masters() | dict(self.run.model.named_buffers())
                self.values = {name: _in_full(value).detach().clone() for name, value in tensors.items()}
                self.modules = module_states(self.run.model)
        else:
            self.worse += 1
        return metric

    def _evaluate(self) -> float | None:
        generators = randomness.generators_in(self.task.batches("val"))
        before = randomness.rng_state(), [randomness.generator_state(generator) for generator in generators]
        try:
            autocasts = autocasts_of_caller()  # in which the training computes, too
            with mode(self.run.model, training=False), as_written(), ExitStack() as stack:
                for autocast in autocasts:
                    stack.enter_context(autocast)
                return evaluate(self.run, self.task, label=f"{self.label}, validation")
        except Exception as error:
            if is_out_of_memory(error):
                raise TrainingError(
                    f"{self.label}: no memory to measure the metric; lower the batch size of Task(val=...), pass a metric with"
                    " update and compute, which keeps no predictions, or leave it out by Train(validate_every=0)"
                ) from error
            if self.asked:
                raise
            if not self.failed:
                log.warning("%s: the metric is not measured during the training: %s", self.label, error)
            self.failed = True
            return None
        finally:
            randomness.set_rng_state_(before[0])
            for generator, state in zip(generators, before[1], strict=True):
                randomness.set_generator_state_(generator, state)

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
            if name not in self.values:
                continue
            if tensor.shape == self.values[name].shape:
                tensor.copy_(self.values[name])
            else:  # a buffer that the model made larger since
                module, leaf = owner(model, name)
                module._buffers[leaf] = self.values[name].to(tensor)
        restore_module_states_(model, self.modules)
        announce(
            log, "%s: the weights of step %d are kept, %s %.4g", self.label, self.best_step, self.task.metric_name, self.best
        )

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
