"""Quantization-aware training: the same graph as static quantization, with gradients (Jacob et al., 1712.05877).

BatchNorm lives on while its statistics follow the batches (`live`), weights are rounded as they will be folded, ranges follow
the activations or are learned (LSQ, Esser et al., 1902.08153), and after a share of the training all of it holds still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compresskit.base.errors import SettingError
from compresskit.base.inputs import Batches, calibration_inputs
from compresskit.base.task import Task
from compresskit.distill.losses.logits import match_predictions
from compresskit.distill.objectives.imitate import imitate
from compresskit.graph.capture import Dynamic
from compresskit.graph.surgery import frozen_copy
from compresskit.quant.build import build_quantized
from compresskit.quant.numerics.observers import MinMax, MovingAverage, Observer, check_observer
from compresskit.quant.numerics.targets import X86, Target, check_target
from compresskit.quant.static import calibrated_in, part_of
from compresskit.train.train import Train, fit_


def prepare_qat(
    model: nn.Module,
    batches: Batches,
    *,
    target: Target = X86,
    observer: Callable[[], Observer] = partial(MovingAverage, momentum=0.01),
    learned: bool = False,
    skip: tuple[str, ...] = (),
    dynamic: Dynamic = (0,),
    strict: bool = False,
    inside: str | None = None,
) -> Any:
    """A quantized copy, ready to be trained in any loop: a `Quantized`; with `inside`, a copy of the model that holds one there.

    Its ranges start at those of the batches and then follow the training, in the observer's way, or are learned; BatchNorm
    statistics follow too. `quantized.freeze_statistics_()` freezes both, some way before the end, so that the weights can adapt;
    `quantized.convert_()` after the last step folds BatchNorm for good and nudges scales away from rounding boundaries, which
    exporting alone does not. Under DistributedDataParallel ranges are joined over ranks. target, skip, dynamic, strict,
    inside: as in `quantize_static`.
    """
    check_target(target, "prepare_qat")
    check_observer(observer, "prepare_qat")
    part, example, everything = part_of(model, batches, inside, "prepare_qat")
    quantized = build_quantized(part, example, target, MinMax, skip=skip, dynamic=dynamic, strict=strict, trainable=True)
    whole = calibrated_in(model, quantized, everything, inside)
    quantized.unfold_batchnorm_(learned=learned)
    if not learned:
        quantized.observe_(True, observer)
    return whole.train()


@contextmanager
def zeros_kept(model: nn.Module) -> Iterator[None]:
    """Inside the block weights that are exactly zero get no gradient, so that a pruned network stays as sparse as it came."""
    handles = []
    for parameter in model.parameters():
        zero = parameter.detach() == 0
        if parameter.ndim >= 2 and bool(zero.any()):

            def stop(grad: Tensor, zero: Tensor = zero) -> Tensor:
                return grad.masked_fill(zero, 0)

            handles.append(parameter.register_hook(stop))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, kw_only=True)
class QAT(Train):
    """Quantize, then train with the rounding in place.

    objective: what the float model says (soft targets) and the task's loss, half of each, where nothing is given.
    target, observer, samples, skip, dynamic, strict, inside: as in `StaticQuant`; the observer follows the ranges while training.
    learned: the scales are parameters (LSQ) and no observer follows.
    freeze: share of the training after which ranges and BatchNorm statistics hold still.
    The other settings are those of `Train`, with a gentle default rate. Weights that are zero stay zero.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"float"})
    keeps: ClassVar[frozenset[str]] = frozenset({"dense"})

    optimizer: Callable[..., torch.optim.Optimizer] = field(default=partial(torch.optim.SGD, lr=1e-3, momentum=0.9))
    target: Target = X86
    observer: Callable[[], Observer] = partial(MovingAverage, momentum=0.01)
    learned: bool = False
    samples: int = 512
    skip: tuple[str, ...] = ()
    dynamic: Dynamic = (0,)
    strict: bool = False
    inside: str | None = None
    freeze: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_target(self.target, "QAT")
        check_observer(self.observer, "QAT")
        if not 0 <= self.freeze <= 1:
            raise SettingError(f"QAT(freeze=...): wanted a share of the training in [0, 1], got {self.freeze}")
        if self.samples < 1:
            raise SettingError(f"QAT(samples=...): wanted a whole number >= 1, got {self.samples}")

    @property
    def starts_from_trained(self) -> bool:
        """True: it quantizes the incoming model before it trains."""
        return True

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model = model.to(task.device).eval()
        goal = task if task.reference is not None else replace(task, reference=frozen_copy(model))
        whole = prepare_qat(
            model,
            calibration_inputs(task, self.samples),
            target=self.target,
            observer=self.observer,
            learned=self.learned,
            skip=self.skip,
            dynamic=self.dynamic,
            strict=self.strict,
            inside=self.inside,
        )
        quantized = whole.get_submodule(self.inside) if self.inside else whole

        def hold(step: int, steps: int) -> None:
            if step >= self.freeze * steps:
                quantized.freeze_statistics_()

        hold(0, 1)
        # At temperature 1 this is the cross-entropy to labels half of which are the float model's predictions. With less of the
        # task's loss a network that is trained further would stay where the float model was (benchmarks/quantize_cifar.md).
        objective = self.objective or imitate(model, loss=match_predictions, weight=0.5, task_weight=0.5)
        with zeros_kept(whole):
            fit_(whole, goal, self, objective=objective, after_step=[hold], label="QAT")
        quantized.convert_()
        return whole
