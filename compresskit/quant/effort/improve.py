"""Quantize with more than the rules: try remedies one after another, and keep each only where it pays.

fit, judge = halves of the calibration data
balance channels -> choose ranges -> keep the noisiest layers float -> reconstruct blocks -> correct biases -> imitate the float
    model; each made by `fit`, kept where the outputs on `judge` are closer to the float model's
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

from torch import nn

from compresskit.base.task import Inputs, batch_size
from compresskit.graph.capture import Captured
from compresskit.quant.calibration.reconstruct import reconstruct_blocks_
from compresskit.quant.calibration.rounding_noise import rounding_noise
from compresskit.quant.calibration.rows import in_chunks
from compresskit.quant.effort.balance import balance_channels_
from compresskit.quant.effort.biases import correct_biases_
from compresskit.quant.effort.float_layers import choose_float_layers
from compresskit.quant.effort.ranges import SeveralRanges, choose_ranges_
from compresskit.quant.effort.samples import OutputError, halves, joined_samples
from compresskit.quant.effort.tuning import minimise_error_
from compresskit.quant.model import CALIBRATION_BYTES, Quantized
from compresskit.quant.passes.prepare_graph import Remedy
from compresskit.quant.passes.rounding_boundaries import nudge_scales_

log = logging.getLogger(__name__)

Effort = Literal["fast", "balanced", "best"]
LEAST_DECIBELS = 0.05  # dB that a remedy must gain on the data to judge by
PROBE_SAMPLES = 16  # on which ranges are chosen and biases corrected
NOISE_SAMPLES = 8  # by which the noise of each rounding is estimated
STRENGTHS = (1.0, 0.5)  # of the balancing of channels
MOST_NOISE_LEFT = 0.9  # float layers that are predicted to leave more of the noise than this are not tried
TUNING_STEPS = {"balanced": 100, "best": 300}  # of imitation
MOST_TUNED_MACS = 250e6  # of one sample, in networks that "balanced" tunes: larger ones would take more than a minute or two
TUNING_ROWS = 8
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
    ) -> Quantized:
        """observer: None for the user's or the default one. adjust, floating: as in `build_quantized`."""


def quantize_with_effort(
    module: nn.Module,
    batches: Sequence[Inputs],
    build: Build,
    *,
    effort: Effort,
    own_observer: bool,
    float_macs: float,
    where: str,
) -> Quantized:
    """Return the best model that the remedies of an effort level reach, calibrated.

    Args:
        module: the float model. batches: its calibration inputs.
        build: makes the quantized model.
        effort: "balanced" or "best".
        own_observer: whether the user chose the observer; ranges are then not chosen.
        float_macs: the largest share of the MACs that may stay float where rounding costs most.
        where: what messages begin with.

    Raises DataError where half of the calibration data is too little.
    """
    fit, judge = halves(batches, where)
    trials = _Trials(module, fit, judge, build)
    trials.start()
    for strength in STRENGTHS:
        if trials.try_balance(strength):
            break
    if not own_observer:
        trials.try_ranges()
    trains = trials.has_gradients()
    if trains and float_macs > 0:
        trials.try_float_layers(float_macs)
    if effort == "best":
        trials.try_reconstruction()  # before biases are corrected: its float model is what the model holds
    trials.try_changed("correct biases", lambda q: correct_biases_(q, joined_samples(fit, PROBE_SAMPLES)))
    if trains and (effort == "best" or trials.macs <= MOST_TUNED_MACS):
        steps, learn_from = TUNING_STEPS[effort], trials.error_on(fit)
        trials.try_changed(
            f"imitate the float model, {steps} steps", lambda q: minimise_error_(q, learn_from, steps=steps, batch=TUNING_ROWS)
        )
    return trials.result(batches)


class _Trials:
    """The model so far, its signal-to-noise ratio on the data to judge by, and what each remedy did."""

    def __init__(self, module: nn.Module, fit: list[Inputs], judge: list[Inputs], build: Build) -> None:
        self.module, self.fit, self.judge, self.build = module, fit, judge, build
        self.remedies: list[Remedy] = []
        self.adjust: Callable[[Captured], object] | None = None
        self.moved = 0
        self.chooses_ranges = False

    def start(self) -> None:
        """Make the model without remedies."""
        self.model = self._calibrated(self.build(), self.fit)
        self.rows = max(1, CALIBRATION_BYTES // self.model.row_bytes)
        self.error = self.error_on(self.judge)
        self.quality = self.error.decibels(self.model)

    @property
    def macs(self) -> int:
        """Multiply-accumulates for one sample."""
        return sum(cost.macs for cost in self.model.placement.costs.values())

    def has_gradients(self) -> bool:
        """Whether gradients of the outputs reach the roundings: an argmax at the end has none, nor have some operators."""
        try:
            return any(rounding_noise(self.model, joined_samples(self.fit, 1), probes=1).values())
        except RuntimeError as error:  # an operator without a derivative
            log.warning("no layers are kept float, and nothing is trained: %s", str(error).splitlines()[0])
            return False

    def error_on(self, batches: Sequence[Inputs]) -> OutputError:
        """The error of the outputs on some data."""
        return OutputError(self.module, batches, self.rows)

    def try_balance(self, strength: float) -> bool:
        """Try to balance channels; returns whether that paid, or there are none to balance."""
        began, counts = time.perf_counter(), list[int]()

        def adjust(captured: Captured) -> None:
            counts.append(balance_channels_(captured.module, self.fit, strength=strength))

        built = self.build(adjust=adjust)
        if not counts[0]:
            return True
        kept = self._judged(f"balance channels, strength {strength:g}", self._calibrated(built, self.fit), began)
        if kept:
            self.adjust, self.moved = adjust, counts[0]
        return kept

    def try_ranges(self) -> None:
        """Try ranges that are chosen activation by activation."""
        began = time.perf_counter()
        self.chooses_ranges = self._judged("choose ranges", self._with_ranges({}), began)

    def try_float_layers(self, most_macs: float) -> None:
        """Try to leave the layers float whose rounding adds most noise to the outputs for the work that they are."""
        began = time.perf_counter()
        noise = rounding_noise(self.model, joined_samples(self.fit, min(self.rows, NOISE_SAMPLES)))
        found = choose_float_layers(self.model, noise, most_macs)
        if found.noise > MOST_NOISE_LEFT:
            return
        floating = dict.fromkeys(
            sorted(found.names),
            f"rounding here and around it is {1 - found.noise:.0%} of the noise, for {found.work:.1%} of the work",
        )
        if self.chooses_ranges:
            candidate = self._with_ranges(floating)
        else:
            candidate = self._calibrated(self.build(adjust=self.adjust, floating=floating), self.fit)
        self._judged(f"float layers, {len(floating)} operators, {found.work:.1%} of the work", candidate, began)

    def _with_ranges(self, floating: Mapping[str, str]) -> Quantized:
        formats = self.model.target.activations
        observer = partial(SeveralRanges, min(8, formats.bits), symmetric=formats.symmetric)
        candidate = self._calibrated(self.build(observer=observer, adjust=self.adjust, floating=floating), self.fit, finish=False)
        choose_ranges_(candidate, joined_samples(self.fit, PROBE_SAMPLES))
        self._finish(candidate)
        return candidate

    def try_changed(self, name: str, change: Callable[[Quantized], object]) -> None:
        """Try a change of a copy of the model so far."""
        began, candidate = time.perf_counter(), copy.deepcopy(self.model)
        change(candidate)
        nudge_scales_(candidate.body)
        self._judged(name, candidate, began)

    def try_reconstruction(self) -> None:
        """Try to learn the rounding block by block, for as many steps as take some minutes."""
        affordable = int(MOST_RECONSTRUCTION_MACS / (3 * RECONSTRUCTION_ROWS * max(1, self.macs)))
        if affordable < LEAST_RECONSTRUCTION_STEPS:
            log.info("blocks are not reconstructed: %.2g MACs a sample would take too long", self.macs)
            return
        steps, data = min(RECONSTRUCTION_STEPS, affordable), self._rows_that_fit(MOST_RECONSTRUCTION_BYTES)
        rate = RECONSTRUCTION_TRAVEL / steps

        def change(quantized: Quantized) -> None:
            reconstruct_blocks_(quantized, data, steps=steps, batch_size=RECONSTRUCTION_ROWS, rate=rate)

        self.try_changed(f"reconstruct blocks, {steps} steps", change)

    def _rows_that_fit(self, size: int) -> list[Inputs]:
        """As much of the data to learn from, a batch at least, as has largest activations of `size` bytes together."""
        left, taken = max(1, size // self.model.row_bytes), list[Inputs]()
        for inputs in in_chunks(self.fit, max(1, min(RECONSTRUCTION_ROWS, left))):
            if taken and left < batch_size(inputs):
                break
            taken.append(inputs)
            left -= batch_size(inputs)
        return taken

    def result(self, batches: Sequence[Inputs]) -> Quantized:
        """The model so far, with its remedies; where none paid, calibrated on all data."""
        if not any(remedy.kept for remedy in self.remedies):
            self.model = self._calibrated(self.build(), batches)
        origin = self.model.origin
        self.model.origin = replace(origin, remedies=tuple(self.remedies), smoothed=origin.smoothed + self.moved)
        return self.model

    def _judged(self, name: str, candidate: Quantized, began: float) -> bool:
        """Keep a candidate where it pays, and say what it bought."""
        quality = self.error.decibels(candidate)
        kept = quality > self.quality + LEAST_DECIBELS
        remedy = Remedy(name=name, before=self.quality, after=quality, kept=kept, seconds=time.perf_counter() - began)
        self.remedies.append(remedy)
        log.info("%s", remedy)
        if kept:
            self.model, self.quality = candidate, quality
        return kept

    def _calibrated(self, quantized: Quantized, batches: Sequence[Inputs], *, finish: bool = True) -> Quantized:
        quantized.eval()
        quantized.calibrate_(batches)
        if finish:
            self._finish(quantized)
        return quantized

    @staticmethod
    def _finish(quantized: Quantized) -> None:
        nudge_scales_(quantized.body)
        quantized.balance_weights_()
