"""Quantization-aware training: the same graph as static quantization, with gradients (Jacob et al., 1712.05877)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from compresskit.errors import SettingError
from compresskit.quant.insert import Quantized
from compresskit.quant.observers import MinMax, MovingAverage, Observer
from compresskit.quant.static import calibration_inputs, quantize_static
from compresskit.quant.targets import X86, Target
from compresskit.surgery import frozen_copy
from compresskit.task import Inputs, Task
from compresskit.train import Train, fit_


def prepare_qat(
    model: nn.Module,
    batches: Iterable[Inputs],
    *,
    target: Target = X86,
    observer: Callable[[], Observer] = partial(MovingAverage, momentum=0.01),
    skip: tuple[str, ...] = (),
) -> Quantized:
    """A quantized copy, ready to be trained in any loop.

    Its ranges start at those of the batches and then follow the training, in the observer's way, until
    `model.observe_(False)` holds them still; that should be some way before the end, so that the weights can settle.
    """
    quantized = quantize_static(model, batches, target=target, observer=MinMax, skip=skip)
    quantized.observe_(True, observer)
    return quantized.train()


@dataclass(frozen=True, kw_only=True)
class QAT(Train):
    """Quantize, then train with the rounding in place.

    target, observer, samples, skip: as in `StaticQuant`; the observer follows the ranges while training.
    freeze: share of the training after which ranges hold still.
    The other settings are those of `Train`. The defaults are gentle, and gradients are clipped: with BatchNorm folded nothing
    else holds the scale of a layer (ResNet-20 under soft targets at a rate of 0.002: chance level after 60 steps, and stable
    at 0.01 with the clip).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"float"})
    keeps: ClassVar[frozenset[str]] = frozenset({"dense"})

    optimizer: Callable[..., torch.optim.Optimizer] = field(default=partial(torch.optim.SGD, lr=1e-3, momentum=0.9))
    clip: float | None = 1.0
    target: Target = X86
    observer: Callable[[], Observer] = partial(MovingAverage, momentum=0.01)
    samples: int = 512
    skip: tuple[str, ...] = ()
    freeze: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.freeze <= 1:
            raise SettingError(f"QAT(freeze=...): wanted a share of the training in [0, 1], got {self.freeze}")
        if self.samples < 1:
            raise SettingError(f"QAT(samples=...): wanted a whole number >= 1, got {self.samples}")

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model = model.to(task.device).eval()
        goal = task if task.reference is not None else replace(task, reference=frozen_copy(model))
        quantized = prepare_qat(
            model, calibration_inputs(task, self.samples), target=self.target, observer=self.observer, skip=self.skip
        )

        def hold(step: int, steps: int) -> None:
            if step >= self.freeze * steps:
                quantized.observe_(False)

        hold(0, 1)

        fit_(quantized, goal, self, after_step=[hold], label="QAT")
        quantized.observe_(False)
        quantized.settle_()
        return quantized
