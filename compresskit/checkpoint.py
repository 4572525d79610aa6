"""Files that survive: safetensors and JSON, written atomically, read without executing anything."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compresskit.errors import CheckpointError
from compresskit.surgery import restructure_, structure

FORMAT = 1  # of structure.json; a reader refuses files of a later one

MODEL, STRUCTURE = "model.safetensors", "structure.json"


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`; what was written there takes its place at once, or not at all.

    The file is synced before it is renamed, so that after a power cut either the old or the new one is there, whole.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, record: Any) -> None:
    """Write a record, atomically."""
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    with atomic(path) as temporary:
        temporary.write_text(text)


def read_json(path: str | Path, what: str) -> Any:
    """Read a JSON object; `CheckpointError` names the file where it is missing, damaged or of a later format."""
    path = Path(path)
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not there; {what} was expected") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged, {what} was expected ({error}); delete it to start that stage again") from None
    if not isinstance(record, dict):
        raise CheckpointError(f"{path}: wanted a JSON object with {what}, got {type(record).__name__}")
    if (version := record.get("format", FORMAT)) != FORMAT:
        raise CheckpointError(f"{path}: written in format {version}, this compresskit reads {FORMAT}; update compresskit")
    return record


def write_tensors(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors as safetensors, atomically; a tensor that shares memory with another is stored by itself."""
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with atomic(path) as temporary:
        save_file(plain, temporary)


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read a safetensors file; `CheckpointError` where it is missing or damaged."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not there") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); delete it to start that stage again") from None


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
    tensors = read_tensors(folder / MODEL)
    if wrong := [k for k, v in tensors.items() if list(v.shape) != record["tensors"].get(k)]:
        raise CheckpointError(f"{folder}: {MODEL} and {STRUCTURE} disagree about {wrong[0]}")
    restructure_(model, record)
    load_values_(model, tensors, folder / MODEL)
    return model
