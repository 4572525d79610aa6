"""Importance of runs of convolutions: `(MergeScoring) -> {name: what is lost without the activations}`, measured on data.

merged_error   how far the predictions move from the original model's: no labels (the default)
metric_loss    how much worse the task's metric gets on its validation data

Both look at the model as it will be: without the activations of the run, the padding moved, BatchNorm statistics estimated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compresskit.base.errors import SettingError
from compresskit.base.inputs import call_checked
from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs, Task, batch_size, first_tensor
from compresskit.graph.surgery import frozen_copy, no_attention_fastpath
from compresskit.graph.tracing import no_autocast
from compresskit.measure import evaluate
from compresskit.prune.depth.importance import dim_of_classes, mean_error
from compresskit.prune.depth.merging.merge_runs import ConvolutionRun, gather_
from compresskit.train.batchnorm import reestimate_batchnorm_


@dataclass(frozen=True, kw_only=True)
class MergeScoring:
    """What importances of runs read.

    model: the original. runs: those to score. batches: inputs. predictions: what the original model gives for each.
    task: for importances that need labels; None where there is none.
    """

    model: nn.Module
    runs: Sequence[ConvolutionRun]
    batches: Sequence[Inputs]
    predictions: Sequence[Tensor]
    task: Task | None

    def without(self, run: ConvolutionRun) -> nn.Module:
        """A copy of the model without the activations of a run, in eval mode; BatchNorm statistics are those of the batches."""
        changed = gather_(frozen_copy(self.model), [run])
        if any(batch_size(inputs) > 1 for inputs in self.batches):
            reestimate_batchnorm_(changed, self.batches)
        return changed


MergeImportance = Callable[[MergeScoring], dict[str, float]]


def predictions_of(model: nn.Module, batches: Sequence[Inputs], task: Task | None) -> list[Tensor]:
    """A changed model's predictions for every batch."""
    predict = first_tensor if task is None else task.predict
    with torch.no_grad(), no_attention_fastpath(), no_autocast():
        return [predict(call_checked(model, inputs, "calibration data")) for inputs in batches]


def merged_error(scoring: MergeScoring) -> dict[str, float]:
    """The error of the predictions without the activations of each run.

    The error is `distill.losses.match_predictions`: KL divergence for two or more classes, else a relative squared error.
    """
    errors, dim = {}, dim_of_classes(scoring.model, scoring.predictions, scoring.task)
    for run in progress_bar(scoring.runs, desc="score runs", unit="run"):
        got = predictions_of(scoring.without(run), scoring.batches, scoring.task)
        errors[run.name] = mean_error(got, scoring.predictions, dim)
    return errors


def metric_loss(scoring: MergeScoring) -> dict[str, float]:
    """How much worse the task's metric is on its validation data without the activations of each run."""
    task = scoring.task
    if task is None or task.prefers_higher is None:
        raise SettingError(
            "importance=metric_loss: it reads the metric; pass task=Task(val=..., metric=..., higher_is_better=...), or use"
            " merged_error"
        )
    before, sign = evaluate(scoring.model, task), 1 if task.prefers_higher else -1
    return {run.name: sign * (before - evaluate(scoring.without(run), task)) for run in scoring.runs}
