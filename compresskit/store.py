"""Save and load any model of the library: `save(model, folder)`, `load(fresh model of the same class, folder)`.

model.safetensors     the values
structure.json        the shapes (pruned), or how it was quantized
"""

from __future__ import annotations

from pathlib import Path

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
from compresskit.quant.insert import Quantized
from compresskit.quant.store import rebuild, record


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a float, pruned or quantized model into a folder, which is made where it is missing."""
    if not isinstance(model, Quantized):
        save_model(model, folder)
        return
    model, folder = model.settled(), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / MODEL, model.state_dict())
    write_json(folder / STRUCTURE, {"format": FORMAT, **record(model)})


def load(model: nn.Module, folder: str | Path) -> nn.Module:
    """The saved model, rebuilt from a fresh float model of the class it came from.

    A float or pruned model is loaded into `model` itself, which is returned; a quantized one is a new module. Nothing in the
    files is executed. Raises CheckpointError where they are damaged, or of another model.
    """
    folder = Path(folder)
    saved = read_json(folder / STRUCTURE, "a model's structure")
    if saved.get("kind") != "quantized":
        return load_model_(model, folder)
    quantized = rebuild(model, saved)
    load_values_(quantized, read_tensors(folder / MODEL), folder / MODEL)
    return quantized
