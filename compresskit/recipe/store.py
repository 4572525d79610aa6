"""Save and load any model of the library: `save(model, folder)`, `load(fresh model of the same class, folder)`.

model.safetensors     the values
structure.json        the shapes (pruned), or how it was quantized, as a whole or in parts
masks.safetensors     which weights are held at zero, a bit each, where the model carries masks
snapshots.safetensors weights on the way through its training, where a later stage rewinds to them
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from compresskit.base.errors import CheckpointError
from compresskit.base.files import FORMAT, read_json, read_tensors, write_json, write_tensors
from compresskit.graph.masks import Masks, attach_, detach_, masks_of
from compresskit.graph.surgery import owner
from compresskit.quant.model import Quantized
from compresskit.quant.serialize import rebuild, record
from compresskit.recipe.model_files import MODEL, STRUCTURE, bytes_of, load_model_, load_values_, save_model
from compresskit.train.snapshots import SNAPSHOTS, Snapshots

MASKS = "masks.safetensors"


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a float, pruned or quantized model into a folder, which is made where it is missing."""
    parts = {name: part for name, part in model.named_modules() if isinstance(part, Quantized)}
    folder = Path(folder)
    converted = {name: part.converted() for name, part in parts.items()}
    if any(converted[name] is not part for name, part in parts.items()):  # a copy stands for what is still being trained
        model = converted[""] if "" in converted else _with_parts(model, converted)
    folder.mkdir(parents=True, exist_ok=True)
    masks = masks_of(model)
    extra = {} if masks is None else {"masks": {"removed": masks.removed, "total": masks.total}}
    if masks is not None:
        write_tensors(folder / MASKS, masks.state())
    if not parts:
        save_model(model, folder, **extra)
        return
    write_tensors(folder / MODEL, model.state_dict())
    records = {name: record(part) for name, part in converted.items()}
    write_json(folder / STRUCTURE, {"format": FORMAT, **records.get("", {"kind": "parts", "parts": records}), **extra})


def _with_parts(model: nn.Module, parts: dict[str, Quantized]) -> nn.Module:
    whole = copy.deepcopy(model)
    for name, part in parts.items():
        whole.set_submodule(name, part)
    return whole


def load(model: nn.Module, folder: str | Path) -> nn.Module:
    """The saved model, rebuilt from a fresh float model of the class it came from.

    A float or pruned model is loaded into `model` itself, which is returned; a quantized one is a new module. Nothing in the
    files is executed. Raises CheckpointError where they are damaged, or of another model.
    """
    folder = Path(folder)
    saved = read_json(folder / STRUCTURE, "a model's structure")
    detach_(model)  # what it carried was for other weights
    if saved.get("kind") in ("parts", "quantized"):
        # Before the work of building it again; besides the weights it has a few numbers for each channel.
        tensors = read_tensors(folder / MODEL, 4 * bytes_of(model) + 2**20)
        quantized = _rebuilt(model, saved, folder / STRUCTURE)
        load_values_(quantized, tensors, folder / MODEL)
    else:
        quantized = load_model_(model, folder)
    if "masks" in saved:
        _load_masks_(quantized, folder / MASKS, saved["masks"])
    return quantized


def _rebuilt(model: nn.Module, saved: dict[str, Any], where: Path) -> nn.Module:
    """The quantized model of a record, its values still to be loaded; CheckpointError where the record is none."""
    try:
        if saved["kind"] == "quantized":
            return rebuild(model, saved)
        whole = copy.deepcopy(model)
        for name, part in saved["parts"].items():
            owner(whole, f"{name}.weight")  # raises where there is no such module
            whole.set_submodule(name, rebuild(whole.get_submodule(name), part))
        return whole
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: not the record of a quantized model ({error!r}); delete the folder") from error


def _load_masks_(model: nn.Module, path: Path, saved: Any) -> None:
    masks = Masks.from_state(read_tensors(path, 2 * bytes_of(model)), model, path)
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
