"""The command line, for what is not training: `compresskit verify|audit|bench FILE...`, `compresskit report FOLDER`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compresskit.checkpoint import read_json
from compresskit.errors import CompressError, DataError, SettingError
from compresskit.export.audit import audit
from compresskit.export.verify import compare
from compresskit.measure import latency, session
from compresskit.report import read_row, table
from compresskit.task import Inputs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 where all is well, 1 where a file does not agree, 2 where it cannot be read."""
    parser = argparse.ArgumentParser(prog="compresskit", description="Look at ONNX files and at finished runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("verify", "run a file as it is written and optimized, and compare; or two files, the first being the reference"),
        ("audit", "which operators ONNX Runtime executes in integers"),
        ("bench", "median latencies, all files measured in turn; ratios to the first"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("files", nargs="+", metavar="FILE", help="ONNX file")
        command.add_argument("--json", action="store_true", help="print JSON")
        if name != "audit":
            command.add_argument("--inputs", help="npz file with an array for each input; random numbers where not given")
            command.add_argument("--batch", type=int, default=1, help="rows of random inputs")
    commands.choices["bench"].add_argument("--threads", type=int, default=1, help="threads of ONNX Runtime")
    report = commands.add_parser("report", help="the table of a finished run")
    report.add_argument("files", nargs="+", metavar="FOLDER", help="folder of a run")
    report.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        return {"verify": _verify, "audit": _audit, "bench": _bench, "report": _report}[options.command](options)
    except CompressError as error:
        sys.stderr.write(f"compresskit: {error}\n")
        return 2


def _show(options: argparse.Namespace, record: Any, text: str) -> None:
    sys.stdout.write((json.dumps(record, indent=1) if options.json else text) + "\n")


def _session(path: str, *, optimize: bool = True) -> Any:
    try:
        return session(path, optimize=optimize)
    except Exception as error:
        raise DataError(f"{path}: ONNX Runtime cannot load it: {str(error).strip().splitlines()[-1]}") from error


def _inputs(path: str, options: argparse.Namespace) -> Inputs:
    """Inputs by name: from the npz file, or random; a symbolic first dimension becomes `--batch`, any other 16."""
    wanted = {i.name: i for i in _session(path).get_inputs()}
    if options.inputs:
        try:
            given = dict(np.load(options.inputs, allow_pickle=False))
        except (OSError, ValueError) as error:
            raise DataError(f"{options.inputs}: not an npz file of arrays ({error})") from None
        if missing := sorted(set(wanted) - set(given)):
            raise DataError(f"{options.inputs}: no array {missing[0]!r}; the file wants {sorted(wanted)}")
        return {name: torch.from_numpy(given[name]) for name in wanted}
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for name, entry in wanted.items():
        shape = [s if isinstance(s, int) else (options.batch if i == 0 else 16) for i, s in enumerate(entry.shape)]
        floating = entry.type in ("tensor(float)", "tensor(double)", "tensor(float16)")
        inputs[name] = torch.randn(shape, generator=generator) if floating else torch.zeros(shape, dtype=torch.int64)
    return inputs


def _verify(options: argparse.Namespace) -> int:
    if len(options.files) > 2:
        raise SettingError(f"verify: wanted one file, or a reference and a file, got {len(options.files)}")
    inputs = _inputs(options.files[0], options)
    feed = {name: value.numpy() for name, value in inputs.items()} if isinstance(inputs, dict) else {}
    reference = _session(options.files[0], optimize=len(options.files) == 2).run(None, feed)
    other = _session(options.files[-1]).run(None, feed)
    level = compare(reference, other)
    top = "" if level.agreement is None else f"same class {level.agreement:.2%}, "
    text = f"{options.files[-1]}: {top}within a step {level.within_one:.2%}, largest error {level.largest:.3g} steps"
    _show(options, asdict(level), text)
    return 0 if level.within_two >= 0.97 else 1


def _audit(options: argparse.Namespace) -> int:
    found = {path: audit(path) for path in options.files}
    _show(
        options, {p: asdict(a) | {"share": a.share} for p, a in found.items()}, "\n".join(f"{p}: {a}" for p, a in found.items())
    )
    return 0


def _bench(options: argparse.Namespace) -> int:
    times = latency(options.files, _inputs(options.files[0], options), threads=options.threads)
    width = max(map(len, options.files))
    rows = [f"{p:<{width}}  {t:9.3f} ms  {t / times[0]:6.3f}" for p, t in zip(options.files, times, strict=True)]
    _show(options, dict(zip(options.files, times, strict=True)), "\n".join(rows))
    return 0


def _report(options: argparse.Namespace) -> int:
    for folder in options.files:
        path = Path(folder) / "report.json"
        record = read_json(path, "the report of a run")
        rows = [read_row(row, path) for row in record.get("rows", [])]
        _show(options, record, table(rows) if rows else f"{path}: no stage is finished")
    return 0


if __name__ == "__main__":
    sys.exit(main())
