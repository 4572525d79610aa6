"""A model's own files: values and structure, loaded only after names, shapes and dtypes were all compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compresskit.base.errors import CheckpointError
from compresskit.base.files import FORMAT, read_json, read_tensors, write_json, write_tensors
from compresskit.graph.surgery import restructure_, structure

MODEL, STRUCTURE = "model.safetensors", "structure.json"


def bytes_of(model: nn.Module) -> int:
    """Bytes of the values that a model stores."""
    return sum(value.numel() * value.element_size() for value in model.state_dict().values())


def load_values_(model: nn.Module, tensors: dict[str, Tensor], where: str | Path) -> None:
    """Load a state dict after names, shapes and dtypes have all been compared; nothing changes if any differs."""
    own = model.state_dict()
    if odd := sorted(set(own) ^ set(tensors)):
        side = "the file lacks" if odd[0] in own else "the model has no"
        raise CheckpointError(f"{where}: {side} {odd[0]!r} ({len(odd)} names differ); it is of another model")
    for name, value in tensors.items():
        if own[name].shape != value.shape or own[name].dtype != value.dtype:
            raise CheckpointError(
                f"{where}: {name} is {tuple(value.shape)} {value.dtype}, the model wants"
                f" {tuple(own[name].shape)} {own[name].dtype}"
            )
    model.load_state_dict(tensors)


def save_model(model: nn.Module, folder: str | Path, **extra: Any) -> None:
    """Write `model.safetensors` and `structure.json` into a folder; `extra` goes into the JSON."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / MODEL, model.state_dict())
    write_json(folder / STRUCTURE, {"format": FORMAT, "structure": structure(model), **extra})


def load_model_(model: nn.Module, folder: str | Path) -> nn.Module:
    """Give a fresh model of the same class the saved structure (pruned shapes) and values; the model itself is returned.

    Raises CheckpointError for another model's files or damaged ones; a model that was refused keeps its values.
    """
    folder = Path(folder)
    record = read_json(folder / STRUCTURE, "a model's structure").get("structure")
    if not isinstance(record, dict) or not all(isinstance(record.get(k), dict) for k in ("tensors", "modules")):
        raise CheckpointError(f"{folder / STRUCTURE}: no structure of a float model in it; use compresskit.load")
    tensors = read_tensors(folder / MODEL, bytes_of(model))
    if wrong := [k for k, v in tensors.items() if list(v.shape) != record["tensors"].get(k)]:
        raise CheckpointError(f"{folder}: {MODEL} and {STRUCTURE} disagree about {wrong[0]}")
    try:
        restructure_(model, record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / STRUCTURE}: not the structure of a model ({error!r}); delete the folder") from None
    load_values_(model, tensors, folder / MODEL)
    return model
