"""Repair a quantized model that loses too much: find the causes, then try remedies from the cheapest to the dearest.

quantize -> diagnose -> plan (remedies in the order of their cost; those that do not apply are listed) -> try one after the other
on one half of the data, keep what pays on the other, stop at the loss that is allowed
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Unpack

from torch import nn

from compresskit.base.errors import SettingError
from compresskit.base.inputs import Batches, calibration_inputs
from compresskit.base.settings import check_field_types, refuse_unknown_settings
from compresskit.base.stage import Stage
from compresskit.base.task import Task, batch_size
from compresskit.quant.accuracy_target.few_bits import widened_bits
from compresskit.quant.accuracy_target.losses import MetricLoss, OutputLoss
from compresskit.quant.calibrated import (
    CalibratedOptions,
    check_samples,
    in_place_of,
    inputs_to_quantize,
    module_to_quantize,
)
from compresskit.quant.calibration.constant_values import warn_of_constants
from compresskit.quant.calibration.diagnose import Finding, diagnose
from compresskit.quant.calibration.rows import in_chunks
from compresskit.quant.effort.aligned_sums import quantizers_of_sums
from compresskit.quant.effort.ranges import set_range_
from compresskit.quant.effort.samples import batch_varies, halves
from compresskit.quant.effort.trials import PROBE_SAMPLES, RECONSTRUCTION_ROWS, STRENGTHS, Trials
from compresskit.quant.effort.unusual import without_unusual
from compresskit.quant.numerics.quantizers import WeightQuantizer
from compresskit.quant.passes.prepare_graph import Remedy
from compresskit.quant.static import StaticSettings, builder

log = logging.getLogger(__name__)

BALANCINGS = 3  # how often channels are balanced; each enlarges a channel by at most 32
NAMED_RANGES = 6  # activations whose range is tried by itself
IMITATION_STEPS = 300
FLOAT_SHARES = (0.15, 0.35, 0.6)  # of the work that may stay float, tried one after the other up to `most_float`
WIDENED_SHARES = (0.3, 0.6, 0.9)  # of the noise of weights, removed by more bits for some layers
SECONDS_PER_STEP = 3.0  # a training step takes about as long as three passes


@dataclass(frozen=True, kw_only=True)
class PlannedRemedy:
    """One remedy that is going to be tried.

    name: what is tried. costs: what it costs the file. seconds: about how long it takes, 0 where it is not known.
    skipped: why it does not apply to this model; empty where it does.
    """

    name: str
    costs: str = "nothing"
    seconds: float = 0.0
    skipped: str = ""

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.name}: left out, {self.skipped}"
        return f"{self.name}: costs the file {self.costs}, about {max(1, round(self.seconds))} s"


@dataclass(frozen=True, kw_only=True)
class RepairReport:
    """What `repair` found and did; prints as text.

    wanted: the loss that is allowed, in percent. measured: of what, and on how many `samples` that chose nothing.
    before, after: the loss before and after the remedies. sqnr_before, sqnr_after: of the outputs, in dB.
    weights, activations: SQNR of the outputs before the remedies if only weights, or only activations, were rounded.
    causes: what `diagnose` found. plan: the remedies in the order in which they are tried. remedies: what each bought.
    """

    wanted: float
    measured: str
    samples: int
    before: float
    after: float
    sqnr_before: float
    sqnr_after: float
    weights: float
    activations: float
    causes: tuple[Finding, ...]
    plan: tuple[PlannedRemedy, ...]
    remedies: tuple[Remedy, ...] = ()

    @property
    def reached(self) -> bool:
        """Whether the loss is no more than what is allowed."""
        return self.after <= self.wanted

    def diagnosis(self) -> str:
        """What was found, and what is going to be tried."""
        head = (
            f"{self.measured}: {self.before:.3f} % lost on {self.samples} samples, {self.wanted:g} % allowed; outputs"
            f" {self.sqnr_before:.1f} dB (weights alone {self.weights:.1f}, activations alone {self.activations:.1f})"
        )
        return "\n".join([head, *(f"* {cause}" for cause in self.causes), *(f"- {planned}" for planned in self.plan)])

    def __str__(self) -> str:
        verdict = "within" if self.reached else "not within"
        end = f"{self.after:.3f} % lost, {verdict} the {self.wanted:g} % that are allowed; outputs {self.sqnr_after:.1f} dB"
        return "\n".join([self.diagnosis(), *(f"+ {remedy}" for remedy in self.remedies), end])

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        return asdict(self) | {"reached": self.reached}


class RepairOptions(CalibratedOptions, total=False):
    """Keyword arguments of `repair`; `RepairSettings` has their defaults."""

    inside: str | None
    smooth: bool
    drop: float
    most_float: float
    minutes: float | None


@dataclass(frozen=True, kw_only=True)
class RepairSettings(StaticSettings):
    """Settings of `repair`, which explains them."""

    drop: float = 0.1
    most_float: float = 0.6
    minutes: float | None = None

    def check(self, where: str) -> None:
        """Raise SettingError, which begins with `where`, for a setting out of range."""
        super().check(where)
        if self.effort != "fast" or self.float_macs is not None:
            raise SettingError(
                f"{where}: it tries all remedies until the loss is small enough; leave effort= and float_macs= out"
            )
        if not 0 <= self.drop < 100:
            raise SettingError(f"{where}(drop=...): wanted a percentage, 0 <= drop < 100, got {self.drop!r}")
        if not 0 <= self.most_float <= 1:
            raise SettingError(f"{where}(most_float=...): wanted a share of the work in 0..1, got {self.most_float!r}")
        if self.minutes is not None and not self.minutes > 0:
            raise SettingError(f"{where}(minutes=...): wanted a positive number, or None, got {self.minutes!r}")


def repair(
    model: nn.Module, batches: Batches, *, task: Task | None = None, **options: Unpack[RepairOptions]
) -> tuple[nn.Module, RepairReport]:
    """Quantize a model with as many remedies against rounding errors as it needs to lose no more than allowed.

    It quantizes as `quantize_static` does, diagnoses, logs the causes and the plan, and tries remedies in the order of what they
    cost: another range for single activations, balanced channels, ranges for all, corrected biases, rounding learned block by
    block, training to imitate the float model; then what costs the file something: more bits for some layers, float layers. A
    remedy is made by one half of the batches, and kept where it pays on the other half. Nothing needs labels.

    Args:
        model: any float module; it is not changed.
        batches: an iterable of inputs, or one batch; 16 samples at least, some hundreds to see small losses.
        task: judges by its metric on its validation data, instead of by the outputs on the other half of the batches. With
            `metrics.float_targets` and `metrics.agreement` it needs no labels either.
        drop: the loss that is allowed, in percent. By a task: points (hundredths) of a metric in 0..1, a percentage of another.
            Without a task: of the probability that the float model gives to its classes, or of the power of other outputs.
        most_float: the largest share of the work (a MAC, or a value written, is one) that may stay float; none with `strict`.
        minutes: no remedy is begun that is expected to end later; None for no limit.
        target, observer, skip, choose, deployment, smooth, dynamic, strict, bits, inside: as in `quantize_static`.

    Returns the quantized model (with `inside`, the whole model), and a report of what was found and what each remedy bought. The
    model is the best that was found, also where that is not good enough: look at `report.reached`.
    Raises DataError for too little data, SettingError for settings that do not fit, ModelError as `quantize_static`.
    """
    refuse_unknown_settings(RepairSettings, (), options, {}, "repair")
    settings = RepairSettings(**options)
    settings.check("repair")
    return _repair(model, batches, task, settings, "repair")


def _repair(
    model: nn.Module, batches: Batches, task: Task | None, settings: RepairSettings, where: str
) -> tuple[nn.Module, RepairReport]:
    began = time.perf_counter()
    module, example, data = module_to_quantize(model, batches, settings.inside, where)
    inputs = inputs_to_quantize(model, data, settings.inside)
    cut = batch_varies(settings.dynamic)
    fit, judge = halves(inputs, where, cut=cut)
    parts = list(in_chunks(judge, max(1, batch_size(inputs[0])))) if cut else judge
    loss = (
        OutputLoss(module, parts)
        if task is None
        else MetricLoss(model, task, lambda quantized: in_place_of(model, quantized, settings.inside))
    )
    tolerance = 0.0 if task is None else max(settings.drop / 10, 100 / max(1, loss.samples))
    build = builder(module, example, settings, trials=True)
    trials = Trials(module, fit, judge, build, measure=loss, tolerance=tolerance, cut=cut)
    trials.start()
    work = _Repairing(trials, settings, began)
    report = work.diagnosed(loss.name, loss.samples)
    log.info("%s: %s", where, report.diagnosis())
    work.run()
    assert trials.drop is not None
    report = replace(report, after=trials.drop, sqnr_after=trials.quality, remedies=tuple(trials.remedies))
    log.info("%s: %.3f %% lost, %g %% allowed", where, report.after, report.wanted)
    quantized = trials.result(inputs)
    warn_of_constants(quantized, where)
    quantized.keep_masked_()
    return in_place_of(model, quantized, settings.inside), report


class _Repairing:
    """The remedies of one model, in the order in which they are tried."""

    def __init__(self, trials: Trials, settings: RepairSettings, began: float) -> None:
        self.trials, self.settings, self.began = trials, settings, began
        self.causes: tuple[Finding, ...] = ()
        started = time.perf_counter()
        trials.error.of(trials.model)
        rows = sum(map(batch_size, trials.judge))
        self.row_seconds = (time.perf_counter() - started) / max(1, rows)
        self.fit_rows = sum(map(batch_size, trials.fit))
        self.trains = trials.has_gradients()
        self.steps: list[tuple[PlannedRemedy, Callable[[], object]]] = []

    def diagnosed(self, measured: str, samples: int) -> RepairReport:
        """Find the causes, and plan."""
        trials = self.trials
        assert trials.drop is not None
        self.causes = diagnose(trials.model, [trials.few(PROBE_SAMPLES, trials.judge)]).findings
        self._plan()
        return RepairReport(
            wanted=self.settings.drop,
            measured=measured,
            samples=samples,
            before=trials.drop,
            after=trials.drop,
            sqnr_before=trials.quality,
            sqnr_after=trials.quality,
            weights=self._alone(weights=True),
            activations=self._alone(weights=False),
            causes=self.causes,
            plan=tuple(planned for planned, _ in self.steps),
        )

    def run(self) -> None:
        """Try one remedy after the other until the loss is small enough, or the time is over."""
        for planned, attempt in self.steps:
            if self.reached():
                return
            if planned.skipped:
                continue
            left = None if self.settings.minutes is None else 60 * self.settings.minutes - (time.perf_counter() - self.began)
            if left is not None and planned.seconds > left:
                log.info("%s: not tried, about %.0f s and %.0f s are left", planned.name, planned.seconds, max(0.0, left))
                continue
            attempt()

    def reached(self) -> bool:
        """Whether the model so far loses no more than is allowed."""
        return self.trials.drop is not None and self.trials.drop <= self.settings.drop

    def _alone(self, *, weights: bool) -> float:
        """SQNR of the outputs if only weights, or only activations, are rounded."""
        quantizers = self.trials.model.quantizers()
        for quantizer in quantizers:
            quantizer.enabled = isinstance(quantizer, WeightQuantizer) == weights
        try:
            return self.trials.error.decibels(self.trials.model)
        finally:
            self.trials.model.enable_()

    def _plan(self) -> None:
        """Fill `steps`: first what costs the file nothing, from the quickest to the slowest, then what costs it something."""
        settings, trials = self.settings, self.trials
        rebuild = self.row_seconds * 2 * (self.fit_rows + sum(map(batch_size, trials.judge))) + 1
        own = "observer= says which ranges are taken" if settings.observer is not None else ""
        no_gradient = "" if self.trains else "no gradient reaches the roundings"
        named = self._named_ranges()
        rest, count, times = without_unusual(trials.model, trials.fit)
        name = "leave out unusual samples" + (f" ({count}, up to {times:.0f} times as large as the others)" if count else "")
        self._add(name, partial(trials.try_samples, name, rest), rebuild, skipped="" if count else "there are none")
        self._add("ranges of " + (", ".join(named) or "single activations"), self._try_named, len(named) * 2 * rebuild,
                  skipped=own or ("" if named else "none stands out"))  # fmt: skip
        self._add("balance channels", self._try_balance, BALANCINGS * rebuild)
        others = "; ".join(f"not {name}: {why}" for name, why in trials.uneven_norms.items())
        name = f"even channels of {', '.join(trials.norms) or 'layer norms'}" + (
            f" ({others})" if trials.norms and others else ""
        )
        self._add(name, trials.try_norms, len(STRENGTHS) * rebuild, skipped="" if trials.norms else others or "there are none")
        no_sums = "" if quantizers_of_sums(trials.model.body) else "there are none"
        self._add("align sums", trials.try_aligned_sums, 2 * rebuild, skipped=no_sums or no_gradient)
        self._add("narrow ranges", trials.try_narrow_ranges, 2 * rebuild, skipped=own)
        self._add("choose ranges", trials.try_ranges, 2 * rebuild, skipped=own)
        few = any(q.scheme.bits < 8 for q in trials.model.quantizers() if isinstance(q, WeightQuantizer))
        learned = "the rounding is learned below" if few else ""  # from the weights of the float model
        self._add("round weights in turn", trials.try_weights_in_turn, 2 * rebuild, skipped=learned)
        self._add("correct biases", trials.try_biases, rebuild)
        shares = [share for share in FLOAT_SHARES if share <= settings.most_float and not settings.strict]
        no_float = no_gradient or ("" if shares else "strict=True" if settings.strict else f"most_float={settings.most_float:g}")
        if shares and not few:
            self._add_float(shares.pop(0), rebuild, no_float)
        steps = trials.reconstruction_steps
        learning = self.row_seconds * SECONDS_PER_STEP
        self._add("reconstruct blocks", trials.try_reconstruction, learning * steps * RECONSTRUCTION_ROWS,
                  skipped="" if steps else "the network is too large")  # fmt: skip
        imitating = learning * IMITATION_STEPS * trials.tuning_rows
        self._add("imitate the float model", partial(trials.try_imitation, IMITATION_STEPS), imitating, skipped=no_gradient)
        for share in WIDENED_SHARES if few else ():
            attempt = partial(self._try_widening, share)
            self._add(f"8 bits where {share:.0%} of the noise of weights comes from", attempt, rebuild, "bytes", no_gradient)
        if not few:
            self._add("more bits for weights", trials.try_biases, skipped="all weights have 8 bits")
        for share in shares or ([] if not no_float else [FLOAT_SHARES[0]]):
            self._add_float(share, rebuild + imitating, no_float)

    def _add(
        self, name: str, attempt: Callable[[], object], seconds: float = 0.0, costs: str = "nothing", skipped: str = ""
    ) -> None:
        self.steps.append((PlannedRemedy(name=name, costs=costs, seconds=seconds, skipped=skipped), attempt))

    def _add_float(self, share: float, seconds: float, skipped: str) -> None:
        attempt = partial(self.trials.try_float_layers, share)
        self._add(f"up to {share:.0%} of the work in float", attempt, seconds, "bytes and time", skipped)

    def _named_ranges(self) -> list[str]:
        """Activations whose range the diagnosis questions."""
        found = [cause.layer for cause in self.causes if cause.cause in ("outliers", "uneven channels")]
        labels = {quantizer.label for quantizer in self.trials.model.activation_quantizers()}
        return [name for name in dict.fromkeys(found) if name in labels][:NAMED_RANGES]

    def _try_named(self) -> None:
        for label in self._named_ranges():
            for rule in ("least error", "percentile"):
                if self.reached():
                    return
                change = partial(set_range_, label=label, rule=rule, batches=self.trials.fit)
                if self.trials.try_changed(f"{rule} on {label}", change):
                    break

    def _try_balance(self) -> None:
        strengths = (None, *STRENGTHS) if self.trains else STRENGTHS
        for _ in range(BALANCINGS):
            if self.reached() or not any(self.trials.try_balance(strength) for strength in strengths):
                return

    def _try_widening(self, share: float) -> None:
        bits, names = widened_bits(self.trials.model, self.trials.few(PROBE_SAMPLES), share)
        if names:
            self.trials.try_bits(f"8 bits for {', '.join(names)}", bits)


@dataclass(frozen=True, kw_only=True)
class Repair(RepairSettings, Stage):
    """Quantize a trained model with as many remedies as it needs, as `repair` does; the settings that both have mean the same.

    samples: how many calibration samples to use, from `Task(calibration=...)` or the training data.
    by_metric: whether the task's metric on its validation data judges; the metric in the report is then of data that chose.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"float"})
    keeps: ClassVar[frozenset[str]] = frozenset({"dense"})

    samples: int = 512
    by_metric: bool = False

    def __post_init__(self) -> None:
        check_field_types(self)
        self.check("Repair")
        check_samples(self.samples, "Repair")

    def calibration_samples(self, model: nn.Module) -> int:
        return self.samples

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model = model.to(task.device).eval()
        judge = task if self.by_metric else None
        repaired, report = _repair(model, calibration_inputs(task, self.samples), judge, self, "Repair")
        if not report.reached:
            log.warning("Repair: %.3f %% of the %s are lost, %g %% were allowed", report.after, report.measured, report.wanted)
        return repaired
