"""What stays float by the ranges that calibration data show, besides what a target's rules leave float."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from compresskit.graph.capture import Captured
from compresskit.quant.calibrated import CalibratedSettings
from compresskit.quant.measured_placement.hard_gates import HardGates
from compresskit.quant.measured_placement.joined_values import SeparateScales
from compresskit.quant.measured_placement.shown_ranges import ShownRanges
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.passes.placement import Placement

ByRanges = Callable[[Captured, Placement, Scheme], Mapping[str, str]]


def float_by_ranges(shown: ShownRanges, settings: CalibratedSettings) -> ByRanges:
    """Names what stays float with some settings: no layers with `strict`; where no operator may be float, only hard sigmoids that
    run in integers in another form.
    """
    if settings.strict == "all":
        return HardGates(shown, floats=False)
    separate, gates = SeparateScales(shown, layers=not settings.strict), HardGates(shown)

    def found(captured: Captured, placement: Placement, scheme: Scheme) -> Mapping[str, str]:
        return separate(captured, placement, scheme) or gates(captured, placement, scheme)

    return found
