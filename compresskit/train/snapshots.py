"""Snapshots of the weights during a training, to which a later stage rewinds: `{fraction of the training: {} -> state}`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compresskit import mixed
from compresskit.base.errors import ModelError, SettingError
from compresskit.mixed.formats.casts import in_fp32

SNAPSHOTS = "snapshots.safetensors"
Snapshots = dict[float, dict[str, Tensor]]


def fill_snapshots_(snapshots: Snapshots | None, model: nn.Module, run: mixed.Run, step: int, steps: int) -> None:
    """Fill every empty snapshot whose fraction of the training is reached: weights and buffers by name, half ones in fp32.

    Args:
        snapshots: fraction of the training, in [0, 1), -> a dict that is empty or filled already; None for no snapshots.
        model: the model that is trained.
        run: has the fp32 masters of its weights.
        step: optimizer steps that are done.
        steps: of the whole training.

    Raises:
        SettingError: a fraction is out of range.
    """
    for fraction, state in (snapshots or {}).items():
        if not 0 <= fraction < 1:
            raise SettingError(f"Task(snapshots=...): wanted fractions of a training in [0, 1), got {fraction}")
        if not state and step >= round(fraction * steps):
            stored = model.state_dict().keys()
            values = run.named_masters() | {name: buffer for name, buffer in model.named_buffers() if name in stored}
            state.update({n: in_fp32(v).detach().clone() for n, v in values.items()})


def rewind_(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """Set the weights and buffers of a model to a snapshot, and return it; its masks are not changed.

    Raises:
        ModelError: the snapshot was taken of another model, or shapes have changed; the model is not changed.
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors = {name: tensors[name] for name in tensors if name in model.state_dict()}
    if unmatched := sorted(tensors.keys() ^ state.keys()):
        raise ModelError(f"rewind: {unmatched[0]} is only in one of model and snapshot; rewind the model that was trained")
    for name, value in state.items():
        if tensors[name].shape != value.shape:
            raise ModelError(
                f"rewind: {name} was {tuple(value.shape)}, this {type(model).__name__} has {tuple(tensors[name].shape)}; channels"
                " cannot be pruned between a training and the rewinding to it"
            )
    with torch.no_grad():
        for name, value in state.items():
            tensors[name].copy_(value)
    return model
