"""The report of a run: one `StageReport` per stage, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from compresskit.base.errors import CheckpointError
from compresskit.base.files import FORMAT, write_json

TABLE_HEAD = ("stage", "metric", "params", "MACs", "file", "smaller", "latency", "faster", "verified")
#: Types of a field in a file, by its annotation.
FIELD_TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": int | float,
    "bool": bool,
    "int | None": int | None,
    "float | None": int | float | None,
    "bool | None": bool | None,
}
MASK_COLUMNS = ("zeros", "zipped")
LATENCY_NOISE = 1.1  # times another latency: less is no difference


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One row of a report: the model that a stage returned, in numbers.

    Attributes:
        stage: name of its folder, such as `2-prune`.
        metric: the task's metric on the validation data, of the ONNX file in ONNX Runtime if `executed`, else of the PyTorch
            model.
        parameters: number of parameter values. nonzero: how many of them are not zero.
        macs: multiply-accumulates for one sample.
        seconds: how long the stage took.
        bytes: of the ONNX file, with its external data; None where none was written.
        latency_ms: median milliseconds for one sample in ONNX Runtime, measured in turn with the files of the other stages.
        executed: whether the metric was computed by running the ONNX file.
        verified: whether the ONNX file agrees with the model; None where none was written.
        removed: weights that masks hold at zero; None where the model carries no masks.
        masked: weights of all tensors that have a mask.
        zipped: bytes of the ONNX file in a zip, for models with masks, whose zeros compress well.
    """

    stage: str
    metric: float
    parameters: int
    nonzero: int
    macs: int
    seconds: float
    bytes: int | None = None
    latency_ms: float | None = None
    executed: bool = False
    verified: bool | None = None
    removed: int | None = None
    masked: int | None = None
    zipped: int | None = None


def table(rows: Sequence[StageReport]) -> str:
    """Reports as a table.

    `smaller` and `faster` are ratios to the first row. A metric marked ~ is that of the PyTorch model, not of the ONNX file. For
    models with masks, `zeros` is the fraction of the weights with a mask that it holds at zero, and `zipped` the size of the file
    in a zip.
    """
    sparse = any(row.removed is not None for row in rows)
    lines = [TABLE_HEAD + MASK_COLUMNS * sparse, *(_measurements(row, rows[0]) + _sparsity(row) * sparse for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for line in lines:
        cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        text.append("  ".join(cells))
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def remarks(rows: Sequence[StageReport]) -> list[str]:
    """What the table does not say by itself, a sentence each: whether a file before the last one is smaller, or faster."""
    return [*_size_remark(rows), *_time_remark(rows)]


def _size_remark(rows: Sequence[StageReport]) -> list[str]:
    sizes = [(row.bytes, row.stage) for row in rows if row.bytes]
    if not sizes or sizes[-1][0] == min(sizes)[0]:
        return []
    (size, stage), (smallest, before) = sizes[-1], min(sizes)
    return [
        f"The file of {stage} ({size:,} bytes) is larger than that of {before} ({smallest:,} bytes): what its rounding or masks"
        " add to the graph is more than they save in a model of this size."
    ]


def _time_remark(rows: Sequence[StageReport]) -> list[str]:
    times = [(row.latency_ms, row.stage) for row in rows if row.latency_ms]
    if not times or times[-1][0] <= LATENCY_NOISE * min(times)[0]:
        return []
    (time, stage), (least, before) = times[-1], min(times)
    return [
        f"The file of {stage} ({time:.3f} ms) is slower than that of {before} ({least:.3f} ms) on this machine; `compresskit"
        " audit --profile --against` says which layers are. Narrow layers often are slower in integers: `StaticQuant` and `QAT` "
        'leave those float with choose="measure".'
    ]


def _measurements(row: StageReport, first: StageReport) -> tuple[str, ...]:
    verified = {True: "yes", False: "NO", None: "-"}[row.verified]
    smaller = f"{first.bytes / row.bytes:.1f}x" if row.bytes and first.bytes else "-"
    faster = f"{first.latency_ms / row.latency_ms:.2f}x" if row.latency_ms and first.latency_ms else "-"
    return (
        row.stage,
        f"{'' if row.executed else '~'}{row.metric:.4f}",
        _with_unit(row.parameters),
        _with_unit(row.macs),
        "-" if row.bytes is None else f"{row.bytes / 1024:.1f} KiB",
        smaller,
        "-" if row.latency_ms is None else f"{row.latency_ms:.3f} ms",
        faster,
        verified,
    )


def _sparsity(row: StageReport) -> tuple[str, ...]:
    zeros = "-" if row.removed is None or not row.masked else f"{row.removed / row.masked:.1%}"
    return zeros, "-" if row.zipped is None else f"{row.zipped / 1024:.1f} KiB"


def _with_unit(number: int) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def write_report(path: str | Path, rows: Sequence[StageReport], **extra: Any) -> None:
    """Write reports as JSON, with other JSON-ready entries beside them."""
    write_json(path, {"format": FORMAT, "rows": [asdict(row) for row in rows], **extra})


def read_stage_report(record: dict[str, Any], where: Path) -> StageReport:
    """A report from its JSON; raises CheckpointError, which names the file `where`, for anything else."""
    try:
        for field in fields(StageReport):
            value = record.get(field.name, field.default)
            if not isinstance(value, FIELD_TYPES[str(field.type)]) or (isinstance(value, bool) and "bool" not in str(field.type)):
                raise TypeError(f"{field.name} is {value!r}")
        # earlier files have a "note", which was always empty
        return StageReport(**{name: value for name, value in record.items() if name != "note"})
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}: not a row of a report ({error}): {json.dumps(record)[:80]}") from None
