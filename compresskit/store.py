"""Save and load any model of the library: `save(model, folder)`, `load(fresh model of the same class, folder)`.

model.safetensors     the values
structure.json        the shapes (pruned), or how it was quantized, as a whole or in parts
"""

from __future__ import annotations

import copy
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
from compresskit.surgery import owner


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a float, pruned or quantized model into a folder, which is made where it is missing."""
    parts = {name: part for name, part in model.named_modules() if isinstance(part, Quantized)}
    if not parts:
        save_model(model, folder)
        return
    folder = Path(folder)
    settled = {name: part.settled() for name, part in parts.items()}
    if any(settled[name] is not part for name, part in parts.items()):  # a copy stands for what is still being trained
        model = settled[""] if "" in settled else _with_parts(model, settled)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / MODEL, model.state_dict())
    records = {name: record(part) for name, part in settled.items()}
    write_json(folder / STRUCTURE, {"format": FORMAT, **records.get("", {"kind": "parts", "parts": records})})


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
    if saved.get("kind") == "parts" and isinstance(saved.get("parts"), dict):
        quantized = copy.deepcopy(model)
        for name, part in saved["parts"].items():
            owner(quantized, f"{name}.weight")  # raises where there is no such module
            quantized.set_submodule(name, rebuild(quantized.get_submodule(name), part))
    elif saved.get("kind") == "quantized":
        quantized = rebuild(model, saved)
    else:
        return load_model_(model, folder)
    load_values_(quantized, read_tensors(folder / MODEL), folder / MODEL)
    return quantized
