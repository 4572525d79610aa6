"""Leave tables of rows that are looked up float where one scale for each row loses what a column tells rows by.

A row of features in their own units, a price beside a rate, has the steps of the price: nothing is left of the rate, which a
BatchNorm behind the lookup may make as large. Columns that no output depends on may be lost, as those that training left small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.distributed import on_rank_zero
from compresskit.base.task import Inputs
from compresskit.graph.capture import Captured, parameter_name
from compresskit.graph.differences import without_fills
from compresskit.graph.interpreter import run_graph
from compresskit.graph.surgery import get_tensor, mode
from compresskit.quant.measured_placement.shown_ranges import ShownRanges
from compresskit.quant.numerics.dynamic_quantizers import RowQuantizer
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.numerics.targets import X86
from compresskit.quant.passes.placement import Placement

LEAST_OF_A_COLUMN = 20.0  # dB, of how its values differ from their mean
LEAST_BY_A_TABLE = 30.0  # dB of each output that rounding a table, and nothing else, has to leave
MOST_OF_A_TABLE = 2**22  # values that are looked at, in rows of equal distance
LOSES_COLUMNS = "one scale for each row loses columns of its table that are small beside others, and outputs by them"


class UnevenTables:
    """Names lookups in such tables, each with the reason; called with a captured graph and a placement.

    Each table is looked at once, and of several processes the first decides for all.
    """

    def __init__(self, shown: ShownRanges) -> None:
        self._shown = shown
        self._known: dict[str, bool] = {}

    def __call__(self, captured: Captured, placement: Placement, scheme: Scheme) -> dict[str, str]:
        """scheme: format of activations, of which nothing here depends."""
        nodes = [node for node in captured.module.graph.nodes if placement.lookups.get(node.name) == ""]
        tables = {node.name: str(parameter_name(node.args[0])) for node in nodes}
        if unknown := sorted({*tables.values()} - self._known.keys()):
            self._known |= on_rank_zero(lambda: self._uneven(captured, placement, unknown))
        return {name: LOSES_COLUMNS for name, table in tables.items() if self._known[table]}

    def _uneven(self, captured: Captured, placement: Placement, names: list[str]) -> dict[str, bool]:
        tables = {name: get_tensor(captured.module, name) for name in names}
        found = {name: loses_columns(table) for name, table in tables.items()}
        if any(found.values()):
            rows = self._shown.rows(captured, placement)
            errors = partial(_relative_errors, captured.module, rows, _output_tensors(captured.module, rows))
            found = {name: lost and loses_outputs(tables[name], errors) for name, lost in found.items()}
        return found


def loses_columns(table: Tensor) -> bool:
    """Whether rounding each row of a table to eight bits of its own scale leaves less than `LEAST_OF_A_COLUMN` of any column."""
    rows = table.detach()[:: max(1, table.numel() // MOST_OF_A_TABLE)]
    rows = rows[rows.isfinite().all(1)]
    noise, signal = (_rounded_rows(rows) - rows).square().sum(0), (rows - rows.mean(0)).square().sum(0)
    return bool((noise > 10 ** (-LEAST_OF_A_COLUMN / 10) * signal).any())


def loses_outputs(table: Tensor, errors: Callable[[], Sequence[float]]) -> bool:
    """Whether rounding a table of a model that computes in float leaves less than `LEAST_BY_A_TABLE` of any output.

    table: is rounded meanwhile. errors: of each output of the model, against those that it has: power of the difference / power.
    """
    kept = table.detach().clone()
    with torch.no_grad():
        table.copy_(_rounded_rows(kept))
        try:
            return any(lost > 10 ** (-LEAST_BY_A_TABLE / 10) for lost in errors())
        finally:
            table.copy_(kept)


def _output_tensors(graph: fx.GraphModule, batches: Sequence[Inputs]) -> list[list[Tensor]]:
    """The floating-point outputs of a graph for each batch."""
    with torch.no_grad(), mode(graph, training=False):
        found = [pytree.tree_leaves(run_graph(graph, pytree.tree_leaves(inputs))) for inputs in batches]
    return [[v.double() for v in leaves if isinstance(v, Tensor) and v.is_floating_point()] for leaves in found]


def _relative_errors(graph: fx.GraphModule, batches: Sequence[Inputs], exact: list[list[Tensor]]) -> list[float]:
    """The error of each output of a graph, as `loses_outputs` wants it. What code fills in is left out."""
    errors = []
    for wanted, got in zip(zip(*exact, strict=True), zip(*_output_tensors(graph, batches), strict=True), strict=True):
        pairs = [without_fills(a, b) for a, b in zip(wanted, got, strict=True)]
        noise = sum(float((a - b).square().sum()) for a, b in pairs)
        errors.append(noise / max(sum(float(a.square().sum()) for a, _ in pairs), 1e-300))
    return errors


def _rounded_rows(rows: Tensor) -> Tensor:
    rounding = RowQuantizer(X86.weights)
    rounding.enabled = True
    return rounding(rows, rows)  # type: ignore[no-any-return]
