"""Layers of signs: weights and inputs of one bit, with learned factors (XNOR-Net++, Bulat and Tzimiropoulos, 1909.13863).

binarize_(model, batches)                      replaces layers by `Signed` ones, whose factors are fitted to what the layers gave
Binarize(finetune=ck.Distill(epochs=5))        the same as a stage, and the training that makes it useful
sign_formats(model)                            one bit for these weights, for `quantize_weights(overrides=)`
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.inputs import Batches, calibration_inputs, each_inputs, not_finite, not_finite_error
from compresskit.base.settings import check_field_types
from compresskit.base.stage import PROPERTIES, Stage
from compresskit.base.task import Inputs, Task
from compresskit.graph.masks import masks_of
from compresskit.graph.replacements import Signed, SignGradient, replace_module_
from compresskit.graph.surgery import frozen_copy
from compresskit.graph.tracing import no_modes_of_caller
from compresskit.quant.numerics.palette import Palette
from compresskit.quant.qat.replaced_layers import (
    Layer,
    channel_axis,
    check_plain_weight,
    check_skip,
    layers_to_replace,
    run_watched,
)
from compresskit.train.batchnorm import reestimate_batchnorm_
from compresskit.train.train import Train, fit_

log = logging.getLogger(__name__)

WINDOW = 2.0  # in mean distances of the inputs from their thresholds: a gradient reaches most of them


class _InputMeans:
    """Means of the input channels of one layer, and the sizes of its outputs behind the channels, over all its calls."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.count = 0
        self.sizes: set[tuple[int, ...]] = set()

    def __call__(self, layer: Layer, x: Tensor, y: Tensor) -> None:
        axis = channel_axis(layer)
        rows = x.movedim(axis, -1).flatten(0, -2).double()
        self.total, self.count = self.total + rows.sum(0), self.count + len(rows)
        self.sizes.add(tuple(y.shape[y.ndim + axis + 1 :]))


class _Fit:
    """Least squares of a layer's outputs by those of signs, one factor for each output channel (and an offset for a bias)."""

    def __init__(self, signed: Signed) -> None:
        self.signed = signed
        self.distance: Tensor | float = 0.0
        self.sums: Tensor | float = 0.0
        self.inputs = self.rows = 0

    def __call__(self, layer: Layer, x: Tensor, y: Tensor) -> None:
        axis = channel_axis(layer)
        far = (x.movedim(axis, -1) - self.signed.threshold).abs()
        self.distance, self.inputs = self.distance + far.double().sum(), self.inputs + far.numel()
        signs, wanted = (v.movedim(axis, -1).flatten(0, -2).double() for v in (self.signed(x), y))
        if self.signed.bias is not None:
            signs = signs - self.signed.bias
        self.sums = self.sums + torch.stack([(signs * wanted).sum(0), (signs * signs).sum(0), signs.sum(0), wanted.sum(0)])
        self.rows += len(signs)

    def write_(self, signed: Signed) -> None:
        """Set threshold, window, factors of channels, and bias."""
        assert isinstance(self.sums, Tensor)
        product, square, ones, wanted = self.sums
        if signed.bias is not None:
            product, square = product - ones * wanted / self.rows, square - ones * ones / self.rows
        factor = torch.where(square > 0, product / square.clamp(min=1e-12), 0.0)
        signed.threshold.copy_(self.signed.threshold)
        if (far := float(self.distance) / self.inputs) > 0:
            signed.window.fill_(WINDOW * far)
        signed.factors[0].copy_(factor)
        if signed.bias is not None:
            signed.bias.copy_((wanted - factor * ones) / self.rows)


@no_modes_of_caller()
def binarize_(
    model: nn.Module,
    batches: Batches,
    *,
    weights: bool = True,
    activations: bool = True,
    gradient: SignGradient = "polynomial",
    factors: Literal["all", "channels"] = "all",
    ends: bool = False,
    skip: tuple[str, ...] = (),
) -> nn.Module:
    """Replace linear layers and convolutions by layers of signs, in place, and return the model; it needs training afterwards.

    Thresholds start at the mean of each input channel, factors of output channels (and biases) from least squares against what
    the layer gave, those of rows and columns at 1. A layer of signs that is there already takes these settings, and keeps its
    values.

    Args:
        model: a float model.
        batches: inputs without labels, or one batch; the model runs on them twice.
        weights, activations, gradient: see `graph.replacements.Signed`. Training is often done first with one of the two alone.
        factors: "all": of channels, and of each row and column of the output, whose size is then fixed; "channels": only those.
        ends: replace the first and the last layer that run, too, which lose most.
        skip: dotted names of modules that stay, with all layers inside.

    Raises SettingError for names that the model does not have and for signs of nothing; ModelError where no layer is left to
    replace, and for a model with masks of pruned weights, since a sign is never zero; DataError where a layer reads nan or
    infinite values, as of data that hold such.
    """
    _check(weights, activations, "binarize_")
    if masks_of(model) is not None:
        raise ModelError(f"{type(model).__name__} has masks, and a sign is never zero; binarize the model before it is pruned")
    modules = dict(model.named_modules())
    check_skip(model, skip, "binarize_")
    data = list(each_inputs(batches, "binarize_"))
    means = _input_means(model, data)
    chosen = layers_to_replace(model, list(means), skip, ends=ends)
    fits: dict[str, _Fit] = {}
    settings: dict[str, Any] = {"weights": weights, "activations": activations, "gradient": gradient}
    for name in chosen:
        module: Any = modules[name]
        if isinstance(module, Signed):
            module.weights, module.activations, module.gradient = weights, activations, gradient
            continue
        module = check_plain_weight(module, name)
        sizes = means[name].sizes if factors == "all" and len(means[name].sizes) == 1 else {()}
        trial = Signed(copy.deepcopy(module), *sizes, **settings)
        with torch.no_grad():
            trial.threshold.copy_(torch.as_tensor(means[name].total) / means[name].count)
        fits[name] = _Fit(trial)
    run_watched(model, data, fits.get)
    for name, fit in fits.items():
        module = modules[name]
        made = Signed(module, fit.signed.sizes, **settings)
        with torch.no_grad():
            fit.write_(made)
        replace_module_(model, name, made)
    return model


def _input_means(model: nn.Module, data: Sequence[Inputs]) -> dict[str, _InputMeans]:
    """Means of the inputs of all layers that run. Raises DataError where one is nan or infinite."""
    means: dict[str, _InputMeans] = {}
    run_watched(model, data, lambda name: means.setdefault(name, _InputMeans()))
    if bad := next((name for name, found in means.items() if not_finite(found.total)), ""):
        raise not_finite_error("binarize_", f"the input of {bad}", data)
    return means


def _check(weights: bool, activations: bool, where: str) -> None:
    if not (weights or activations):
        raise SettingError(f"{where}(weights=False, activations=False): no sign would be taken; leave one of them out")


def sign_formats(model: nn.Module) -> dict[str, Palette]:
    """One bit for the weights of each layer of signs: `quantize_weights(model, batch, overrides=sign_formats(model))`."""
    signed = [(name, module) for name, module in model.named_modules() if isinstance(module, Signed) and module.weights]
    return {f"{name}.layer.weight": Palette(bits=1) for name, _ in signed}


@dataclass(frozen=True, kw_only=True)
class Binarize(Stage):
    """Replace layers by layers of signs, re-estimate BatchNorm, and train.

    Args:
        finetune: the training that makes it useful, with a learning-rate schedule of its own; None trains nothing.
        samples: of inputs that thresholds, factors and BatchNorm statistics are fitted to.
        weights, activations, gradient, factors, ends, skip: see `binarize_`.
    """

    needs: ClassVar[frozenset[str]] = PROPERTIES

    finetune: Train | None
    samples: int = 512
    weights: bool = True
    activations: bool = True
    gradient: SignGradient = "polynomial"
    factors: Literal["all", "channels"] = "all"
    ends: bool = False
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_field_types(self)
        _check(self.weights, self.activations, "Binarize")
        if self.samples < 1:
            raise SettingError(f"Binarize(samples=...): wanted a whole number >= 1, got {self.samples!r}")

    def calibration_samples(self, model: nn.Module) -> int:
        return self.samples

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model = model.to(task.device)
        guided = task if task.reference is not None else replace(task, reference=frozen_copy(model))
        batches = list(calibration_inputs(task, self.samples, "read layers"))
        binarize_(
            model,
            batches,
            weights=self.weights,
            activations=self.activations,
            gradient=self.gradient,
            factors=self.factors,
            ends=self.ends,
            skip=self.skip,
        )
        reestimate_batchnorm_(model, batches)
        if self.finetune is not None:
            fit_(model, guided, self.finetune, label="binary training")
        return model.eval()
