"""How much a quantized model loses against its float model, in percent: by a task's metric, or without labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.task import Inputs, Task, batch_size, call
from compresskit.graph.differences import without_fills
from compresskit.graph.surgery import mode
from compresskit.measure import evaluate
from compresskit.metrics import OutputAgreement
from compresskit.quant.effort.samples import float_leaves
from compresskit.quant.model import Quantized

PERFECT_DECIBELS = 150.0  # of an agreement, from which on only the arithmetic of fp32 differs


class MetricLoss:
    """What a model loses of a task's metric on its validation data.

    A metric whose float value lies in 0..1, as an accuracy does, loses points (hundredths); another one a percentage of it. Of an
    agreement with the float model in dB, which that model has without end, the power of the error is lost (0.1 % at 30 dB).

    name: what is measured. samples: on how many. best: of the float model. whole: puts a quantized part into the whole model.
    """

    def __init__(self, model: nn.Module, task: Task, whole: Callable[[Quantized], nn.Module], *, where: str = "repair") -> None:
        """Measure the float model. Raises SettingError, which begins with `where`, where nothing says which metric is better."""
        if task.prefers_higher is None:
            raise SettingError(
                f"{where}(task=...): whether more of {task.metric_name} is better is not said; pass Task(higher_is_better=...)"
            )
        self.task, self.whole, self.name = task, whole, task.metric_name
        self.sign = 1 if task.prefers_higher else -1
        self.best = evaluate(model, task, label="float model")
        self.unit = 1.0 if 0 <= self.best <= 1 else max(abs(self.best), 1e-300)
        agrees = isinstance(task.metric, OutputAgreement) and task.metric.outputs in ("psnr", "sqnr")
        self.of_error = agrees and self.best >= PERFECT_DECIBELS
        self.samples = sum(batch_size(task.inputs(batch)) for batch in task.batches("val"))

    def __call__(self, quantized: Quantized) -> float:
        """The loss in percent; below 0 where the quantized model is better, infinite where its metric is nan or infinite."""
        found = evaluate(self.whole(quantized), self.task, finite=False)
        if not math.isfinite(found):
            return math.inf
        return 100 * 10 ** (-found / 10) if self.of_error else 100 * self.sign * (self.best - found) / self.unit


class OutputLoss:
    """What a model loses by the float model's own outputs, without labels: the power of the error, in percent (0.1 % are 30 dB).

    It is the mean over the samples, each at most 100 %, so that one sample of unusual size does not count for all. Of classes,
    (N, classes), the mean of a sample's outputs does not count, and the loss is at least what the accuracy would lose if the
    float model's probabilities were right: the probability (softmax of the float outputs) of its class, less that of the class
    that the quantized model gives. That alone is too kind: on data that the model was trained on it is sure of its classes, and
    hardly any of them changes.

    name: what is measured. samples: on how many.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Inputs], *, where: str = "repair") -> None:
        """Run the float model. Raises ModelError, which begins with `where`, where it has no output in floating point."""
        self.batches, self.samples = list(batches), sum(map(batch_size, batches))
        self.wanted = [self._outputs(model, inputs) for inputs in self.batches]
        if not self.wanted[0]:
            raise ModelError(f"{where}: {type(model).__name__} has no floating point output to compare; pass task=")
        first = self.wanted[0][0]
        self.classes = len(self.wanted[0]) == 1 and first.ndim == 2 and first.shape[1] > 1
        self.name = "outputs, of classes" if self.classes else "outputs"

    def __call__(self, quantized: Quantized) -> float:
        """The loss in percent, at least 0."""
        probability = error = 0.0
        for inputs, wanted in zip(self.batches, self.wanted, strict=True):
            rows = batch_size(inputs)
            outputs = self._outputs(quantized, inputs)
            pairs = [without_fills(a.double(), b.double()) for a, b in zip(wanted, outputs, strict=True)]
            if self.classes:
                probability += float(_lost_probability(*pairs[0]))
                pairs = [(a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)) for a, b in pairs]
            error += sum(_relative_error(clean, got, rows) for clean, got in pairs) / len(pairs)
        return 100 * max(error, probability) / max(1, self.samples)

    @staticmethod
    def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
        with torch.no_grad(), mode(model, training=False):
            return [value.clone() for value in float_leaves(call(model, inputs))]


def _lost_probability(clean: Tensor, got: Tensor) -> Tensor:
    """Probability, by the clean outputs (N, classes), of their class less that of the other's class; sum of the samples."""
    chances = clean.softmax(1)
    return (chances.amax(1) - chances.gather(1, got.argmax(1, keepdim=True))[:, 0]).sum()


def _relative_error(clean: Tensor, got: Tensor, rows: int) -> float:
    """Power of the error relative to that of the clean output, at most 1; sum of the samples."""
    parts = (
        (clean.reshape(rows, -1), got.reshape(rows, -1)) if clean.ndim and clean.shape[0] == rows else (clean[None], got[None])
    )
    clean, got = (part.flatten(1) for part in parts)
    relative = (clean - got).square().sum(1) / clean.square().sum(1).clamp(min=1e-300)
    return float(relative.clamp(max=1).nan_to_num(1.0).mean()) * rows
