"""Try remedies against rounding errors on a quantized model: each is made on some data, and judged on other data."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from torch import nn

from compresskit.base.errors import first_line
from compresskit.base.task import Inputs
from compresskit.graph.capture import Captured, module_path
from compresskit.graph.normalize import Node
from compresskit.quant.calibration.reconstruct import reconstruct_blocks_
from compresskit.quant.calibration.rounding_noise import rounding_noise
from compresskit.quant.calibration.rows import in_chunks
from compresskit.quant.calibration.smoothquant import even_norms_, norms_of
from compresskit.quant.effort.aligned_sums import align_sums_, exact_sums, quantizers_of_sums
from compresskit.quant.effort.balance import balance_channels_, scale_channels_
from compresskit.quant.effort.biases import correct_biases_, correct_weight_errors_
from compresskit.quant.effort.float_layers import LEAST_RATIO, LEAST_RATIO_OF_NEARLY_ALL, choose_float_layers
from compresskit.quant.effort.least_noise import least_noise_factors
from compresskit.quant.effort.ranges import SeveralRanges, choose_ranges_, narrow_by_, narrow_ranges_
from compresskit.quant.effort.samples import OutputError, joined_samples, mean_decibels, rows_within
from compresskit.quant.effort.tuning import minimise_error_
from compresskit.quant.effort.weights_in_turn import round_weights_in_turn_
from compresskit.quant.measured_placement.beside_float import Timed
from compresskit.quant.model import CALIBRATION_BYTES, Quantized
from compresskit.quant.numerics.bit_widths import BitWidths
from compresskit.quant.passes.prepare_graph import Remedy
from compresskit.quant.passes.rounding_boundaries import nudge_scales_

log = logging.getLogger(__name__)

LEAST_DECIBELS = 0.05  # dB that a remedy must gain on the data to judge by
LEAST_LOWERED = 0.02  # of the second measure that it must lower, where the outputs come no closer
PROBE_SAMPLES = 16  # by which biases are corrected
RANGE_SAMPLES, RANGE_MACS = (16, 64), 2e10  # on which ranges are chosen: at least, at most, and of their forward pass
WEIGHT_SAMPLES, WEIGHT_MACS = (16, 512), 5e10  # the same for the inputs of layers, by which weights are rounded
WEIGHT_ERROR_SAMPLES = 64  # by which mean errors of weights are corrected, at most
NARROW_SAMPLES = 256  # by which ranges are narrowed
NOISE_SAMPLES, NOISE_MACS = (8, 64), 2e9  # the same for the noise of each rounding: a few samples can make most of it
STRENGTHS = (1.0, 0.5)  # of the balancing of channels
MOST_NOISE_LEFT = 0.9  # float layers that are predicted to leave more of the noise than this, and to take longer, are not tried
TUNING_ROWS = (2, 8)  # of a step of imitation, at least and at most
TUNING_MACS = 1e9  # of a step's forward pass, where more than the fewest rows allow that
RECONSTRUCTION_STEPS, RECONSTRUCTION_ROWS = 300, 16  # for each block, at most; rows of a step
LEAST_RECONSTRUCTION_STEPS = 50
MOST_RECONSTRUCTION_MACS = 6e12  # of all steps of all blocks, forward and backward: some minutes
MOST_RECONSTRUCTION_BYTES = 2**30  # of the largest activation for all rows; some three of that size are kept
RECONSTRUCTION_TRAVEL = 6.0  # how far the choice of a weight can move, in logits: its learning rate times the steps


class Build(Protocol):
    """Builds the quantized model, still to be calibrated."""

    def __call__(
        self,
        *,
        observer: Callable[[], SeveralRanges] | None = None,
        adjust: Callable[[Captured], object] | None = None,
        floating: Mapping[str, str] | None = None,
        bits: BitWidths | None = None,
    ) -> Quantized:
        """observer, bits: None for the user's or the default ones. adjust, floating: as in `build_quantized`."""


class Trials:
    """The model so far, how good it is on the data to judge by, and what each remedy did.

    A remedy is kept where the outputs come closer to the float model's by `LEAST_DECIBELS`. With a second measure it is kept
    where it lowers that, by more than the tolerance; where there is one, also where it brings the outputs closer without raising
    the second measure by more than that.

    model: the best so far. quality: its signal-to-noise ratio at the outputs in dB, their mean. worst: the same of its worst
        output. drop: its second measure, or None.
    corrects: whether the mean errors of its rounded weights are going to be corrected; it is judged so.
    norms: names of those whose channels can be evened out. uneven_norms: names of the others, and why not.
    """

    def __init__(
        self,
        module: nn.Module,
        fit: list[Inputs],
        judge: list[Inputs],
        build: Build,
        *,
        measure: Callable[[Quantized], float] | None = None,
        tolerance: float = 0.0,
        timed: Timed | None = None,
        cut: bool = True,
    ) -> None:
        """Set up the trials of one model; `start` begins them.

        Args:
            module: the float model. fit, judge: inputs that remedies are made by, and that they are judged on.
            build: makes the quantized model.
            measure: a second measure of a model, lower is better. tolerance: how much of it is chance.
            timed: times a model beside the float one. Layers are left float only while it is faster, or no slower than at first.
            cut: whether batches may be cut and joined; not where the model takes one size of batch only.
        """
        self.cut = cut
        self.module, self.fit, self.judge, self.build = module, fit, judge, build
        self.measure, self.tolerance, self.timed = measure, tolerance, timed
        self.drop: float | None = None
        self.remedies: list[Remedy] = []
        self.adjust: Callable[[Captured], object] | None = None
        self.bits: BitWidths | None = None
        self.floating: dict[str, str] = {}
        self.free: frozenset[str] = frozenset()
        self.refused = set[frozenset[str]]()  # sets of float layers that did not pay, since something was last kept
        self.moved = 0
        self.norms: list[str] = []
        self.uneven_norms: dict[str, str] = {}
        self.chooses_ranges = False
        self.corrects = False
        self.changes: list[Callable[[Quantized], object]] = []

    def start(self) -> None:
        """Make the model without remedies."""
        self.first = self.model = self.calibrated(self.build(adjust=self._find_norms), self.fit)
        self.rows = max(1, CALIBRATION_BYTES // self.model.row_bytes)
        self.error = self.error_on(self.judge)
        errors = self.error.of(self.model)
        self.quality, self.worst = mean_decibels(errors), mean_decibels([max(errors, default=0.0)])
        self.drop = None if self.measure is None else self.measure(self.model)

    def _find_norms(self, captured: Captured) -> None:
        links, self.uneven_norms = norms_of(captured.module)
        self.norms = [module_path(link.base) or link.base.name for link in links]

    @property
    def macs(self) -> int:
        """Multiply-accumulates for one sample."""
        return sum(cost.macs for cost in self.model.placement.costs.values())

    @property
    def gives_maps(self) -> bool:
        """Whether an output has a value for each position, as those of detectors and of dense predictions."""
        return any(output.ndim > 2 for output in self.error.outputs[0])

    def has_gradients(self) -> bool:
        """Whether gradients of the outputs reach the roundings: an argmax at the end has none, nor have some operators."""
        try:
            return any(rounding_noise(self.model, self.few(1), probes=1).values())
        except RuntimeError as error:  # an operator without a derivative
            log.warning("no layers are kept float, and nothing is trained: %s", first_line(error))
            return False

    def error_on(self, batches: Sequence[Inputs]) -> OutputError:
        """The error of the outputs on some data."""
        return OutputError(self.module, batches, self.rows if self.cut else None)

    def few(self, count: int, batches: Sequence[Inputs] | None = None) -> Inputs:
        """A batch of at most `count` samples, of the data to make by if None; the first batch where batches cannot be cut."""
        batches = self.fit if batches is None else batches
        return joined_samples(batches, count) if self.cut else batches[0]

    def try_balance(self, strength: float | None) -> bool:
        """Try to balance channels, once more where they are balanced; returns whether that paid, or there are none to balance.

        It is judged with the mean errors of rounded weights corrected, which even channels make larger; they are in the end.

        strength: as in `balance_channels_`; None balances for the least noise that gradients predict.
        """
        began, counts, before = time.perf_counter(), list[int](), self.adjust
        found: dict[int, float] = {}
        rounded = {point.node for point in self.model.placement.points}

        def adjust(captured: Captured) -> None:
            if before is not None:
                before(captured)
            if strength is None:
                if not found:  # later the same graph is built anew, for which the same factors do
                    found.update(least_noise_factors(captured.module, self.fit, self.noise_samples(), rounded))
                counts.append(scale_channels_(captured.module, found))
            else:
                counts.append(balance_channels_(captured.module, self.fit, rounded=rounded, strength=strength))

        candidate = self.calibrated(self.build(adjust=adjust, bits=self.bits), self.fit)
        if not counts[0]:
            return True
        how = "for least noise" if strength is None else f"strength {strength:g}"
        kept = self.judged(f"balance channels, {how}", candidate, began, corrects=True)
        if kept:
            self.adjust, self.moved, self.corrects = adjust, max(self.moved, counts[0]), True
        return kept

    def try_norms(self) -> bool:
        """Try to even out the channels that norms hand to linear layers; returns whether that paid, or there are none."""
        before = self.adjust
        for strength in STRENGTHS:
            began = time.perf_counter()

            def adjust(captured: Captured, strength: float = strength) -> None:
                if before is not None:
                    before(captured)
                even_norms_(captured, self.fit, strength)

            if not self.norms:
                return True
            candidate = self.calibrated(self.build(adjust=adjust, bits=self.bits), self.fit)
            if self.judged(f"even channels of {', '.join(self.norms)}, strength {strength:g}", candidate, began):
                self.adjust, self.moved = adjust, self.moved + len(self.norms)
                return True
        return False

    def try_samples(self, name: str, fit: list[Inputs]) -> bool:
        """Try other data to make everything by, from now on; returns whether that paid."""
        began, before = time.perf_counter(), self.fit
        self.fit = fit
        kept = self.judged(name, self._rebuilt(), began)
        if not kept:
            self.fit = before
        return kept

    def try_ranges(self) -> bool:
        """Try ranges that are chosen activation by activation; returns whether that paid."""
        began = time.perf_counter()
        kept = self.judged("choose ranges", self._rebuilt(ranges=True), began)
        self.chooses_ranges |= kept
        return kept

    def try_float_layers(
        self, most_macs: float, *, least: float = LEAST_DECIBELS, by_time: bool = False, anew: bool = False
    ) -> bool:
        """Try to leave the layers float whose rounding adds most noise to the outputs for the work that they are.

        What was learned on the way is learned again. Layers that were left float before count as part of the work.

        Args:
            most_macs: the largest share of the work that may be float.
            least: dB that it must gain.
            by_time: weigh the noise against time, and not against the work alone.
            anew: choose from all layers, also those that were left float before, and take less noise for their price.

        Returns whether that paid.
        """
        began = time.perf_counter()
        model, before, free = self.model, self.floating, self.free
        if anew:
            model, before, free = self._rebuilt(floating={}), {}, frozenset()
        measured = self.timed.operators(model) if by_time and self.timed is not None else None
        found = choose_float_layers(
            model,
            self._noise(model),
            most_macs,
            before,
            free=free,
            by_time=by_time,
            measured=measured,
            least_ratio=LEAST_RATIO_OF_NEARLY_ALL if anew else LEAST_RATIO,
        )
        if not found.names or (found.slower and found.noise > MOST_NOISE_LEFT):
            return False
        why = f"rounding here and around it is {1 - found.noise:.0%} of the noise, for {found.work:.1%} of the work"
        floating = {**before, **dict.fromkeys(sorted(found.names), why)}
        if floating.keys() == self.floating.keys() or frozenset(floating) in self.refused:
            return False
        self.refused.add(frozenset(floating))
        candidate = self._rebuilt(floating=floating)
        name = f"float layers, {len(floating)} operators, {found.work:.1%} of the work"
        kept = self.judged(name, candidate, began, least, timed=self.timed)
        if kept:
            self.floating, self.free = floating, free | found.free
        return kept

    def samples(self, bounds: tuple[int, int], macs: float) -> int:
        """How many samples to take, within bounds: fewer in a larger network. macs: of one forward pass of all."""
        return max(bounds[0], min(bounds[1], int(macs / max(1, self.macs))))

    def noise_samples(self) -> Inputs:
        """What the noise of each rounding is estimated by."""
        return self.few(min(self.rows, self.samples(NOISE_SAMPLES, NOISE_MACS)))

    def _noise(self, quantized: Quantized) -> dict[Node, float]:
        """The noise of each rounding on a few samples of the data to make by."""
        return rounding_noise(quantized, self.noise_samples(), exact=exact_sums(quantized.body))

    def try_aligned_sums(self) -> bool:
        """Try to give operands and results of sums one scale; returns whether that paid."""
        if not quantizers_of_sums(self.model.body):
            return False
        return self.try_changed("align sums", lambda quantized: align_sums_(quantized, self._noise))

    def try_narrow_ranges(self) -> bool:
        """Try to narrow ranges, many by one factor; returns whether that paid."""
        chosen: list[tuple[float, float]] = []

        def change(quantized: Quantized) -> None:
            if chosen:  # by an earlier call: the model is built anew, with more data or other float layers
                narrow_by_(quantized, chosen[0])
            else:
                chosen.append(narrow_ranges_(quantized, self.error_on([self.few(NARROW_SAMPLES)])))

        return self.try_changed("narrow ranges", change)

    def try_bits(self, name: str, bits: BitWidths) -> bool:
        """Try other bit widths; what was learned on the way is learned again. Returns whether that paid."""
        began = time.perf_counter()
        kept = self.judged(name, self._rebuilt(bits=bits), began)
        if kept:
            self.bits = bits
        return kept

    def _rebuilt(
        self, *, floating: Mapping[str, str] | None = None, bits: BitWidths | None = None, ranges: bool = False
    ) -> Quantized:
        """The model so far, built anew with what was kept, and with something else."""
        floating, bits = self.floating if floating is None else floating, self.bits if bits is None else bits
        ranges = ranges or self.chooses_ranges
        candidate = self._with_ranges(floating, bits) if ranges else self._with_extremes(floating, bits)
        for change in self.changes:
            change(candidate)
            nudge_scales_(candidate.body)
        return candidate

    def _with_extremes(self, floating: Mapping[str, str], bits: BitWidths | None) -> Quantized:
        return self.calibrated(self.build(adjust=self.adjust, floating=floating, bits=bits), self.fit)

    def _with_ranges(self, floating: Mapping[str, str], bits: BitWidths | None) -> Quantized:
        formats = self.model.target.activations
        observer = partial(SeveralRanges, min(8, formats.bits), symmetric=formats.symmetric)
        built = self.build(observer=observer, adjust=self.adjust, floating=floating, bits=bits)
        candidate = self.calibrated(built, self.fit, finish=False)
        choose_ranges_(candidate, self.few(self.samples(RANGE_SAMPLES, RANGE_MACS)))
        self.finish(candidate)
        return candidate

    def try_changed(self, name: str, change: Callable[[Quantized], object], *, corrects: bool | None = None) -> bool:
        """Try a change of a copy of the model so far; returns whether that paid. corrects: as in `judged`."""
        began, candidate = time.perf_counter(), copy.deepcopy(self.model)
        change(candidate)
        nudge_scales_(candidate.body)
        kept = self.judged(name, candidate, began, corrects=corrects)
        if kept:
            self.changes.append(change)
        return kept

    def try_weights_in_turn(self) -> bool:
        """Try to round the weights of each layer such that their errors make up for each other; returns whether that paid."""

        def change(quantized: Quantized) -> None:
            few = self.few(self.samples(WEIGHT_SAMPLES, WEIGHT_MACS))
            round_weights_in_turn_(quantized, list(in_chunks([few], self.rows)) if self.cut else self.fit)

        return self.try_changed("round weights in turn", change)

    def try_biases(self) -> bool:
        """Try to correct biases for all errors before them; returns whether that paid. Else those of the weights are."""

        def change(quantized: Quantized) -> None:
            correct_biases_(quantized, self.few(PROBE_SAMPLES))

        kept = self.try_changed("correct biases", change, corrects=False)
        if not kept and self.corrects:
            self._correct_weight_errors(self.model)
            self.changes.append(self._correct_weight_errors)
        self.corrects = False
        return kept

    def _correct_weight_errors(self, quantized: Quantized) -> None:
        """Correct the mean errors of a model's rounded weights by the data to make by, as much of it as fits in memory."""
        correct_weight_errors_(quantized, self.few(max(PROBE_SAMPLES, min(WEIGHT_ERROR_SAMPLES, self.rows))))
        nudge_scales_(quantized.body)

    @property
    def tuning_rows(self) -> int:
        """Rows of a step of imitation: fewer in a larger network, so that it takes as long as in a smaller one."""
        fewest, most = TUNING_ROWS
        return max(fewest, min(most, int(TUNING_MACS / max(1, self.macs))))

    def try_imitation(self, steps: int) -> bool:
        """Try to train weights, biases and scales to imitate the float model; returns whether that paid."""

        def change(quantized: Quantized) -> None:
            minimise_error_(quantized, self.error_on(self.fit), steps=steps, batch=self.tuning_rows)

        return self.try_changed(f"imitate the float model, {steps} steps", change)

    def refit(self, batches: Sequence[Inputs]) -> None:
        """Make the model anew from all data, with every remedy that was kept; none of the data is left to judge the result.

        Ranges that one half of the data shows clip large values of the other half; those of all of it clip fewer of new samples.
        """
        if not any(remedy.kept for remedy in self.remedies):
            return
        began, self.fit = time.perf_counter(), list(batches)
        self.model = self._rebuilt()
        log.info("what was kept is made once more, from all data, not judged: %.1f s", time.perf_counter() - began)

    @property
    def rounds_weights_to_few_bits(self) -> bool:
        """Whether some weights have fewer than 8 bits."""
        return any(rounding.scheme.bits < 8 for rounding, _ in self.model.rounded_weights())

    @property
    def reconstruction_steps(self) -> int:
        """For how many steps a block can be reconstructed such that all take some minutes; 0 where that is too few."""
        affordable = int(MOST_RECONSTRUCTION_MACS / (3 * RECONSTRUCTION_ROWS * max(1, self.macs)))
        return 0 if affordable < LEAST_RECONSTRUCTION_STEPS else min(RECONSTRUCTION_STEPS, affordable)

    def try_reconstruction(self) -> bool:
        """Try to learn the rounding block by block, for as many steps as take some minutes; returns whether that paid."""
        steps = self.reconstruction_steps
        if not self.cut:
            log.info("blocks are not reconstructed: that mixes the rows of batches, and this model takes one size of batch only")
            return False
        if not steps:
            log.info("blocks are not reconstructed: %.2g MACs a sample would take too long", self.macs)
            return False
        rate = RECONSTRUCTION_TRAVEL / steps

        def change(quantized: Quantized) -> None:
            data = rows_within(self.fit, MOST_RECONSTRUCTION_BYTES // self.model.row_bytes, RECONSTRUCTION_ROWS)
            reconstruct_blocks_(quantized, data, steps=steps, batch_size=RECONSTRUCTION_ROWS, rate=rate)

        return self.try_changed(f"reconstruct blocks, {steps} steps", change)

    def result(self, batches: Sequence[Inputs]) -> Quantized:
        """The model so far, with its remedies; where none paid, calibrated on all data."""
        if not any(remedy.kept for remedy in self.remedies):
            self.model = self.calibrated(self.build(), batches)
        elif self.corrects:
            self._correct_weight_errors(self.model)
        origin = self.model.origin
        self.model.origin = replace(origin, remedies=tuple(self.remedies), smoothed=origin.smoothed + self.moved)
        return self.model

    def judged(
        self,
        name: str,
        candidate: Quantized,
        began: float,
        least: float = LEAST_DECIBELS,
        *,
        corrects: bool | None = None,
        timed: Timed | None = None,
    ) -> bool:
        """Keep a candidate where it pays, by `least` dB where the outputs judge, and say what it bought.

        corrects: whether it is judged with the mean errors of its weights corrected; None for as the model so far. The model that
            is kept is without: remedies compare it with its float parameters, and these with what they were.
        timed: given for a candidate that may cost latency, which is kept only where it is faster than the float model, or no
            slower than the first model.
        """
        judged = candidate
        if self.corrects if corrects is None else corrects:
            judged = copy.deepcopy(candidate)
            self._correct_weight_errors(judged)
        errors = self.error.of(judged)
        quality = mean_decibels(errors)
        drop = None if self.measure is None else self.measure(judged)
        pays = self._pays(quality, drop, least)
        times = timed(candidate, self.first) if timed is not None and pays else None
        remedy = Remedy(
            name=name,
            before=self.quality,
            after=quality,
            kept=pays and (times is None or times.faster),
            seconds=time.perf_counter() - began,
            drop_before=self.drop,
            drop_after=drop,
            milliseconds=None if times is None else times.milliseconds,
            float_milliseconds=None if times is None else times.float_milliseconds,
        )
        self.remedies.append(remedy)
        log.info("%s", remedy)
        if remedy.kept:
            self.model, self.quality, self.drop = candidate, quality, drop
            self.worst = mean_decibels([max(errors)])
            self.refused.clear()
        return remedy.kept

    def _pays(self, quality: float, drop: float | None, decibels: float) -> bool:
        closer = quality > self.quality + decibels
        if drop is None or self.drop is None:
            return closer
        if math.isinf(self.drop):  # a metric that nothing could be told by
            return math.isfinite(drop) or closer
        least = max(self.tolerance, LEAST_LOWERED * self.drop)
        return drop < self.drop - least or (self.tolerance > 0 and closer and drop <= self.drop + self.tolerance)

    def calibrated(self, quantized: Quantized, batches: Sequence[Inputs], *, finish: bool = True) -> Quantized:
        quantized.eval()
        quantized.calibrate_(batches)
        if finish:
            self.finish(quantized)
        return quantized

    @staticmethod
    def finish(quantized: Quantized) -> None:
        nudge_scales_(quantized.body)
        quantized.balance_weights_()
