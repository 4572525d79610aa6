"""The folder of a run: whose it is, and when a stage in it is the stage that is asked for."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from compresskit.checkpoint import read_json, write_json
from compresskit.errors import CheckpointError
from compresskit.surgery import structure
from compresskit.task import PROPERTIES, Stage, Task, describe, fingerprint


def comes_trained(stage: Stage) -> bool:
    """Whether the chain starts from a trained model: its first stage is no training, or makes a student of the model's."""
    if getattr(stage, "trains_itself", False):
        return False
    trains = not getattr(stage, "needs", frozenset()) and getattr(stage, "keeps", PROPERTIES) == PROPERTIES
    return not trains or getattr(stage, "student", None) is not None


def stage_keys(model: nn.Module, task: Task, stages: list[Any], seed: int, *, trained: bool) -> list[str]:
    """A key for each stage: its settings, all before it, the model's structure, the data (lengths, first validation batch), the
    loss and the metric; and the model's weights, where the chain starts from trained ones.
    """
    lengths = [None if getattr(task, w) is None else task.length(w) for w in ("train", "val", "calibration")]
    data = [lengths, fingerprint(next(iter(task.batches("val")))), describe([task.loss, task.metric, task.predict])]
    weights = fingerprint(model) if trained else None
    digest = hashlib.sha256(json.dumps([structure(model), seed, data, weights], sort_keys=True).encode())
    keys = []
    for record in stages:
        digest.update(json.dumps(record, sort_keys=True).encode())
        keys.append(digest.hexdigest()[:16])
    return keys


def claim(out: Path, model: nn.Module, names: list[str], record: dict[str, Any], *, trained: bool) -> None:
    """Make `out` this recipe's, or raise `CheckpointError` where it is somebody else's or cannot be written.

    Other initial weights of a chain that begins with training are only warned of: what is finished no longer depends on them.
    """
    shape = hashlib.sha256(json.dumps(structure(model), sort_keys=True).encode()).hexdigest()[:16]
    record = record | {"model": type(model).__name__, "structure": shape, "weights": fingerprint(model)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / "recipe.json").exists() and any(out.iterdir()):
            raise CheckpointError(f"{out}: not empty, and not the folder of a run; choose another out=")
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written ({error.strerror}); choose another out=") from None
    if (out / "recipe.json").exists():
        old = read_json(out / "recipe.json", "a recipe")
        before = [f"{i}-{str(stage.get('kind', stage)).lower()}" for i, stage in enumerate(old.get("stages", []), 1)]
        shared = min(len(before), len(names))
        same = all(old.get(key) == record[key] for key in ("model", "structure"))
        if not same or before[:shared] != names[:shared]:
            raise CheckpointError(
                f"{out}: belongs to another recipe ({old.get('model')}: {', '.join(before)}), this one is {record['model']}:"
                f" {', '.join(names)}{'' if same else ' of another model'}; choose another out=, or delete the folder"
            )
        if not trained and old.get("weights") != record["weights"]:
            warnings.warn(
                f"{out}: the incoming weights are not those that this run started from; finished stages are kept. Seed before the"
                " model is made to silence this, or choose another out= to start afresh",
                stacklevel=3,
            )
            record["weights"] = old.get("weights")
    try:
        write_json(out / "recipe.json", record)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written ({error.strerror}); choose another out=") from None
