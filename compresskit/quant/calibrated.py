"""Settings and steps that static quantization and quantization-aware training share: both start from calibrated ranges.

CalibratedOptions     the keyword arguments of `quantize_static` and `prepare_qat`, for type checkers
CalibratedSettings    the same with their defaults and checks; the stages `StaticQuant` and `QAT` inherit them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypedDict

import torch
from torch import nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.inputs import Batches, first_and_all
from compresskit.base.settings import check_field_types
from compresskit.base.task import Inputs
from compresskit.graph.capture import Dynamic, check_dynamic, check_runs, inputs_inside
from compresskit.graph.surgery import check_is_module, copy_model, mode
from compresskit.quant.build import Strict
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.bit_widths import TARGET_BITS, Bits, BitWidths, check_bits, check_target_takes
from compresskit.quant.numerics.observers import Observer, check_observer
from compresskit.quant.numerics.targets import DEFAULT_DEPLOYMENT, X86, Deployment, Target, check_target

Choose = Literal["auto", "rules", "measure"]


class CalibratedOptions(TypedDict, total=False):
    """Keyword arguments that `quantize_static` and `prepare_qat` share; `CalibratedSettings` has their meanings and defaults."""

    target: Target
    observer: Callable[[], Observer] | None
    skip: tuple[str, ...]
    choose: Choose
    deployment: Deployment
    dynamic: Dynamic
    strict: Strict
    bits: BitWidths


@dataclass(frozen=True, kw_only=True)
class CalibratedSettings:
    """Settings of every quantization that starts from calibrated ranges.

    target: where the model will run.
    observer: makes one range observer for each activation; None for the default of the method.
    skip: dotted names of modules that stay float, or names of values that are not rounded.
    choose: "rules" places operators by the target's rules; "measure" then by their times on this machine; "auto" measures only
        what some methods need, see `choice`.
    deployment: threads and batch that are measured.
    dynamic: dimensions of the inputs that may vary, `(0, 2, 3)` for batch, height and width; see `graph.Dynamic`.
    strict: raise where a layer with weights would stay float that no other setting leaves float; "all": where any operator would.
    bits: of weights and activations, for all layers or by module; None in them for the target's. `Bits(weights=4)`.
    inside: dotted name of the one submodule that is quantized; None for the whole model.
    """

    target: Target = X86
    observer: Callable[[], Observer] | None = None
    skip: tuple[str, ...] = ()
    choose: Choose = "auto"
    deployment: Deployment = DEFAULT_DEPLOYMENT
    dynamic: Dynamic = (0,)
    strict: Strict = False
    bits: BitWidths = TARGET_BITS
    inside: str | None = None

    @property
    def choice(self) -> Literal["rules", "guard", "measure"]:
        """What `choose` means with the other settings; "guard" measures only where the rules turn out to cost time."""
        return "measure" if self.choose == "measure" else "rules"

    def check(self, where: str) -> None:
        """Raise SettingError, which begins with `where`, for a setting out of range."""
        check_field_types(self, where)
        check_dynamic(self.dynamic, f"{where}(dynamic=...)")
        check_target(self.target, where)
        check_observer(self.observer, where)
        check_bits(self.bits, where)
        if isinstance(self.bits, Bits):
            check_target_takes(self.bits, self.target, "")
        if not isinstance(self.strict, bool) and not (isinstance(self.strict, str) and self.strict == "all"):
            raise SettingError(f'{where}(strict=...): wanted False, True or "all", got {self.strict!r}')
        if self.choose not in ("auto", "rules", "measure"):
            raise SettingError(f'{where}(choose=...): wanted "auto", "rules" or "measure", got {self.choose!r}')
        if self.strict == "all" and self.choose == "measure":
            raise SettingError(f'{where}(strict="all"): choose="measure" leaves float what is faster so; leave one of them out')
        if not isinstance(self.deployment, Deployment):
            raise SettingError(f"{where}(deployment=...): wanted Deployment(threads=, batch=), got {self.deployment!r}")
        if self.choice == "rules" and self.deployment != DEFAULT_DEPLOYMENT:
            raise SettingError(f'{where}(deployment=...): only a measured choice depends on it; write choose="measure", too')


def check_samples(samples: int, where: str) -> None:
    """Raise SettingError unless a stage looks at one calibration sample at least."""
    if samples < 1:
        raise SettingError(f"{where}(samples=...): wanted a whole number >= 1, got {samples}")


def module_to_quantize(
    model: nn.Module, batches: Batches, inside: str | None, where: str
) -> tuple[nn.Module, Inputs, Iterator[Inputs]]:
    """Return the module to quantize, its inputs in the first batch, and all batches of the whole model.

    Raises DataError, which begins with `where`, where there is no batch; ModelError where the model is no module.
    """
    check_is_module(model, where)
    first, data = first_and_all(batches, where)
    if not inside:
        return model, first, data
    check_runs(model, first)
    with torch.no_grad(), mode(model, training=False):
        module, example = inputs_inside(model, first, inside)
    return module, example, data


def module_inputs(model: nn.Module, inputs: Inputs, inside: str) -> Inputs:
    """Return what a submodule receives when the whole model runs on a batch."""
    with torch.no_grad(), mode(model, training=False):
        return inputs_inside(model, inputs, inside)[1]


def inputs_to_quantize(model: nn.Module, batches: Iterable[Inputs], inside: str | None) -> list[Inputs]:
    """Return what the module to quantize receives when the whole model runs on each batch."""
    return [batch if not inside else module_inputs(model, batch, inside) for batch in batches]


def in_place_of(model: nn.Module, quantized: Quantized, inside: str | None) -> nn.Module:
    """Return the quantized module, or, where `inside` is given, a copy of the whole model with it in its place."""
    if not inside:
        return quantized
    whole = copy_model(model)
    whole.set_submodule(inside, quantized)
    return whole


def calibrate_inside(model: nn.Module, quantized: Quantized, batches: Iterable[Inputs], inside: str | None) -> nn.Module:
    """Calibrate a quantized module on batches of the whole model.

    Returns the quantized module, or, where `inside` is given, a copy of the whole model with it in its place.

    Raises ModelError where code around the part reads what only the float one has, as nn.TransformerEncoder of its first layer.
    """
    whole = in_place_of(model, quantized, inside)
    try:
        quantized.calibrate_(batches, through=whole if inside else None)
    except AttributeError as error:
        if not inside or error.obj is not quantized:
            raise
        raise ModelError(
            f"inside={inside!r}: code around this module reads its {error.name!r}, which a quantized one does not have; quantize"
            " the module that holds that code, or the whole model"
        ) from error
    return whole
