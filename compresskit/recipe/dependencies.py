"""What the stages of a recipe depend on, described by value, and the keys that are made of it.

A stage's key is a hash of everything its result depends on: the model, the task with a sample of its data, the settings of the
recipe, of the stage and of all stages before it, and the versions of this library and of torch. What cannot be described makes
a key that no stage has, so that the stage runs again.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from compresskit.base.fingerprint import Description, describe_by_value, fingerprint, short_hash
from compresskit.base.stage import Stage
from compresskit.base.version import __version__
from compresskit.graph.surgery import structure
from compresskit.mixed.formats.policy import BATCH_NORMS
from compresskit.train.modes import given_modes

COUNTED = "num_batches_tracked"  # the buffer in which BatchNorm counts

#: The key of a stage, and what it depends on that cannot be described.
StageKey = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """What the stages of a recipe depend on.

    Attributes:
        stages: the settings of each stage.
        task: the data, the loss and what else a task has, by name.
        model: the incoming model.
        settings: of the recipe itself.
        own: the tasks of stages that have one of their own, by the stage's index.
    """

    stages: tuple[Description, ...]
    task: dict[str, Description]
    model: Description
    settings: dict[str, Any]
    own: dict[int, dict[str, Description]] = field(default_factory=dict)

    @property
    def stage_records(self) -> list[Any]:
        """The settings of all stages, JSON-ready."""
        return [stage.record for stage in self.stages]

    @property
    def task_records(self) -> dict[str, Any]:
        """The task, JSON-ready."""
        return _records(self.task)

    @property
    def own_records(self) -> dict[str, Any]:
        """The tasks of single stages, JSON-ready, by the number of the stage."""
        return {str(i + 1): _records(task) for i, task in self.own.items()}

    def keys(self) -> list[StageKey]:
        """For each stage its key, and what of it, of the task or of an earlier stage cannot be described."""
        unknown = [entry for part in (self.model, *self.task.values()) for entry in part.unknown]
        common = [self.model.record, self.settings, self.task_records, versions()]
        digest = hashlib.sha256(json.dumps(common, sort_keys=True).encode())
        keys = []
        for i, stage in enumerate(self.stages):
            unknown += stage.unknown
            digest.update(json.dumps(stage.record, sort_keys=True).encode())
            if i in self.own:
                unknown += [entry for part in self.own[i].values() for entry in part.unknown]
                digest.update(json.dumps(_records(self.own[i]), sort_keys=True).encode())
            if unknown:
                digest.update(uuid.uuid4().bytes)
            keys.append((digest.hexdigest()[:16], tuple(unknown)))
        return keys


def _records(task: dict[str, Description]) -> dict[str, Any]:
    return {name: part.record for name, part in task.items()}


def describe_stages(stages: Sequence[Stage]) -> tuple[Description, ...]:
    """The settings of stages. A student that a function makes is described by its structure too."""
    found = []
    for i, stage in enumerate(stages):
        described = describe_by_value(stage, f"stage {i + 1}, {type(stage).__name__}")
        if stage.makes_student:
            with torch.random.fork_rng(devices=[]):
                student = structure_hash(stage.skeleton(nn.Module()))
            made = {"made by": described.record["student"], "structure": student}
            described = Description(described.record | {"student": made}, described.unknown)
        found.append(described)
    return tuple(found)


def shows_training(model: nn.Module) -> bool:
    """Whether a model cannot be new: what its layers are made with is another in one of them.

    BatchNorm that counted a batch; a normalization whose weights or biases differ from one another; a linear layer or convolution
    with biases beyond those that torch draws, 1 / sqrt(inputs of a filter). A model trained a little may show none of these.
    """
    for module in model.modules():
        if isinstance(module, BATCH_NORMS) and any(count > 0 for name, count in module.named_buffers() if name == COUNTED):
            return True
        own = dict(module.named_parameters(recurse=False))
        weight, bias = own.get("weight"), own.get("bias")
        if weight is None or bias is None or bias.numel() < 2 or bias.is_meta:
            continue
        if weight.shape == bias.shape and any(len(values.unique()) > 1 for values in (weight, bias)):
            return True
        drawn = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and len(bias.unique()) > 1
        if drawn and bias.abs().max() > (1 + 1e-3) * weight[0].numel() ** -0.5:
            return True
    return False


def describe_model(model: nn.Module, *, trained: bool, fixed: dict[str, str] | None = None) -> Description:
    """The incoming model: its structure and attributes, and its weights where it comes trained.

    fixed: of a new model, digests of its buffers and frozen parameters, by name; None for not compared.
    """
    described = describe_by_value(model, "the model", weights=trained, modes=False)
    weights = fingerprint(model) if trained else None
    modes = given_modes(model)  # none for most models
    known: list[Any] = [modes] if modes else []
    trains = [parameter.requires_grad for parameter in model.parameters()]
    known += [{"trains": False}] if trains and not any(trains) else []
    known += [{"fixed": fixed}] if fixed and not trained else []
    return Description([structure(model), described.record, weights, *known], described.unknown)


def structure_hash(model: nn.Module) -> str:
    """A short hash of a model's structure."""
    return short_hash(structure(model))


def versions() -> list[str]:
    """Versions that results depend on: of this library, and of torch without its patch number."""
    return [__version__, ".".join(torch.__version__.split(".")[:2])]
