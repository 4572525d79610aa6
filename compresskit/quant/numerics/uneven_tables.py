"""Tables of rows that are looked up: which cannot be rounded with one scale for each row."""

from __future__ import annotations

from torch import Tensor

LEAST_OF_A_COLUMN = 20.0  # dB of a table that is rounded with a scale for each row; those of trained words have 25 to 50
MOST_OF_A_TABLE = 2**22  # of a table that are looked at, in rows of equal distance
LOSES_COLUMNS = "one scale for each row would lose columns of its table that are small beside others"


def loses_columns(table: Tensor) -> bool:
    """Whether rounding each row of a table to eight bits of its own scale leaves a column too little of what it tells rows by.

    As of features in their own units, prices beside rates.
    """
    rows = table.detach().float()[:: max(1, table.numel() // MOST_OF_A_TABLE)]
    rows = rows[rows.isfinite().all(1)]
    steps = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    noise = ((rows / steps).round() * steps - rows).square().sum(0)
    return bool((noise > 10 ** (-LEAST_OF_A_COLUMN / 10) * (rows - rows.mean(0)).square().sum(0)).any())
