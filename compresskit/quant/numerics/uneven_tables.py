"""Tables of rows that are looked up: which lose too much if they are rounded with one scale for each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs
from compresskit.graph.interpreter import run_graph
from compresskit.graph.surgery import get_tensor, mode

LEAST_OF_A_COLUMN = 20.0  # dB of a table that is rounded with a scale for each row; those of trained words have 25 to 50
LEAST_BY_A_TABLE = 30.0  # dB that rounding a table, and nothing else, has to leave of the outputs
MOST_OF_A_TABLE = 2**22  # values that are looked at, in rows of equal distance
LOSES_COLUMNS = "one scale for each row loses columns of its table that are small beside others, and outputs by them"


def loses_columns(table: Tensor) -> bool:
    """Whether rounding each row of a table to eight bits of its own scale leaves a column too little of what it tells rows by.

    As of features in their own units, prices beside rates.
    """
    rows = table.detach().float()[:: max(1, table.numel() // MOST_OF_A_TABLE)]
    rows = rows[rows.isfinite().all(1)]
    noise = (_rounded(rows) - rows).square().sum(0)
    return bool((noise > 10 ** (-LEAST_OF_A_COLUMN / 10) * (rows - rows.mean(0)).square().sum(0)).any())


def loses_outputs(graph: fx.GraphModule, name: str, batches: Sequence[Inputs]) -> bool:
    """Whether rounding a table of a float graph so, and nothing else, costs an output too much: columns may not matter."""
    table = get_tensor(graph, name)
    leaves = [pytree.tree_leaves(inputs) for inputs in batches]
    with torch.no_grad(), mode(graph, training=False):
        exact = [pytree.tree_leaves(run_graph(graph, inputs)) for inputs in leaves]
        kept = table.detach().clone()
        table.copy_(_rounded(kept))
        try:
            got = [pytree.tree_leaves(run_graph(graph, inputs)) for inputs in leaves]
        finally:
            table.copy_(kept)
    for wanted, found in zip(zip(*exact, strict=True), zip(*got, strict=True), strict=True):
        if isinstance(wanted[0], Tensor) and wanted[0].is_floating_point():
            signal = sum(float(v.square().sum()) for v in wanted)
            noise = sum(float((a - b).square().sum()) for a, b in zip(wanted, found, strict=True))
            if noise > 10 ** (-LEAST_BY_A_TABLE / 10) * signal:
                return True
    return False


def _rounded(rows: Tensor) -> Tensor:
    steps = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (rows / steps).round() * steps
