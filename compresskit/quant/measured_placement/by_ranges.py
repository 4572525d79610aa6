"""What stays float by ranges, of values that calibration data show and of columns of tables, besides what no rule rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from compresskit.graph.capture import Captured
from compresskit.quant.calibrated import CalibratedSettings
from compresskit.quant.measured_placement.hard_gates import HardGates
from compresskit.quant.measured_placement.joined_values import SeparateScales
from compresskit.quant.measured_placement.shown_ranges import ShownRanges
from compresskit.quant.measured_placement.uneven_tables import UnevenTables
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
    tables = UnevenTables(shown)

    def found(captured: Captured, placement: Placement, scheme: Scheme) -> Mapping[str, str]:
        rules = (tables, separate, gates)  # each is asked again once what the one before it names is float
        return next((named for rule in rules if (named := rule(captured, placement, scheme))), {})

    return found
