"""Quantization-aware training: train a model with the rounding of its target in place (Jacob et al., 1712.05877).

quantize, calibrate -> unfold BatchNorm -> train; late in the training freeze BatchNorm statistics and ranges -> convert

Weights are rounded as they will be after BatchNorm is folded, while its statistics follow the batches. The ranges of activations
follow the batches, too, or are learned (LSQ, Esser et al., 1902.08153).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Unpack, overload

import torch
from torch import Tensor, nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.inputs import Batches, calibration_inputs
from compresskit.base.packing import Resumable
from compresskit.base.settings import refuse_unknown_settings
from compresskit.base.task import Task
from compresskit.distill.losses import match_predictions
from compresskit.distill.objectives.imitate import imitate
from compresskit.graph.capture import module_path
from compresskit.graph.normalize import aten
from compresskit.graph.surgery import frozen_copy, get_tensor
from compresskit.graph.tracing import no_modes_of_caller
from compresskit.quant.build import build_quantized
from compresskit.quant.calibrated import (
    CalibratedOptions,
    CalibratedSettings,
    calibrate_inside,
    check_samples,
    in_place_of,
    inputs_to_quantize,
    module_to_quantize,
)
from compresskit.quant.calibration.layer_outputs import integer_layers
from compresskit.quant.measured_placement.by_ranges import float_by_ranges
from compresskit.quant.measured_placement.latency_search import measured_choice
from compresskit.quant.measured_placement.repeated_calls import SharedScales
from compresskit.quant.measured_placement.shown_ranges import ShownRanges, shown_batches
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.bit_widths import refuse_one_bit
from compresskit.quant.numerics.observers import MinMax, MovingAverage
from compresskit.quant.qat.carried_hooks import carry_hooks_
from compresskit.quant.qat.left_out import keep_frozen_, say_what_is_left_out
from compresskit.quant.qat.oscillations import FreezeOscillating, Oscillations, damped
from compresskit.quant.qat.progressive import ProgressiveBits, check_progressive
from compresskit.quant.qat.stale_statistics import renew_stale_statistics_
from compresskit.train.modes import given_modes
from compresskit.train.param_groups import groups_of
from compresskit.train.train import Train, fit_

log = logging.getLogger(__name__)


class QATOptions(CalibratedOptions, total=False):
    """Keyword arguments of `prepare_qat`; `QATSettings` has their defaults."""

    learned: bool
    offsets: bool


@dataclass(frozen=True, kw_only=True)
class QATSettings(CalibratedSettings):
    """Settings of a model that is prepared for quantization-aware training; `prepare_qat` explains them."""

    learned: bool = False
    offsets: bool = False

    def check(self, where: str) -> None:
        """Raise SettingError, which begins with `where`, for a setting out of range."""
        super().check(where)
        if self.offsets and not self.learned:
            raise SettingError(f"{where}(offsets=True): zero points are learned together with scales; write learned=True, too")
        if self.offsets and not self.target.zero_points:
            raise SettingError(f"{where}(offsets=True): {self.target.name} knows no zero point but 0; leave offsets out")


@overload
def prepare_qat(model: nn.Module, batches: Batches, *, inside: None = None, **options: Unpack[QATOptions]) -> Quantized: ...
@overload
def prepare_qat(model: nn.Module, batches: Batches, *, inside: str | None, **options: Unpack[QATOptions]) -> nn.Module: ...
def prepare_qat(model: nn.Module, batches: Batches, *, inside: str | None = None, **options: Unpack[QATOptions]) -> nn.Module:
    """Return a quantized copy of a float model, ready to be trained in any loop.

    Call `quantized.freeze_statistics_()` some time before the end of the training: it freezes BatchNorm statistics and ranges, so
    that the weights can adapt to them. Call `quantized.convert_()` after the last step: it folds BatchNorm and nudges scales away
    from rounding boundaries, which exporting alone does not. Under DistributedDataParallel ranges are joined over ranks.

    The graph that is trained is that of the deployed model, in eval mode: it has no dropout nor anything else that is random in
    train mode alone (noise, stochastic depth, the samples of a variational autoencoder), and a layer that runs several times,
    with another BatchNorm behind each, has a weight for each call; both are logged. A parameter that the gradient of an output
    reaches in train mode alone, such as the width of such noise, is a warning where both modes return the same outputs. What a
    model computes of parameters once for eval mode, such as position biases of LeViT, is computed in the graph, so that these are
    trained; where it cannot be, a warning names them.

    Gradient hooks of parameters (`parameter.register_hook`) act on those that are trained in their place; those of parameters
    that are merged into others, and backward hooks of modules, are not called, which is logged, too.

    Args:
        model: any float module; it is not changed.
        batches: an iterable of inputs, or one batch, from which the ranges start; the first captures the model.
        inside: dotted name of a submodule that alone is quantized; the result is then a copy of the whole model.
        observer: follows the range of each activation during the training; default `MovingAverage(momentum=0.01)`.
        learned: make the scales parameters (LSQ) instead; no observer follows then. Default False.
        offsets: learn the zero points of activations, too (LSQ+, Bhalgat et al., 2004.09576), of all but those that a ReLU makes.
            Default False.
        target, skip, choose, deployment, dynamic, strict, bits: as in `quantize_static`.

    Returns the quantized model in train mode; with `inside`, the whole model.
    Raises DataError where there is no batch; ModelError where the model cannot be captured, is quantized already, or has
    nothing that runs in integers; SettingError for settings that do not fit.
    """
    refuse_unknown_settings(QATSettings, (), options, {}, "prepare_qat")
    settings = QATSettings(inside=inside, **options)
    settings.check("prepare_qat")
    with no_modes_of_caller():
        return _prepare_model(model, batches, settings, "prepare_qat")[0]


def _prepare_model(model: nn.Module, batches: Batches, settings: QATSettings, where: str) -> tuple[nn.Module, Quantized]:
    """The prepared model, and the quantized part of it."""
    module, example, data = module_to_quantize(model, batches, settings.inside, where)
    if not settings.learned:
        refuse_one_bit(settings.bits, where)
    first, data = shown_batches(data)
    shown = ShownRanges(partial(inputs_to_quantize, model, first, settings.inside))
    separate = float_by_ranges(shown, settings)
    choice = measured_choice(module, example, settings, separate, trains=True)
    quantized = build_quantized(
        module,
        example,
        settings.target,
        None if settings.learned else MinMax,  # learned scales start from the range of least error, where bits are few
        skip=settings.skip,
        floating=choice.floating,
        dynamic=settings.dynamic,
        strict=settings.strict,
        bits=settings.bits,
        trainable=True,
        separate=separate,
        share=SharedScales(shown),
    )
    _refuse_zeros_in_one_bit(quantized, where)
    _refuse_max_norm(quantized, where)
    quantized.origin = replace(quantized.origin, measured=choice.record)
    whole = calibrate_inside(model, quantized, data, settings.inside)
    quantized.unfold_batchnorm_(learned=settings.learned, offsets=settings.offsets)
    keep_frozen_(module, quantized)
    say_what_is_left_out(module, example, quantized, where)
    carry_hooks_(model, whole, settings.inside, where)
    renew_stale_statistics_(quantized, example, where)
    if not settings.learned:
        quantized.observe_(True, settings.observer or partial(MovingAverage, momentum=0.01))
    return whole.train(), quantized


def _refuse_zeros_in_one_bit(quantized: Quantized, where: str) -> None:
    """Raise ModelError for a layer with zeros, as pruning leaves them, whose weights are to have one bit."""
    for layer in integer_layers(quantized):
        zeros = int((get_tensor(quantized.body, layer.weight) == 0).sum())
        if layer.quantizer.scheme.bits == 1 and zeros:
            raise ModelError(
                f"{where}: {quantized.placement.layers[layer.node.name]} has {zeros} weights that are zero, and one bit holds"
                " only -1 and 1 times a scale; take 2 bits for it, bits={...: Bits(weights=2)}"
            )


def _refuse_max_norm(quantized: Quantized, where: str) -> None:
    """Raise ModelError for a lookup that scales rows of its table down, through which no gradient goes in a graph."""
    for node in quantized.body.graph.nodes:
        trains = node.target is aten.embedding_renorm.default and get_tensor(quantized.body, node.args[0].target).requires_grad
        if trains:
            raise ModelError(
                f"{where}: {module_path(node) or node.name} looks up with max_norm, of which torch has no gradient in a graph;"
                " set max_norm=None and scale the rows down once before (`torch.renorm`), or take quantize_static"
            )


@contextmanager
def zeros_kept(model: nn.Module) -> Iterator[None]:
    """Give weights that are exactly zero no gradient inside the block, so that a pruned network stays as sparse as it is."""
    handles = []
    for parameter in model.parameters():
        zero = parameter.detach() == 0
        if parameter.ndim >= 2 and bool(zero.any()):

            def stop(grad: Tensor, zero: Tensor = zero) -> Tensor:
                if not grad.is_sparse:
                    return grad.masked_fill(zero, 0)
                grad = grad.coalesce()  # of rows that were looked up
                kept = grad.values().masked_fill(zero[tuple(grad.indices())], 0)
                return torch.sparse_coo_tensor(grad.indices(), kept, grad.shape, is_coalesced=True, check_invariants=False)

            handles.append(parameter.register_hook(stop))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, kw_only=True)
class QAT(QATSettings, Train):
    """Quantize a trained model as `prepare_qat` does, train it, and convert it. Weights that are zero stay zero.

    target, observer, learned, offsets, bits, skip, choose, deployment, dynamic, strict, inside: as in `prepare_qat`.
    samples: how many calibration samples the ranges start from, from `Task(calibration=...)` or the training data.
    freeze: fraction of the training after which BatchNorm statistics and ranges are frozen.
    progressive: bits of weights and activations that the training passes before the last ones, such as (8, 4), in equal parts of
        its first half; `()` for none.
    oscillations: what is done about weights that are rounded up and down in turn; by default nothing.
    objective: what is minimised. The default is half the task's loss and half the distance to the float model's predictions.
    The other settings are those of `Train`, with a small default learning rate.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"float"})
    keeps: ClassVar[frozenset[str]] = frozenset({"dense"})

    optimizer: Callable[..., torch.optim.Optimizer] = field(default=partial(torch.optim.SGD, lr=1e-3, momentum=0.9))
    samples: int = 512
    freeze: float = 0.8
    progressive: tuple[int, ...] = ()
    oscillations: Oscillations = field(default_factory=Oscillations)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("QAT")
        check_samples(self.samples, "QAT")
        if not 0 <= self.freeze <= 1:
            raise SettingError(f"QAT(freeze=...): wanted a fraction of the training in [0, 1], got {self.freeze}")
        check_progressive(self.progressive, "QAT")
        if not isinstance(self.oscillations, Oscillations):
            raise SettingError(f"QAT(oscillations=...): wanted quant.qat.Oscillations(...), got {self.oscillations!r}")

    @property
    def starts_from_trained(self) -> bool:
        """True: it quantizes the incoming model before it trains."""
        return True

    def check_fits(self, model: nn.Module, task: Task) -> None:
        """As `Train` does, with the names of learned scales, too, where there are some.

        Raises what `Train.check_fits` and `prepare_qat` raise.
        """
        super().check_fits(model, task)
        if not self.learned or self.param_groups is None:
            return
        module, example, _ = module_to_quantize(model, calibration_inputs(task, 2), self.inside, "QAT")
        quantized = build_quantized(
            module,
            example,
            self.target,
            None,
            skip=self.skip,
            dynamic=self.dynamic,
            bits=self.bits,
            trainable=True,
        )
        quantized.unfold_batchnorm_(learned=True, offsets=self.offsets)
        groups_of(in_place_of(model, quantized, self.inside), self.param_groups, quiet=True)

    def calibration_samples(self, model: nn.Module) -> int:
        return self.samples

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        if kept := [name for name, training in given_modes(model).items() if not training]:
            log.warning(
                "QAT: %s (%d in all), given in eval mode, are trained; QAT(freeze=0) keeps all statistics", kept[0], len(kept)
            )
        model = model.to(task.device).eval()
        with_reference = task if task.reference is not None else replace(task, reference=frozen_copy(model))
        with no_modes_of_caller():
            whole, quantized = _prepare_model(model, calibration_inputs(task, self.samples), self, "QAT")

        def freeze_late(step: int, steps: int) -> None:
            if step >= self.freeze * steps:
                quantized.freeze_statistics_()

        freeze_late(0, 1)
        # At temperature 1 this is the cross-entropy to labels half of which are the float model's predictions. With less of the
        # task's loss a network that is trained further would stay where the float model was (benchmarks/quantize_cifar.md).
        objective = self.objective or imitate(model, loss=match_predictions, weight=0.5, task_weight=0.5)
        how = self.oscillations
        if how.damping:
            objective = damped(objective, quantized, how.damping)
        freezers = [] if how.freezing is None else [FreezeOscillating(quantized, how.freezing, how.momentum)]

        def freeze_oscillating(step: int, steps: int) -> None:
            for freezer in freezers:
                freezer.step_()

        passed = [ProgressiveBits(quantized, self.progressive)] if self.progressive else []

        def change_bits(step: int, steps: int) -> None:
            for bits in passed:
                bits.step_(step / steps)

        change_bits(0, 1)
        hooks = [change_bits, freeze_late, freeze_oscillating]
        resumables: list[Resumable] = [*passed, *freezers]
        with zeros_kept(whole):
            fit_(whole, with_reference, self, objective=objective, after_step=hooks, resumables=resumables, label="QAT")
        for freezer in freezers:
            log.info("QAT: %.1f %% of the weights oscillated and were fixed", 100 * freezer.fraction())
        quantized.convert_()
        return whole
