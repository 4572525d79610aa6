"""Weights kept on the way through a training, to which a later stage rewinds. `{share of the training: {} -> state}`"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import ModelError, SettingError

SNAPSHOTS = "snapshots.safetensors"
Snapshots = dict[float, dict[str, Tensor]]


def take_(wanted: Snapshots | None, model: nn.Module, run: Any, step: int, steps: int) -> None:
    """Fill, in fp32 and by name, every empty snapshot whose share of the steps has come."""
    for share, state in (wanted or {}).items():
        if not 0 <= share < 1:
            raise SettingError(f"Task(snapshots=...): wanted shares of a training in [0, 1), got {share}")
        if not state and step >= round(share * steps):
            stored = model.state_dict().keys()
            values = run.named_masters() | {name: buffer for name, buffer in model.named_buffers() if name in stored}
            state.update({n: (v.float() if v.is_floating_point() else v).detach().clone() for n, v in values.items()})


def rewind_(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """Give a model the weights and statistics of a snapshot again; it is returned, its masks as they are.

    Raises ModelError, the model untouched, where the snapshot is of another model or of other shapes.
    """
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    own = {name: own[name] for name in own if name in model.state_dict()}
    if odd := sorted(own.keys() ^ state.keys()):
        raise ModelError(f"rewind: {odd[0]} is only in one of model and snapshot; rewind the model that was trained")
    for name, value in state.items():
        if own[name].shape != value.shape:
            raise ModelError(
                f"rewind: {name} was {tuple(value.shape)}, this {type(model).__name__} has {tuple(own[name].shape)}; channels"
                " cannot be pruned between a training and the rewinding to it"
            )
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(value)
    return model
