"""Static quantization: ranges from calibration batches, no training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, overload

import torch
from torch import nn

from compresskit.base.errors import SettingError
from compresskit.base.inputs import Batches, calibration_inputs, first_and_all
from compresskit.base.settings import check_field_types
from compresskit.base.stage import Stage
from compresskit.base.task import Inputs, Task
from compresskit.graph.capture import Dynamic, check_runs, inputs_inside
from compresskit.graph.surgery import mode
from compresskit.quant.build import build_quantized
from compresskit.quant.latency_search import slower_in_integers
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.observers import Observer, check_observer
from compresskit.quant.numerics.targets import X86, Target, check_target
from compresskit.quant.passes.rounding_boundaries import nudge_scales_


@overload
def quantize_static(  # noqa: D418  every public name says what it is
    model: nn.Module,
    batches: Batches,
    *,
    target: Target = X86,
    observer: Callable[[], Observer] | None = None,
    skip: tuple[str, ...] = (),
    choose: Literal["rules", "measure"] = "rules",
    smooth: bool = True,
    dynamic: Dynamic = (0,),
    strict: bool = False,
    inside: None = None,
) -> Quantized:
    """The whole model, quantized."""


@overload
def quantize_static(  # noqa: D418  every public name says what it is
    model: nn.Module,
    batches: Batches,
    *,
    target: Target = X86,
    observer: Callable[[], Observer] | None = None,
    skip: tuple[str, ...] = (),
    choose: Literal["rules", "measure"] = "rules",
    smooth: bool = True,
    dynamic: Dynamic = (0,),
    strict: bool = False,
    inside: str | None,
) -> nn.Module:
    """A copy of the model with one part quantized."""


def quantize_static(
    model: nn.Module,
    batches: Batches,
    *,
    target: Target = X86,
    observer: Callable[[], Observer] | None = None,
    skip: tuple[str, ...] = (),
    choose: Literal["rules", "measure"] = "rules",
    smooth: bool = True,
    dynamic: Dynamic = (0,),
    strict: bool = False,
    inside: str | None = None,
) -> nn.Module:
    """A quantized copy of a float model, its ranges found on batches of inputs.

    Args:
        model: any float module; it is left as it was.
        batches: an iterable of inputs (tensors, tuples or dicts), or one batch; the first is also the example that the model is
            captured with.
        target: where it will run.
        observer: makes one range observer for each rounded value; None takes `HistogramMSE` for what linear layers over tokens
            read, where nothing in integers makes it, and `MinMax` for all else.
        skip: dotted names of modules that stay float.
        choose: "rules" puts in integers what the target's rules say; "measure" then takes back to float what runs faster so on
            this machine, timed in ONNX Runtime (some seconds for each part that is tried).
        smooth: even out, on a copy and by the first batch, the channels that linear layers read (`smooth_`); the function of the
            float model stays what it was; and leave the first and last layer of a transformer float where they cost next to
            nothing (`sensitive_ends`). For models without layer norms it does nothing.
        dynamic: dimensions of the inputs that may vary, `(0, 2, 3)` for batch, height and width; see `graph.Dynamic`.
        strict: raise where an operator is one that no rule knows, instead of leaving it float.
        inside: dotted name of a submodule. It alone is quantized, with what it receives when the model runs on the batches,
            and the result is a copy of the whole model that holds the quantized part in its place (a detection model, say, with
            `inside="backbone", dynamic=(0, 2, 3)`).

    Raises DataError where there is no batch; ModelError where the model cannot be captured, is quantized already, or has
    nothing that runs in integers.
    """
    check_target(target, "quantize_static")
    check_observer(observer, "quantize_static")
    check_choose(choose, "quantize_static")
    part, example, everything = part_of(model, batches, inside, "quantize_static")
    floating = slower_in_integers(part, example, target, skip=skip, dynamic=dynamic) if choose == "measure" else {}
    quantized = build_quantized(
        part, example, target, observer, skip=skip, floating=floating, dynamic=dynamic, strict=strict,
        smooth=example if smooth else None,
    )  # fmt: skip
    whole = calibrated_in(model, quantized, everything, inside)
    nudge_scales_(quantized.body)
    quantized.keep_masked_()
    return whole


def part_of(model: nn.Module, batches: Batches, inside: str | None, where: str) -> tuple[nn.Module, Inputs, Iterator[Inputs]]:
    """The module that is to be quantized, what it receives in the first batch, and all batches of the whole model."""
    first, everything = first_and_all(batches, where)
    if not inside:
        return model, first, everything
    check_runs(model, first)
    with torch.no_grad(), mode(model, training=False):
        part, example = inputs_inside(model, first, inside)
    return part, example, everything


def calibrated_in(model: nn.Module, quantized: Quantized, batches: Iterable[Inputs], inside: str | None) -> nn.Module:
    """The quantized model, or a copy of the whole model with it in its place; its ranges are found on batches of the whole."""
    if not inside:
        quantized.calibrate_(batches)
        return quantized
    whole = copy.deepcopy(model)
    whole.set_submodule(inside, quantized)
    quantized.calibrate_(batches, through=whole)
    return whole


def check_choose(choose: str, where: str) -> None:
    """Raise SettingError for anything but the two ways of placing."""
    if choose not in ("rules", "measure"):
        raise SettingError(f'{where}(choose=...): wanted "rules" or "measure", got {choose!r}')


@dataclass(frozen=True, kw_only=True)
class StaticQuant(Stage):
    """Quantize after training.

    target: where the model will run.
    observer: makes one range observer for each rounded value; None chooses, see `quantize_static`.
    samples: how many calibration samples to look at, from `Task(calibration=...)` or the training data.
    skip: dotted names of modules that stay float.
    choose, smooth, dynamic, strict, inside: as in `quantize_static`.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"float"})
    keeps: ClassVar[frozenset[str]] = frozenset({"dense"})

    target: Target = X86
    observer: Callable[[], Observer] | None = None
    samples: int = 512
    skip: tuple[str, ...] = ()
    choose: Literal["rules", "measure"] = "rules"
    smooth: bool = True
    dynamic: Dynamic = (0,)
    strict: bool = False
    inside: str | None = None

    def __post_init__(self) -> None:
        check_field_types(self)
        check_target(self.target, "StaticQuant")
        check_observer(self.observer, "StaticQuant")
        check_choose(self.choose, "StaticQuant")
        if self.samples < 1:
            raise SettingError(f"StaticQuant(samples=...): wanted a whole number >= 1, got {self.samples}")

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model = model.to(task.device).eval()
        return quantize_static(
            model,
            calibration_inputs(task, self.samples),
            target=self.target,
            observer=self.observer,
            skip=self.skip,
            choose=self.choose,
            smooth=self.smooth,
            dynamic=self.dynamic,
            strict=self.strict,
            inside=self.inside,
        )
