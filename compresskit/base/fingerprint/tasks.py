"""Descriptions of a task by value: the parts of it on which results depend."""

from __future__ import annotations

import copy
from typing import Any

from compresskit.base.fingerprint.describe import Description, describe_by_value
from compresskit.base.task import RunningMetric, Task


def describe_task(task: Task) -> dict[str, Description]:
    """The parts of a task on which results depend, by name.

    Raises SettingError or DataError where a loader is missing, empty or has no length.
    """
    parts = {
        "loss": task.loss,
        "metric": _without_memory(task.metric),
        "predict": task.predict,
        "target": task.target,
        "reference": task.reference,
        "higher_is_better": task.prefers_higher is not False,  # nothing said is taken for True, by all that does not refuse it
    }
    described = {name: describe_by_value(part, f"Task({name}=...)") for name, part in parts.items()}
    for name in ("train", "val", "calibration"):
        if getattr(task, name) is None:
            described[name] = Description(None)
            continue
        batches = task.length(name) if name == "val" else task.known_length(name)
        loader = describe_by_value(getattr(task, name), f"Task({name}=...)", data=True)
        described[name] = Description([batches, loader.record], loader.unknown)
    return described


def _without_memory(metric: Any) -> Any:
    """A running metric as it is before its first batch."""
    if not isinstance(metric, RunningMetric):
        return metric
    try:
        metric = copy.deepcopy(metric)
    except Exception:  # whatever of it cannot be copied
        return metric
    metric.reset()
    return metric
