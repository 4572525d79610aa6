"""Write the report of one or several runs: as one HTML file that needs nothing else, or as CSV."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

from compresskit.base.files import atomic
from compresskit.base.version import __version__
from compresskit.measure.charts import Chart, Series, draw
from compresskit.recipe.page.layers import floating_layers, layer_charts, layer_rows, named_times, time_charts, time_rows
from compresskit.recipe.page.records import RunRecord
from compresskit.recipe.page.statistics import (
    PairedBootstrap,
    PairedTest,
    bootstrap_interval,
    paired_bootstrap,
    paired_test,
    wilson_interval,
)
from compresskit.recipe.report import StageReport, remarks

TEMPLATE = "report.html.jinja"
LONGEST_RECIPE = 60_000  # characters of a recipe that a page shows; report.json holds all of it
MOST_LINES = 12  # of one chart
STARVED = 0.2  # of the time
COLUMNS = "stage metric interval change p parameters non-zeros MACs file smaller latency faster verified time".split()
#: What is drawn over the steps of a training: title, name of the axis, key of an epoch's entry.
CURVES = (
    ("Loss", "mean loss of an epoch", "loss"),
    ("Learning rate", "learning rate", "rates"),
    ("Loss scale", "scale", "scale"),
)


def write_page(path: str | Path, runs: Sequence[RunRecord]) -> None:
    """Write the page of runs, atomically. Raises CheckpointError where it cannot be written."""
    text = page_of_runs(runs)
    with atomic(path) as temporary:
        _write_escaped(temporary, text)


def write_csv(path: str | Path, runs: Sequence[RunRecord]) -> None:
    """Write one line for each stage and each baseline of each run, with the fields of `StageReport`, atomically."""
    text = csv_of_runs(runs)
    with atomic(path) as temporary:
        _write_escaped(temporary, text)


def _write_escaped(path: Path, text: str) -> None:
    # A name of a file that the locale cannot decode has surrogates, which UTF-8 has no form of.
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def csv_of_runs(runs: Sequence[RunRecord]) -> str:
    """The stages of runs as CSV; the first column names the run."""
    out = io.StringIO()
    writer = csv.DictWriter(out, ["run", *(field.name for field in fields(StageReport))], lineterminator="\n")
    writer.writeheader()
    for name, run in zip(run_names(runs), runs, strict=True):
        for row in [*run.rows, *run.baselines]:
            writer.writerow({"run": name, **asdict(row)})
    return out.getvalue()


def page_of_runs(runs: Sequence[RunRecord]) -> str:
    """The HTML of a page. What comes from users is escaped."""
    names = run_names(runs)
    return _template().render(  # type: ignore[no-any-return]
        title=", ".join(names) if len(names) < 4 else f"{len(names)} runs",
        runs=[_context(name, run) for name, run in zip(names, runs, strict=True)],
        charts=comparison_charts(names, runs),
        columns=COLUMNS,
        version=__version__,
    )


@cache
def _template() -> Any:
    import jinja2  # here, since nothing else needs it and importing the library stays quick

    templates = jinja2.FileSystemLoader(Path(__file__).parent)
    options: dict[str, Any] = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return jinja2.Environment(loader=templates, autoescape=True, **options).get_template(TEMPLATE)


def run_names(runs: Sequence[RunRecord]) -> list[str]:
    """Short names of runs: the last part of the path, and more of it where two are the same."""
    paths = [run.folder.resolve() for run in runs]
    short = [path.name or str(path) for path in paths]
    names = [name if short.count(name) == 1 else f"{path.parent.name}/{name}" for path, name in zip(paths, short, strict=True)]
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]


def _context(name: str, run: RunRecord) -> dict[str, Any]:
    """What the template shows of a run."""
    recipe = json.dumps({key: value for key, value in run.recipe.items() if key not in ("format", "task")}, indent=1)
    times = named_times(run.times, run.details)
    cut = f"\n... and {len(recipe) - LONGEST_RECIPE:,} characters more; recipe.json holds all of them"
    return {
        "name": name,
        "metric": run.metric,
        "chain": [{"name": stage, "done": stage in {row.stage for row in run.rows}} for stage in run.stages],
        "reused": run.reused,
        "summary": summary(run),
        "rows": [_cells(row, run.rows[0], *_certainty(run, row)) for row in [*run.rows, *_baselines(run)]],
        "tests": [sentence for row in run.rows[1:] if (sentence := _test_in_words(run, row))],
        "layer_charts": layer_charts(run.details),
        "layers": layer_rows(run.details),
        "floating": floating_layers(run.details),
        "time_charts": time_charts(times),
        "times": time_rows(times),
        "timed": list(run.times)[-1] if run.times else "",
        "estimated": any(not row.executed for row in [*run.rows, *_baselines(run)]),
        "notes": remarks(run.rows),
        "missing": run.missing,
        "curves": training_charts(run),
        "waiting": _waiting(run),
        "environment": list(_environment_lines(run)),
        "recipe": "" if not run.recipe else recipe if len(recipe) <= LONGEST_RECIPE else recipe[:LONGEST_RECIPE] + cut,
    }


def _baselines(run: RunRecord) -> list[StageReport]:
    """Baselines to compare with the stages; none without a stage to compare with."""
    return run.baselines if run.rows else []


def summary(run: RunRecord) -> str:
    """What a run achieved, in a sentence: from the first finished stage to the last."""
    if not run.rows:
        return "No stage is finished."
    first, last = run.rows[0], run.rows[-1]
    parts = [f"{run.metric} {first.metric:.4f} to {last.metric:.4f}"]
    if first.bytes and last.bytes:
        parts.append(f"file {ratio(first.bytes, last.bytes)} smaller")
    if first.latency_ms and last.latency_ms:
        parts.append(f"latency {ratio(first.latency_ms, last.latency_ms)} faster")
    files = [row for row in run.rows if row.bytes is not None]
    wrong = [row.stage for row in files if not row.verified]
    proof = f"not verified: {', '.join(wrong)}" if wrong else f"{len(files)} of {len(files)} files verified in ONNX Runtime"
    return f"From {first.stage} to {last.stage}: {', '.join(parts)}; {proof}."


def ratio(first: float, now: float) -> str:
    """How many times smaller `now` is than `first`: 2.50x."""
    return f"{first / now:.2f}x"


def _certainty(run: RunRecord, row: StageReport) -> tuple[str, str]:
    """The confidence interval of a stage's metric, and p of the paired test against the first stage; "" where unknown."""
    if outcomes := _outcomes(run, row):
        low, high = wilson_interval(int(outcomes[0], 16).bit_count(), outcomes[1])
    elif resampled := _resampled(run, row):
        low, high = bootstrap_interval(resampled)
    else:
        return "", ""
    test = _test(run, row)
    return f"{low:.4f} to {high:.4f}", "" if test is None or row is run.rows[0] else _p_value(test.p)


def _outcomes(run: RunRecord, row: StageReport) -> tuple[str, int] | None:
    """Which samples a stage has right, and how many there are, if that is recorded and fits its accuracy."""
    entry = run.details.get(row.stage, {})
    correct, samples = entry.get("correct"), entry.get("samples")
    if not isinstance(correct, str) or not isinstance(samples, int) or samples < 1:
        return None
    right = int(correct, 16).bit_count() if re.fullmatch("[0-9a-f]+", correct) else -1
    return (correct, samples) if abs(right / samples - row.metric) < 1e-6 else None


def _resampled(run: RunRecord, row: StageReport) -> list[float]:
    """The metric of draws of the samples; empty if that is not recorded."""
    entry = run.details.get(row.stage, {})
    found, samples = entry.get("resampled"), entry.get("samples")
    if not isinstance(samples, int) or not isinstance(found, list):
        return []
    return found if all(isinstance(value, float | int) for value in found) else []


def _test(run: RunRecord, row: StageReport) -> PairedTest | PairedBootstrap | None:
    """The paired test of a stage against the first one; None where they did not meet the same samples in the same order."""
    first, now = (run.details.get(name, {}).get("targets") for name in (run.rows[0].stage, row.stage))
    if first != now:
        return None
    right = _outcomes(run, run.rows[0]), _outcomes(run, row)
    if right[0] and right[1] and right[0][1] == right[1][1]:
        return paired_test(right[0][0], right[1][0], right[1][1])
    before, after = _resampled(run, run.rows[0]), _resampled(run, row)
    return paired_bootstrap(before, after) if before and len(before) == len(after) else None


def _test_in_words(run: RunRecord, row: StageReport) -> str:
    test, first = _test(run, row), run.rows[0]
    if test is None:
        return ""
    change, higher = row.metric - first.metric, True if isinstance(test, PairedTest) else run.higher_is_better
    other = "different" if higher is None else "better" if (change > 0) == higher else "worse"
    verdict = "no difference is shown" if test.p >= 0.05 else other
    samples = run.details[row.stage]["samples"]
    counted = (
        f"{test.lost} are no longer right, {test.gained} became right; "
        if isinstance(test, PairedTest)
        else f"{len(_resampled(run, row))} times drawn again; "
    )
    return (
        f"{row.stage} against {first.stage}, on the same {samples:,} samples: {counted}difference {change:+.4f}"
        f" ({test.low:+.4f} to {test.high:+.4f}), p {_p_value(test.p)}: {verdict}."
    )


def _p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _cells(row: StageReport, first: StageReport, interval: str, p: str) -> list[str]:
    change = row.metric - first.metric
    return [
        row.stage,
        f"{'' if row.executed else '~'}{row.metric:.4f}",
        interval,
        "" if row is first else f"{change:+.4f}",
        p,
        f"{row.parameters:,}",
        f"{row.nonzero:,}",
        f"{row.macs:,}",
        "-" if row.bytes is None else f"{row.bytes:,} B",
        ratio(first.bytes, row.bytes) if first.bytes and row.bytes else "-",
        "-" if row.latency_ms is None else f"{row.latency_ms:.3f} ms",
        ratio(first.latency_ms, row.latency_ms) if first.latency_ms and row.latency_ms else "-",
        {True: "yes", False: "NO", None: "-"}[row.verified],
        f"{row.seconds:,.1f} s",
    ]


def comparison_charts(names: Sequence[str], runs: Sequence[RunRecord]) -> list[Chart]:
    """The metric against the size and against the latency of the files, all runs on the same axes."""
    kinds = {(run.metric, run.higher_is_better) for run in runs}
    metric, higher = kinds.pop() if len(kinds) == 1 else ("metric", None)
    remark = "" if higher is not None else "No Pareto line: the runs do not say whether a larger metric is better."
    largest = max((row.bytes or 0 for run in runs for row in run.rows), default=0)
    unit, size = ("MiB", 2**20) if largest >= 2**20 else ("KiB", 2**10)
    charts = []
    rows = [row for run in runs for row in [*run.rows, *run.baselines]]
    sizes = {id(row): row.bytes / size for row in rows if row.bytes is not None}
    times = {id(row): row.latency_ms for row in rows if row.latency_ms is not None}
    for title, axis, figures in (
        ("size of the file", f"ONNX file, {unit}", sizes),
        ("latency", "median latency of one sample in ONNX Runtime, ms", times),
    ):
        series = []
        for name, run in zip(names, runs, strict=True):
            for label, part in ((name, run.rows), (f"{name}, baselines", run.baselines)):
                if found := [row for row in part if id(row) in figures]:
                    points = [(figures[id(row)], row.metric) for row in found]
                    series.append(Series(label, points, [row.stage for row in found]))
        if series:
            name = f"{metric[:1].upper()}{metric[1:]} against {title}"
            charts.append(draw(name, axis, metric, series, lines=False, higher_is_better=higher, remark=remark))
    return charts


def training_charts(run: RunRecord) -> list[Chart]:
    """Loss, metric, learning rate and loss scale over the steps of the trainings, as far as the run recorded them."""
    trainings = [(f"{stage}: {_text(t.get('label'))}", t) for stage, ts in run.history.items() for t in ts]
    kinds = [(title, axis, [(name, _epochs(t, key)) for name, t in trainings]) for title, axis, key in CURVES]
    kinds.insert(
        1, (f"{run.metric[:1].upper()}{run.metric[1:]} during training", run.metric, [(n, _metrics(t)) for n, t in trainings])
    )
    charts = []
    for title, axis, found in kinds:
        series = [Series(name, points) for name, points in found if points]
        if not series:
            continue
        left_out = len(series) - MOST_LINES
        remark = f"{left_out} more trainings are in report.json." if left_out > 0 else ""
        if title == "Loss scale":
            skipped = [f"{name} {_skipped(t)}" for name, t in trainings if _epochs(t, "scale")]
            remark = f"Steps skipped because gradients overflowed: {', '.join(skipped[:MOST_LINES])}. {remark}".strip()
        charts.append(draw(title, "optimizer step", axis, series[:MOST_LINES], lines=True, remark=remark))
    return charts


def _waiting(run: RunRecord) -> str:
    """What share of their time the trainings waited for data, and what to do where that is much; "" where it was not measured."""
    found = {}
    for stage, trainings in run.history.items():
        for training in trainings:
            if shares := [share for _, share in _epochs(training, "waiting")]:
                found[f"{stage}: {_text(training.get('label'))}"] = sum(shares) / len(shares)
    if not found:
        return ""
    more = (
        " The loader is too slow for the steps: give it workers (num_workers=), or decode and resize once, before the training."
    )
    listed = ", ".join(f"{name} {share:.0%}" for name, share in found.items())
    return f"Share of the time in which a training waited for data: {listed}.{more if max(found.values()) > STARVED else ''}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "training"


def _epochs(training: dict[str, Any], key: str) -> list[tuple[float, float]]:
    """The points (step, value) of an entry of the epochs; of several learning rates, the first."""
    epochs = training.get("epochs")
    found = (
        [(entry.get("step"), entry.get(key)) for entry in epochs if isinstance(entry, dict)] if isinstance(epochs, list) else []
    )
    return _numbers_only((step, value[0] if isinstance(value, list) and value else value) for step, value in found)


def _metrics(training: dict[str, Any]) -> list[tuple[float, float]]:
    found = training.get("metrics")
    return _numbers_only(pair for pair in found if isinstance(pair, list) and len(pair) == 2) if isinstance(found, list) else []


def _numbers_only(pairs: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in pairs if isinstance(x, int | float) and isinstance(y, int | float)]


def _skipped(training: dict[str, Any]) -> int:
    return int(max((value for _, value in _epochs(training, "skipped")), default=0))


def _environment_lines(run: RunRecord) -> Iterator[tuple[str, str]]:
    """(name, value) of what is known of the machine and the versions."""
    for name, value in run.environment.items():
        if isinstance(value, dict):
            shown = ", ".join(f"{key} {_word(entry)}" for key, entry in value.items())
        elif isinstance(value, list):
            shown = ", ".join(map(str, value)) or "none"
        else:
            shown = str(value)
        yield str(name), shown


def _word(value: Any) -> str:
    return {"True": "yes", "False": "no", "None": "not known"}.get(str(value), str(value))
