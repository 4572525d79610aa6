"""Baselines of a run: the networks that its stages made, with new weights, trained as long on labels alone; half precision.

out/baselines/2-distill/    a run of one training: the student, without a teacher
out/baselines/3-prune/      a network of the size that is left, never distilled and never pruned
out/baselines/3-prune-fp16/ the last network in float, in half precision; and 3-prune-bf16/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from compresskit.base.errors import ModelError
from compresskit.base.stage import Stage
from compresskit.base.task import Task
from compresskit.graph.masks import masks_of
from compresskit.graph.quantized import is_quantized
from compresskit.graph.surgery import copy_model
from compresskit.train.train import Train


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A network with new weights, and the training that it gets. stage: the index of the stage that made it."""

    stage: int
    model: nn.Module
    train: Train


def trainings_in(stage: Stage) -> Iterator[Train]:
    """The trainings of a stage: itself, and those among its settings."""
    values: list[Any] = [vars(stage).get(field.name) for field in fields(stage)] if is_dataclass(stage) else []
    yield from (value for value in [stage, *values] if isinstance(value, Train))


def baselines(stages: Sequence[Stage], models: Mapping[int, nn.Module], task: Task, own: Mapping[int, Task]) -> list[Baseline]:
    """The baselines of the stages that made a student or removed channels or layers, of models in float and without masks.

    Each is trained for as many optimizer steps as the network was since it was made, with the optimizer and the schedule of the
    longest of those trainings, and the task's loss.

    Args:
        stages: of the recipe.
        models: what each stage returned, and at -1 the incoming model.
        task: of the run.
        own: the tasks of stages that have one of their own.

    Raises:
        ModelError: a module has weights that cannot be drawn anew.
    """
    found = []
    since: list[tuple[int, Train]] = []
    for i, stage in enumerate(stages):
        if stage.makes_student:
            since.clear()
        since += [(training.length(own.get(i, task)).steps, training) for training in trainings_in(stage)]
        if not since or not (stage.makes_student or _other_shapes(models[i - 1], models[i])) or _compressed(models[i]):
            continue
        longest = max(since, key=lambda entry: entry[0])[1]
        plain = Train(**{field.name: getattr(longest, field.name) for field in fields(Train)})
        steps = sum(length for length, _ in since)
        train = replace(plain, epochs=None, steps=steps, objective=None, validate_every=0, keep_best=False, patience=None)
        found.append(Baseline(stage=i, model=with_new_weights(models[i]), train=train))
    return found


def last_dense_float(models: Mapping[int, nn.Module]) -> int | None:
    """The stage of the last model in float and without masks, None where there is none; -1 is the incoming model."""
    return max((stage for stage, model in models.items() if not _compressed(model)), default=None)


def _other_shapes(before: nn.Module, after: nn.Module) -> bool:
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (before, after)]
    return shapes[0] != shapes[1]


def _compressed(model: nn.Module) -> bool:
    """Whether a model is quantized or has masks, which new weights would not be."""
    return is_quantized(model) or masks_of(model) is not None


def with_new_weights(model: nn.Module) -> nn.Module:
    """A copy of a model whose weights are drawn by the `reset_parameters` of its modules, as torch initializes them.

    Raises:
        ModelError: a module with parameters of its own has no such method.
    """
    model = copy_model(model)
    for name, module in model.named_modules():
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            with torch.no_grad():
                reset()
        elif next(module.parameters(recurse=False), None) is not None:
            raise ModelError(
                f"Recipe(baselines=True): {name or 'the model'} ({type(module).__name__}) has parameters of its own and no"
                " reset_parameters(), so that its weights cannot be drawn anew; give it that method, or leave baselines= out"
            )
    return model.requires_grad_(requires_grad=True)
