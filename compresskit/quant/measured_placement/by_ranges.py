"""What stays float by ranges, of values that calibration data show and of columns of tables, besides what no rule rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from compresskit.graph.capture import Captured, parameter_name
from compresskit.graph.surgery import get_tensor
from compresskit.quant.calibrated import CalibratedSettings
from compresskit.quant.measured_placement.hard_gates import HardGates
from compresskit.quant.measured_placement.joined_values import SeparateScales
from compresskit.quant.measured_placement.shown_ranges import ShownRanges
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.numerics.uneven_tables import LOSES_COLUMNS, loses_columns, loses_outputs
from compresskit.quant.passes.placement import Placement

ByRanges = Callable[[Captured, Placement, Scheme], Mapping[str, str]]


def float_by_ranges(shown: ShownRanges, settings: CalibratedSettings) -> ByRanges:
    """Names what stays float with some settings: no layers with `strict`; where no operator may be float, only hard sigmoids that
    run in integers in another form.
    """
    if settings.strict == "all":
        return HardGates(shown, floats=False)
    separate, gates = SeparateScales(shown, layers=not settings.strict), HardGates(shown)
    uneven: dict[str, bool] = {}  # of each table, which is looked at once

    def tables(captured: Captured, placement: Placement) -> Mapping[str, str]:
        found = {}
        for node in captured.module.graph.nodes:
            if node.name in placement.lookups and not placement.lookups[node.name]:
                name = str(parameter_name(node.args[0]))
                if name not in uneven:
                    columns = loses_columns(get_tensor(captured.module, name))
                    uneven[name] = columns and loses_outputs(captured.module, name, shown.rows(captured, placement))
                if uneven[name]:
                    found[node.name] = LOSES_COLUMNS
        return found

    def found(captured: Captured, placement: Placement, scheme: Scheme) -> Mapping[str, str]:
        return tables(captured, placement) or separate(captured, placement, scheme) or gates(captured, placement, scheme)

    return found
