"""Static quantization: ranges of activations are found on calibration batches; no training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Unpack, overload

from torch import nn

from compresskit.base.errors import SettingError
from compresskit.base.inputs import Batches, calibration_inputs
from compresskit.base.settings import check_field_types, refuse_unknown_settings
from compresskit.base.stage import Stage
from compresskit.base.task import Inputs, Task
from compresskit.graph.capture import Captured
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
from compresskit.quant.calibration.constant_values import warn_of_constants, warn_of_lost_channels
from compresskit.quant.effort.improve import FLOAT_MACS, TIMED_FLOAT_MACS, Effort, quantize_with_effort
from compresskit.quant.effort.samples import OutputError, batch_varies, halves, rows_within, tell_of_loss
from compresskit.quant.effort.trials import Build
from compresskit.quant.effort.unseen_sizes import SeenSizes
from compresskit.quant.measured_placement.beside_float import beside_float, measures
from compresskit.quant.measured_placement.by_ranges import float_by_ranges
from compresskit.quant.measured_placement.latency_search import measured_choice
from compresskit.quant.measured_placement.repeated_calls import SharedScales
from compresskit.quant.measured_placement.shown_ranges import ShownRanges, shown_batches
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.bit_widths import Bits, BitWidths, refuse_one_bit
from compresskit.quant.numerics.observers import Observer
from compresskit.quant.passes.prepare_graph import Origin, prepare_graph
from compresskit.quant.passes.rounding_boundaries import nudge_scales_

OUTPUT_SAMPLES = 64  # that show whether a channel of an output is lost, at most
LOSS_SAMPLES = 16  # that show what rounding leaves of the outputs, at most


class StaticOptions(CalibratedOptions, total=False):
    """Keyword arguments of `quantize_static`; `StaticSettings` has their defaults."""

    smooth: bool
    effort: Effort
    float_macs: float | None


@dataclass(frozen=True, kw_only=True)
class StaticSettings(CalibratedSettings):
    """Settings of static quantization; `quantize_static` explains them."""

    smooth: bool = True
    effort: Effort = "fast"
    float_macs: float | None = None

    def check(self, where: str) -> None:
        """Raise SettingError, which begins with `where`, for a setting out of range."""
        super().check(where)
        refuse_one_bit(self.bits, where)
        if self.effort not in ("fast", "balanced", "best"):
            raise SettingError(f'{where}(effort=...): wanted "fast", "balanced" or "best", got {self.effort!r}')
        if self.float_macs is None:
            return
        if self.effort == "fast":
            raise SettingError(
                f'{where}(float_macs=...): only the other effort levels measure the noise; write effort="balanced"'
            )
        if not 0 <= self.float_macs < 1:
            raise SettingError(f"{where}(float_macs=...): wanted a share of the MACs, 0 <= share < 1, got {self.float_macs!r}")

    @property
    def choice(self) -> Literal["rules", "guard", "measure"]:
        """As `choose` says; "auto" guards the speed of a model that an effort level may leave layers float in."""
        if self.choose == "auto" and self.effort != "fast" and not self.strict:
            return "guard"
        return super().choice

    @property
    def most_float(self) -> float:
        """The largest share of the MACs that an effort level may leave float."""
        if self.float_macs is not None:
            return self.float_macs
        shares = TIMED_FLOAT_MACS if measures(self) else FLOAT_MACS
        return 0.0 if self.strict else shares[self.effort]


@overload
def quantize_static(
    model: nn.Module, batches: Batches, *, inside: None = None, **options: Unpack[StaticOptions]
) -> Quantized: ...
@overload
def quantize_static(model: nn.Module, batches: Batches, *, inside: str | None, **options: Unpack[StaticOptions]) -> nn.Module: ...
def quantize_static(
    model: nn.Module, batches: Batches, *, inside: str | None = None, **options: Unpack[StaticOptions]
) -> nn.Module:
    """Return a quantized copy of a float model, its ranges found on calibration batches.

    Args:
        model: any float module; it is not changed.
        batches: an iterable of inputs (tensors, tuples or dicts), or one batch. All of them show the ranges; the first also
            captures the model, and some rows of the first ones show where values of very different ranges are joined, such as
            boxes and scores: what one scale for them would destroy stays float.
        inside: dotted name of a submodule. It alone is quantized, on the inputs that it receives when the model runs on the
            batches, and the result is a copy of the whole model with the quantized part in its place (a detection model, say,
            with `inside="backbone", dynamic=(0, 2, 3)`).
        target: where the model will run; default `X86`.
        observer: makes one range observer for each activation. The default takes `HistogramMSE` for values in float that only
            linear layers over tokens read, and `MinMax` for all others.
        skip: dotted names of modules that stay float; or names of values, as the placement prints them, that are not rounded, so
            that what reads them stays float, too.
        choose: "rules" runs in integers what the target's rules say; "measure" then takes back to float what is faster so on this
            machine, timed in ONNX Runtime; each part that is tried takes an export and up to some seconds. A line of the log and
            `origin.measured` of the result say what it chose and what that took. "auto" (the default) is "rules" with
            effort="fast". With the other efforts it times the file of the rules beside the float model's, and measures as above
            where integers save less than a tenth; more layers are then left float for accuracy only while the file stays faster
            than the float model's. It times nothing with `strict`, and where another type of processor than this one is the
            target.
        deployment: threads and batch that are timed; default `Deployment(threads=1, batch=1)`.
        smooth: even out, on a copy and by the first batch, the channels that linear layers read (`smooth_`), and leave the first
            and last layer of a transformer float where they are a small part of the MACs. Changes nothing in models without layer
            norms. Default True.
        effort: "fast" (the default) takes the ranges that the observer finds. "balanced" tries remedies on one half of the
            calibration data (even out channels, give operands and results of sums one scale so that adding rounds nothing, narrow
            ranges, leave layers float whose rounding makes much noise for little time, choose ranges activation by activation,
            round the weights of each layer in turn so that errors make up for each other (GPTQ), correct biases, and in networks
            of up to 500 million MACs train weights, biases and scales for 50 steps, with the rounding in place, to imitate the
            float model) and keeps each only where the outputs on the other half come closer to the float model's. In the end
            what was kept is made once more, from all of the data.
            "best" imitates for 300 steps, in networks of any size, and learns the rounding of weights of fewer than 8 bits block
            by block. None of them needs labels; a line of the log for each, and `origin.remedies` of the result, say what it
            bought.
        float_macs: the largest share of the MACs that "balanced" and "best" may leave float, such as 0.1; 0 for none. A value
            that an operator writes counts as one MAC. "balanced" takes none where every output is within 32 dB of the float
            model's (40 dB and 0.15 for outputs with a value for each position), and more than 0.25 only where one is not
            within 30; "best" takes more than 0.35 only where that halves the noise that is left, and more than 0.8 only where an
            output is not within 36 dB, too. Default None: 0.25 and 0.6, 0.7 and 0.98 where files are timed, or 0 with `strict`.
        dynamic: dimensions of the inputs that may vary, `(0, 2, 3)` for batch, height and width; see `graph.Dynamic`. Default
            `(0,)`, the batch.
        strict: raise where a layer with weights (convolution, linear layer, product by a parameter, recurrent layer) would stay
            float, unless `skip`, `choose` or `smooth` leaves it so. Operators without weights (norms, softmax, products of two
            activations, what no rule knows) may stay float. "all": raise where any operator would, whatever leaves it so, for
            runtimes that have no float at all. Default False.

    Returns the quantized model, which `export_onnx` writes with integers; with `inside`, the whole model.
    Raises DataError where there is no batch; ModelError where the model cannot be captured, is quantized already, or has
    nothing that runs in integers; SettingError for settings that do not fit.
    """
    refuse_unknown_settings(StaticSettings, (), options, {}, "quantize_static")
    settings = StaticSettings(inside=inside, **options)
    settings.check("quantize_static")
    with no_modes_of_caller():
        return _quantize(model, batches, settings, "quantize_static")


def builder(
    module: nn.Module,
    example: Inputs,
    settings: StaticSettings,
    *,
    trials: bool = False,
    shown: Callable[[], Iterable[Inputs]] | None = None,
) -> Build:
    """Return what builds the quantized model of some settings, with other ones for a trial; placed by time if they say so.

    trials: it is called many times, and keeps the captured graph for that.
    shown: gives batches by whose values joined ones are kept apart; None for the example alone.
    """
    ranges = ShownRanges(shown or (lambda: [example]))
    separate, share = float_by_ranges(ranges, settings), SharedScales(ranges)
    choice = measured_choice(module, example, settings, separate)

    @functools.cache
    def prepared(bits: Bits | tuple[tuple[str, Bits], ...]) -> tuple[Captured, Origin]:
        widths = bits if isinstance(bits, Bits) else dict(bits)
        return prepare_graph(module, example, settings.target, settings.skip, settings.dynamic, bits=widths)[:2]

    def build(
        *,
        observer: Callable[[], Observer] | None = None,
        adjust: Callable[[Captured], object] | None = None,
        floating: Mapping[str, str] | None = None,
        bits: BitWidths | None = None,
    ) -> Quantized:
        bits = settings.bits if bits is None else bits
        built = build_quantized(
            module,
            example,
            settings.target,
            observer or settings.observer,
            skip=settings.skip,
            floating={**choice.floating, **(floating or {})},
            dynamic=settings.dynamic,
            strict=settings.strict,
            bits=bits,
            smooth=example if settings.smooth else None,
            adjust=adjust,
            prepared=prepared(bits if isinstance(bits, Bits) else tuple(bits.items())) if trials else None,
            separate=separate,
            share=share,
        )
        built.origin = replace(built.origin, measured=choice.record)
        return built

    return build


def _quantize(model: nn.Module, batches: Batches, settings: StaticSettings, where: str) -> nn.Module:
    module, example, data = module_to_quantize(model, batches, settings.inside, where)
    sizes = SeenSizes(module, example, settings.dynamic)
    if settings.effort == "fast":
        first, data = shown_batches(data)
        shown = functools.partial(inputs_to_quantize, model, first, settings.inside)
        quantized = builder(module, example, settings, shown=shown)()
        with sizes.of_calls(quantized):
            result = calibrate_inside(model, quantized, data, settings.inside)
        warn_of_constants(quantized, where)
        nudge_scales_(quantized.body)
        quantized.balance_weights_()
    else:
        own, inputs = settings.observer is not None, inputs_to_quantize(model, data, settings.inside)
        cut, where = batch_varies(settings.dynamic), f'{where}(effort="{settings.effort}")'
        for each in inputs:
            sizes.add(each)
        halves(inputs, where, cut=cut)  # raises where there is too little data, before anything is timed
        shown = functools.partial(list, inputs)
        build = builder(module, example, settings, trials=True, shown=shown)
        with beside_float(module, example, settings) as timed:
            quantized = quantize_with_effort(
                module,
                inputs,
                build,
                effort=settings.effort,
                own_observer=own,
                float_macs=settings.most_float,
                where=where,
                timed=timed,
                cut=cut,
            )
        warn_of_constants(quantized, where)
        result = in_place_of(model, quantized, settings.inside)
    quantized.keep_masked_()
    warn_of_lost_channels(quantized, lambda: _compared(shown(), settings, OUTPUT_SAMPLES), where)
    error = OutputError(module, _compared(shown(), settings, LOSS_SAMPLES), None)
    tell_of_loss(error, quantized, where, "`diagnose` says which layers lose how much, and `repair` tries what helps")
    sizes.warn_of_others(quantized, where)
    return result


def _compared(shown: Sequence[Inputs], settings: StaticSettings, count: int) -> list[Inputs]:
    """At most `count` rows of the batches, by which the outputs are compared with the float model's."""
    return rows_within(shown, count, LOSS_SAMPLES) if batch_varies(settings.dynamic) else list(shown[:1])


@dataclass(frozen=True, kw_only=True)
class StaticQuant(StaticSettings, Stage):
    """Quantize a trained model, as `quantize_static` does; the settings that both have mean the same.

    samples: how many calibration samples to use, from `Task(calibration=...)` or the training data.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"float"})
    keeps: ClassVar[frozenset[str]] = frozenset({"dense"})

    samples: int = 512

    def __post_init__(self) -> None:
        check_field_types(self)
        self.check("StaticQuant")
        check_samples(self.samples, "StaticQuant")

    def calibration_samples(self, model: nn.Module) -> int:
        return self.samples

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        with no_modes_of_caller():
            return _quantize(model.to(task.device).eval(), calibration_inputs(task, self.samples), self, "StaticQuant")
