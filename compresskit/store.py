"""Save and load any model of the library: `save(model, folder)`, `load(fresh model of the same class, folder)`.

model.safetensors     the values
structure.json        the shapes (pruned), or how it was quantized
masks.safetensors     which weights are held at zero, a bit each, where the model carries masks
snapshots.safetensors weights on the way through its training, where a later stage rewinds to them
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from compresskit.checkpoint import (
    FORMAT,
    MODEL,
    STRUCTURE,
    load_model_,
    load_values_,
    read_json,
    read_tensors,
    save_model,
    write_json,
    write_tensors,
)
from compresskit.errors import CheckpointError
from compresskit.masks import Masks, attach_, detach_, masks_of
from compresskit.quant.insert import Quantized
from compresskit.quant.store import rebuild, record
from compresskit.snapshots import Snapshots

MASKS, SNAPSHOTS = "masks.safetensors", "snapshots.safetensors"


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a float, pruned or quantized model into a folder, which is made where it is missing."""
    folder = Path(folder)
    model = model.settled() if isinstance(model, Quantized) else model
    folder.mkdir(parents=True, exist_ok=True)
    masks = masks_of(model)
    extra = {} if masks is None else {"masks": {"removed": masks.removed, "total": masks.total}}
    if masks is not None:
        write_tensors(folder / MASKS, masks.state())
    if not isinstance(model, Quantized):
        save_model(model, folder, **extra)
        return
    write_tensors(folder / MODEL, model.state_dict())
    write_json(folder / STRUCTURE, {"format": FORMAT, **record(model), **extra})


def load(model: nn.Module, folder: str | Path) -> nn.Module:
    """The saved model, rebuilt from a fresh float model of the class it came from.

    A float or pruned model is loaded into `model` itself, which is returned; a quantized one is a new module. Nothing in the
    files is executed. Raises CheckpointError where they are damaged, or of another model.
    """
    folder = Path(folder)
    saved = read_json(folder / STRUCTURE, "a model's structure")
    detach_(model)  # what it carried was for other weights
    if saved.get("kind") != "quantized":
        load_model_(model, folder)
    else:
        model = rebuild(model, saved)
        load_values_(model, read_tensors(folder / MODEL), folder / MODEL)
    if "masks" in saved:
        _load_masks_(model, folder / MASKS, saved["masks"])
    return model


def _load_masks_(model: nn.Module, path: Path, saved: Any) -> None:
    masks = Masks.from_state(read_tensors(path), model, path)
    if not isinstance(saved, dict) or (masks.removed, masks.total) != (saved.get("removed"), saved.get("total")):
        raise CheckpointError(f"{path}: removes {masks.removed} of {masks.total} weights, {STRUCTURE} says {saved}")
    if broken := masks.broken(model):
        name, count = next(iter(broken.items()))
        raise CheckpointError(f"{path}: {count} weights of {name} are not zero that it removes; it is of another model")
    attach_(model, masks)


def save_snapshots(snapshots: Snapshots, folder: Path) -> None:
    """Write filled snapshots into the folder of the training that they are of."""
    tensors = {f"{share}/{name}": value for share, state in snapshots.items() for name, value in state.items()}
    write_tensors(folder / SNAPSHOTS, tensors)


def load_snapshots_(snapshots: Snapshots, folder: Path) -> None:
    """Fill snapshots from the folder of a training; CheckpointError where one of them is not in it."""
    for key, value in read_tensors(folder / SNAPSHOTS).items():
        share, _, name = key.partition("/")
        if share in (wanted := {str(share): share for share in snapshots}):
            snapshots[wanted[share]][name] = value
    if missing := [share for share, state in snapshots.items() if not state]:
        raise CheckpointError(f"{folder / SNAPSHOTS}: no snapshot of {missing[0]} of the training in it; delete the folder")
