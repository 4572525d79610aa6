"""Trained ternary quantization (TTQ, Zhu et al., 1612.01064): weights are -a, 0 or b, with two learned scales for each layer.

ternarize_(model, batches)                       layers whose weights are computed so from float weights, for training
bake_ternary_(model)                             the same values as plain weights again
Ternarize(finetune=ck.Distill(epochs=5))         all of it as a stage
ternary_formats(model)                           two bits for these weights, for `quantize_weights(overrides=)`
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.inputs import Batches, calibration_inputs, first_and_all
from compresskit.base.settings import check_field_types
from compresskit.base.stage import PROPERTIES, Stage
from compresskit.base.task import Task
from compresskit.graph.masks import masks_of
from compresskit.graph.surgery import frozen_copy, parameter_owners
from compresskit.graph.tracing import no_modes_of_caller
from compresskit.quant.numerics.palette import Palette
from compresskit.quant.qat.replaced_layers import Layer, check_plain_weight, check_skip, layers_to_replace, run_watched
from compresskit.train.batchnorm import reestimate_batchnorm_
from compresskit.train.train import Train, fit_


class TernaryWeight(nn.Module):
    """A parametrization: `positive` above the threshold, -`negative` below minus it, 0 between.

    The threshold is a fraction of the largest |weight|. The gradient of a float weight is that of its value, times the scale of
    its side outside of the threshold and times 1 inside, as in the paper; scales have their true gradient.

    weight: the float weight; both scales start at the mean |weight| of their side. threshold: the fraction.
    """

    def __init__(self, weight: Tensor, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold
        weight = weight.detach()
        edge = threshold * weight.abs().max()
        sides = [side[side > edge] for side in (weight, -weight)]
        means = [side.mean() if side.numel() else weight.new_ones(()) for side in sides]
        self.positive, self.negative = (nn.Parameter(mean.clone()) for mean in means)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight's values, of its shape."""
        edge = self.threshold * weight.detach().abs().max()
        above, below = weight > edge, weight < -edge
        values = torch.where(above, self.positive, torch.where(below, -self.negative, 0.0))
        if not torch.is_grad_enabled() or torch.compiler.is_exporting():
            return values
        slope = torch.where(above, self.positive, torch.where(below, self.negative, 1.0)).detach()
        return values + slope * (weight - weight.detach())  # adds zeros


@no_modes_of_caller()
def ternarize_(
    model: nn.Module, batches: Batches, *, threshold: float = 0.05, ends: bool = False, skip: tuple[str, ...] = ()
) -> nn.Module:
    """Give linear layers and convolutions ternary weights, in place, and return the model; it needs training afterwards.

    Args:
        model: a float model.
        batches: inputs without labels, or one batch; the first shows which layers run, and in which order.
        threshold: fraction of a layer's largest |weight| up to which weights are zero.
        ends: the first and the last layer that run, too, which lose most.
        skip: dotted names of modules that stay, with all layers inside.

    Raises SettingError for a threshold out of range and for unknown names; ModelError where no layer is left, for a model with
    masks of pruned weights, and for a weight that is shared or parametrized already.
    """
    _check_threshold(threshold, "ternarize_")
    check_skip(model, skip, "ternarize_")
    if masks_of(model) is not None:
        raise ModelError(f"{type(model).__name__} has masks, which ternary weights would not keep; ternarize it first")
    order: dict[str, None] = {}
    run_watched(model, [first_and_all(batches, "ternarize_")[0]], lambda name: order.setdefault(name))
    owners, modules = parameter_owners(model), dict(model.named_modules())
    chosen = layers_to_replace(model, list(order), skip, ends=ends)
    for name in chosen:
        layer = check_plain_weight(modules[name], name)
        if len(owners[id(layer.weight)]) > 1:
            raise ModelError(f"{name}: other layers share its weight; leave it out with skip=")
    for name in chosen:
        layer = modules[name]
        parametrize.register_parametrization(layer, "weight", TernaryWeight(layer.weight, threshold))
    return model


def bake_ternary_(model: nn.Module) -> nn.Module:
    """Make the values of ternary weights plain parameters, in place, and return the model."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight") and isinstance(module.parametrizations["weight"][0], TernaryWeight):  # type: ignore[index]
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    return model


def ternary_formats(model: nn.Module) -> dict[str, Palette]:
    """Two bits for each weight of a linear layer or convolution with at most three values, of which one is 0.

    For `quantize_weights(model, batch, overrides=ternary_formats(model))`, which stores exactly these values. In a model with
    BatchNorm each channel has values of its own, since BatchNorm is folded into the weights before it.
    """
    modules = dict(model.named_modules())
    folds = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules.values())
    layers = [(name, module) for name, module in modules.items() if isinstance(module, Layer)]
    found = {f"{name}.weight" if name else "weight": layer.weight.detach().unique() for name, layer in layers}
    made = Palette(bits=2, group_size=1 if folds else None)
    return {name: made for name, values in found.items() if len(values) <= 3 and bool((values == 0).any())}


def _check_threshold(threshold: float, where: str) -> None:
    if not 0 <= threshold < 1:
        raise SettingError(f"{where}(threshold=...): wanted a fraction in [0, 1), got {threshold}")


@dataclass(frozen=True, kw_only=True)
class Ternarize(Stage):
    """Train ternary weights, and leave them as plain weights of three values for each layer.

    Args:
        finetune: the training, with a learning-rate schedule of its own; None trains nothing.
        samples: of inputs that BatchNorm statistics are re-estimated on before it.
        threshold, ends, skip: see `ternarize_`.
    """

    needs: ClassVar[frozenset[str]] = PROPERTIES

    finetune: Train | None
    samples: int = 512
    threshold: float = 0.05
    ends: bool = False
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_field_types(self)
        _check_threshold(self.threshold, "Ternarize")
        if self.samples < 1:
            raise SettingError(f"Ternarize(samples=...): wanted a whole number >= 1, got {self.samples!r}")

    def calibration_samples(self, model: nn.Module) -> int:
        return self.samples

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model = model.to(task.device)
        guided = task if task.reference is not None else replace(task, reference=frozen_copy(model))
        batches = list(calibration_inputs(task, self.samples, "read layers"))
        ternarize_(model, batches, threshold=self.threshold, ends=self.ends, skip=self.skip)
        reestimate_batchnorm_(model, batches)
        if self.finetune is not None:
            fit_(model, guided, self.finetune, label="ternary training")
        return bake_ternary_(model.eval())
