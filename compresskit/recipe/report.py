"""The table of a run: one row a stage, against the first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from compresskit.base.errors import CheckpointError
from compresskit.base.files import write_json
from compresskit.measure import Row

HEAD = ("stage", "metric", "params", "MACs", "file", "smaller", "latency", "faster", "verified")
#: What a field of a row may hold in a file, by its annotation.
KINDS: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": int | float,
    "bool": bool,
    "int | None": int | None,
    "float | None": int | float | None,
    "bool | None": bool | None,
}
SPARSE = ("zeros", "zipped")


def table(rows: Sequence[Row]) -> str:
    """Rows as text. `smaller` and `faster` are ratios to the first row; a metric not executed in ONNX Runtime is marked ~.

    Where a model carries masks, `zeros` is the share of the masked weights that is held at zero, `zipped` the file in a zip.
    """
    sparse = any(row.removed is not None for row in rows)
    lines = [HEAD + SPARSE * sparse, *(_cells(row, rows[0]) + _zeros(row) * sparse for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for line in lines:
        cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        text.append("  ".join(cells))
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def _cells(row: Row, first: Row) -> tuple[str, ...]:
    verified = {True: "yes", False: "NO", None: "-"}[row.verified]
    smaller = f"{first.bytes / row.bytes:.1f}x" if row.bytes and first.bytes else "-"
    faster = f"{first.latency_ms / row.latency_ms:.2f}x" if row.latency_ms and first.latency_ms else "-"
    return (
        row.stage,
        f"{'' if row.executed else '~'}{row.metric:.4f}",
        _short(row.parameters),
        _short(row.macs),
        "-" if row.bytes is None else f"{row.bytes / 1024:.1f} KiB",
        smaller,
        "-" if row.latency_ms is None else f"{row.latency_ms:.3f} ms",
        faster,
        verified,
    )


def _zeros(row: Row) -> tuple[str, ...]:
    share = "-" if row.removed is None or not row.masked else f"{row.removed / row.masked:.1%}"
    return share, "-" if row.zipped is None else f"{row.zipped / 1024:.1f} KiB"


def _short(number: int) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def write_report(path: str | Path, rows: Sequence[Row], **extra: Any) -> None:
    """Write rows as `report.json`."""
    write_json(path, {"format": 1, "rows": [asdict(row) for row in rows], **extra})


def read_row(record: dict[str, Any], where: Path) -> Row:
    """A row from its JSON."""
    try:
        for field in fields(Row):
            value = record.get(field.name, field.default)
            if not isinstance(value, KINDS[str(field.type)]) or (isinstance(value, bool) and "bool" not in str(field.type)):
                raise TypeError(f"{field.name} is {value!r}")
        return Row(**record)
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}: not a row of a report ({error}): {json.dumps(record)[:80]}") from None
