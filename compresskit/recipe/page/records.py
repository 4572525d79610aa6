"""Read the folder of a run for its report, whatever of it is there: finished, unfinished or damaged."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compresskit.base.errors import CheckpointError
from compresskit.base.files import read_json
from compresskit.recipe.details import DETAILS
from compresskit.recipe.folder import PROGRESS, ROW, START
from compresskit.recipe.report import StageReport, read_stage_report

REPORT, RECIPE = "report.json", "recipe.json"
NAMED_RUNS = 3  # in a message
MEASURED_AT_THE_END = ("latency_ms", "bytes")  # of a run, for all its stages together


@dataclass(kw_only=True)
class RunRecord:
    """What is known of a run.

    Attributes:
        folder: of the run.
        rows: of the stages that are finished.
        stages: names of all stages of the recipe, finished or not, in their order.
        recipe: what recipe.json says: settings of the stages, seed, versions, model.
        metric: name of the metric.
        higher_is_better: whether a larger metric is better; None where the run does not say.
        environment: versions and machine, see `compresskit.export.check.environment`; empty where the run does not say.
        history: stage -> its trainings, see `compresskit.train.history`.
        baselines: rows of `Recipe(baselines=True)`.
        reused: stages that the last run read from their folders.
        details: stage -> which samples are right, layers and noise, see `compresskit.recipe.details`; of finished stages.
        times: stage -> where the latency of its file goes, see `compresskit.recipe.details.layer_times`.
        missing: a sentence for everything that should be there and is not.
    """

    folder: Path
    rows: list[StageReport] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    metric: str = "metric"
    higher_is_better: bool | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    history: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    baselines: list[StageReport] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    times: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """What report.json holds, and what is missing, JSON-ready."""
        return {
            "folder": str(self.folder),
            "rows": [asdict(row) for row in self.rows],
            "baselines": [asdict(row) for row in self.baselines],
            "stages": self.recipe.get("stages", []),
            "metric": {"name": self.metric, "higher_is_better": self.higher_is_better},
            "reused": self.reused,
            "history": self.history,
            "layer_times": self.times,
            "environment": self.environment,
            "missing": self.missing,
        }


def read_run(folder: str | Path, report: dict[str, Any] | None = None) -> RunRecord:
    """Read what is there of a run.

    Args:
        folder: of the run.
        report: the contents of report.json, where it is not written yet.

    Raises CheckpointError where there is no such folder, or it is not that of a run.
    """
    run = RunRecord(folder=Path(folder))
    if run.folder.is_file():
        raise CheckpointError(f"{folder}: a file; wanted the folder of a run")
    if not run.folder.is_dir():
        raise CheckpointError(f"no such file: {folder}; wanted the folder of a run")
    if report is None and not any((run.folder / name).exists() for name in (REPORT, RECIPE)):
        inside = _runs_inside(run.folder)
        raise CheckpointError(f"{run.folder / REPORT}: not there, nor is {RECIPE}; wanted the folder of a run{inside}")
    run.recipe = _read(run, run.folder / RECIPE, "the recipe of a run") or {}
    if report is None:
        report = _read(run, run.folder / REPORT, "the report of a run")
        if report is not None and (changed := _changed_since(run.folder, report)):
            run.missing.append(f"{run.folder / REPORT}: of an earlier run, {changed} has changed since; what follows is newer")
            report = None
    _read_stages(run, report)
    if report is not None:
        _read_rest(run, report)
    for row in run.rows:
        path = run.folder / Path(row.stage).name / DETAILS
        if path.exists() and (found := _read(run, path, "the details of a finished stage")) is not None:
            run.details[row.stage] = found
    return run


def _runs_inside(folder: Path) -> str:
    """The first runs in a folder, such as that of a search, for a message."""
    runs = sorted(path.parent for places in ("*", "*/*") for path in folder.glob(f"{places}/{RECIPE}"))
    more = f" and {len(runs) - NAMED_RUNS} more" if len(runs) > NAMED_RUNS else ""
    return f", such as {', '.join(map(str, runs[:NAMED_RUNS]))}{more}" if runs else ""


def _read(run: RunRecord, path: Path, what: str) -> dict[str, Any] | None:
    """A JSON file of the run; None, and an entry among what is missing, where it is not there or damaged."""
    try:
        return read_json(path, what)
    except CheckpointError as error:
        run.missing.append(str(error).replace("; delete it to start that stage again", "").replace("Delete it to start", "Start"))
        return None


def _changed_since(folder: Path, report: dict[str, Any]) -> str:
    """The first stage that ran, or began to run, after a report was written; "" where there is none."""
    for row in _as_list(report.get("rows")):
        name = str(row.get("stage")) if isinstance(row, dict) else ""
        if not name or not (folder / Path(name).name).is_dir():  # the report alone was copied
            continue
        try:
            now = read_json(folder / Path(name).name / ROW, "the row of a finished stage").get("row")
        except CheckpointError:
            return name
        if not isinstance(now, dict) or any(now.get(key) != row.get(key) for key in now if key not in MEASURED_AT_THE_END):
            return name
    return ""


def _read_stages(run: RunRecord, report: dict[str, Any] | None) -> None:
    """The finished stages: from the report, or, where it is not there, from the folders of the stages."""
    settings = _as_list(run.recipe.get("stages"))
    expected = [f"{i}-{_kind(stage).lower()}" for i, stage in enumerate(settings, 1)]
    if report is not None:
        for row in _as_list(report.get("rows")):
            _add_row(run, run.rows, row, run.folder / REPORT)
        names = [row.stage for row in run.rows]
    else:
        there = [p.name for p in run.folder.iterdir() if (p / ROW).exists()]
        known = {START, *expected} if settings else there  # a recipe with fewer stages leaves the folders of the others
        names = sorted((name for name in there if name in known), key=_stage_number)
        for name in names:
            found = _read(run, run.folder / name / ROW, "the row of a finished stage")
            if found is not None and _add_row(run, run.rows, found.get("row"), run.folder / name / ROW):
                run.history[name] = _trainings(found.get("history"))
    run.stages = sorted({*names, *expected}, key=_stage_number)
    finished = [row.stage for row in run.rows]
    for i, name in enumerate(run.stages):
        if name not in finished:
            run.missing.append(_unfinished(run.folder / name))
            after = run.stages[i + 1 :]
            older = [stage for stage in after if stage in finished]
            run.missing += [f"{stage}: its result is older than {name}, and is not shown" for stage in older]
            run.missing += [_unfinished(run.folder / stage) for stage in after if stage not in finished]
            run.rows = [row for row in run.rows if row.stage not in older]
            break


def _add_row(run: RunRecord, rows: list[StageReport], row: Any, where: Path) -> bool:
    try:
        rows.append(read_stage_report(row, where))
        return True
    except CheckpointError as error:
        run.missing.append(str(error))
        return False


def _unfinished(folder: Path) -> str:
    checkpoints = list((folder / PROGRESS).glob("*.safetensors")) if folder.is_dir() else []
    if not checkpoints:
        return f"{folder.name}: not finished"
    newest = max(checkpoints, key=lambda path: path.stat().st_mtime)
    return f"{folder.name}: interrupted; its last checkpoint is {PROGRESS}/{newest.name}. Run the same command again to go on"


def _read_rest(run: RunRecord, report: dict[str, Any]) -> None:
    """What a report holds besides its rows; that of an older version holds less."""
    metric, environment = report.get("metric"), report.get("environment")
    if isinstance(metric, dict):
        run.metric = str(metric.get("name", "metric"))
        higher = metric.get("higher_is_better")
        run.higher_is_better = higher if isinstance(higher, bool) else None
    run.environment = environment if isinstance(environment, dict) else {}
    history = report.get("history")
    if isinstance(history, dict):
        run.history = {str(name): _trainings(trainings) for name, trainings in history.items()}
    times = report.get("layer_times")
    if isinstance(times, dict):
        run.times = {str(name): found for name, found in times.items() if isinstance(found, dict)}
    run.reused = [str(name) for name in _as_list(report.get("reused"))]
    for row in _as_list(report.get("baselines")):
        _add_row(run, run.baselines, row, run.folder / REPORT)


def _trainings(found: Any) -> list[dict[str, Any]]:
    return [training for training in _as_list(found) if isinstance(training, dict)]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _kind(stage: Any) -> str:
    return str(stage.get("kind", "stage") if isinstance(stage, dict) else stage)


def _stage_number(name: str) -> tuple[int, str]:
    number = name.partition("-")[0]
    return (int(number) if number.isdecimal() else 10**6, name)
