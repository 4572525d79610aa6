"""The check before a run: everything that would otherwise fail hours later is tried once on the first batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import CompressError, DataError
from compresskit.base.stage import Stage
from compresskit.base.task import IGNORED, RunningMetric, Task, call, first_rows, shapes_of
from compresskit.graph.capture import capture, check_runs
from compresskit.graph.quantized import is_quantized
from compresskit.graph.surgery import copy_model
from compresskit.train.objective import supervised_loss
from compresskit.train.train import Train


def preflight_check(model: nn.Module, task: Task, stages: Sequence[Stage] = ()) -> None:
    """Run the model, its capture, the loss and the metric once, on the first batch of each loader.

    The model is not changed. Raises ModelError where the model does not run or cannot be captured, SettingError where a training
    has no data, DataError where the loss or the metric does not fit the data, where a loader is empty, or where a training counts
    epochs of data without a length.
    """
    for which in ("val", "train", "calibration"):
        if which != "val" and getattr(task, which) is None:
            continue
        task.length(which) if which == "val" else task.known_length(which)
        batch = next(iter(task.batches(which)))
        inputs, target = task.split(batch) if which != "calibration" else (task.inputs(batch), None)
        probe = copy_model(model).to(task.device)
        check_runs(probe, inputs)
        with torch.no_grad():
            predictions = task.predict(call(probe.eval(), inputs))
            try:
                if which == "train":
                    supervised_loss(task, predictions, target)
                elif which == "val" and not isinstance(task.metric, RunningMetric) and not _all_ignored(task, target):
                    task.score(predictions, target)
            except CompressError:
                raise
            except Exception as error:
                what = "loss" if which == "train" else "metric"
                first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise DataError(
                    f"Task({what}=...) fails on the first batch of {which} (predictions {tuple(predictions.shape)}, target"
                    f" {shapes_of(target) or type(target).__name__}): {first_line}"
                ) from error
    for training in (training for stage in stages for training in _trainings_in(stage)):
        training.length(task)
    probe = copy_model(model).to(task.device).eval()
    for stage in stages:
        stage.rehearse(probe, task)
    if not is_quantized(model):
        capture(model, first_rows(task.example(), 2))


def _trainings_in(stage: Stage) -> Iterator[Train]:
    """The trainings of a stage: itself, and those among its settings."""
    values: list[Any] = [vars(stage).get(field.name) for field in fields(stage)] if is_dataclass(stage) else []
    yield from (value for value in [stage, *values] if isinstance(value, Train))


def _all_ignored(task: Task, target: Any) -> bool:
    """Whether no label of a batch counts, as in one of padding alone; the whole validation set may still hold some that do."""
    labels = target.unique().tolist() if isinstance(target, Tensor) and not target.is_floating_point() else [0]
    return set(labels) <= {IGNORED, task.ignore_index}
