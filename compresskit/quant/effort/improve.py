"""Quantize with more than the rules: try remedies one after another, and keep each only where it pays.

fit, judge = halves of the calibration data
balance channels -> align sums -> narrow ranges -> keep the noisiest layers float -> choose ranges -> reconstruct blocks ->
    round weights in turn -> correct biases -> imitate the float model
each made by `fit`, kept where the outputs on `judge` are closer to the float model's
make what was kept once more, by all of the data
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Literal

from torch import nn

from compresskit.base.task import Inputs
from compresskit.quant.effort.samples import halves
from compresskit.quant.effort.trials import LEAST_DECIBELS, STRENGTHS, Build, Trials
from compresskit.quant.measured_placement.beside_float import Timed
from compresskit.quant.model import Quantized

log = logging.getLogger(__name__)

Effort = Literal["fast", "balanced", "best"]
TUNING_STEPS = {"balanced": 50, "best": 300}  # of imitation, which is done twice
FLOAT_MACS = {"fast": 0.0, "balanced": 0.25, "best": 0.6}  # share that an effort level may leave float by default
TIMED_FLOAT_MACS = {**FLOAT_MACS, "balanced": 0.7, "best": 0.98}  # the same where the file is timed, and must stay the faster one
MOST_IN_STEPS = 0.8  # of the work, in steps of which each holds the one before
FIRST_SHARES = {"balanced": 0.15, "best": 0.35}  # of the work, that is tried before the largest that is allowed
TIMED_SHARE = 0.4  # of the first share, tried before it where latency decides
ENOUGH = 32.0  # dB at the worst output, beyond which "balanced" pays no latency for more: classes hardly change there
ENOUGH_OF_MAPS = 40.0  # the same for outputs with a value for each position, which do change, but for the first shares only
FAR = 36.0  # dB at the worst output, below which "best" chooses from nearly all layers: some decisions still change there
POOR = {"balanced": 30.0, "best": ENOUGH}  # dB at the worst output, below which time is weighed for all that is allowed
LEAST_FURTHER = 3.0  # dB that a larger share must gain in "best": half of the noise
MOST_TUNED_MACS = 500e6  # of one sample, in networks that "balanced" tunes: larger ones would take more than a minute or two


def quantize_with_effort(
    module: nn.Module,
    batches: Sequence[Inputs],
    build: Build,
    *,
    effort: Effort,
    own_observer: bool,
    float_macs: float,
    where: str,
    timed: Timed | None = None,
    cut: bool = True,
) -> Quantized:
    """Return the best model that the remedies of an effort level reach, calibrated.

    Args:
        module: the float model. batches: its calibration inputs.
        build: makes the quantized model.
        effort: "balanced" or "best".
        own_observer: whether the user chose the observer; ranges are then not chosen.
        float_macs: the largest share of the MACs that may stay float where rounding costs most.
        where: what messages begin with.
        timed: times a model beside the float one. Layers are then left float only while it is faster, or no slower than at first.
        cut: whether batches may be cut and joined; not where the model takes one size of batch only.

    Raises DataError where half of the calibration data is too little.
    """
    fit, judge = halves(batches, where, cut=cut)
    trials = Trials(module, fit, judge, build, timed=timed, cut=cut)
    trials.start()
    if not trials.error.outputs[0]:
        log.warning(
            "%s: %s has no output in floating point to compare, so no remedy can be judged: quantized as with"
            ' effort="fast"; pass it without its argmax for more',
            where,
            type(module).__name__,
        )
        return trials.result(batches)
    trains = trials.has_gradients()
    for strength in (None, *STRENGTHS) if trains else STRENGTHS:
        if trials.try_balance(strength):
            break
    trials.try_norms()
    if trains:
        trials.try_aligned_sums()
    if not own_observer:
        trials.try_narrow_ranges()
    if trains and float_macs > 0:
        _try_float_layers(trials, float_macs, effort)
    if not own_observer:
        trials.try_ranges()  # of what is rounded: narrow ones make up for coarse steps where layers make most of the noise
    # Both before biases are corrected, and one of them alone: the float model that they follow is what the model holds.
    reconstructs = effort == "best" and trials.rounds_weights_to_few_bits
    if not (reconstructs and trials.try_reconstruction()):
        trials.try_weights_in_turn()
    trials.try_biases()
    if trains and (effort == "best" or trials.macs <= MOST_TUNED_MACS):
        trials.try_imitation(TUNING_STEPS[effort])
    trials.refit(batches)
    return trials.result(batches)


def _try_float_layers(trials: Trials, most: float, effort: Effort) -> None:
    """Leave layers float, in steps up to the largest share of the work, since float costs latency.

    The first steps weigh noise against time, as far as the outputs need it. "best" then weighs noise against work, and its last
    steps must each halve the noise; where an output is still far, it chooses anew, by time, from nearly all layers.
    """
    _weigh_time(trials, min(most, MOST_IN_STEPS), effort)
    if effort == "best":
        _weigh_work(trials, min(most, MOST_IN_STEPS))
        if trials.timed is not None and trials.worst < FAR:
            trials.try_float_layers(most, least=LEAST_FURTHER, by_time=True, anew=True)


def _weigh_time(trials: Trials, most: float, effort: Effort) -> None:
    """Leave layers float that make much noise for their time, until the outputs are close enough.

    Beyond a quarter of the work only where an output is poor. Where the file is timed, a smaller step is the first.
    """
    smaller = [TIMED_SHARE * FIRST_SHARES["balanced"]] if trials.timed is not None else []
    failed = False
    for share in _up_to(most, [*smaller, FIRST_SHARES["balanced"], FLOAT_MACS["balanced"], most]):
        if trials.worst >= _enough(effort, share, maps=trials.gives_maps):
            return
        further = share > FLOAT_MACS["balanced"]
        if failed and not further:  # one that is further may hold other layers, too large for the shares before
            continue
        tried = len(trials.remedies)
        least = LEAST_FURTHER if further and effort == "best" else LEAST_DECIBELS
        kept = trials.try_float_layers(share, least=least, by_time=True)
        failed |= not kept and (trials.timed is None or len(trials.remedies) > tried)  # with a clock the first may be too small


def _enough(effort: Effort, share: float, *, maps: bool) -> float:
    """At how many dB at the worst output no such share of the work is left float for its time. maps: see `Trials.gives_maps`."""
    if share > FLOAT_MACS["balanced"]:
        return POOR[effort]
    if effort == "best":
        return math.inf
    return ENOUGH_OF_MAPS if maps and share <= FIRST_SHARES["balanced"] else ENOUGH


def _weigh_work(trials: Trials, most: float) -> None:
    """Leave layers float that make much noise for their work; where the file is timed, a smaller step is the first."""
    smaller = [TIMED_SHARE * FIRST_SHARES["best"]] if trials.timed is not None else []
    for share in _up_to(most, [*smaller, FIRST_SHARES["best"], FLOAT_MACS["best"], most]):
        least = LEAST_FURTHER if share > FIRST_SHARES["best"] else LEAST_DECIBELS
        trials.try_float_layers(share, least=least)  # one that is too slow or gains too little says nothing about larger ones


def _up_to(most: float, shares: Sequence[float]) -> list[float]:
    """Shares in ascending order, none above the most."""
    return sorted({min(share, most) for share in shares})
